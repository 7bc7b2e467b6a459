"""Tests checkpoints and SIGKILL: a run that lost a worker continues with the metrics of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.certificate.findings import Findings
from megarl.certificate.runs import PLAIN, gpu_count, killed, steps_in, train
from megarl.system.device import has_cuda

_STEPS, _KILLED_AFTER = 6, 3
_LIMIT_S = 400.0
_TIMES = ("timing_s/", "perf/", "team/")
_CLOSE = 0.05  # limit of the entropy's relative change on a GPU, where gradient sums have another order in each run


def run(found: Findings, folder: Path) -> None:
    """Train undisturbed; train, kill a worker and continue; compare."""
    processes = min(gpu_count() or 1, 2)
    settings = [*PLAIN, f"cluster.nproc={processes}", "data.batch_size=8", "rollout.sampling.n=4"]
    settings += [f"trainer.steps={_STEPS}", "trainer.save_every=1"]
    expected = {line["step"]: numbers_of(line) for line in train(folder / "undisturbed", settings, _LIMIT_S)}
    run_dir = folder / "killed"
    code = killed(run_dir, settings, lambda: _victim(run_dir, processes - 1), _LIMIT_S)
    found.check("the command notices that a worker was killed", code != 0, f"exit code {code}")
    lost = max((line["step"] for line in steps_in(run_dir)), default=0)
    found.check("steps are left to do", lost < _STEPS, f"killed after step {lost}")
    resumed = {line["step"]: numbers_of(line) for line in train(run_dir, settings, _LIMIT_S)}
    found.check("every step is there once", sorted(resumed) == list(range(1, _STEPS + 1)), f"{sorted(resumed)}")
    different = [step for step in expected if resumed.get(step) != expected[step]]
    if not has_cuda():
        found.check("the numbers of an undisturbed run", not different, f"different steps: {different or 'none'}")
        return
    found.fact("steps with other bits than in an undisturbed run", different or "none")
    first = min(lost + 1, _STEPS)
    before, after = expected[first]["actor/entropy"], resumed[first]["actor/entropy"]
    found.within(f"entropy of step {first}, the first after the kill", abs(before - after) / abs(before), _CLOSE)


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a step that do not measure time or memory."""
    return {name: value for name, value in line.items() if name != "time" and not name.startswith(_TIMES)}


def _victim(run_dir: Path, rank: int) -> int | None:
    """Return the process id of the rank that the test kills, once the run has made enough steps; otherwise None."""
    from megarl.runtime.health import read_beat

    if not any(line["step"] >= _KILLED_AFTER for line in steps_in(run_dir)):
        return None
    beat = read_beat(run_dir, rank)
    return None if beat is None else beat.pid
