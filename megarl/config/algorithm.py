"""The RL objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.base import Section

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


class AdvantageConfig(Section):
    """Advantage estimator."""

    name: str = Field("grpo", description="registered estimator or pkg.mod:fn")
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation; false gives Dr. GRPO")
    allow_singleton: bool = Field(False, description="accept groups of one sample (advantage 0)")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="GAE lambda")


class PolicyLossConfig(Section):
    """Policy loss."""

    name: str = Field("ppo", description="registered loss or pkg.mod:fn")
    clip_low: NonNegativeFloat = Field(0.2, description="lower clip range")
    clip_high: NonNegativeFloat = Field(0.2, description="upper clip range")
    dual_clip: PositiveFloat | None = Field(3.0, gt=1, description="bound of -A*r for A < 0; null: no bound")
    aggregation: Aggregation = Field("token-mean", description="how token losses become one number")
    sum_norm: PositiveFloat | None = Field(None, description="divisor of seq-mean-token-sum-norm")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")


class KLConfig(Section):
    """Distance to the reference policy."""

    use: Literal["none", "loss", "reward"] = Field("none", description="no KL, a loss term, or a reward term")
    estimator: str = Field("low_var_kl", description="kl, abs, mse, low_var_kl, their straight-through '+' forms")
    coef: NonNegativeFloat = Field(0.001, description="weight; the starting value when adaptive")
    adaptive: bool = Field(False, description="adapt coef towards target (reward form only)")
    target: PositiveFloat = Field(0.1, description="target KL of the adaptive controller")
    horizon: PositiveInt = Field(10_000, description="horizon of the adaptive controller, in samples")


class DynamicSamplingConfig(Section):
    """DAPO: drop groups that carry no signal and generate until the batch is full."""

    enabled: bool = Field(False, description="turn the filter on")
    max_rounds: PositiveInt = Field(10, description="generation rounds of a step before the run stops with an error")
    surplus: Literal["keep", "drop"] = Field(
        "keep", description="groups beyond a full batch: keep them for the next step, or drop them"
    )


class OverlongConfig(Section):
    """DAPO: soft penalty for responses near the length limit."""

    buffer_tokens: PositiveInt | None = Field(None, description="length of the penalty zone; null: no penalty")
    factor: PositiveFloat = Field(1.0, description="penalty at the limit")


class AlgorithmConfig(Section):
    """What is optimised. `pipeline` names the task graph."""

    pipeline: str = Field("grpo", description="grpo, ppo, dapo, or pkg.mod:fn that builds a TaskGraph")
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="advantage estimator")
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="policy loss")
    kl: KLConfig = Field(default_factory=KLConfig, description="KL to the reference")
    dynamic_sampling: DynamicSamplingConfig = Field(
        default_factory=DynamicSamplingConfig, description="DAPO group filter"
    )
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="DAPO length penalty")
