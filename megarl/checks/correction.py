"""Checks of `rollout_correction`: contradicting keys are refused before anything starts."""

from __future__ import annotations

from typing import Any

from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.needs import component_fields, estimator_fields
from megarl.checks.checklist import Checklist
from megarl.config.algorithm import AdvantageConfig, PolicyLossConfig
from megarl.config.correction import ResolvedCorrection
from megarl.config.run import RunConfig

_NAME = "rollout correction"
_KEY = "rollout_correction"


def check_correction(config: RunConfig, checks: Checklist) -> None:
    """Check mode and loss, weights, rejection, and whether they suit how samples are generated."""
    checks = checks.of(_NAME)
    correction = config.rollout_correction.resolved()
    _check_mode(config, correction, checks)
    _check_weights(config, correction, checks)
    _check_rejection(config, correction, checks)
    _check_generation(config, checks.of("sampling"))


def _check_mode(config: RunConfig, correction: ResolvedCorrection, checks: Checklist) -> None:
    name, default = config.algorithm.loss.name, PolicyLossConfig.model_fields["name"].default
    losses = POLICY_LOSSES.names()
    correcting = [other for other in losses if POLICY_LOSSES.spec(other).corrects]
    if correction.bypass and correction.loss == "ppo" and correction.is_level != "none":
        checks.fail(
            f"{_KEY}.is_level",
            "with mode bypass the ppo loss already has the ratio pi_theta / pi_rollout, so weights would count it "
            "twice",
            found=correction.is_level,
            allowed="none, or loss: pg, or mode: decoupled",
            fix=f"set {_KEY}.is_level=none, {_KEY}.loss=pg, or {_KEY}.mode=decoupled",
        )
    if correction.loss == "pg" and not correction.bypass:
        checks.fail(
            f"{_KEY}.loss",
            "the pg loss uses the weight pi_theta / pi_rollout, which is the ratio of mode bypass",
            found=f"pg with mode {correction.mode}",
            allowed="ppo, or pg with mode: bypass",
            fix=f"set {_KEY}.mode=bypass, or {_KEY}.loss=ppo",
        )
    if correction.loss == "pg" and name not in (default, *correcting):
        checks.fail(
            "algorithm.loss.name",
            f"{_KEY}.loss: pg replaces the policy loss, but another one is named",
            found=name,
            allowed=[*correcting, f"{default} (the default)"],
            fix=f"remove algorithm.loss.name, or set {_KEY}.loss=ppo",
        )
    if correction.bypass and "sum_pi_squared" in component_fields(config.algorithm):
        estimates = "sum_pi_squared" in estimator_fields(config.algorithm)
        kind, key = ("estimator", "advantage") if estimates else ("loss", "loss")
        section = AdvantageConfig if estimates else PolicyLossConfig
        instead = section.model_fields["name"].default
        reader = config.algorithm.advantage.name if estimates else name
        checks.fail(
            f"{_KEY}.mode",
            f"{reader} weighs tokens by the trainer's probabilities, which mode bypass does not compute",
            found="bypass",
            allowed=f"decoupled, or another {kind}",
            fix=f"set {_KEY}.mode=decoupled, or algorithm.{key}.name={instead}",
        )
    if name in correcting and correction.loss != "pg":
        checks.fail(
            "algorithm.loss.name",
            f"{name} takes its weights from {_KEY}, which does not enable them",
            found=f"{name} with {_KEY}.loss: {correction.loss}",
            allowed=f"{_KEY}.loss: pg",
            fix=f"set {_KEY}.preset=pg_is and remove algorithm.loss.name",
        )


def _check_weights(config: RunConfig, correction: ResolvedCorrection, checks: Checklist) -> None:
    threshold = correction.is_threshold
    if isinstance(threshold, tuple) and not (len(threshold) == 2 and threshold[0] < threshold[1]):
        checks.fail(
            f"{_KEY}.is_threshold",
            "two-sided weights need a lower and a larger upper bound",
            found=list(threshold),
            allowed="number > 0, or [low, high] with low < high",
            fix=f"set {_KEY}.is_threshold=[0.5,5]",
        )
    elif correction.is_level != "none" and not isinstance(threshold, tuple) and threshold < 1:
        checks.warn(
            f"{_KEY}.is_threshold",
            "weights are clipped below 1, so even samples without any gap lose weight",
            found=threshold,
            fix="set a usual threshold: 1.5 to 5 at token level, 2 to 10 at sequence level",
        )
    if not correction.is_batch_normalize:
        return
    if correction.is_level == "none":
        checks.warn(
            f"{_KEY}.is_batch_normalize",
            "nothing is normalised, because is_level is none",
            found=True,
            fix=f"set {_KEY}.is_level=token or sequence",
        )
    elif correction.bypass and (terms := _unweighted_terms(config)):
        checks.fail(
            f"{_KEY}.is_batch_normalize",
            "with mode bypass the mean weight is known only after the last micro-batch, when the gradient already "
            f"holds terms without a weight: {', '.join(terms)}",
            found=True,
            allowed=False,
            fix=f"set {_KEY}.is_batch_normalize=false, remove these terms, or set {_KEY}.mode=decoupled with loss: ppo",
        )


