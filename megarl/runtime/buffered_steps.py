"""Which runs may go on from a checkpoint that holds samples of steps that nobody was trained on.

A rollout in a team of its own samples ahead of training (megarl.disaggregated). Its checkpoints say of how many steps
they hold samples, in which order, with which settings; a run whose settings or teams differ is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Role
from megarl.errors import ConfigError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement


def describe_buffered(config: RunConfig, placement: Placement, step: int) -> dict[str, Any] | None:
    """What the state of a checkpoint after `step` says of the samples of the next ones; None: it has nothing of them.

    With `steps` 0 it has no samples: at the end of a run as ready there may still be prompts that it left out.
    """
    team, left = placement.of_role(Role.ROLLOUT), max(0, config.trainer.steps - step)
    if not config.async_.max_staleness or team is None or (not left and config.async_.order == "in_order"):
        return None
    fields: dict[str, list[str]] = {}
    for one in placement.given_by(team.name):
        fields.setdefault(one.node, []).extend(one.fields)
    return {
        "order": config.async_.order,
        "steps": min(config.async_.max_staleness, left),
        "parts": team.replicas,
        "fields": fields,
        "settings": _settings(config),
    }


def steps_held(saved: Mapping[str, Any] | None) -> int:
    """Steps for which a checkpoint has samples, by what `describe_buffered` said when it was written."""
    return 0 if saved is None else saved.get("steps", 1)  # an older version knew one


def _settings(config: RunConfig) -> dict[str, Any]:
    """Settings by key that drawing and training of one step must have in common.

    In order the store takes as many groups for a step as the one has. The log-probs that the actor computes are
    compared with those that samples were drawn with, which are of the other.
    """
    settings: dict[str, Any] = {"rollout.sampling.temperature": config.rollout.sampling.temperature}
    if config.async_.order == "in_order":
        settings["data.batch_size"] = config.data.batch_size
    return settings


def refuse_other_sampling(step: int, saved: Mapping[str, Any], config: RunConfig, placement: Placement) -> None:
    """Refuse to resume where what was drawn for the next step cannot be trained on in this run.

    Args:
        step: of the checkpoint.
        saved: what `describe_buffered` said when it was written.
        config: of this run.
        placement: of this run.

    Raises:
        ConfigError: a setting is another one, the rollout is in the actor's team now, or hands over something else.
    """
    order, held = saved.get("order", "in_order"), steps_held(saved)  # an older version knew no other order
    if order != config.async_.order:
        raise ConfigError(
            f"the checkpoint holds samples that were drawn ahead of training, from step {step + 1} on, in another "
            "order",
            where="async.order",
            found=config.async_.order,
            allowed=order,
            fix=_way_out(step, held, f"async.order={order}"),
        )
    if order == "in_order" and config.async_.max_staleness < held - 1:
        raise ConfigError(
            f"the checkpoint holds samples of {held} steps that were drawn ahead of training, and this run would not "
            "keep what is left of them in its next one",
            where="async.max_staleness",
            found=config.async_.max_staleness,
            allowed=f"{held - 1} or more",
            fix=f"set async.max_staleness={held - 1}; a run that goes on from its first checkpoint may have one less",
        )
    before = saved.get("settings", {})  # an older version did not note them
    for key, now in _settings(config).items():
        if key in before and before[key] != now:
            raise ConfigError(
                f"the checkpoint holds the samples of step {step + 1}, and they were drawn with another value",
                where=key,
                found=now,
                allowed=str(before[key]),
                fix=_way_out(step, held, f"{key}={before[key]}"),
            )
    _refuse_other_fields(step, held, saved["fields"], placement)


def refuse_left_out(step: int, prompts: int, config: RunConfig) -> None:
    """Refuse to resume in order where a run as ready left out prompts, which would never be drawn.

    Args:
        step: of the checkpoint, which holds no samples.
        prompts: how many it left out.
        config: of this run.

    Raises:
        ConfigError: there are some.
    """
    if not prompts or config.async_.order == "as_ready":
        return
    steps = -(-prompts // config.data.batch_size)
    raise ConfigError(
        f"the run that wrote the checkpoint left out {count(prompts, 'prompt')} that were to be drawn again, and in "
        "order nobody draws them",
        where="async.order",
        found=config.async_.order,
        allowed="as_ready",
        fix=_way_out(step, steps, "async.order=as_ready"),
    )


def _refuse_other_fields(step: int, held: int, kept: Mapping[str, Sequence[str]], placement: Placement) -> None:
    team = placement.of_role(Role.ROLLOUT)
    assert team is not None, "every run draws samples"
    if team == placement.of_role(Role.ACTOR):
        raise ConfigError(
            f"the checkpoint holds samples of step {step + 1} that were drawn ahead of training, by a rollout in a "
            "team of its own, and only such a one can hand them over",
            where="placement",
            found="the rollout in the team of the actor",
            allowed="a team of its own for the rollout",
            fix=_way_out(step, held, "the placement of before"),
        )
    given = placement.given_by(team.name)
    lacking = [f"{field} of {one.node}" for one in given for field in one.fields if field not in kept.get(one.node, ())]
    if lacking:
        raise ConfigError(
            f"the checkpoint holds samples of step {step + 1} that were drawn ahead of training, and they lack fields "
            "that nodes of this recipe hand over",
            where="recipe",
            found=", ".join(lacking),
            allowed="; ".join(f"{', '.join(fields)} of {node}" for node, fields in kept.items()),
            fix=_way_out(step, held, "the recipe of before"),
        )


def _way_out(step: int, held: int, before: str) -> str:
    """What to do first: a run of `held` more steps uses all that the checkpoint after `step` has, in either order."""
    last = step + held
    steps = f"step {last}" if held == 1 else f"steps {step + 1} to {last}"
    return (
        f"finish {steps} with {before} and trainer.steps={last}: that writes a checkpoint that holds no samples, from "
        "which other settings may go on (a learning rate that decays over the whole run is at its end in this step, "
        "unless optim.decay_steps says how long that is); or start with trainer.resume=never"
    )


def left_out(folder: Path, parts: int) -> int:
    """Of the checkpoint that `parts` replicas wrote into: how many prompts before its loader's place nobody has drawn.

    It is one that holds no samples, so these are all that a run in order would miss.
    """
    return sum(len(json.loads((folder / f"flow_{part}.json").read_text())["again"]) for part in range(parts))
