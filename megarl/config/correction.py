"""Rollout correction: its keys, the presets that set them, and the resolved form of a recipe's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megarl.config.base import Section
from megarl.system.errors import count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_ICEPOP: dict[str, Any] = {"is_level": "token", "is_threshold": (0.5, 5.0)}
_TOKEN: dict[str, Any] = {"is_level": "token", "is_threshold": 2.0}
_SEQUENCE: dict[str, Any] = {"is_level": "sequence", "is_threshold": 2.0}
_GEOMETRIC: dict[str, Any] = {"rs_level": "geometric", "rs_threshold": 1.001}
_K3: dict[str, Any] = {"rs": ({"level": "geometric", "stat": "k3", "lower": None, "upper": 0.01},)}
_VETO: dict[str, Any] = {"veto_threshold": 1e-4}
_CLIP: dict[str, Any] = {"mode": "bypass"}
_PG: dict[str, Any] = {"mode": "bypass", "loss": "pg"}

#: The keys that each preset sets. All others have the defaults of `ResolvedCorrection`.
PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_seq_is_rs": {**_SEQUENCE, "rs_level": "sequence", "rs_threshold": 2.0},
    "decoupled_geo_rs": {**_GEOMETRIC, **_VETO},
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_geo_rs_token_tis": {**_GEOMETRIC, **_TOKEN},
    "decoupled_geo_rs_seq_tis": {**_GEOMETRIC, **_SEQUENCE},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_token_tis": {**_K3, **_TOKEN},
    "decoupled_k3_rs_seq_tis": {**_K3, **_SEQUENCE},
    "ppo_is_bypass": _CLIP,
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEOMETRIC},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3},
    "pg_is": {**_PG, **_SEQUENCE},
    "pg_rs": {**_PG, **_GEOMETRIC, **_VETO},
    "bypass_pg_token_icepop": {**_PG, **_ICEPOP},
    "bypass_pg_geo_rs": {**_PG, **_GEOMETRIC},
    "bypass_pg_geo_rs_token_tis": {**_PG, **_GEOMETRIC, **_TOKEN},
    "bypass_pg_geo_rs_seq_tis": {**_PG, **_GEOMETRIC, **_SEQUENCE},
}


if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


class RejectionRule(Section):
    """One rejection rule; a token is trained on if all rules accept it."""

    level: Literal["token", "sequence", "geometric", "seq_max"] = Field(
        description="what a rule accepts or rejects: single tokens, or whole sequences by a statistic of their tokens"
    )
    stat: Literal["k1", "k2", "k3"] = Field(
        "k1", description="the tested quantity: k1 is the ratio, k2 is 0.5 log^2 ratio, k3 is ratio - 1 - log ratio"
    )
    lower: NonNegativeFloat | None = Field(
        None, description="smallest accepted value; null: 1 / upper for k1 except at level seq_max, else no bound"
    )
    upper: PositiveFloat | None = Field(None, description="largest accepted value; null: no bound")


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the policy that generated and the policy that trains. A key that is null takes the
    preset's value.
    """

    preset: Preset = Field("disabled", description="named set of the keys below; disabled only measures the gap")
    mode: Literal["decoupled", "bypass"] | None = Field(
        None,
        description="decoupled: the trainer computes the old log-probs; bypass: the rollout's log-probs are "
        "used, which saves a forward pass",
    )
    loss: Literal["ppo", "pg"] | None = Field(
        None, description="ppo: the loss of algorithm.loss; pg: unclipped policy gradient (needs bypass)"
    )
    is_level: Literal["none", "token", "sequence"] | None = Field(None, description="importance weights")
    is_threshold: PositiveFloat | list[NonNegativeFloat] | None = Field(
        None, description="clip weights to min(ratio, C) for a number C; for [low, high] weights outside are 0 (IcePop)"
    )
    is_batch_normalize: bool | None = Field(None, description="divide the weights by their mean over the batch")
    is_normalize_over: Literal["trained", "all"] | None = Field(
        None,
        description="samples whose weights that mean is over: trained ones, or all with rejected ones (verl); null: "
        "trained",
    )
    rs_level: Literal["none", "token", "sequence", "geometric"] | None = Field(
        None, description="level at which one rule rejects by the ratio; short form of one entry in rs"
    )
    rs_threshold: PositiveFloat | None = Field(None, description="largest ratio that the short form accepts")
    rs_threshold_lower: NonNegativeFloat | None = Field(
        None, description="smallest ratio that the short form accepts; null: 1 / upper"
    )
    rs: list[RejectionRule] | None = Field(
        None, description="list of rules {level, stat, lower, upper}; a token is trained on if all rules accept it"
    )
    veto_threshold: NonNegativeFloat | None = Field(
        None, description="reject a sequence that has a token with a ratio below this; 0: no veto"
    )
    rs_affects_baseline: bool | None = Field(
        None, description="leave fully rejected samples out of their group's baseline; null: true unless mode is bypass"
    )

    def resolved(self) -> ResolvedCorrection:
        """Return the preset's values, overridden by this section's keys."""
        values = dict(PRESETS[self.preset])
        given = self.model_dump(exclude={"preset"}, exclude_none=True)
        if "rs" in given:
            given["rs"] = tuple({"lower": None, "upper": None, **rule} for rule in given["rs"])
        if isinstance(given.get("is_threshold"), list):
            given["is_threshold"] = tuple(given["is_threshold"])
        values |= given
        values.setdefault("rs_affects_baseline", values.get("mode") != "bypass")
        return ResolvedCorrection(**values)


