"""The training examples of a cold start (SFT): policy calls of demonstrations, which scripted experts may play."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.loader import PromptLoader
from megarl.robots.config import robot_of
from megarl.robots.data.demonstration_sources import EXPERTS, find_demonstrations
from megarl.robots.data.demonstrations import write_demonstrations
from megarl.robots.models.flow.cloning import FlowExamples
from megarl.robots.models.vla.actions import NumberCodec
from megarl.robots.models.vla.cloning import CloningExamples
from megarl.robots.rollout.experts import ExpertCounts, demonstrate
from megarl.runtime.setup import open_loader
from megarl.system.errors import ConfigError
from megarl.system.tracing import keep_beating, phase

if TYPE_CHECKING:
    from megarl.robots.setup import Robots
    from megarl.runtime.rank_state import RankState

DEMONSTRATIONS = "demonstrations"  # folder for demonstrations in the run folder


def load_calls(c: RankState, robots: Robots) -> PromptLoader:
    """Return the loader of policy calls from the demonstrations in `sft.train_files`. Collective over a team.

    One rank writes the experts' demonstrations to RUN_DIR/demonstrations, and all ranks read them.
    """
    config, layout, body = c.config, c.layout, robots.body
    robot = robot_of(config)
    sources = config.sft.train_files or [EXPERTS]
    folder = c.run_dir / DEMONSTRATIONS
    if EXPERTS in sources:
        with phase("demonstrate"), keep_beating():
            layout.world.broadcast_json(_show(c, robots, folder) if layout.rank == 0 else None)
    places = [str(folder) if source == EXPERTS else source for source in sources]
    states = body.view.states
    kind = FlowExamples if isinstance(body.codec, NumberCodec) else CloningExamples
    data = kind(
        find_demonstrations(places, robots.tasks, robot.recorded_cameras),
        robots.trials["train"].prompts,
        body.codec,
        body.view.pictures,
        cameras=robot.cameras,
        chunk=robot.chunk,
        states=(lambda seen: seen) if states is None else states.normalise,
    )
    return open_loader(config, data, layout, "sft")


def _show(c: RankState, robots: Robots, folder: Path) -> int:
    """Let experts play training start states, write their demonstrations to `folder`, and return how many there are."""
    robot, seed, counts = robot_of(c.config), c.config.trainer.seed, ExpertCounts()
    assert robots.pool is not None, "the first rank of a replica has the simulators"
    counted: Counter[str] = Counter()
    pairs = []
    for task, trial in robots.trials["train"].pairs:
        counted[task] += 1
        if robot.demonstrations is None or counted[task] <= robot.demonstrations:
            pairs.append((task, trial))
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with c.context.progress("demonstrations", len(pairs)) as advance:
        shown = demonstrate(robots.pool, pairs, noise=robot.expert_noise, seed=seed, counts=counts, advance=advance)
        written = write_demonstrations(partial, shown)
    print(counts.describe(), flush=True)
    if not written:
        raise ConfigError(
            "no demonstrations to clone: the experts solved no episode",
            where="sft.train_files",
            found=counts.describe(),
            fix="raise the simulator's limit of environment steps, lower robot.expert_noise, or name folders of "
            "demonstrations",
        )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return written
