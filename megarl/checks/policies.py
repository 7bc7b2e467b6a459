"""Checks of the section `policies`: what several policies of an episode need, and what does not go with them."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.advantages.base import GroupSettings
from megarl.algorithms.needs import advantage_fields
from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.models import FurtherModelConfig
from megarl.config.policies import DISTRIBUTION
from megarl.config.rollout import BRANCHING
from megarl.config.run import RunConfig
from megarl.config.training import ActorConfig
from megarl.runtime.stages.needs import estimators
from megarl.system.errors import ConfigError

#: Fields of an estimator that each policy's samples have.
_KNOWN = ("running_baseline",)


def check_policies(config: RunConfig, job: str, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check the environment, estimators and settings of a run with several policies.

    Args:
        facts: of the run's policy; None: not known.
    """
    if not config.policies:
        return
    if job != "train":
        if _has_models(config):
            checks.fail(
                "policies",
                f"megarl {job} loads one model, but these policies have several",
                found=", ".join(f"{name}: {policy.model or 'actor'}" for name, policy in config.policies.items()),
                allowed="policies that share the weights of `model`",
                fix="use the accuracy of held-out prompts that the run has measured, or export one model (hf, hf_NAME)",
            )
        return
    conflicts = [*_conflicts(config), *(_conflicts_of_models(config, facts) if _has_models(config) else ())]
    for key, value, allowed, why in conflicts:
        checks.fail(key, why, found=value, allowed=allowed, fix=f"set {key}={allowed}, or remove the section policies")
    if not any(policy.train for policy in config.policies.values()):
        checks.fail(
            "policies",
            "no policy is trained",
            found=", ".join(f"{name}.train=false" for name in config.policies),
            fix=f"set policies.{next(iter(config.policies))}.train=true",
        )
    most = config.rollout.sampling.max_new_tokens
    for name, policy in config.policies.items():
        room = policy.sampling.max_new_tokens
        if room is not None and room > most:
            checks.fail(
                f"policies.{name}.sampling.max_new_tokens",
                "rollout.sampling.max_new_tokens limits the turns of all policies",
                found=room,
                allowed=f"at most {most}",
                fix=f"raise rollout.sampling.max_new_tokens to {room}",
            )
        if policy.train:
            _check_estimator(name, config, checks)
        shared = [other for other, settings in config.policies.items() if settings.model == policy.model]
        keys = [key for key in DISTRIBUTION if getattr(policy.sampling, key) is not None]
        if keys and (policy.model is None or len(shared) > 1):
            checks.fail(
                f"policies.{name}.sampling.{keys[0]}",
                "policies that share weights also share the distribution from which tokens are drawn",
                found=getattr(policy.sampling, keys[0]),
                allowed="null, or a model that no other policy has",
                fix=f"set rollout.sampling.{keys[0]}, or policies.{name}.model to a model of its own",
            )


def _has_models(config: RunConfig) -> bool:
    return any(policy.model for policy in config.policies.values())


def _check_estimator(name: str, config: RunConfig, checks: Checklist) -> None:
    """Check the estimator of the policy `name`."""
    section, policy = estimators(config)[name], config.policies[name]
    key = "algorithm.advantage" if policy.advantage is None else f"policies.{name}.advantage"
    try:
        chosen = ADVANTAGES.choose(section, key)
    except ConfigError as error:
        checks.from_error(error)
        return
    if others := [field for field in advantage_fields(section) if field not in _KNOWN]:
        checks.fail(
            f"{key}.name",
            f"{section.name} needs {', '.join(others)}, which samples of several policies do not have",
            found=section.name,
            allowed="estimators of scores, such as grpo, rloo, rae",
            fix=f"set {key}.name=grpo",
        )
    alone = isinstance(chosen.settings, GroupSettings) and not chosen.settings.allow_singleton
    if alone and policy.compare == "prompt" and config.rollout.sampling.n < 2:
        checks.fail(
            "rollout.sampling.n",
            f"{section.name} compares the samples of a prompt, but there is only one of {name}",
            found=1,
            allowed="integer >= 2",
            fix=f"set rollout.sampling.n=8, or policies.{name}.advantage.name=rae",
        )


