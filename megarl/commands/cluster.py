"""`megarl launch`, `status`, `logs` and `cancel`: runs as batch jobs of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megarl.artifacts.run_folder import refuse_other_files
from megarl.system.errors import UserError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement
    from megarl.launchers.submit import SubmittedJob

_LOOK_S = 0.5
_TAIL = 20  # last lines of each log file that `megarl logs` shows first
_NOTES = 10  # recent events that `megarl status` shows


def add_arguments(commands: Any, read_recipe: Callable[[argparse.Namespace], RunConfig]) -> None:
    """Add the arguments of the cluster commands."""
    launch = commands.add_parser(
        "launch",
        help="submit a run to a cluster",
        description="Write the batch script of a run to its folder and submit it to Slurm, with settings of the "
        "cluster from ~/.config/megarl/clusters.yaml. Or create the run's objects in Kubernetes "
        "(docs/launching.md).",
    )
    launch.add_argument("recipe", metavar="RECIPE", help="a recipe file or the name of a shipped one")
    launch.add_argument("overrides", metavar="KEY.PATH=VALUE", nargs="*", help="overrides of the recipe's values")
    where = launch.add_mutually_exclusive_group(required=True)
    where.add_argument("--slurm", action="store_true", help="by sbatch")
    where.add_argument("--kubernetes", action="store_true", help="create a JobSet or a RayJob with kubectl")
    launch.add_argument(
        "--job", choices=("train", "sft", "eval"), default="train", help="command that the job runs (default: train)"
    )
    launch.add_argument("--launcher", choices=("local", "torchrun", "ray"), help="default: launch.launcher")
    launch.add_argument("--run-dir", type=Path, help="run folder that all nodes can see; a run in it is continued")
    launch.add_argument("--dry-run", action="store_true", help="print the scripts and all problems; submit nothing")
    launch.set_defaults(
        run=lambda arguments: (_kubernetes if arguments.kubernetes else _launch)(arguments, read_recipe(arguments))
    )
    for name, run, text in (
        ("status", _status, "show the state of a submitted run"),
        ("logs", _logs, "show the output of a submitted run"),
        ("cancel", _cancel, "end the job of a submitted run; the run can be continued later"),
    ):
        parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder")
        if name == "logs":
            parser.add_argument("-f", "--follow", action="store_true", help="keep showing new lines until the run ends")
        parser.set_defaults(run=run)


def _launch(arguments: argparse.Namespace, config: RunConfig) -> int:
    from megarl.launchers.site import naming_site, with_site

    filled = with_site(config)
    with naming_site(config, filled):
        return _submit(arguments, filled)


def _submit(arguments: argparse.Namespace, config: RunConfig) -> int:
    from megarl.launchers.common import make_run_dir
    from megarl.launchers.preflight import check_run_folder
    from megarl.launchers.slurm import Submission, job_script, node_script, plan
    from megarl.launchers.slurm_settings import check_settings, doubtful, memory_bytes, unset_limit
    from megarl.launchers.submit import check_cluster, excluded, submit, write_scripts

    launcher = arguments.launcher or config.launch.launcher
    if config.cluster.nnodes > 1 and launcher == "local":
        launcher = "torchrun"
    slurm = config.launch.slurm
    memory = ("launch.slurm.memory", memory_bytes(slurm.memory))
    image, show = slurm.image is not None, arguments.dry_run
    _, checks_text = _check(config, launcher, arguments.job, image=image, memory=memory, show=show)
    parent = Path(config.tracking.dir) / config.name
    if arguments.run_dir is not None:
        refuse_other_files(arguments.run_dir)
    run_dir = (arguments.run_dir or parent / "STAMP").resolve()
    job = Submission(config, run_dir, arguments.job, launcher, Path.cwd())
    check_settings(job)
    for doubt in filter(None, [unset_limit(job), *doubtful(job)]):
        _warn(doubt)
    if arguments.dry_run:
        files = {"job.sh": job_script(job), "node.sh": node_script(job), "plan.json": json.dumps(plan(job), indent=1)}
        for name, text in files.items():
            print(f"== launch/{name} ==\n{text}")
        _close(checks_text)
        return 0
    check_cluster(job)
    run_dir = make_run_dir(config, arguments.run_dir, arguments.job)
    if not (result := check_run_folder(run_dir)).ok:
        raise UserError(
            "the run folder cannot be used", where="--run-dir", found=result.reason, fix="name another folder"
        )
    if (active := _active_job(run_dir)) is not None:
        state, fix = f"job {active[0]}, {active[1]}", f"wait for the job to end, or run megarl cancel {run_dir}"
        raise UserError("this run has a job that is still active", where="--run-dir", found=state, fix=fix)
    job = dataclasses.replace(job, run_dir=run_dir)
    write_scripts(job)
    for node, reason in excluded(run_dir).items():
        print(f"left out node {node}: {reason} (launch/excluded.jsonl)")
    print(f"run folder: {run_dir}\njob: {submit(job)}")
    print(f"  megarl status {run_dir}\n  megarl logs -f {run_dir}\n  megarl cancel {run_dir}")
    return 0


def _kubernetes(arguments: argparse.Namespace, config: RunConfig) -> int:
    from megarl.launchers.kubernetes import as_yaml, create, doubtful, make_job, manifests, quantity

    run_dir = None if arguments.run_dir is None else str(arguments.run_dir)
    job = make_job(config, arguments.job, arguments.launcher, run_dir, time.strftime("%Y%m%d-%H%M%S"))
    given = job.settings.memory
    memory = ("launch.kubernetes.memory", None if given is None else quantity(given))
    show = arguments.dry_run
    placement, checks_text = _check(job.in_pods, job.launcher, arguments.job, image=True, memory=memory, show=show)
    for doubt in doubtful(config, arguments.job, placement):
        _warn(doubt)
    if arguments.dry_run:
        print(as_yaml(manifests(job)), end="")
        _close(checks_text)
        return 0
    print(create(job))
    space = "" if job.settings.namespace is None else f" --namespace {job.settings.namespace}"
    kind = "rayjob" if job.launcher == "ray" else "jobset"
    print(f"run folder in the pods: {job.run_dir}\n  kubectl get{space} {kind} {job.name}")
    print(f"  kubectl delete{space} {kind}/{job.name} configmap/{job.name}")
    return 0


def _check(
    config: RunConfig, launcher: str, job: str, *, image: bool, memory: tuple[str, float | None], show: bool
) -> tuple[Placement | None, str]:
    """Raise the failed checks of a job and print its warnings; return its teams (None: unknown), and with `show` the
    estimate and all checks as text. Checks of this machine are left out, and with an `image` also those of the servers'
    interpreter.
    """
    from megarl.checks.before_start import with_steps
    from megarl.checks.checklist import problems_of
    from megarl.checks.dry_run import memory_and_checks
    from megarl.checks.host import host_memory
    from megarl.checks.recipe import check_config
    from megarl.config.base import raise_problems
    from megarl.dag.stage import Role

    with contextlib.redirect_stdout(sys.stderr):  # standard output is meant to be piped
        config = with_steps(config, job, dry=True)
    checked = check_config(config, launcher=launcher, job=job, here=False)
    checks = [check for check in checked.items if not (image and check.key == "rollout.sglang.python")]
    shown = memory_and_checks(config, checked, checks, job) if show else ""
    raise_problems(problems_of(checks))
    for check in checks:
        if check.status == "warn":
            _warn(str(check.problem()))
    (key, size), placement = memory, checked.placement
    if size is None or placement is None or checked.sizes[Role.ACTOR] is None:
        return placement, shown
    gpu = config.cluster.device_memory_gb is not None
    needed = host_memory(config, checked.sizes, placement, gpu=gpu, job=job).needed
    if needed.least > size:
        _warn(f"{key} is {size / 1e9:,.3g} GB, and the processes of a node need at least {needed.least / 1e9:,.3g} GB")
    return placement, shown


def _close(checks_text: str) -> None:
    """Print the checks of --dry-run to standard error, since its standard output is meant to be piped."""
    sys.stdout.flush()
    print(f"{checks_text}. Nothing was submitted.", file=sys.stderr)


def _warn(text: str) -> None:
    """Print a warning to standard error, since the standard output of --dry-run is meant to be piped."""
    print(f"megarl: warning: {text}", file=sys.stderr)


def _active_job(run_dir: Path) -> tuple[str, str] | None:
    from megarl.launchers.submit import jobs_of, state_of

    for job in reversed(jobs_of(run_dir)):
        state = state_of(job.number)
        if state.active:
            return job.number, state.name
    return None


def _submitted(run_dir: Path) -> list[SubmittedJob]:
    """Return the jobs submitted for a run, or raise UserError."""
    from megarl.launchers.submit import jobs_of

    jobs, log = jobs_of(run_dir), run_dir / "log.txt"
    if jobs:
        return jobs
    if not run_dir.is_dir():
        problem = "this is not a folder" if run_dir.exists() else "this folder does not exist"
        fix = "name the folder that megarl launch printed; it is below tracking.dir, as in runs/NAME/STAMP"
    else:
        problem = "no job was submitted for this folder"
        fix = f"submit one with megarl launch RECIPE --slurm --run-dir {run_dir}"
        if log.is_file():
            fix = f"the run was started without a batch job, and its output is in {log}: tail -f {log}"
    allowed = "a run folder made by megarl launch RECIPE --slurm"
    raise UserError(problem, where="RUN_DIR", found=str(run_dir), allowed=allowed, fix=fix)


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from megarl.launchers.submit import excluded, latest_tests, notes_of, state_of

    run_dir = arguments.run_dir.resolve()
    table = Table(title=str(run_dir))
    for column in ("job", "submitted", "state", "ran", "limit", "nodes"):
        table.add_column(column)
    for job in _submitted(run_dir):
        state = state_of(job.number)
        table.add_row(job.number, job.submitted, state.name, state.ran, state.limit, state.nodes or job.nodes)
    Console().print(table)
    print(f"run: {_run_text(run_dir)}")
    if notes := notes_of(run_dir):
        print(f"restarted after lost nodes: {sum(note['kind'] == 'restart' for note in notes)}")
    for node, reason in excluded(run_dir).items():
        print(f"left out: {node}: {reason}")
    for node, result in latest_tests(run_dir).items():
        print(f"pre-flight: {node}: {result}")
    for note in notes[-_NOTES:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["time"]))
        print(f"{at} job {note['job']}: {note['text']}")
    return 0


def _run_text(run_dir: Path) -> str:
    from megarl.artifacts.records import read_run, setting

    run, done = read_run(run_dir), last_step(run_dir)
    if not run and done is None:
        return "not begun"
    status, steps = run.get("status", "status unknown"), setting(run, "trainer", "steps")
    of = "" if steps is None else f" of {steps}"
    return f"{status}, step {done}{of}" if done is not None else f"{status}, before step 1"


def last_step(run_dir: Path) -> int | None:
    """Return the number of the last training step in metrics.jsonl, or None before the first step."""
    from megarl.artifacts.jsonl import STEP, read_jsonl

    lines = read_jsonl(run_dir / "metrics.jsonl", needs=STEP)
    steps = [line["step"] for line in lines if line["stage"] == "train"]
    return steps[-1] if steps else None


def _cancel(arguments: argparse.Namespace) -> int:
    from megarl.launchers.submit import cancel

    run_dir = arguments.run_dir.resolve()
    _submitted(run_dir)
    active = _active_job(run_dir)
    if active is None:
        print("no job of this run is waiting or running")
        return 0
    cancel(active[0])
    print(f"job {active[0]} is ending; to continue the run: megarl launch RECIPE --slurm --run-dir {run_dir}")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    run_dir = arguments.run_dir.resolve()
    _submitted(run_dir)
    files: dict[Path, IO[str]] = {}
    while True:
        # check before reading whether the job has ended: lines that it writes after the reading would be lost
        over = not arguments.follow or _active_job(run_dir) is None
        for file in [run_dir / "log.txt", *sorted((run_dir / "launch").glob("job-*.txt"))]:
            if file not in files and file.is_file():
                files[file] = file.open(encoding="utf-8", errors="replace")
                text = files[file].read().splitlines(keepends=True)[-_TAIL:]
            else:
                text = [files[file].read()] if file in files else []
            if "".join(text).strip() and len(files) > 1:
                print(f"-- {file.name}")
            sys.stdout.write("".join(text))
        sys.stdout.flush()
        if over:
            return 0
        time.sleep(_LOOK_S)
