"""Memory of robots' episodes from the simulators' answers to a batch: `python -m megarl.benchmarks.episodes`.

Synthetic pictures, as a policy sees them. The floor is one copy of them; what is measured is the most that the process
had at any time, less what it had before.
"""

from __future__ import annotations

import argparse
import json
import math
import resource

import numpy as np

from megarl.data.batch import Batch
from megarl.rollout.robots.acting import Chunk
from megarl.rollout.robots.episode import Episode, add_episodes
from megarl.simulators.protocol import Observation, TaskSpec
from megarl.training.calls import calls_of


def measure(episodes: int, calls: int, size: int, cameras: int, dim: int, chunk: int) -> dict[str, float]:
    """GB of a batch of `episodes` of `calls` policy calls each, with its floor."""
    names = {f"camera{n}": (size, size) for n in range(cameras)}
    spec = TaskSpec("synthetic", "do it", 1, calls * chunk, dim, 8, names)
    rng = np.random.default_rng(0)

    def seen() -> Observation:
        frames = {name: np.full((size, size, 3), int(rng.integers(256)), np.uint8) for name in names}
        return Observation(frames, np.zeros(8, np.float32))

    before = _peak()
    played = []
    for number in range(episodes):
        act = Chunk([1] * (dim * chunk), [0.0] * (dim * chunk), np.zeros((chunk, dim), np.float32))
        one = Episode(spec, number, [seen() for _ in range(calls)], [act] * calls, [chunk] * calls, seen())
        played.append(one)
    batch = Batch({}, {}, size=episodes)
    add_episodes(batch, played, 0)
    rows = calls_of(batch)
    assert len(rows) == episodes * calls
    floor = episodes * (calls + 1) * cameras * size * size * 3
    return {"episodes": episodes, "calls": calls, "floor_gb": floor / 1e9, "peak_gb": (_peak() - before) / 1e9}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("episodes", 512), ("calls", 64), ("size", 224), ("cameras", 1), ("dim", 7), ("chunk", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    found = measure(**vars(parser.parse_args()))
    print(json.dumps({name: round(value, 3) if math.isfinite(value) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
