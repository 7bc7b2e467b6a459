"""Runs of `megarl launch --slurm` on the Slurm of a test."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl import cli
from megarl.commands.cluster import last_step
from megarl.launchers.submit import jobs_of, state_of
from tests.launchers import slurm_cluster


@contextlib.contextmanager
def a_slurm(folder: Path, nodes: int, more: str = slurm_cluster.PARTITION) -> Iterator[slurm_cluster.Cluster]:
    """A cluster that `megarl launch` uses; where it does not start, tests are skipped."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(slurm_cluster.cluster(folder, nodes, more))
        except slurm_cluster.DoesNotRunHere as error:
            pytest.skip(str(error))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SLURM_CONF", str(found.conf))
        (folder / "none.yaml").write_text("{}\n")
        patch.setenv("MEGARL_CLUSTERS", str(folder / "none.yaml"))
        yield found


#: Nodes are processes that share two cores: how fast they reach each other says nothing of them.
SHARED = ("launch.preflight_bandwidth=0", "launch.preflight_clock_s=30")


def launch(recipe: Path, run_dir: Path, *keys: str) -> int:
    """The exit code of the command, for two nodes."""
    arguments = ["launch", str(recipe), "--slurm", "cluster.nnodes=2", "launch.slurm.partition=debug", *SHARED, *keys]
    return cli.main([*arguments, "--run-dir", str(run_dir)])


def slow_reward(recipe: Path, seconds: float) -> str:
    """The override for rewards that take so long, so that a run is not over before something happens to it."""
    reward, file = (recipe.parent / "reward.py").read_text(), recipe.parent / "slow.py"
    sleep = f"closeness(samples):\n    import time; time.sleep({seconds})"
    file.write_text(reward.replace("closeness(samples):", sleep))
    return f"reward.name={file}:closeness"


def wait(until: Callable[[], bool], what: str, seconds: float = 200, run_dir: Path | None = None) -> None:
    """Until something is so; where it does not come, the error shows what the run has said so far."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"no {what} within {seconds} s\n{said(run_dir) if run_dir else ''}"
        time.sleep(0.3)


def wait_for_step(run_dir: Path, step: int, seconds: float = 200) -> None:
    """Until the run has done a step."""

    def done() -> bool:
        return (run_dir / "metrics.jsonl").is_file() and (last_step(run_dir) or 0) >= step

    wait(done, f"step {step}", seconds, run_dir)


def wait_for_end(run_dir: Path, seconds: float = 200) -> str:
    """Until the last job of the run has ended; its state."""

    def over() -> bool:
        last = jobs_of(run_dir)[-1].number
        return not state_of(last).active and jobs_of(run_dir)[-1].number == last

    wait(over, "end of the last job", seconds, run_dir)
    return state_of(jobs_of(run_dir)[-1].number).name


def said(run_dir: Path) -> str:
    """What jobs and run have printed."""
    files = [*sorted((run_dir / "launch").glob("job-*.txt")), run_dir / "log.txt"]
    return "\n".join(f"{file.name}: {file.read_text()[-3000:]}" for file in files if file.is_file())


def events(run_dir: Path, kind: str) -> list[str]:
    """The texts of the run's events of this kind."""
    lines = (run_dir / "launch" / "events.jsonl").read_text().splitlines()
    return [event["text"] for event in map(json.loads, lines) if event["kind"] == kind]
