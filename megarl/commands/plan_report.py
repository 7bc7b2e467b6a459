"""`megarl plan` as tables and as JSON; every number has the tag of its formula."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checks.descriptors import descriptors, group_sizes
from megarl.checks.host import host_memory
from megarl.checks.machine import TIGHT
from megarl.config.load import differences, dump_config, find_recipe, load_config, recipe_names
from megarl.config.run import RunConfig
from megarl.config.yamlio import to_yaml
from megarl.planning.outcome import ROOM_KEYS, Filled, StepPlan
from megarl.planning.search import FoundPlan, SearchResult, describe_layout
from megarl.planning.shards import Sizes
from megarl.planning.workload import Workload
from megarl.recipes.components import COMPONENTS

if TYPE_CHECKING:
    from rich.table import Table


_GOES_BY = "change one of:"
_PARTS_SHOWN = 3


@dataclass(frozen=True)
class Figure:
    """A number of a plan.

    Attributes:
        name: what the number measures.
        value: the number.
        unit: its unit.
        formula: tag of its formula in docs/planning.md.
    """

    name: str
    value: float
    unit: str
    formula: str


def rest_of(config: RunConfig, plan: StepPlan, sizes: Sizes) -> list[Figure]:
    """Return other estimates of the dry run: host memory per machine, process groups and file descriptors per rank."""
    host = host_memory(config, sizes, plan.placement, gpu=plan.hardware.gpu).peak
    fullest = max(plan.placement.teams, key=lambda team: descriptors(team.devices, team.parallel))
    return [
        Figure("host memory of a machine", host.bytes / 1e9, "GB", "M2"),
        Figure("process groups of a rank", 1 + len(group_sizes(fullest.devices, fullest.parallel)), "", "D1"),
        Figure("file descriptors of a rank", descriptors(fullest.devices, fullest.parallel), "", "D1"),
    ]


def figures(plan: StepPlan) -> list[Figure]:
    """Return the figures of a whole step, such as duration, throughput and memory, which belong to no phase."""
    room, (size, seconds, still) = plan.room, plan.checkpoint
    return [
        Figure("step", plan.step_s, "s", "S1"),
        Figure("tokens of a step", plan.tokens, "tokens", "S2"),
        Figure("tokens per second", plan.tokens_per_s, "tokens/s", "S2"),
        Figure("tokens per second and device", plan.per_device, "tokens/s", "S2"),
        Figure("MFU", 100 * plan.mfu, "%", "S3"),
        Figure("fullest device", plan.taken / 1e9, "GB", "M1"),
        Figure("generating engines", room.engines, "", "K1"),
        Figure("weights on a device of an engine", room.weights / 1e9, "GB", "K1"),
        Figure("room for keys and values on it", room.bytes / 1e9, "GB", "K1"),
        Figure("tokens that fit into an engine", room.tokens, "tokens", "K1"),
        Figure("samples decoded at the same time", room.slots, "", "K1"),
        Figure("checkpoint", size / 1e9, "GB", "C1"),
        Figure("writing it", seconds, "s", "C1"),
        Figure("waiting for it", still, "s", "C1"),
        *([Figure("a step of sft", sum(part.seconds for part in plan.sft), "s", "T8")] if plan.sft else []),
    ]


def hints(config: RunConfig, plan: StepPlan) -> list[str]:
    """Return hints on settings that limit speed without need, and on waits that this plan does not include."""
    lines, servers, room = [], config.rollout.servers, plan.room
    samples = config.data.batch_size * config.rollout.sampling.n / max(1, room.engines)
    fitting, bound = int(room.tokens / room.longest), None if servers is None else servers.max_concurrency
    if bound is not None and bound < min(samples, fitting):
        lines.append(
            f"rollout.sglang.max_concurrency={bound} limits generation: a server has {samples:,.0f} samples of a "
            f"step, and its cache has room for {fitting:,} of the longest at the same time"
        )
    if config.async_.max_staleness:
        lines.append(
            "the step time is that of the busiest team; megarl simulate adds the time that teams wait for each other"
        )
    return lines


def assumed_lengths(config: RunConfig, plan: StepPlan) -> str:
    """Return a line with the assumed token counts, on which most of the plan depends, and the options that set them."""
    work = Workload.of(config, plan.given)
    tokens = f"{_short(work.prompt)} prompt and {_short(work.lengths.mean)} response tokens on average"
    return f"assumes {tokens} (--assume prompt_tokens=, mean_tokens=)"


def tables(config: RunConfig, recipe: str, plan: StepPlan, rest: list[Figure]) -> list[Table | str]:
    """Return a plan as tables, followed by lines on whether it fits into memory."""
    title = f"{recipe} on {plan.hardware.describe()}: {plan.step_s:.3g} s a step, by formulas"
    title += ", if it fit" if misfits(plan) else ""
    phases = _phases(f"{title}\n{assumed_lengths(config, plan)}", plan)
    numbers = _table("", "what", "value", "unit", "by")
    for figure in (*figures(plan), *rest):
        numbers.add_row(figure.name, _short(figure.value), figure.unit, figure.formula)
    shown: list[Table | str] = [phases, numbers, _memory(plan), f"hardware: {plan.hardware.source}"]
    verdict = [f"does not fit: {line}" for line in misfits(plan)]
    verdict = verdict or [f"may not fit: {line}" for line in doubts(plan)]
    if not verdict and tight(plan):
        verdict = [f"tight: {plan.fullest.moment.name} holds more than {TIGHT:.0%} of a device; {_keys(plan.fullest)}"]
    return [*shown, *verdict]


def tight(plan: StepPlan) -> bool:
    """Return whether the plan uses so much of a device's memory that a run may not fit."""
    return plan.fullest.bytes > TIGHT * 1e9 * plan.hardware.memory_gb


