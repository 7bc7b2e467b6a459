"""Checks of the section `robot`, and of other settings that conflict with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.algorithms.needs import estimator_fields
from megarl.algorithms.progress import ProgressSettings
from megarl.config.components import settings_at
from megarl.config.engines import DEFAULT, KEY
from megarl.config.rollout import SamplingConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.data.sources import TEXT
from megarl.robots.checks.policy import check_policy
from megarl.robots.config import SIMULATOR, EmbeddingSettings, FlowConfig, refuse_other_tasks, robot_of
from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.models.vla.calls import FLOW
from megarl.robots.simulators.registry import MEASURING, measures_progress

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

#: Losses whose term for a token does not depend on other tokens of the sequence.
TOKEN_LOSSES = ("ppo", "cispo", "dro", "gpg", "pg_is", "sapo")


def check_robot(config: RunConfig, placement: Placement | None, checks: Checklist, *, starts: bool = False) -> None:
    """Check the section `robot` of a recipe; without it, check that no data source is a simulator.

    Args:
        starts: whether the run starts on this machine now.
    """
    checks = checks.of("robot")
    data = config.data
    wanted = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    if config.robot is None:
        for key, sources in wanted.items():
            if SIMULATOR in sources:
                checks.fail(
                    "robot",
                    f"{key} contains {SIMULATOR!r}, but the recipe has no simulator",
                    found="null",
                    allowed="the section `robot`",
                    fix=f"add robot.simulator, or list files in {key}",
                )
        return
    before = len(checks.items)
    _check_settings(config, checks)
    _check_interpreter(config, checks, starts)
    _check_surroundings(config, placement, checks)
    if config.model.lora is not None:
        checks.fail(
            "model.lora",
            "LoRA is not supported for robot policies",
            found="set, with a section `robot`",
            allowed="null",
            fix="remove model.lora: all weights of a robot's policy are trained",
        )
    check_policy(config, checks)
    for key, sources in wanted.items():
        if sources not in ([SIMULATOR], []) or (key == "data.train_files" and not sources):
            checks.fail(
                key,
                "a recipe with the section `robot` takes its rows from the simulator's start states",
                found=sources,
                allowed=f"[{SIMULATOR}]",
                fix=(
                    "leave --prompt out; `megarl eval` plays held-out start states"
                    if any(source.startswith(TEXT) for source in sources)
                    else f"set {key}=[{SIMULATOR}]"
                ),
            )
    if config.sft.steps and SIMULATOR in (config.sft.train_files or [SIMULATOR]):
        checks.fail(
            "sft.train_files",
            "the cold start of a robot policy needs demonstrations",
            found=config.sft.train_files or "null",
            allowed="[experts], folders of demonstrations, or TASK=FILE.hdf5",
            fix="set sft.train_files=[experts], or sft.steps=0",
        )
    if not any(check.status == "fail" for check in checks.items[before:]):
        robot = config.robot
        checks.ok(f"{robot.simulator['name']}, {robot.chunk} actions of {robot.dim} numbers in a policy call")


def _check_settings(config: RunConfig, checks: Checklist) -> None:
    """Check the keys of the simulator and of scores."""
    robot = robot_of(config)
    if not robot.cameras:
        fix = "list the cameras that the policy was trained with, in their order"
        checks.fail("robot.cameras", "the policy has no camera", found=[], allowed="names of cameras", fix=fix)
    for where, keys, model in (
        ("robot.simulator", robot.simulator, SimulatorSettings),
        ("robot.reward.srpo", robot.reward.srpo, ProgressSettings),
        ("robot.reward.embedding", robot.reward.embedding, EmbeddingSettings),
    ):
        with checks.recorded():
            settings = settings_at(where, keys, model)
            if isinstance(settings, SimulatorSettings | EmbeddingSettings):
                settings.check(where)
            if isinstance(settings, SimulatorSettings):
                _check_deadlines(config, settings, checks)
                if settings.tasks:
                    refuse_other_tasks(robot.held_out_tasks, list(settings.tasks))
    _check_per_call(config, checks)
    bank, name = robot.reward.srpo.get("bank"), robot.reward.embedding.get("name")
    if robot.reward.name == "progress" and bank and name == "own":
        checks.fail(
            "robot.reward.srpo.bank",
            "the encoder `own` changes in each step, so stored embeddings cannot be compared with new ones",
            found=bank,
            allowed="0 with the embedding `own`",
            fix="set robot.reward.srpo.bank=0, or another robot.reward.embedding.name",
        )


def _check_per_call(config: RunConfig, checks: Checklist) -> None:
    """Check that rewards of single policy calls have a critic and a simulator that measures progress. Whether a
    user's own simulator measures it is known only after its first step, where `megarl.robots.stages` looks."""
    reward, simulator = robot_of(config).reward, robot_of(config).simulator.get("name")
    if not reward.per_call:
        return
    key, factor = "robot.reward.per_call", f"{reward.per_call:g}, with"
    if "values" not in estimator_fields(config.algorithm):
        checks.fail(
            key,
            "only an estimator with a critic credits rewards to single policy calls",
            found=f"{factor} algorithm.advantage.name={config.algorithm.advantage.name}",
            allowed="0 without a critic",
            fix="set algorithm.advantage.name=gae, or robot.reward.per_call=0",
        )
    if isinstance(simulator, str) and measures_progress(simulator) is False:
        checks.fail(
            key,
            "the reward of a policy call is a change of progress, which this simulator does not measure",
            found=f"{factor} robot.simulator.name={simulator}",
            allowed=f"0, or one of the simulators {', '.join(MEASURING)}, or your own simulator that returns progress",
            fix="set robot.reward.per_call=0",
        )