def _conflicts(config: RunConfig) -> Iterator[tuple[str, object, str, str]]:
    """Yield, for each setting that does not go with several policies: its key, its value, what is allowed, and why."""
    env, algorithm, data = config.env, config.algorithm, config.data
    by_agent = "several policies are called by an agent"
    counts = "this counts the samples of a prompt, of which several policies have different numbers"
    every = {
        "env.name": (env.get("name"), env.get("name") in BRANCHING, BRANCHING[0], by_agent),
        "env.score": (env.get("score"), env.get("score", "agent") == "agent", "agent", "the agent gives the rewards"),
        "env.train": (env.get("train"), env.get("train", "all") == "all", "all", "policies.NAME.train says so"),
        "env.credit": (env.get("credit"), env.get("credit", "each") == "each", "each", "policies have their rewards"),
        "env.models": (env.get("models"), not env.get("models"), "[]", "calls name policies"),
        "placement": ("several teams", not config.placement.has_several_teams, "'!replace {}'", "one team plays them"),
        "data.experts": ("files", data.experts is None, "null", "experts answer for no policy"),
        "data.replay": ("groups", data.replay is None, "null", counts),
        "data.curriculum": ("pools", data.curriculum is None, "null", counts),
        "algorithm.dynamic_sampling.enabled": (True, not algorithm.dynamic_sampling.enabled, "false", counts),
        "algorithm.resampling.name": (algorithm.resampling.name, not algorithm.resampling.active, "none", counts),
        "algorithm.filter.name": (algorithm.filter.name, not algorithm.filter.active, "bounds", counts),
        "algorithm.kl.use": (algorithm.kl.use, algorithm.kl.use != "reward", "loss", counts),
    }
    for key, (value, fits, allowed, why) in every.items():
        if not fits:
            yield key, value, allowed, why


def _conflicts_of_models(config: RunConfig, facts: ModelFacts | None) -> Iterator[tuple[str, object, str, str]]:
    """Yield what does not go with policies that have weights of their own, as `_conflicts`."""
    rollout, algorithm, size = config.rollout, config.algorithm, config.data.batch_size
    names = list(dict.fromkeys(policy.model for policy in config.policies.values() if policy.model in config.models))
    engine = "several models generate only with the embedded engine"
    several = "policies with weights of their own have one mini-batch per step"
    no_cp = "several models generate turn by turn, which cp and experts do not"
    compared = "each policy would be compared with the run's policy"
    every = {
        "rollout.engine": (rollout.engine, rollout.holds_model, "embedded", engine),
        "rollout.stale_steps": (rollout.stale_steps, not rollout.stale_steps, "0", engine),
        "rollout.replay_kept_tokens": (True, not rollout.replay_kept_tokens, "false", engine),
        "actor.parallel.cp": (config.actor.parallel.cp, config.actor.parallel.cp == 1, "1", no_cp),
        "model": ("a mixture of experts", facts is None or not facts.is_moe, "a dense model", no_cp),
        "model.lora": ("adapters", config.model.lora is None, "null", "policies have weights of their own"),
        "placement.share": (config.placement.share, config.placement.share == "dealt", "dealt", several),
        "algorithm.distillation.coef": (algorithm.distillation.coef, not algorithm.distillation.coef, "0", compared),
        "algorithm.kl.use": (algorithm.kl.use, algorithm.kl.use == "none", "none", compared),
    }
    trained: dict[str, ActorConfig | FurtherModelConfig] = {"actor": config.actor}
    trained |= {f"models.{name}": config.models[name] for name in names}
    for section, settings in trained.items():
        mini = settings.mini_batch_size
        every[f"{section}.mini_batch_size"] = (mini, mini in (None, size), "null", several)
        offloads = settings.engine.offload
        every[f"{section}.engine.offload"] = (offloads, not offloads, "false", "all policies generate at the same time")
    for key, (value, fits, allowed, why) in every.items():
        if not fits:
            yield key, value, allowed, why