@dataclass(frozen=True)
class ResolvedCorrection:
    """Rollout correction with every key resolved; see `RolloutCorrectionConfig`."""

    mode: str = "decoupled"
    loss: str = "ppo"
    is_level: str = "none"
    is_threshold: float | tuple[float, ...] = 2.0
    is_batch_normalize: bool = False
    is_normalize_over: str = "trained"
    rs_level: str = "none"
    rs_threshold: float | None = None
    rs_threshold_lower: float | None = None
    rs: tuple[dict[str, Any], ...] = ()
    veto_threshold: float = 0.0
    rs_affects_baseline: bool = True

    @property
    def rules(self) -> list[dict[str, Any]]:
        """All rejection rules as dicts with level, stat, lower and upper: that of `rs_level`, then those of `rs`."""
        short = {"stat": "k1", "lower": self.rs_threshold_lower, "upper": self.rs_threshold}
        return [*([] if self.rs_level == "none" else [{"level": self.rs_level, **short}]), *self.rs]

    @property
    def bypass(self) -> bool:
        """Whether the rollout's log-probs are used as old log-probs."""
        return self.mode == "bypass"

    @property
    def rejects(self) -> bool:
        """Whether a rejection rule or the veto can remove tokens from the loss."""
        return bool(self.rules) or self.veto_threshold > 0

    @property
    def active(self) -> bool:
        """Whether the recipe corrects the loss, as opposed to only measuring the mismatch."""
        return self.bypass or self.is_level != "none" or self.rejects


def describe_correction(config: RunConfig) -> list[str]:
    """Return the lines of the plan and the log that describe the rollout correction and the gap that it corrects."""
    correction, section = config.rollout_correction.resolved(), config.rollout_correction
    lines = [f"gap       {gap_source(config)}", f"preset    {section.preset}"]
    if not correction.active:
        return [*lines, "effect    none: the gap is measured, not corrected"]
    where = "in the update, pi_theta / pi_rollout" if correction.bypass else "before the update, pi_old / pi_rollout"
    lines.append(f"mode      {correction.mode}, loss {correction.loss}; ratios are taken {where}")
    weights = "none"
    if correction.is_level != "none":
        low_high = isinstance(correction.is_threshold, tuple)
        bound = f"inside {list(correction.is_threshold)}" if low_high else f"at most {correction.is_threshold}"  # type: ignore[arg-type]
        over = " over all tokens, rejected ones too" if correction.is_normalize_over == "all" else ""
        weights = (
            f"{correction.is_level}, {bound}{f', divided by their mean{over}' if correction.is_batch_normalize else ''}"
        )
    lines.append(f"weights   {weights}")
    for rule in correction.rules:
        lower, upper = rule["lower"], rule["upper"]
        if lower is None and rule["stat"] == "k1" and rule["level"] != "seq_max":
            lower = f"1/{upper}"
        bounds = " or ".join(
            f"{side} {bound}" for side, bound in (("below", lower), ("above", upper)) if bound is not None
        )
        lines.append(f"reject    {rule['level']} {rule['stat']} {bounds}")
    if correction.veto_threshold:
        lines.append(f"veto      sequences with a token ratio below {correction.veto_threshold}")
    if correction.rejects:
        lines.append(
            f"baseline  rejected samples {'leave' if correction.rs_affects_baseline else 'stay in'} their group"
        )
    return lines


def gap_source(config: RunConfig) -> str:
    """Describe the gap's two sides: the rollout engine with its precision and weight age, and the trainer."""
    rollout = config.rollout
    lag = rollout.stale_steps + config.async_.max_staleness  # only one of the two terms can be above 0
    most = "up to " if not config.async_.in_order else ""
    age = f", weights {most}{count(lag, 'step')} old" if lag else ""
    weights = " with FP8 weights" if config.sync.fp8 else ""
    return f"{rollout.engine} engine {config.rollout_dtype}{weights}{age} -> trainer {config.model.dtype}"
