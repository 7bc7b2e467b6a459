"""Checks that the role `reward_model` can score what the run generates, at the places where it is used."""

from __future__ import annotations

from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist, Roles
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.rewards.references import uses_reward

_WHAT = "reward model"


def check_reward_model(
    config: RunConfig,
    roles: Roles,
    placement: Placement | None,
    found: ModelFacts | None,
    job: str,
    checks: Checklist,
) -> None:
    """Check the section `reward_model` against the rest of the recipe."""
    checks = checks.of(_WHAT)
    section, part = config.reward_model, config.reward.of_model
    if part is None:
        if section.path is not None:
            checks.warn(
                "reward_model.path",
                "a reward model is set, but nothing uses it",
                found=section.path,
                fix="set reward.name=reward_model, name it as a part of reward.parts, or remove reward_model.path",
            )
        return
    key = f"reward.parts.{part}.name" if part else "reward.name"
    if section.path is None:
        checks.fail(
            "reward_model.path",
            f"{key} needs a reward model, and none is set",
            found=None,
            allowed="a Hugging Face folder or hub name of a sequence classifier with one label",
            fix="set reward_model.path, such as the folder hf/ of a run of algorithm.pipeline=reward_model",
        )
    if not config.task.writes_text or not uses_reward(config):
        checks.fail(
            key,
            "the environment scores the samples of this recipe, so this reward would not be used",
            found="reward_model",
            fix="remove it, or set `scores = False` in the environment's class",
        )
    elif roles is not None and Role.REWARD_MODEL not in roles:
        checks.fail(
            key,
            "nodes of the task graph compute a reward model's score, and this pipeline lacks them",
            found=f"reward_model with algorithm.pipeline={config.algorithm.pipeline_name}",
            allowed="rewards of functions, or a pipeline with these nodes",
            fix="add the nodes by megarl.recipes.grpo.add_reward",
        )
    _check_form(config, checks)
    _check_length(config, found, checks)
    _check_held_out(config, placement, job, checks)


def _check_form(config: RunConfig, checks: Checklist) -> None:
    section = config.reward_model
    if config.has_turns and section.form != "tokens":
        checks.fail(
            "reward_model.form",
            "episodes have turns and observations, which only the form tokens can represent",
            found=section.form,
            allowed="tokens, for a reward model with the policy's tokenizer",
            fix="set reward_model.form=tokens, or serve the model and use the reward http, which gets `transcript`",
        )
    key, column = config.data.shows
    if column is not None:
        checks.fail(
            key,
            "a reward model reads only text",
            found=column,
            allowed="null",
            fix="serve the model and use the reward http, or a function that uses images",
        )


def _check_length(config: RunConfig, found: ModelFacts | None, checks: Checklist) -> None:
    """Check that the longest sample fits, if its length is known and one that does not fit would end the run."""
    section, longest = config.reward_model, config.longest_sequence()
    if section.form != "tokens" or config.reward.on_error != "raise":
        return
    positions = None if found is None else found.max_positions
    limits = {"reward_model.max_tokens": section.max_tokens, "reward_model.path": positions}
    for key, limit in limits.items():
        if limit is not None and limit < longest:
            checks.fail(
                key,
                "the reward model accepts fewer tokens than the longest sample has",
                found=f"{limit} tokens",
                allowed=f"at least {longest}: longest prompt and response",
                fix="lower rollout.sampling.max_new_tokens, or set reward.on_error to a score for samples that are too "
                "long",
            )
            return


def _check_held_out(config: RunConfig, placement: Placement | None, job: str, checks: Checklist) -> None:
    """Check that held-out samples get a score without the reward model where there is none: in `megarl sft`, in a cold
    start, and where another team generates.
    """
    if not config.data.held_out or job in ("eval", "generate"):
        return
    homes = {placement.of_role(role) for role in (Role.REWARD_MODEL, Role.ROLLOUT)} if placement is not None else set()
    if job == "train" and len(homes - {None}) > 1:
        why = "the reward model is in another team"
    elif job == "sft":
        why = "megarl sft has no reward model"
    elif config.sft.steps:
        why = "a cold start comes before the reward model"
    else:
        return
    part, chosen_by = config.reward.of_model, config.validation.select_by
    others = [label for label in config.reward.parts if label != part]
    if not others:
        checks.fail(
            "reward.parts",
            f"held-out samples are scored where they are generated, but {why}",
            found="only the reward model gives a reward",
            allowed="a further part, whose scores validation then uses",
            fix="add a part with a function, with weight 0 to measure it only, or remove data.val_files",
        )
    elif chosen_by == part:
        checks.fail(
            "validation.select_by",
            f"samples are selected where they are generated, but {why}",
            found=chosen_by,
            allowed=[*others, "overall", "null"],
            fix="set validation.select_by=null; `megarl eval`, which has the model, can select by it",
        )
