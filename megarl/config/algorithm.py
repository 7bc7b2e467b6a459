"""The recipe's section `algorithm`: the RL objective."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megarl.config.base import ComponentSection, Section

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


#: Keys of `algorithm.loss` that belong to no single loss.
_SHARED = ("aggregation", "sum_norm", "entropy_coef", "echo_coef", "expert_coef", "expert_gate")


class AdvantageConfig(ComponentSection):
    """The advantage estimator. Each estimator also has keys of its own."""

    name: str = Field("grpo", description="registered estimator, file.py:fn or pkg.mod:fn")

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward that the estimator reads, each with its weight; empty for most estimators."""
        return self.own.get("parts", {})


class PolicyLossConfig(ComponentSection):
    """The policy loss. These keys are shared by all losses; each loss also has keys of its own."""

    name: str = Field("ppo", description="registered loss, file.py:fn or pkg.mod:fn")
    aggregation: Aggregation = Field("token-mean", description="how the losses of tokens are combined into one number")
    sum_norm: PositiveFloat | None = Field(None, description="divisor that seq-mean-token-sum-norm uses")
    entropy_coef: float = Field(
        0.0, ge=-1, le=1, description="weight of the entropy bonus; a negative weight is a penalty"
    )

    echo_coef: NonNegativeFloat = Field(
        0.0,
        le=1,
        description="weight of the cross-entropy on the environment's observations (ECHO), as 0.05; 0: no term",
    )

    expert_coef: NonNegativeFloat = Field(
        0.0, le=1000, description="weight of the cross-entropy on expert responses (data.experts); 0: no term"
    )
    expert_gate: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="train on a prompt's own samples only if more than this share of them has a score above 0.5, and "
        "on its expert responses only otherwise (HPT: 0 or 0.25); null: on both",
    )

    def of(self, name: str) -> PolicyLossConfig:
        """Return the settings of the loss `name`: the shared keys, and the loss's own keys with their defaults."""
        return PolicyLossConfig(name=name, **{key: getattr(self, key) for key in _SHARED})


class KLConfig(ComponentSection):
    """The KL distance to the reference policy. An estimator may have keys of its own."""

    named_by: ClassVar[str] = "estimator"

    use: Literal["none", "loss", "reward"] = Field(
        "none", description="where the KL enters: nowhere, as a loss term, or as a reward term"
    )
    estimator: str = Field(
        "low_var_kl",
        description="kl, abs, mse, low_var_kl, their straight-through '+' forms, unbiased_k3, full, file.py:fn or "
        "pkg.mod:fn",
    )
    coef: NonNegativeFloat = Field(
        0.001, le=1000, description="weight of the KL term; with adaptive the starting value"
    )
    adaptive: bool = Field(False, description="adapt coef so that the measured KL approaches target (reward form only)")
    target: PositiveFloat = Field(0.1, description="KL that the adaptive controller aims at")
    horizon: PositiveInt = Field(10_000, description="horizon of the adaptive controller, in samples")


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling: drop groups without a learning signal and generate more until the batch is full."""

    enabled: bool = Field(False, description="turn the filter on")
    max_rounds: PositiveInt = Field(
        10,
        description="maximum generation rounds of a step, each of data.batch_size prompts (smaller rounds, "
        "rollout.round_prompts, are more rounds); `short` decides what happens after them. With "
        "async.order=as_ready the run ends when a replica drops all groups of this many rounds in a row (also groups "
        "that algorithm.filter empties)",
    )
    short: Literal["fail", "fill"] = Field(
        "fail",
        description="what happens when max_rounds did not fill the batch. fail: the run ends; fill: dropped groups of "
        "the last data.batch_size prompts fill the batch; their group advantages are 0, so they give no gradient",
    )
    surplus: Literal["keep", "drop"] = Field(
        "keep", description="what happens to groups beyond a full batch: keep them for the next step, or drop them"
    )
    metric: Literal["score", "success"] = Field(
        "score",
        description="the quantity whose values decide whether a group is kept: the score, or the success of an "
        "episode in a simulator, which is known before the score",
    )
    low: float | None = Field(
        None,
        description="keep groups whose mean is at least this, such as 0.1; with `low` or `high` set, equal values "
        "within a group are allowed",
    )
    high: float | None = Field(None, description="keep groups whose mean is at most this, such as 0.9")
    drop_cut: bool = Field(False, description="drop groups in which an episode in a simulator used all its `max_steps`")

    @property
    def kept_groups(self) -> str:
        """The condition under which a group is kept, as text for messages."""
        bounds = [
            f"{word} {value:g}" for word, value in (("at least", self.low), ("at most", self.high)) if value is not None
        ]
        differing = "scores that differ" if self.metric == "score" else "successes and failures"
        condition = f"a mean {self.metric} of {' and '.join(bounds)}" if bounds else differing
        return f"{condition} and no episode that was cut" if self.drop_cut else condition


class FilterConfig(ComponentSection):
    """The filter that removes samples from baselines and loss. Each filter has keys of its own.

    The batch keeps its size; with async.order=as_ready a group without remaining samples is replaced by another group.
    """

    name: str = Field("bounds", description="registered filter, file.py:fn or pkg.mod:fn")

    @property
    def active(self) -> bool:
        """Whether a filter is on: a custom filter is named, or the default filter has one of its keys set."""
        default = self.name == FilterConfig.model_fields["name"].default
        return not default or any(value is not None and value is not False for value in self.own.values())


class ResamplingConfig(ComponentSection):
    """PF-PPO's resampling: redraw the samples of a step with weights that depend on their scores before training."""

    name: str = Field("none", description="registered weight function, none, file.py:fn or pkg.mod:fn")

    @property
    def active(self) -> bool:
        """Whether samples are resampled before training."""
        return self.name != ResamplingConfig.model_fields["name"].default