def misfits(plan: StepPlan) -> list[str]:
    """Return a line for each moment of a step whose memory certainly does not fit, with the recipe keys that change
    it."""
    lines, limit = [], plan.hardware.memory_gb
    needed = max(plan.filled, key=lambda filled: filled.moment.least)
    if needed.moment.least > limit * 1e9:
        least, about = needed.moment.least / 1e9, needed.bytes / 1e9
        text = f"{needed.moment.name} needs at least {least:,.1f} GB (about {about:,.1f}) of {limit:.3g}"
        lines.append(f"{text}; {_keys(needed)}")
    if plan.room.certain:
        lines += _no_room(plan)
    return lines


def doubts(plan: StepPlan) -> list[str]:
    """Return a line for each moment of a step whose memory probably does not fit, by estimates and SGLang's own memory;
    a dry run warns of these moments.
    """
    lines, fullest, limit = [], plan.fullest, plan.hardware.memory_gb
    if fullest.bytes > limit * 1e9:
        lines.append(f"{fullest.moment.name} needs {fullest.bytes / 1e9:,.1f} of {limit:.3g} GB; {_keys(fullest)}")
    return lines + _no_room(plan)


def _no_room(plan: StepPlan) -> list[str]:
    room = plan.room
    if room.fits:
        return []
    return [
        f"an engine has room for {int(room.tokens):,} tokens beside {room.weights / 1e9:,.1f} GB of weights on a "
        f"device, and the longest sample has {room.longest:,.0f}; {_GOES_BY} {ROOM_KEYS}"
    ]


def _keys(filled: Filled) -> str:
    """Return the recipe keys that change the memory use at one moment of a step."""
    largest = sorted(filled.moment.terms, key=lambda part: -part.bytes)[:3]
    return f"{_GOES_BY} {'; '.join(dict.fromkeys(part.keys for part in largest))}"


_WORDS = frozenset(("phase", "team", "what", "by", "placement, layout, engine", "moment", "most of it", "unit", ""))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
    return made


def _phases(title: str, plan: StepPlan) -> Table:
    several = plan.placement.separate
    table = _table(title, "phase", *(["team"] if several else []), "s", "share", "GB moved", "by", "what")
    for phase in plan.phases:
        whole = [f"{phase.seconds:.3g}", f"{phase.seconds / plan.step_s:.0%}", "", "", ""]
        table.add_row(phase.name, *([phase.team] if several else []), *whole)
        for part in phase.parts:
            size = _short(part.bytes / 1e9) if part.bytes else ""
            row = [f"{part.seconds:.3g}", "", size, part.formula, part.what]
            table.add_row("", *([""] if several else []), *row)
    return table


def _short(value: float) -> str:
    """Format a number with three significant digits; a whole number or one from 1,000 on as an integer."""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _memory(plan: StepPlan) -> Table:
    limit = plan.hardware.memory_gb
    made = _table(f"a device, of {limit:.3g} GB", "team", "moment", "GB", "by", "most of it")
    for filled in plan.filled:
        text = ", ".join(
            f"{part.what} {size / 1e9:.3g}"
            # a part that adapts to the free memory has a maximum
            + (f" (up to {part.bytes / 1e9:.3g})" if part.bytes > size else "")
            for part, size in filled.parts[:_PARTS_SHOWN]
        )
        more = sum(size for _, size in filled.parts[_PARTS_SHOWN:])
        text += f", all else {more / 1e9:.3g}" if more else ""
        made.add_row(filled.team, filled.moment.name, f"{filled.taken / 1e9:.3g}", "M1", text)
    return made


