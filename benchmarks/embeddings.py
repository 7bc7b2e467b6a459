"""How well SRPO's scores order failures by true progress, by embedding: `python -m megarl.benchmarks.embeddings`.

Episodes of `reach` by its scripted expert, disturbed by normal noise of each of `--noise`; steps of `--trials` start
states each, no start state twice. For each embedding (`own` as it learns, and with its first, random weights), and for
embeddings exchanged at random, Spearman's correlation of score and progress over the failures of a task: its mean over
the last `--measured` steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from megarl.algorithms.progress import ProgressSettings
from megarl.algorithms.srpo import ProgressScorer
from megarl.comm import WorkerGroup
from megarl.config.embedding import EmbeddingSettings
from megarl.data.batch import Batch, Jagged
from megarl.models.episodes import build_embedder
from megarl.simulators.reach import Reach

CAMERA = "top"


def played(tasks: Sequence[str], trials: Sequence[int], noises: Sequence[float], chunk: int) -> Batch:
    """An episode of every task, trial and noise, as a batch holds it."""
    frames, states, success, progress, names = [], [], [], [], []
    for task in tasks:
        simulator = Reach(task, Reach.settings)
        for trial in trials:
            for number, noise in enumerate(noises):
                drawn = np.random.Generator(np.random.PCG64([trial, number]))
                seen, over, taken = [simulator.reset(trial)], False, 0
                while not over:
                    action = simulator.expert() + noise * drawn.normal(size=3)
                    outcome = simulator.step(action[None].astype(np.float32))
                    over, taken = outcome.over, taken + 1
                    if over or taken % chunk == 0:  # before the next policy call, or at the end
                        seen.append(outcome.observation)
                frames.append(torch.from_numpy(np.stack([one.frames[CAMERA] for one in seen])))
                states.append(torch.from_numpy(np.stack([one.state for one in seen])))
                success.append(outcome.success)
                progress.append(outcome.progress)
                names.append(task)
    return Batch(
        {
            f"frames/{CAMERA}": Jagged.from_list([one[:-1] for one in frames]),
            f"end_frames/{CAMERA}": torch.stack([one[-1] for one in frames]),
            "states": Jagged.from_list([one[:-1] for one in states]),
            "end_state": torch.stack([one[-1] for one in states]),
            "success": torch.tensor(success),
            "progress": torch.tensor(progress, dtype=torch.float32),
        },
        {"task": names, "env_error": [""] * len(names)},
        size=len(names),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each embedding and its control."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", default=["reach_red", "push_up"])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--trials", type=int, default=32, help="start states of a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--measured", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the encoder's weights and of what it learns on")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps = [
        played(given.tasks, range(step * given.trials, (step + 1) * given.trials), given.noise, given.chunk)
        for step in range(given.steps)
    ]
    solved = torch.cat([batch["success"] for batch in steps]).float().mean()
    print(f"{len(steps)} steps of {len(steps[0])} episodes, {solved:.0%} of them solved")
    cpu, alone = torch.device("cpu"), WorkerGroup.alone()
    for name, learns in (("state", True), ("own", True), ("own", False)):
        wanted = EmbeddingSettings.model_validate({"name": name})
        embedder = build_embedder(wanted, cameras=[CAMERA], device=cpu, group=alone, seed=given.seed)
        embeddings = []
        for step, batch in enumerate(steps):
            if learns:
                embedder.learn(batch, step)
            embeddings.append(embedder.embed(batch))
        for shuffled in (False, True):
            scorer = ProgressScorer(ProgressSettings(shuffled=shuffled), 0)
            found: dict[str, list[float]] = {task: [] for task in given.tasks}
            for step, (batch, rows) in enumerate(zip(steps, embeddings, strict=True)):
                report = scorer.score(rows, batch["success"], batch["task"], step=step)
                for task, value in report.rank_correlations(batch["progress"]).items():
                    if step >= given.steps - given.measured:
                        found[str(task)].append(value)
            shown = ", ".join(f"{task} {np.mean(some):+.2f} of {len(some)} steps" for task, some in found.items())
            kind = f"{name}{'' if learns else ', random weights'}{', shuffled' if shuffled else ''}"
            print(f"{kind}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
