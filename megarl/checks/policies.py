"""Checks of the section `policies`: what several policies of an episode need, and what does not go with them."""

from __future__ import annotations

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.advantages.base import GroupSettings
from megarl.algorithms.needs import advantage_fields, whole_vocabulary
from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.checks.conflicts import Conflict, refuse_conflicts
from megarl.config.data import BY_MODEL
from megarl.config.policies import DISTRIBUTION
from megarl.config.rollout import BRANCHING
from megarl.config.run import RunConfig
from megarl.rewards.references import uses_reward
from megarl.runtime.stages.needs import estimators
from megarl.system.errors import ConfigError

KEY = "policies"
_NO_POLICIES = "policies='!replace {}'"
#: Fields beyond rewards that an estimator may read with several policies, whose samples have no others.
_KNOWN = ("running_baseline",)


def check_policies(config: RunConfig, job: str, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check the environment, estimators and settings of a run with several policies.

    Args:
        facts: sizes of the run's model; None: not known.
    """
    if not config.policies:
        return
    refuse_conflicts(_conflicts_of_env(config), KEY, _NO_POLICIES, checks)
    _check_rewards(config, checks)
    if job != "train":
        if _has_models(config):
            checks.fail(
                KEY,
                f"megarl {job} loads one model, but these policies have several",
                found=", ".join(f"{name}: {policy.model or 'actor'}" for name, policy in config.policies.items()),
                allowed="policies that share the weights of `model`, for example one of the models that the run has "
                "exported (hf, hf_NAME); the run itself measures held-out prompts with all of its models",
                fix=f"set {_shared_weights(config)}",
            )
        return
    refuse_conflicts(_conflicts(config), KEY, _NO_POLICIES, checks)
    if _has_models(config):
        without = _shared_weights(config)
        refuse_conflicts(_conflicts_of_models(config, facts), "policies with weights of their own", without, checks)
    if not any(policy.train for policy in config.policies.values()):
        checks.fail(
            KEY,
            "no policy is trained",
            found=", ".join(f"{name}.train=false" for name in config.policies),
            fix=f"set policies.{next(iter(config.policies))}.train=true",
        )
    for name, policy in config.policies.items():
        if policy.train:
            _check_estimator(name, config, checks)
        _check_sampling(name, config, checks)


def _check_rewards(config: RunConfig, checks: Checklist) -> None:
    """Check that each policy with a `reward` section may have one; `check_reward` checks the functions themselves."""
    model = "a reward model scores the samples of all policies"
    for name, section in config.policy_rewards.items():
        key = f"policies.{name}.reward"
        if not uses_reward(config):
            checks.fail(
                key,
                "the environment gives the rewards of this policy, so no function scores it",
                found=section.name,
                allowed="null; or a function, for an agent with env.score: reward or a class with scores = False",
                fix=f"set {key}=null, or env.score=reward",
            )
        elif section.name == BY_MODEL:
            checks.fail(f"{key}.name", model, found=BY_MODEL, allowed="a function", fix=f"set reward.name={BY_MODEL}")
        elif config.reward.of_model is not None:
            checks.fail(key, model, found=section.name, allowed="null", fix=f"set {key}=null")


def _check_sampling(name: str, config: RunConfig, checks: Checklist) -> None:
    """Check how the turns of the policy `name` are sampled."""
    policy, most = config.policies[name], config.rollout.sampling.max_new_tokens
    room = policy.sampling.max_new_tokens
    if room is not None and room > most:
        checks.fail(
            f"policies.{name}.sampling.max_new_tokens",
            "rollout.sampling.max_new_tokens limits the turns of all policies",
            found=room,
            allowed=f"at most {most}",
            fix=f"set rollout.sampling.max_new_tokens={room}",
        )
    sharing = [other for other, settings in config.policies.items() if settings.model == policy.model]
    keys = [key for key in DISTRIBUTION if getattr(policy.sampling, key) is not None]
    if keys and (policy.model is None or len(sharing) > 1):
        value = getattr(policy.sampling, keys[0])
        checks.fail(
            f"policies.{name}.sampling.{keys[0]}",
            "policies that share weights also share the distribution from which tokens are drawn",
            found=value,
            allowed="null, or a model that no other policy has",
            fix=f"set policies.{name}.sampling.{keys[0]}=null rollout.sampling.{keys[0]}={value}, or, for weights of "
            f"its own, policies.{name}.model={name} models.{name}.train=true",
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


def _shared_weights(config: RunConfig) -> str:
    """Return the overrides with which all policies share the weights of the run's policy."""
    return " ".join(f"policies.{name}.model=null" for name, policy in config.policies.items() if policy.model)


def _conflicts_of_env(config: RunConfig) -> list[Conflict]:
    """Return the settings of the environment that do not go with several policies, in any job."""
    env, name = config.env, config.env.get("name")
    if name not in BRANCHING:  # any other name must be a user's class, with its own keys, checked at its import
        plays = ":" in str(name)
        why = "several policies are called by an agent, or by a class derived from megarl.envs.SeveralPolicies"
        return [Conflict("env.name", name, not plays, BRANCHING[0], why)]
    train, credit = env.get("train"), env.get("credit")
    return [
        Conflict("env.train", train, train not in (None, "all"), "all", "policies.NAME.train chooses what is trained"),
        Conflict("env.credit", credit, credit not in (None, "each"), "each", "policies have their rewards"),
        Conflict("env.models", env.get("models"), bool(env.get("models")), "[]", "calls name policies"),
    ]


def _conflicts(config: RunConfig) -> list[Conflict]:
    """Return the settings of training that do not go with several policies."""
    algorithm, data, ready = config.algorithm, config.data, not config.async_.in_order
    sampling, resampling, keep, kl = algorithm.dynamic_sampling, algorithm.resampling, algorithm.filter, algorithm.kl
    counts = "this counts the samples of a prompt, of which several policies have different numbers"
    nothing = "'!replace {}'"
    return [
        Conflict("async.order", config.async_.order, ready, "in_order", counts),
        Conflict("data.experts", "a section", data.experts is not None, "null", "experts answer for no policy"),
        Conflict("data.replay", "a section", data.replay is not None, "null", counts),
        Conflict("data.curriculum", "a section", data.curriculum is not None, "null", counts),
        Conflict("algorithm.dynamic_sampling.enabled", True, sampling.enabled, "false", counts),
        Conflict("algorithm.resampling.name", resampling.name, resampling.active, "none", counts),
        Conflict("algorithm.filter", keep.name, keep.active, nothing, counts),
        Conflict("algorithm.kl.use", kl.use, kl.use == "reward", "loss", counts),
    ]


def _why_no_reference(config: RunConfig) -> str:
    """Return why the run's reference model cannot be the reference of every policy; empty if it can."""
    for name, policy in config.policies.items():
        if policy.model in config.models and config.models[policy.model].path is not None:
            return f"{name} does not begin as the run's policy, and there is one reference"
        if policy.model and policy.sampling.temperature is not None:
            return f"the reference's log-probs are not at the temperature of {name}"
    if whole_vocabulary(config.algorithm) is not None:
        return "the whole vocabulary is compared with the run's policy only"
    return ""


def _conflicts_of_models(config: RunConfig, facts: ModelFacts | None) -> list[Conflict]:
    """Return the settings that do not go with policies that have weights of their own."""
    rollout, algorithm, share = config.rollout, config.algorithm, config.placement.share
    engine = "several models generate only with the embedded engine"
    several = "groups would be shared out by the tokens of all policies, but a model is trained on those of its own"
    no_cp = "several models generate turn by turn, which cp and experts do not"
    compared = "each policy would be compared with the run's policy"
    key, column = config.data.shows
    stale, kl, coef = rollout.stale_steps, algorithm.kl.use, algorithm.distillation.coef
    other = _why_no_reference(config)
    section = "actor" if rollout.parallel is None else "rollout"
    cp = config.parallel_of("rollout").cp
    conflicts = [
        Conflict("rollout.engine", rollout.engine, not rollout.holds_model, "embedded", engine),
        Conflict("rollout.stale_steps", stale, stale > 0, "0", engine),
        Conflict("rollout.replay_kept_tokens", True, rollout.replay_kept_tokens, "false", engine),
        Conflict(f"{section}.parallel.cp", cp, cp != 1, "1", no_cp),
        Conflict(key, column, column is not None, "null", "further models read text"),
        Conflict("model.lora", "adapters", config.model.lora is not None, "null", "policies have weights of their own"),
        Conflict("placement.share", share, share != "dealt", "dealt", several),
        Conflict("algorithm.distillation.coef", coef, bool(coef), "0", compared),
        Conflict("algorithm.kl.use", kl, kl != "none" and bool(other), "none", other),
    ]
    if facts is not None and facts.is_moe:
        conflicts.append(Conflict("model.path", "a mixture of experts", True, "FOLDER of a dense model", no_cp))
    names = [policy.model for policy in config.policies.values() if policy.model in config.models]
    for role in dict.fromkeys(["actor", *names]):
        settings, section = config.training_of(role), config.section_of(role)
        offloads = settings.engine.offload
        conflicts.append(
            Conflict(
                *(f"{section}.engine.offload", offloads, bool(offloads), "false"),
                "all policies generate at the same time",
            )
        )
    return conflicts