def _check_interpreter(config: RunConfig, checks: Checklist, starts: bool) -> None:
    """Check that the simulator's interpreter exists; if the run does not start here, skip the check."""
    python, key = robot_of(config).simulator.get("python"), "robot.simulator.python"
    if not isinstance(python, str) or shutil.which(os.path.expanduser(python)):
        return
    problem = "interpreter not found on this machine"
    fix = "make the simulator's environment (docs/embodied.md), and name its bin/python"
    if starts:
        checks.fail(key, problem, found=python, allowed="a program that may be run", fix=fix)
    else:
        checks.skip(f"{key}: {python} is not here; it is looked for where the run starts")


def _check_deadlines(config: RunConfig, settings: SimulatorSettings, checks: Checklist) -> None:
    """Check that simulators' deadlines, with retries, are within `cluster.timeout_s`, for which other ranks wait."""
    limit = config.cluster.timeout_s
    for name in ("construct_s", "answer_s") if config.cluster.nproc > 1 else ():
        waits = getattr(settings, name) * (settings.retries + 1)
        if waits > limit:
            checks.fail(
                f"robot.simulator.{name}",
                f"other ranks time out after cluster.timeout_s = {limit:g} s, before the simulator's last retry ends",
                found=f"{getattr(settings, name):g}, with robot.simulator.retries = {settings.retries}",
                allowed=f"at most {limit / (settings.retries + 1):g}",
                fix=f"set cluster.timeout_s={2 * waits:g}, or a lower robot.simulator.{name}",
            )


