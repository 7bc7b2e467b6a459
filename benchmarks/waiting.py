"""How long a policy waits for physics, with and without half-batches: `python -m megarl.benchmarks.waiting`.

Real simulators' processes and the real loop of a rollout; what takes time in them sleeps, as physics on other cores and
a policy on a device do, so that the figures show the order of work and not who shares a core with whom. With a policy
call of `fixed_ms` + rows * `row_ms` the floors of a turn of all slots are physics + call (all slots together) and, in
halves, the longer of physics + call of a half and two calls of halves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megarl.comm import WorkerGroup
from megarl.data.pictures import PIPELINES
from megarl.envs.robots import SimulatorPool, SimulatorSettings
from megarl.rollout.robots.acting import Chunk, PolicyCall
from megarl.rollout.robots.play import EpisodeStart, Player
from megarl.rollout.robots.view import View

SIMULATOR = f"{Path(__file__).with_name('sleeping_simulator.py')}:Sleeping"


class SleepingPolicy:
    """Takes `fixed_s` for a call and `row_s` for each of its rows."""

    def __init__(self, chunk: int, fixed_s: float, row_s: float) -> None:
        self.blank = Chunk([0] * (chunk * 7), [0.0] * (chunk * 7), np.zeros((chunk, 7), np.float32))
        self._fixed_s, self._row_s = fixed_s, row_s

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        """The same chunk for all."""
        time.sleep(self._fixed_s + self._row_s * len(calls))
        return [self.blank] * len(calls)


def measure(
    *, halves: bool, slots: int, turns: int, chunk: int, step_ms: float, fixed_ms: float, row_ms: float
) -> dict[str, float]:
    """Seconds of a rollout in which every slot plays one episode of `turns` policy calls.

    Returns:
        `seconds`, `floor` (seconds) and `waits`, the share of the time in which the policy waited for simulators.
    """
    settings = SimulatorSettings.model_validate(
        {"name": SIMULATOR, "workers": slots, "step_ms": step_ms, "max_steps": turns * chunk}
    )
    policy = SleepingPolicy(chunk, fixed_ms / 1000, row_ms / 1000)
    starts = [EpisodeStart(f"e{n}", "sleep", n, [1], lambda call: call) for n in range(slots)]
    with SimulatorPool(settings) as pool:
        view = View((), PIPELINES["plain"])
        player = Player(pool, policy, WorkerGroup.alone(), view, lambda told: [1], halves=halves, on_error="fail")
        player.play(starts)  # constructs the simulators
        began = time.monotonic()
        _, counts = player.play(starts)
        seconds = time.monotonic() - began
    physics = step_ms * chunk / 1000
    call, half = ((fixed_ms + row_ms * rows) / 1000 for rows in (slots, slots // 2))
    turn = max(physics + half, 2 * half) if halves else physics + call
    return {"seconds": seconds, "floor": turn * turns, "waits": counts.wait_s / (counts.wait_s + counts.act_s)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=16, help="simulators' processes")
    parser.add_argument("--turns", type=int, default=16, help="policy calls of an episode")
    parser.add_argument("--chunk", type=int, default=8, help="environment steps of a policy call")
    parser.add_argument("--fixed-ms", type=float, default=20.0, help="of a policy call")
    parser.add_argument("--row-ms", type=float, default=2.0, help="of each of its rows")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 5.0, 10.0], help="of an environment step")
    own = vars(parser.parse_args())
    print(f"{'step, ms':>10}{'halves':>8}{'seconds':>10}{'floor':>8}{'waits':>8}")
    for step_ms in own.pop("step_ms"):
        for halves in (False, True):
            found = measure(halves=halves, step_ms=step_ms, **own)
            print(
                f"{step_ms:>10.1f}{'yes' if halves else 'no':>8}{found['seconds']:>10.2f}{found['floor']:>8.2f}"
                f"{found['waits']:>8.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
