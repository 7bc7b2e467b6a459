"""What scripted experts show, and what bins take of it: `python -m megarl.benchmarks.experts`.

    seconds, and solved episodes, for each of `--noise`
    of episodes without noise, those that the tokens of their demonstrations solve again, for each of `--bins`

Tokens are played in chunks of `--chunk` actions, without a look at what they come to, and the last action once more.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from megarl.data.demonstrations import Demonstration, OpenDemonstration
from megarl.envs.robots import SimulatorPool, SimulatorSettings, play
from megarl.models.vla.actions import GRIPPER_RULES, ActionCodec, ActionTokens
from megarl.models.vla.cloning import cloning_statistics
from megarl.rollout.robots.experts import ExpertCounts, demonstrate
from megarl.simulators.protocol import Outcome


def solved_again(
    pool: SimulatorPool, shown: Sequence[tuple[int, Demonstration]], bins: int, chunk: int
) -> Counter[str]:
    """Episodes, given with their trial, that the tokens of their demonstrations solve, by task."""
    opened = [OpenDemonstration.of(one, f"trial {trial}") for trial, one in shown]
    codec = ActionCodec(ActionTokens(bins, bins), cloning_statistics(opened, GRIPPER_RULES["none"]).action)
    solved: Counter[str] = Counter()
    for trial, one in shown:
        actions = codec.to_actions(codec.to_tokens(np.concatenate([one.actions, one.actions[-1:]])))
        chunks = [actions[start : start + chunk] for start in range(0, len(actions), chunk)]
        last = play(pool, one.task, trial, chunks)[-1]
        solved[one.task] += isinstance(last, Outcome) and last.success
    return solved


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each noise, and for each number of bins."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--simulator", default="reach")
    parser.add_argument("--tasks", nargs="+", default=["reach_red", "push_up", "push_left"])
    parser.add_argument("--episodes", type=int, default=300, help="of each task, from trial 0 on")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--bins", type=int, nargs="*", default=[])
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(argv)
    settings = SimulatorSettings(name=given.simulator, tasks=given.tasks, workers=given.workers)
    episodes = [(task, trial) for task in given.tasks for trial in range(given.episodes)]
    with SimulatorPool(settings) as pool:
        for noise in given.noise:
            counts, began = ExpertCounts(), time.perf_counter()
            for _ in demonstrate(pool, episodes, noise=noise, seed=0, counts=counts):
                pass
            print(f"noise {noise:g}: {time.perf_counter() - began:.1f} s; {counts.describe()}", flush=True)
        shown: list[tuple[int, Demonstration]] = []
        for task, trial in episodes if given.bins else []:
            shown += [(trial, one) for one in demonstrate(pool, [(task, trial)], noise=0, seed=0)]
        for bins in given.bins:
            solved = solved_again(pool, shown, bins, given.chunk)
            there = Counter(one.task for _, one in shown)
            print(f"{bins} bins: " + ", ".join(f"{task} {solved[task]} of {there[task]}" for task in there))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