def _check_surroundings(config: RunConfig, placement: Placement | None, checks: Checklist) -> None:
    """Report every setting that conflicts with the section `robot`, and why."""

    def refuse(wrong: bool, key: str, value: object, allowed: object, why: str) -> None:
        if wrong:
            problem = f"a recipe with the section `robot` cannot have this: {why}"
            checks.fail(key, problem, found=value, allowed=allowed, fix=f"set {key}={str(allowed).partition(',')[0]}")

    rollout, pipeline = config.rollout, config.algorithm.pipeline_name
    refuse(pipeline in ("grpo", "ppo", "dapo"), "algorithm.pipeline", pipeline, "srpo", "it scores texts, not episodes")
    refuse(rollout.servers is not None, KEY, rollout.engine, DEFAULT, "servers generate only text")
    why = "a robot's policy acts with the trainer's own weights"
    refuse(rollout.stale_steps > 0, "rollout.stale_steps", rollout.stale_steps, 0, why)
    team = None if placement is None else placement.of_role(Role.ROLLOUT)
    apart = team is not None and placement is not None and team != placement.of_role(Role.ACTOR)
    refuse(apart, "placement", "a team of its own", "null", why)
    why = "a robot's environment is its simulator"
    refuse(config.has_turns, "env.name", config.env.get("name"), "single_turn", why)
    cp = config.actor.parallel.cp
    refuse(cp > 1, "actor.parallel.cp", cp, 1, "policy calls attend in both directions")
    loss = config.algorithm.loss.name
    why = "the model gets episodes one call at a time, so the loss of a token must not depend on other tokens"
    refuse(loss not in TOKEN_LOSSES, "algorithm.loss.name", loss, ", ".join(TOKEN_LOSSES), why)
    estimator, why = config.algorithm.advantage.name, "no greedy episodes are played in training"
    refuse(estimator == "remax", "algorithm.advantage.name", estimator, "any estimator except remax", why)
    _check_flow(config, checks, refuse)
    home = None if placement is None else placement.of_role(Role.CRITIC)
    apart = home is not None and placement is not None and home != placement.of_role(Role.ACTOR)
    refuse(apart, "placement", "a critic in a team of its own", "null", "the critic sees the actor's pictures")
    plain, why = SamplingConfig(), "every value of an action is one token, sampled from all action tokens"
    for section, sampling in (("rollout", rollout.sampling), ("validation", config.validation.sampling)):
        for name in ("top_p", "top_k", "min_p", "min_new_tokens", "stop_token_ids", "stop"):
            default, value = getattr(plain, name), getattr(sampling, name)
            value = default if value is None else value
            refuse(value != default, f"{section}.sampling.{name}", value, default, why)


def _check_flow(config: RunConfig, checks: Checklist, refuse: Callable[[bool, str, object, object, str], None]) -> None:
    """Report the settings that a policy that denoises its actions (family pi0) does not support; for other families,
    report settings of `robot.flow`, which they do not read."""
    robot, actor = robot_of(config), config.actor
    if robot.family != FLOW:
        # Defaults are allowed, because the config.yaml of a run has every key.
        if given := sorted(name for name, value in robot.flow if value != getattr(FlowConfig(), name)):
            checks.fail(
                "robot.flow",
                f"only policies of the family {FLOW} denoise their actions",
                found=f"{', '.join(given)} with robot.family={robot.family}",
                allowed=f"the defaults, or robot.family={FLOW}",
                fix="remove the section",
            )
        return
    engine, why = actor.engine, "an action expert is on one device with its language model"
    for role in ("actor", "reference"):
        for name in ("tp", "pp") if role == "actor" or config.reference.parallel is not None else ():
            size = getattr(config.parallel_of(role), name)
            refuse(size > 1, f"{role}.parallel.{name}", size, 1, why)
    why = "an action expert attends to the layers' keys and values, whose gradients would be lost with recomputation"
    refuse(engine.recompute not in ("none", []), "actor.engine.recompute", engine.recompute, "none", why)
    why = "an action expert needs each layer's attention keys and values, which Transformer Engine does not provide"
    refuse(engine.layers == "te", "actor.engine.layers", engine.layers, "local", why)
    why = "a policy with an action expert has no action tokens, to which this key limits attention in both directions"
    refuse(robot.block_only, "robot.block_only", True, False, why)
    warmth, why = config.rollout.sampling.temperature, "robot.flow.noise sets how much an action expert explores"
    refuse(warmth != 1, "rollout.sampling.temperature", warmth, 1, why)
    warmth = config.validation.sampling.temperature
    refuse(warmth not in (0, 1, None), "validation.sampling.temperature", warmth, "0, or 1 to explore", why)
    bonus = config.algorithm.loss.entropy_coef
    why = "the entropy of its actions is constant; a higher robot.flow.noise explores more"
    refuse(bonus != 0, "algorithm.loss.entropy_coef", bonus, 0, why)
