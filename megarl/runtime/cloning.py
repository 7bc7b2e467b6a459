"""The cold start of a robot's policy: what demonstrations did is learned, policy call by policy call."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.demonstration_sources import EXPERTS, find_demonstrations
from megarl.data.demonstrations import write_demonstrations
from megarl.data.loader import PromptLoader
from megarl.errors import ConfigError
from megarl.models.vla.cloning import CloningExamples
from megarl.rollout.robots.experts import ExpertCounts, demonstrate
from megarl.runtime.setup import warn_if_repeated
from megarl.tracing import keep_beating, phase

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from megarl.runtime.controller import Controller
    from megarl.runtime.robots import Robots

FOLDER = "demonstrations"


def load_calls(c: Controller, robots: Robots) -> PromptLoader:
    """Policy calls of the demonstrations that `sft.train_files` names. Collective over the ranks of a team.

    What experts show is written to RUN_DIR/demonstrations by one rank, and read by all.

    Raises:
        ConfigError, DataError: no demonstrations, or of another robot.
        SimulatorError: no simulator works any more.
    """
    config, layout, body = c.config, c.layout, robots.body
    assert config.robot is not None
    sources = config.sft.train_files or [EXPERTS]
    folder = c.run_dir / FOLDER
    if EXPERTS in sources:
        with phase("demonstrate"), keep_beating():
            layout.world.broadcast_json(_show(c, robots, folder) if layout.rank == 0 else None)
    places = [str(folder) if source == EXPERTS else source for source in sources]
    states = body.view.states
    data = CloningExamples(
        find_demonstrations(places, robots.tasks, config.robot.recorded_cameras),
        robots.trials["train"].prompts,
        body.codec,
        body.view.pictures,
        cameras=config.robot.cameras,
        chunk=config.robot.chunk,
        states=_as_they_are if states is None else states.normalise,
    )
    if layout.rank == 0:
        print(data.describe(), flush=True)
        warn_if_repeated("sft.batch_size", config.sft.batch_size, len(data))
    return PromptLoader(
        data, config.sft.batch_size, layout.dp_rank, layout.dp_size, config.trainer.seed, config.data.shuffle
    )


def _show(c: Controller, robots: Robots, folder: Path) -> int:
    """Let experts play start states that are trained on, and write what they did; the first rank does it."""
    robot, seed, counts = c.config.robot, c.config.trainer.seed, ExpertCounts()
    assert robot is not None
    assert robots.pool is not None, "the first rank of a replica has the simulators"
    taken: dict[str, int] = {}
    pairs = []
    for task, trial in robots.trials["train"].pairs:
        taken[task] = taken.get(task, 0) + 1
        if robot.demonstrations is None or taken[task] <= robot.demonstrations:
            pairs.append((task, trial))
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with c.context.progress("demonstrations", len(pairs)) as advance:
        shown = demonstrate(robots.pool, pairs, noise=robot.expert_noise, seed=seed, counts=counts, advance=advance)
        written = write_demonstrations(partial, shown)
    print(counts.describe(), flush=True)
    if not written:
        raise ConfigError(
            "there is nothing to clone: experts solved none of the episodes",
            where="sft.train_files",
            found=counts.describe(),
            fix="raise the simulator's limit of environment steps, lower robot.expert_noise, or name folders of "
            "demonstrations",
        )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return written


def _as_they_are(states: NDArray[np.float32]) -> NDArray[np.float32]:
    return states