def _unweighted_terms(config: RunConfig) -> list[str]:
    """Return the keys of terms of the update that importance weights do not multiply."""
    algorithm = config.algorithm
    terms = {
        "algorithm.loss.entropy_coef": algorithm.loss.entropy_coef != 0,
        "algorithm.loss.echo_coef": algorithm.loss.echo_coef > 0,
        "algorithm.loss.expert_coef": algorithm.loss.expert_coef > 0,
        "algorithm.kl.use=loss": algorithm.kl.use == "loss",
        "algorithm.distillation.coef": algorithm.distillation.coef > 0,
    }
    return [name for name, weighs in terms.items() if weighs]


def _check_rejection(config: RunConfig, correction: ResolvedCorrection, checks: Checklist) -> None:
    if correction.rs_level != "none" and correction.rs_threshold is None:
        checks.fail(
            f"{_KEY}.rs_threshold",
            f"rejection at level {correction.rs_level} has no bound",
            found="null",
            allowed="number > 0",
            fix=f"set {_KEY}.rs_threshold={'1.001' if correction.rs_level == 'geometric' else '2'}",
        )
    elif correction.rs_level == "none" and (
        correction.rs_threshold is not None or correction.rs_threshold_lower is not None
    ):
        checks.warn(
            f"{_KEY}.rs_level",
            "a rejection threshold is set, but no level to which it applies",
            found="none",
            fix=f"set {_KEY}.rs_level=token, sequence or geometric, or remove the threshold",
        )
    seen = set()
    for number, rule in enumerate(correction.rules):
        short = correction.rs_level != "none" and number == 0
        key = f"{_KEY}.rs_threshold" if short else f"{_KEY}.rs"
        _check_rule(rule, key, checks)
        if (rule["level"], rule["stat"]) in seen:
            checks.fail(
                key,
                f"two rejection rules have the level {rule['level']} and the stat {rule['stat']}",
                found=rule,
                allowed="one rule per level and stat",
                fix="keep the tighter bounds",
            )
        seen.add((rule["level"], rule["stat"]))
    if correction.veto_threshold >= 1:
        checks.fail(
            f"{_KEY}.veto_threshold",
            "every sequence has a token ratio below this threshold, so all would be rejected",
            found=correction.veto_threshold,
            allowed="number from 0 to below 1",
            fix=f"set {_KEY}.veto_threshold=1e-4",
        )
    if correction.bypass and correction.rejects and config.rollout_correction.rs_affects_baseline:
        checks.fail(
            f"{_KEY}.rs_affects_baseline",
            "with mode bypass samples are rejected during the update, after the baseline was computed",
            found=True,
            allowed="false, null, or true with mode: decoupled",
            fix=f"remove the key, or set {_KEY}.mode=decoupled",
        )


def _check_rule(rule: dict[str, Any], key: str, checks: Checklist) -> None:
    lower, upper = rule["lower"], rule["upper"]
    if lower is None and upper is None and not key.endswith("rs_threshold"):
        checks.fail(
            key,
            "a rule without bounds rejects nothing",
            found=rule,
            allowed="lower, upper, or both",
            fix="set one",
        )
    if lower is not None and upper is not None and lower > upper:
        checks.fail(
            key,
            "the lower bound is above the upper one, so everything would be rejected",
            found=f"lower {lower}, upper {upper}",
            allowed="lower <= upper",
            fix="exchange the two",
        )
    elif lower is None and upper is not None and upper < 1 and rule["stat"] == "k1" and rule["level"] != "seq_max":
        checks.fail(
            key,
            f"the upper bound {upper} is below the lower one, 1 / {upper}: everything would be rejected",
            found=upper,
            allowed="an upper bound above 1, or a lower bound of its own",
            fix="set the lower bound" if key.endswith("rs") else f"set {_KEY}.rs_threshold_lower",
        )


def _check_generation(config: RunConfig, checks: Checklist) -> None:
    rollout, correction = config.rollout, config.rollout_correction.resolved()
    decoded, trained = config.rollout_dtype, config.model.dtype
    rounds = decoded != trained and decoded != "fp32" and trained != "auto"
    if rounds and not correction.active:
        checks.warn(
            "rollout.dtype",
            f"generation in {decoded} and training in {trained} give different log-probs, which is slightly off-policy",
            found=decoded,
            fix=f"set rollout.dtype=model, or a preset of {_KEY}",
        )
    if config.sync.fp8 and not correction.active:
        checks.warn(
            "sync.fp8",
            "generation with weights in FP8 gives other log-probs than training, which is off-policy",
            found=True,
            fix=f"set a preset of {_KEY}, for example decoupled_token_is, and watch rollout_corr/k3_kl",
        )
    if config.cache_dtype == "fp8" and not correction.active:
        checks.warn(
            "rollout.sglang.kv_cache_dtype",
            "generation with keys and values in FP8 gives other log-probs than training, which is off-policy",
            found=config.rollout.sglang.kv_cache_dtype,
            fix=f"set a preset of {_KEY}, for example decoupled_token_is, and watch rollout_corr/k3_kl",
        )
    lag = config.async_.max_staleness
    if lag and not correction.active:
        checks.warn(
            "async.max_staleness",
            "samples are generated with older weights than those that are trained, and nothing corrects for that",
            found=lag,
            fix=f"set a preset of {_KEY}, for example decoupled_token_is",
        )
    if rollout.stale_steps:
        checks.warn(
            "rollout.stale_steps",
            f"generation with weights that are {rollout.stale_steps} steps old is for experiments with {_KEY}; "
            "checkpoints do not contain the old weights, so such a run cannot be resumed",
            found=rollout.stale_steps,
            fix="set rollout.stale_steps=0 except in such experiments",
        )
