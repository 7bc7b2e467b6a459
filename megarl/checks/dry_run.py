"""The dry run of a recipe as text: resolved keys, task graph, ranks, memory, checks. It starts nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.checks.checklist import Check, problems_of
from megarl.checks.host import host_memory
from megarl.checks.layout import divides_devices
from megarl.checks.machine import gpu_room
from megarl.checks.recipe import Checked, check_config
from megarl.checks.rows import is_readable_here
from megarl.config.correction import describe_correction
from megarl.config.load import changed_keys
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig, steps_text
from megarl.config.yamlio import to_yaml
from megarl.dag.draw import as_text
from megarl.dag.graph import TaskGraph
from megarl.dag.measured import read_measured
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.data.sources import load_rows
from megarl.disaggregated.buffer.size import handover_bytes, object_store_bytes, steps_held
from megarl.planning.memory import Memory, device_memory, server_bytes
from megarl.planning.terms import taken
from megarl.recipes.components import COMPONENTS
from megarl.system.credentials import hide
from megarl.system.errors import ConfigError, UserError, count
from megarl.system.machine import Machine, this_machine

ROWS_SHOWN = 64


@dataclass(frozen=True)
class RunPlan:
    """A plan as text, with the problems that prevent the run; the text lists exactly these problems."""

    text: str
    problems: list[ConfigError]


def make_plan(
    config: RunConfig, launcher: str, job: str = "train", more: Sequence[Check] = (), *, full: bool = True
) -> RunPlan:
    """Describe the run of `config` and collect its problems, with the `more` checks of the caller; nothing is started
    or downloaded. `full` also shows keys that have their defaults.
    """
    machine = this_machine()
    checked = check_config(config, launcher=launcher, job=job, machine=machine)
    # The checks in `more` also read files: a problem at a key that has failed already is listed once.
    known = {check.key for check in checked.items if check.status == "fail"}
    checks = [*checked.items, *(check for check in more if check.status != "fail" or check.key not in known)]
    sections = {"Configuration": _config_text(config, full=full)}
    if job == "train":
        sections["Steps"] = _steps_text(config)
        sections["Task graph"] = _graph_text(config, checked)
        if config.preference is None:
            sections["Rollout correction"] = "\n".join(describe_correction(config))
    else:
        sections[f"What megarl {job} does"] = "\n".join(_job_lines(config, job))
    if checked.placement is not None and checked.placement.separate:
        sections["Teams"] = _teams_text(config, checked, checked.placement, machine)
    sections[f"Ranks ({launcher} launcher)"] = _ranks_text(config, checked.placement)
    last_sections = memory_and_checks(config, checked, checks, job, machine)
    text = _as_text(sections)
    return RunPlan(f"{text}\n\n{last_sections}. Nothing was started.", problems_of(checks))


def _config_text(config: RunConfig, *, full: bool) -> str:
    if full:
        return to_yaml(hide(config.model_dump())[0])
    changed, others = changed_keys(config, COMPONENTS)
    return f"{to_yaml(hide(changed)[0])}... and {others} keys with their defaults, which --full shows"


def _steps_text(config: RunConfig) -> str:
    """Describe the length of the run in steps, and in passes over the rows if the files can be read here."""
    steps, size = config.trainer.steps, config.data.batch_size
    unit = config.data_unit
    if "trainer" in config.uncounted:
        return (
            f"{config.trainer.epochs:g} epochs in batches of {count(size, unit)}; steps are known when the run starts"
        )
    data = config.data
    whole = config.task.writes_text and data.train_files and data.val_split is None
    if whole and all(map(is_readable_here, data.train_files)):
        with contextlib.suppress(UserError):  # the check of the rows reports the error
            rows = sum(len(load_rows(source)) for source in data.train_files)
            return steps_text(steps, size, rows, unit)
    return f"{steps:,} step{'s' * (steps != 1)} of {count(size, unit)}; the data is counted when the run starts"


def memory_and_checks(
    config: RunConfig, checked: Checked, checks: Sequence[Check], job: str, machine: Machine | None = None
) -> str:
    """Return the text of a dry run about memory and checks, and how many checks have each status."""
    sections = {}
    if job == "train":
        sections["Memory per rank (estimate)"] = _memory_text(config, checked, machine or this_machine())
    sections["Checks"] = "\n".join(_check_lines(check) for check in checks)
    counts = ", ".join(f"{sum(c.status == s for c in checks)} {s}" for s in ("ok", "warn", "fail", "skip"))
    return f"{_as_text(sections)}\n\n{counts}"


def _as_text(sections: Mapping[str, str]) -> str:
    return "\n\n".join(f"== {title} ==\n{body.rstrip()}" for title, body in sections.items())


def _job_lines(config: RunConfig, job: str) -> list[str]:
    """Return lines about a command other than train with this recipe."""
    model, sft, data, resume = config.model, config.sft, config.data, config.trainer.resume
    start = model.path or f"a fresh model (seed {model.init_seed})"
    if job == "sft":
        files = ", ".join(sft.train_files or data.train_files)
        passes = "" if sft.epochs is None else f" ({sft.epochs:g} epochs)"
        goal = "" if sft.stop_at_accuracy is None else f", or until the accuracy is {sft.stop_at_accuracy:g}"
        length = f"{count(sft.steps, 'step')} of {count(sft.batch_size, 'example')}{passes}"
        if "sft" in config.uncounted:
            length = f"{sft.epochs:g} epochs in batches of {count(sft.batch_size, 'example')}"
        lines = [f"fine-tunes {start} on {files}", f"{length}{goal}"]
        return [*lines, "writes metrics, checkpoints/" + (" and hf/" if config.trainer.export_hf else "")]
    sampling = config.validation_sampling
    greedy = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    return [
        f"generates responses of {start if resume in ('auto', 'never') else resume} to {', '.join(data.held_out)}",
        f"{sampling.n} per prompt, {greedy}, at most {sampling.max_new_tokens} tokens",
        f"scores them with {config.reward.described}" if job == "eval" else "writes them to responses.jsonl",
    ]


def _graph_text(config: RunConfig, checked: Checked) -> str:
    if checked.graph is None:
        return "cannot be built, see the checks"
    placement = checked.placement
    handovers = () if placement is None else placement.handovers
    return as_text(checked.graph, placement, {handover.key: handover_bytes(config, handover) for handover in handovers})


def _teams_text(config: RunConfig, checked: Checked, placement: Placement, machine: Machine) -> str:
    """Describe each team's roles, workers and memory per rank, and the shared memory for samples between teams."""
    rows = [("team", "roles", "layout", "workers", "GB per rank", "nodes")]
    known = checked.sizes[Role.ACTOR] is not None
    for team in placement.teams:
        memory = "?"
        if known and divides_devices(team):
            memory = f"{_peak(_team_memory(config, checked, team, machine), machine, config)[1] / 1e9:.3f}"
        roles = ", ".join(role.value for role in team.roles)
        rows.append((team.name, roles, _layout_text(team), str(team.devices), memory, ", ".join(team.nodes) or "-"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    if config.placement.auto == "measured" and checked.graph is not None:
        lines += _measured_lines(config, checked.graph, placement)
    store = object_store_bytes(config, placement) / 1e9
    steps = count(steps_held(config), "step")
    lines.append(f"object store of a Ray that the run starts: {store:.3f} GB of shared memory ({steps} of samples)")
    actor, rollout = placement.of_role(Role.ACTOR), placement.of_role(Role.ROLLOUT)
    if actor != rollout:
        lines.append(f"async: {policy_of(config).describe()}")
    return "\n".join(lines)


def _measured_lines(config: RunConfig, graph: TaskGraph, placement: Placement) -> list[str]:
    """Return the measurements from which workers were assigned to teams."""
    run = read_measured(config, graph)
    steps = f"medians of steps {run.timings.first} to {run.timings.last}"
    lines = [f"shared out by device-seconds of a step in {config.placement.measured} ({steps}):"]
    width = max(len(team.name) for team in placement.teams)
    for team in placement.teams:
        parts = [
            f"{id} by servers" if id in run.served else f"{id} {run.timings.seconds[id]:.3g} s x {run.workers[id]}"
            for id in team.nodes
        ]
        lines.append(f"  {team.name:<{width}}  {run.device_seconds(team.nodes):.3g} = {' + '.join(parts) or 'nothing'}")
    return lines


def _layout_text(team: TeamPlan) -> str:
    """Describe a layout's parallel sizes that are not 1, and its number of replicas."""
    sizes = team.parallel.model_dump(exclude_defaults=True)
    words = [name if value is True else f"{name} {value}" for name, value in sizes.items()]
    return ", ".join([*words, f"dp {team.replicas}"])


def _team_memory(config: RunConfig, checked: Checked, team: TeamPlan, machine: Machine) -> Memory:
    gpu = _on_gpus(config, machine)
    return device_memory(config, checked.sizes, team, gpu=gpu, room=gpu_room(config, machine) if gpu else None)


def _on_gpus(config: RunConfig, machine: Machine) -> bool:
    return machine.has_gpu or config.cluster.device_memory_gb is not None


def coordinates(rank: int, nproc: int, parallel: ParallelConfig) -> dict[str, int]:
    """Return a rank's coordinates in Megatron's order tp-cp-ep-dp-pp (tp changes fastest); edp: expert dp."""
    dp = nproc // parallel.model_parallel_size
    etp = parallel.expert_tp
    place = _unravel(rank, {"tp": parallel.tp, "cp": parallel.cp, "dp": dp, "pp": parallel.pp})
    expert = _unravel(rank, {"etp": etp, "ep": parallel.ep, "edp": nproc // (etp * parallel.ep * parallel.pp)})
    return {name: place[name] for name in ("dp", "pp", "cp", "tp")} | {
        name: expert[name] for name in ("ep", "etp", "edp")
    }


def _unravel(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    place = {}
    for name, size in sizes.items():
        rank, place[name] = divmod(rank, size)
    return place


def _ranks_text(config: RunConfig, placement: Placement | None) -> str:
    if placement is None or not all(map(divides_devices, placement.teams)):
        return "the processes do not divide into replicas, see the checks"
    nproc, per_node = config.cluster.nproc, max(1, config.cluster.nproc // config.cluster.nnodes)
    layouts = [team.parallel for team in placement.teams]
    names = ["dp", "pp", "cp", "tp"]
    names += ["ep", "etp", "edp"] if any(parallel.ep > 1 or parallel.etp for parallel in layouts) else []
    # with several teams Ray chooses the machines, so the node of a worker is not known yet
    columns = ["worker", "rank", *names] if placement.separate else ["rank", "node", *names]
    width = max(len(team.name) for team in placement.teams)
    lines = [f"{'team':<{width}}"] if placement.separate else [""]
    lines[0] += "".join(f"{name:>{max(6, len(name) + 1)}}" for name in columns)
    for worker in range(nproc):
        if nproc > ROWS_SHOWN and ROWS_SHOWN // 2 <= worker < nproc - ROWS_SHOWN // 2:
            if worker == ROWS_SHOWN // 2:
                lines.append(f"   ... {nproc - ROWS_SHOWN} ranks left out ...")
            continue
        team = placement.of_worker(worker)
        rank = worker - team.first
        place = coordinates(rank, team.devices, team.parallel)
        second = rank if placement.separate else worker // per_node
        row = "".join(f"{value:>6}" for value in [second, *(place[name] for name in names)])
        lines.append(f"{team.name:<{width}}{worker:>7}{row}" if placement.separate else f"{worker:>6}{row}")
    return "\n".join(lines)


def _memory_text(config: RunConfig, checked: Checked, machine: Machine) -> str:
    placement, facts = checked.placement, checked.sizes[Role.ACTOR]
    if facts is None or placement is None or not all(map(divides_devices, placement.teams)):
        return "not known: " + (
            "the model's sizes are not known here" if facts is None else "the layout does not divide"
        )
    gpu = _on_gpus(config, machine)
    lines = []
    for team in placement.teams:
        if placement.separate:
            lines.append(f"team {team.name}")
        memory = _team_memory(config, checked, team, machine)
        adapts = {part: gpu and part.shrinks and part.bytes > part.least for part in memory.terms()}
        lines += [
            _memory_line(part.what + (", at most" if up_to else ""), part.bytes) for part, up_to in adapts.items()
        ]
        name, size = _peak(memory, machine, config)
        lines.append(_memory_line(f"peak ({name})", size))
    ranks = -(-config.cluster.nproc // config.cluster.nnodes)
    host = host_memory(config, checked.sizes, placement, gpu=gpu).peak
    lines.append(_memory_line(f"host memory of a machine ({count(ranks, 'rank')})", host.bytes))
    if (servers := config.rollout.servers) is not None and not servers.urls:
        if not gpu:  # with GPUs the server's weights are in the table of device memory
            lines.append(_memory_line("a server's weights, per rank of it", server_bytes(config, facts)))
        if gpu_room(config, machine) is None:
            lines.append(
                "(a server's cache is not included: on a GPU up to memory_fraction of the free memory, on a CPU up to "
                "max_total_tokens)"
            )
        if servers.colocated:
            lines.append("(on GPUs, the servers are on the trainer's devices)")
    return "\n".join(lines)


def _peak(memory: Memory, machine: Machine, config: RunConfig) -> tuple[str, float]:
    """Return the name and bytes of the moment with the most memory in use. On a GPU, memory that adapts to the
    available room counts with its minimum.
    """
    gpu = _on_gpus(config, machine)
    sizes = {moment.name: sum(taken(part, gpu=gpu) for part in moment.terms) for moment in memory.moments}
    name = max(sizes, key=lambda key: sizes[key])
    return name, sizes[name]


def _memory_line(name: str, size: float) -> str:
    return f"{name:<48}{size / 1e9:>10.3f} GB"


def _check_lines(check: Check) -> str:
    if check.status in ("ok", "skip"):
        return f"[{check.status:>4}] {check.name}: {check.message}"
    if check.status == "fail":  # the command prints all problems again at its end
        return f"[fail] {check.name}: {f'{check.key}, ' if check.key else ''}see the end"
    lines = str(check.problem()).splitlines()
    return "\n".join([f"[{check.status:>4}] {check.name}: {lines[0]}", *(f"       {line}" for line in lines[1:])])