class DistillationConfig(ComponentSection):
    """The loss term that pulls the policy towards the teacher (`teacher.path`), on the policy's own samples."""

    named_by: ClassVar[str] = "estimator"

    coef: NonNegativeFloat = Field(0.0, le=1000, description="weight of the term; 0: no term")
    estimator: str = Field(
        "low_var_kl+",
        description="an estimator of KL(policy || teacher), as algorithm.kl.estimator, or a divergence over the "
        "teacher's likeliest tokens: forward_kl is KL(teacher || policy), reverse_kl is KL(policy || teacher), jsd "
        "lies between them, forward_kl_topk is forward_kl with verl's defaults",
    )
    through: Literal["loss", "policy"] = Field(
        "loss",
        description="loss: minimise the estimate; policy: use minus the estimate as the advantage of the loss in "
        "algorithm.loss",
    )
    loss_max_clamp: PositiveFloat | None = Field(
        None, description="largest absolute value of a token's estimate; null: no bound"
    )
    task_loss: bool = Field(
        True, description="keep the policy loss on the rewards; false: train on the teacher term only"
    )


class OverlongConfig(Section):
    """DAPO's soft penalty for responses near the length limit."""

    buffer_tokens: PositiveInt | None = Field(
        None, description="length of the penalty zone before the limit, in tokens; null: no penalty"
    )
    factor: PositiveFloat = Field(1.0, le=1000, description="penalty at the limit")


class AlgorithmConfig(Section):
    """The RL objective. `pipeline` names the task graph, or lists its nodes."""

    pipeline: str | list[str | dict[str, Any]] = Field(
        "grpo",
        description="the task graph: grpo, ppo, dapo, srpo, dpo, kto, reward_model, or file.py:fn or pkg.mod:fn that "
        "builds a TaskGraph; or its nodes in order, each the name of a stage, file.py:fn, pkg.mod:fn, or a section "
        "with the keys stage, id, after, config and retry",
    )
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="advantage estimator")
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="policy loss")
    kl: KLConfig = Field(default_factory=KLConfig, description="KL distance to the reference policy")
    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="distillation from a teacher"
    )
    filter: FilterConfig = Field(default_factory=FilterConfig, description="filter that leaves samples out of training")
    dynamic_sampling: DynamicSamplingConfig = Field(
        default_factory=DynamicSamplingConfig, description="DAPO's dynamic sampling of groups"
    )
    resampling: ResamplingConfig = Field(default_factory=ResamplingConfig, description="resampling by score (PF-PPO)")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="DAPO's length penalty")

    @property
    def pipeline_name(self) -> str:
        """The name of the task graph, or the reference to the function that builds it; `listed` for a list of nodes."""
        return self.pipeline if isinstance(self.pipeline, str) else "listed"