def as_json(recipe: str, plan: StepPlan, rest: list[Figure]) -> dict[str, Any]:
    """Return a plan as plain data for JSON."""
    return {
        "recipe": recipe,
        "hardware": asdict(plan.hardware),
        "devices": plan.devices,
        "numbers": [asdict(item) for item in (*figures(plan), *rest)],
        "phases": [
            {
                "name": phase.name,
                "team": phase.team,
                "begins_s": phase.begins,
                "seconds": phase.seconds,
                "formula": "S1",
                "parts": [asdict(part) for part in phase.parts],
            }
            for phase in plan.phases
        ],
        "memory": [
            {
                "team": item.team,
                "moment": item.moment.name,
                "bytes": item.taken,
                "formula": "M1",
                "terms": [
                    {"what": part.what, "bytes": size, "at_most": part.bytes, "keys": part.keys}
                    for part, size in item.parts
                ],
            }
            for item in plan.filled
        ],
        "does_not_fit": misfits(plan),
        "may_not_fit": doubts(plan),
        "assumptions": asdict(plan.given),
    }


def found_table(recipe: str, result: SearchResult) -> Table:
    """Return a table of the best plans of a search."""
    hardware = result.best[0].plan.hardware
    without = f", of which at least {result.without_room} do not fit" if result.without_room else ""
    title = f"{recipe} on {hardware.describe()}: {result.compared} layouts in placements{without}; by S1, S2, S3, M1"
    made = _table(title, "s a step", "tokens/s/dev", "MFU", "GB", "placement, layout, engine")
    for plan_found in result.best:
        plan, choice = plan_found.plan, plan_found.choice
        layout = describe_layout(choice.parallel, choice.spread.trainers())
        cells = [f"{plan.step_s:.3g}", f"{plan.per_device:.0f}", f"{plan.mfu:.1%}", f"{plan.taken / 1e9:.1f}"]
        engine = f"micro-batch {choice.micro_batch_tokens}, recompute {choice.recompute}"
        engine += ", offload" if choice.offload else ""
        made.add_row(*cells, "\n".join((choice.spread.describe(), layout, engine)), end_section=True)
    return made


def found_as_json(recipe: str, result: SearchResult) -> dict[str, Any]:
    """Return the best plans of a search as plain data for JSON."""

    def one(plan_found: FoundPlan) -> dict[str, Any]:
        choice = plan_found.choice
        return {
            "numbers": [asdict(figure) for figure in figures(plan_found.plan)],
            "placement": choice.spread.describe(),
            "layout": choice.parallel.model_dump(),
            "micro_batch_tokens": choice.micro_batch_tokens,
            "recompute": choice.recompute,
            "offload": choice.offload,
            "memory_fraction": choice.memory_fraction,
        }

    hardware = asdict(result.best[0].plan.hardware)
    return {
        "recipe": recipe,
        "hardware": hardware,
        "compared": result.compared,
        "without_room": result.without_room,
        "best": [one(plan_found) for plan_found in result.best],
    }


def write_recipe(file: Path, recipe: str, best: FoundPlan) -> None:
    """Write the changes of `best` against `recipe`, overrides included, as a recipe that extends it."""
    before = load_config(recipe, components=COMPONENTS)
    changed = differences(before.model_dump(mode="json"), best.config.model_dump(mode="json"))
    changed.pop("name", None)
    spread = best.choice.spread
    head = [
        f"# By megarl plan --search: {best.plan.step_s:.3g} s a step by formulas on {best.plan.hardware.describe()};",
        f"# {spread.describe()}; {describe_layout(best.choice.parallel, spread.trainers())}",
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    body = to_yaml({"extends": _parent(recipe, file), **changed})
    text = "\n".join([*head, _replacing(body, before.placement.teams, best.config.placement.teams)])
    draft = file.with_name(f".{file.stem}.draft.yaml")  # in the same folder, since paths in it are relative to the file
    try:
        draft.write_text(text)
        again = load_config(draft, components=COMPONENTS)
        assert dump_config(again) == dump_config(best.config.model_copy(update={"name": again.name})), (
            "the written recipe must read back as it was"
        )
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _parent(recipe: str, file: Path) -> str:
    """Return how the recipe in `file` names its parent: a shipped recipe by its name, another recipe by a relative
    path.
    """
    source = find_recipe(recipe)
    if source.stem in recipe_names() and find_recipe(source.stem) == source and not Path(recipe).is_file():
        return source.stem
    return os.path.relpath(source.resolve(), file.resolve().parent)


def _replacing(body: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Mark `teams` with !replace when teams were removed, since mappings are merged otherwise."""
    if not set(before) - set(after):
        return body
    lines = body.splitlines(keepends=True)
    at = next((n for n, line in enumerate(lines) if line.startswith("  teams:")), None)
    assert at is not None, "teams are among the differences"
    lines[at] = lines[at].replace("  teams:", "  teams: !replace", 1)
    return "".join(lines)
