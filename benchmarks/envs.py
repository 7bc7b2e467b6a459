"""`megarl bench envs`: environment steps per second of a simulator, physics and rendering apart.

    megarl bench envs --simulator reach --workers 2 --steps 500
    megarl bench envs --simulator my_robot.py:MyRobot python=ENV/bin/python size=256

Every process plays one task with random actions, eight to a policy call, and begins the next trial when an episode is
over, until all have done this many environment steps; with `batched=true` all environments of one process do so. `env
steps/s` counts all of them, with the resets and what goes between processes; the other numbers are seconds of one
process: physics per environment step, rendering per policy call, and what one call of `reset` or of the constructor
takes. Further KEY=VALUE are keys of the simulator's section.
`--record 64` holds a clip of 64 frames of every episode, as rewards that look at videos do: then a picture is rendered
after every environment step.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from megarl.system.errors import UserError, WorkerError

if TYPE_CHECKING:
    from megarl.robots.envs import Pool

CHUNK, STEPS, WORKERS = 8, 500, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl bench envs` to those of `megarl bench`."""
    parser.add_argument("--simulator", metavar="NAME", help="envs: included, file.py:Class, or pkg.mod:Class")
    parser.add_argument("--workers", type=int, metavar="N", help=f"envs: processes (default: {WORKERS})")
    parser.add_argument("--record", type=int, metavar="FRAMES", help="envs: record clips of this many frames")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and save; returns the exit code."""
    from rich.table import Table

    from megarl.benchmarks.program import OthersShare
    from megarl.benchmarks.report import show_and_save

    with OthersShare() as others:
        row = measure(_given(arguments), arguments.steps or STEPS, arguments.record)
    table = Table("what", "number", title=f"simulator {row['simulator']}, {row['workers']} processes")
    for name, number in row.items():
        if name not in ("simulator", "workers"):
            table.add_row(name.replace("_", " "), f"{number:.4g}")
    short = row["simulator"].rpartition(":")[2].lower()
    show_and_save(f"envs-{short}", table, {"results": [row]}, others.share, arguments.json)
    return 0


def measure(given: dict[str, Any], steps: int, record: int | None = None) -> dict[str, Any]:
    """Measure `steps` environment steps per process; `record`: number of frames in each episode's clip.

    Raises:
        WorkerError: a simulator failed.
    """
    import numpy as np

    from megarl.robots.envs import SimulatorSettings, open_pool
    from megarl.robots.simulators.protocol import Recording

    settings = SimulatorSettings.model_validate({"workers": WORKERS, "retries": 0} | given)
    with open_pool(settings) as pool:
        tasks = [list(pool.tasks.values())[slot % len(pool.tasks)] for slot in pool.slots]
        recordings = [None if record is None else Recording(tuple(task.cameras), record) for task in tasks]
        for slot in pool.slots:
            pool.begin(slot, tasks[slot].name, 0, recordings[slot])
        waiting = set(pool.slots)
        while waiting:
            waiting -= set(_answers(pool))
        counts, random = pool.counts, np.random.default_rng(0)
        resets, reset_s = counts.resets, counts.seconds["reset"]
        trials, done = [0] * len(tasks), [0] * len(tasks)

        def act(slot: int) -> None:
            pool.act(slot, random.uniform(-1, 1, (CHUNK, tasks[slot].action_dim)))

        began = time.perf_counter()
        for slot in pool.slots:
            act(slot)
        while pool.busy:
            answered = _answers(pool)
            for slot, (executed, _) in answered.items():
                done[slot] += executed
            for slot, (_, over) in answered.items():
                # Environments of one process act together until all of them are done.
                if (min(done) if pool.together else done[slot]) >= steps:
                    continue
                if over:
                    trials[slot] += 1
                    pool.begin(slot, tasks[slot].name, trials[slot] % tasks[slot].trials, recordings[slot])
                else:
                    act(slot)
        seconds = time.perf_counter() - began
        return {
            "simulator": settings.name,
            "workers": settings.workers,
            "frames_of_a_clip": record or 0,
            "env_steps": counts.steps,
            "env_steps_per_s": counts.steps / seconds,
            "physics_ms_per_env_step": 1e3 * counts.seconds["physics"] / counts.steps,
            "rendering_ms_per_policy_call": 1e3 * counts.seconds["render"] / counts.chunks,
            "share_of_time_in_simulators": (counts.seconds["step"] + counts.seconds["reset"] - reset_s)
            / (seconds * (1 if settings.batched else settings.workers)),
            "first_reset_ms": 1e3 * reset_s / resets,
            "reset_ms": 1e3 * (counts.seconds["reset"] - reset_s) / max(1, counts.resets - resets),
            "construct_s": counts.seconds["construct"] / counts.constructions.total(),
            "constructions": counts.constructions.total(),
        }


def _answers(pool: Pool) -> dict[int, tuple[int, bool]]:
    """Return the slots that answered: environment steps executed, and whether the episode is over."""
    from megarl.robots.envs import Failure
    from megarl.robots.simulators.protocol import Outcome

    answered = {}
    for slot, answer in pool.answers(1.0).items():
        if isinstance(answer, Failure):
            text = f"{answer.task}, trial {answer.trial}: {answer.text}\n{answer.output}"
            raise WorkerError(f"megarl bench envs: simulator {pool.settings.name!r}, {text}")
        answered[slot] = (answer.executed, answer.over) if isinstance(answer, Outcome) else (0, False)
    return answered


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the simulator's section from the command line."""
    import yaml

    if arguments.simulator is None:
        raise UserError("no simulator is named", where="megarl bench envs", fix="name one with --simulator")
    given: dict[str, Any] = {"name": arguments.simulator}
    if arguments.workers is not None:
        given["workers"] = arguments.workers
    for text in arguments.overrides[1:]:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError("an argument does not have the form KEY=VALUE", where="megarl bench envs", found=text)
        given[key] = yaml.safe_load(value)
    return given
