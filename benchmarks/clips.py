"""SRPO's scores by clips of every environment step and of every policy call: `python -m megarl.benchmarks.clips`.

    python -m megarl.benchmarks.clips --simulator reach tasks=[reach_red,push_up]
    python -m megarl.benchmarks.clips --simulator metaworld python=PYTHON tasks=[button-press-topdown-v3] plain=true

Episodes of a simulator's scripted experts, disturbed by normal noise of each of `--noise`; each is recorded once, and
compared both ways by V-JEPA 2 with small random weights (published ones: `--path`). A step is `--trials` start states
of each task, at each noise. For both kinds of clips, and for embeddings exchanged at random: Spearman's correlation of
score and true progress over the failures of a task, its mean over the steps. Frames and bytes of a clip are means.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megarl.algorithms.progress import ProgressSettings
from megarl.algorithms.srpo import ProgressScorer
from megarl.comm import WorkerGroup
from megarl.config.embedding import EmbeddingSettings
from megarl.data.batch import Batch, Jagged
from megarl.data.frames import CLIP, END_FRAMES, FRAMES
from megarl.envs.robots import Advice, Answer, Failure, SimulatorPool, SimulatorSettings
from megarl.models.episodes import build_embedder
from megarl.simulators.protocol import Observation, Outcome, Recording

KINDS = ("steps", "calls")


def _ask(pool: SimulatorPool) -> Answer:
    while True:
        if found := pool.answers(1.0):
            if isinstance(found[0], Failure):
                raise SystemExit(f"{found[0].task}, trial {found[0].trial}: {found[0].text}\n{found[0].output}")
            return found[0]


def _episode(pool: SimulatorPool, task: str, trial: int, noise: float, chunk: int, record: Recording) -> dict[str, Any]:
    """One disturbed episode: what was seen before each call and at the end, its clip, and how it ended."""
    drawn = np.random.Generator(np.random.PCG64([trial, round(1000 * noise)]))
    pool.begin(0, task, trial, record)
    first = _ask(pool)
    assert isinstance(first, Observation)
    seen, taken = [first], 0
    while True:
        pool.expert(0)
        advice = _ask(pool)
        assert isinstance(advice, Advice)
        assert advice.action is not None, f"{task} has no expert"
        pool.act(0, (advice.action + noise * drawn.normal(size=advice.action.shape))[None].astype(np.float32))
        outcome = _ask(pool)
        assert isinstance(outcome, Outcome)
        taken += 1
        if outcome.over or taken % chunk == 0:  # before the next policy call, or at the end
            seen.append(outcome.observation)
        if outcome.over:
            return {"task": task, "seen": seen, "outcome": outcome}


def batch_of(episodes: Sequence[dict[str, Any]], cameras: Sequence[str]) -> Batch:
    """Episodes as a batch holds them."""
    fields: dict[str, Any] = {
        "success": torch.tensor([one["outcome"].success for one in episodes]),
        "progress": torch.tensor([one["outcome"].progress for one in episodes], dtype=torch.float32),
    }
    for camera in cameras:
        frames = [torch.from_numpy(np.stack([seen.frames[camera] for seen in one["seen"]])) for one in episodes]
        fields[FRAMES + camera] = Jagged.from_list([one[:-1] for one in frames])
        fields[END_FRAMES + camera] = torch.stack([one[-1] for one in frames])
        fields[CLIP + camera] = Jagged.from_list([torch.from_numpy(one["outcome"].clip[camera]) for one in episodes])
    columns = {"task": [one["task"] for one in episodes], "env_error": [""] * len(episodes)}
    return Batch(fields, columns, size=len(episodes))


def small_encoder(folder: Path) -> str:
    """V-JEPA 2 of one million random weights, 64 frames of 64 pixels."""
    from transformers import VJEPA2Config, VJEPA2Model

    sizes = {"patch_size": 16, "crop_size": 64, "frames_per_clip": 64, "hidden_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "pred_hidden_size": 24, "pred_num_attention_heads": 2}
    torch.manual_seed(0)
    VJEPA2Model(VJEPA2Config(**sizes, **heads, pred_num_hidden_layers=1, pred_num_mask_tokens=1)).save_pretrained(
        folder
    )
    return str(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each kind of clip and its control."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--simulator", default="reach")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--trials", type=int, default=8, help="start states of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--path", help="V-JEPA 2; none: small random weights")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the simulator")
    given = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)
    own = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in given.settings)}
    settings = SimulatorSettings.model_validate({"name": given.simulator, "workers": 1, "retries": 0} | own)
    with SimulatorPool(settings, where="settings") as pool, tempfile.TemporaryDirectory() as folder:
        cameras = tuple(next(iter(pool.tasks.values())).cameras)
        steps = []
        for step in range(given.steps):
            trials = range(step * given.trials, (step + 1) * given.trials)
            plan = [(task, trial, noise) for task in pool.tasks for trial in trials for noise in given.noise]
            played = [_episode(pool, *one, given.chunk, Recording(cameras, 64)) for one in plan]
            steps.append(batch_of(played, cameras))
        solved = torch.cat([batch["success"] for batch in steps]).float().mean()
        print(f"{len(steps)} steps of {len(steps[0])} episodes, {solved:.0%} of them solved")
        path = given.path or small_encoder(Path(folder))
        for kind in KINDS:
            _show(kind, path, steps, cameras, list(pool.tasks))
    return 0


def _show(kind: str, path: str, steps: Sequence[Batch], cameras: tuple[str, ...], tasks: Sequence[str]) -> None:
    wanted = EmbeddingSettings.model_validate({"name": "vjepa2", "path": path, "clip": kind, "batch_size": 16})
    embedder = build_embedder(wanted, cameras=cameras, device=torch.device("cpu"), group=WorkerGroup.alone(), seed=0)
    rows = [embedder.embed(batch) for batch in steps]
    lengths = [batch[(CLIP if kind == "steps" else FRAMES) + cameras[0]].lengths.float().mean() for batch in steps]
    frames = float(sum(lengths) / len(lengths)) + (kind == "calls")
    for shuffled in (False, True):
        scorer, found = ProgressScorer(ProgressSettings(shuffled=shuffled), 0), {task: list[float]() for task in tasks}
        for step, (batch, made) in enumerate(zip(steps, rows, strict=True)):
            report = scorer.score(made, batch["success"], batch["task"], step=step)
            for task, value in report.rank_correlations(batch["progress"]).items():
                found[str(task)].append(value)
        shown = ", ".join(f"{task} {np.mean(some):+.2f} of {len(some)} steps" for task, some in found.items())
        print(f"{kind}, {frames:.0f} frames{', shuffled' if shuffled else ''}: {shown}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
