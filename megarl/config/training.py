"""The recipe's sections for training: optimizer, engine, roles, SFT."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.algorithm import Aggregation
from megarl.config.base import Section
from megarl.config.model import ParallelConfig
from megarl.system.offload_schedule import PARTS


class OptimConfig(Section):
    """AdamW and its learning-rate schedule. Steps are optimizer steps."""

    lr: PositiveFloat = Field(1e-6, le=1, description="peak learning rate")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of the decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape of the schedule after warm-up"
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="optimizer steps of linear warm-up; linear and cosine schedules shorten it to fit the run"
    )
    warmup_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="warm-up as a share of the run's optimizer steps, rounded; replaces warmup_steps",
    )
    decay_steps: PositiveInt | None = Field(
        None, description="optimizer steps until min_lr is reached; null: the whole run"
    )
    weight_decay: NonNegativeFloat = Field(0.01, le=100, description="decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: PositiveFloat = Field(1e-8, le=1, description="denominator constant")
    clip_grad: NonNegativeFloat = Field(
        1.0, description="largest global gradient norm; larger gradients are scaled down; 0: no clipping"
    )
    expert_bias_rate: NonNegativeFloat = Field(
        0.0,
        le=1,
        description="change per optimizer step of the biases by which routers choose experts (as in GLM-4.5): up "
        "for experts with fewer tokens than the mean, down for those with more; 0: they stay as they are",
    )

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps` optimizer steps."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * total_steps)


class EngineConfig(Section):
    """Memory and speed settings of the Megatron engine."""

    micro_batch_tokens: PositiveInt = Field(
        8192,
        description="maximum tokens of a micro-batch per data-parallel rank, image patches included; a longer sequence "
        "is a micro-batch of its own",
    )
    logits_chunk_tokens: PositiveInt = Field(
        1024, description="number of tokens whose vocabulary logits exist at the same time in the fused log-prob"
    )
    recompute: Literal["none", "full", "selective"] | list[Literal["attention", "mlp", "norm", "moe"]] = Field(
        "none",
        description="activations to compute again in the backward pass: none, those of whole layers (full), of "
        "attention over the context (selective), or a list of attention, mlp (dense MLPs), moe (routers and experts) "
        "and norm (inputs of local layers' projections)",
    )
    layers: Literal["auto", "local", "te"] = Field(
        "auto",
        description="implementation of transformer layers: Transformer Engine (te) or plain modules (local); auto: te "
        "for bf16 on GPUs where it is installed and without share_prefixes, else local. Reference and teacher use the "
        "actor's",
    )
    fp8: Literal["none", "blockwise", "delayed", "mxfp8"] = Field(
        "none",
        description="FP8 matrix products in te layers. blockwise: one scale per block; delayed: one scale per tensor, "
        "from maxima of earlier steps, which checkpoints do not hold; mxfp8: one scale per 32 numbers, on Blackwell. "
        "Weights, attention and head stay in model.dtype",
    )
    share_prefixes: bool = Field(
        False,
        description="compute the prompt of a group, and any longer prefix that samples of a micro-batch share, once "
        "and not for each sample, in log-probs, values and updates; results are equal to rounding. Frozen models use "
        "the actor's setting where they can",
    )
    balance_replicas: bool = Field(
        True,
        description="exchange samples between replicas before log-probs, values and updates, so that all compute on "
        "about as many tokens; results are equal to rounding. Samples that share prompts or images, and the two of a "
        "pair, stay together. Reference and teacher use the actor's",
    )
    distributed_optimizer: bool = Field(True, description="shard the optimizer state over data-parallel ranks")
    exp_avg_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype of AdamW's first moment; bf16 saves 2 bytes per parameter and needs a bf16 model, "
        "distributed_optimizer and Transformer Engine",
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients while the backward pass runs")
    offload: bool | list[Literal["parameters", "gradients", "optimizer"]] = Field(
        False,
        description="move parts of the training state to host memory while another role works: true: all three, or a "
        "list of them. Parameters of actor and critic move only together with the other two parts, those of the actor "
        "while colocated servers generate; parameters of frozen models move by themselves",
    )
    stream_optimizer: bool = Field(
        False,
        description="keep the optimizer's state in host memory also during an update, and move it through the GPU in "
        "pieces of 1 GiB in each optimizer step; results are the same. Needs offload true, distributed_optimizer, and "
        "exp_avg_dtype fp32",
    )

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts of the training state (of `megarl.system.offload_schedule.PARTS`) that are moved to host memory
        while they are not used."""
        if isinstance(self.offload, bool):
            return frozenset(PARTS if self.offload else ())
        return frozenset(self.offload)

    @property
    def recomputed(self) -> frozenset[str]:
        """The parts of a layer that the backward pass recomputes; empty with `full`, which recomputes whole layers."""
        if isinstance(self.recompute, str):
            return frozenset({"attention"} if self.recompute == "selective" else ())
        return frozenset(self.recompute)


class MtpConfig(Section):
    """Training of the policy's draft head (multi-token prediction), on the tokens that the policy generates.

    The head predicts the token after the next one. Its loss changes no other weight.
    """

    loss_weight: PositiveFloat = Field(0.1, description="factor of the head's cross-entropy, a mean over its tokens")


class TrainingConfig(Section):
    """How a model is trained; these keys are in the sections `actor`, `critic` and those of `models`."""

    engine: EngineConfig = Field(default_factory=EngineConfig, description="memory and speed of training")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer")
    mini_batch_size: PositiveInt | None = Field(
        None,
        le=1_000_000_000,
        description="prompts per optimizer step over all ranks; null: data.batch_size (one optimizer step)",
    )
    ppo_epochs: PositiveInt = Field(1, description="passes over the samples of a step")
    shuffle: bool = Field(False, description="assign prompts to mini-batches at random, differently in every pass")


class ActorLayout(Section):
    """The layout of the policy. The key comes first in the section `actor`, so it is in a base class."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="layout")


class ActorConfig(TrainingConfig, ActorLayout):
    """Training of the policy."""

    mtp: MtpConfig | None = Field(
        None,
        description="train the draft head (multi-token prediction) with the policy; null: exports have it as it was",
    )


class ModelPlace(Section):
    """Where a model other than the policy comes from, and its layout. These keys come first in the model's section, so
    they are in a base class."""

    path: str | None = Field(None, description="Hugging Face folder or hub name")
    parallel: ParallelConfig | None = Field(
        None, description="layout; null: the actor's. Another layout needs a team of its own (placement)"
    )


class CriticConfig(TrainingConfig, ModelPlace):
    """The value model of PPO: the policy's architecture with one value per token instead of a vocabulary."""

    path: str | None = Field(
        None,
        description="Hugging Face folder or hub name of a policy or of an earlier critic (hf_critic); null: the "
        "actor's weights at the start of RL. With a policy's weights the value head starts at zero",
    )
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5), description="optimizer")
    aggregation: Aggregation = Field(
        "token-mean",
        description="how the value losses of tokens are combined into one number, as algorithm.loss.aggregation",
    )
    sum_norm: PositiveFloat | None = Field(None, description="divisor that seq-mean-token-sum-norm uses")
    value_clip: PositiveFloat | None = Field(
        0.5, description="largest change of a value from the old value that still lowers its loss; null: no bound"
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="number of first training steps in which only the critic trains"
    )


class ReferenceConfig(Section):
    """The frozen reference policy. It is loaded only when a KL term needs it."""

    path: str | None = Field(None, description="Hugging Face folder; null: the actor's weights at the start of RL")
    parallel: ParallelConfig | None = Field(
        None, description="layout; null: the actor's. Another layout needs a team of its own"
    )


class TeacherModelConfig(Section):
    """One of several teachers."""

    path: str = Field(description="Hugging Face folder or hub name; it must have the policy's tokenizer")
    weight: NonNegativeFloat = Field(
        1.0, description="share of this teacher among prompts whose row names no teacher, relative to the other weights"
    )


class TeacherConfig(Section):
    """The frozen teacher of on-policy distillation, or several teachers. They are loaded only when the recipe needs
    them.
    """

    path: str | None = Field(None, description="Hugging Face folder or hub name; it must have the policy's tokenizer")
    models: dict[str, TeacherModelConfig] = Field(
        default_factory=dict,
        description="several named teachers in place of `path`; each prompt has one of them",
    )
    key: str = Field(
        "teacher",
        description="column that names a row's teacher (a key of `models`); a row without it gets one at random, by "
        "weight",
    )
    parallel: ParallelConfig | None = Field(
        None, description="layout; null: the actor's. Another layout needs a team of its own"
    )

    @property
    def paths(self) -> dict[str, str]:
        """Paths of the teachers, by the recipe key that names each."""
        if self.models:
            return {f"teacher.models.{name}.path": model.path for name, model in self.models.items()}
        return {} if self.path is None else {"teacher.path": self.path}


class RewardModelConfig(Section):
    """The frozen reward model that scores samples. It is loaded when the reward or a part of it is `reward_model`."""

    path: str | None = Field(
        None, description="Hugging Face folder or hub name of a sequence classifier with one label, such as RUN_DIR/hf"
    )
    form: Literal["tokens", "text", "chat"] = Field(
        "tokens",
        description="input of the reward model. tokens: the sample's tokens, for a model with the policy's tokenizer; "
        "text: prompt and response through the model's tokenizer; chat: the conversation in the model's chat template",
    )
    end: bool = Field(
        True, description="append the model's end token when the text does not end with it (form text or chat)"
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description="maximum tokens of a sample; longer samples fail (reward.on_error); null: the model's limit",
    )
    parallel: ParallelConfig | None = Field(
        None, description="layout; null: the actor's. Another layout needs a team of its own"
    )


class PreferenceConfig(Section):
    """Training on better and worse responses: DPO and relatives on pairs, KTO on labelled examples, reward models.

    Keys have TRL's names where TRL has them.
    """

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "kto", "bradley_terry"] = Field(
        "sigmoid",
        description="loss of a pair: sigmoid (DPO), robust (DPO with wrong labels), hinge (SLiC) or ipo; of a "
        "labelled example: kto; of a reward model's pair: bradley_terry. Formulas: docs/preferences.md",
    )
    beta: PositiveFloat = Field(0.1, le=1000, description="factor of the log-ratio to the reference policy in the loss")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="assumed share of pairs with a wrong label (sigmoid, robust)"
    )
    length_normalised: bool | None = Field(
        None,
        description="take means of log-ratios over response tokens instead of sums; null: true for ipo, else false",
    )
    sft_coef: NonNegativeFloat = Field(
        0.0, le=1000, description="weight of the mean -log-prob of the chosen responses' tokens (RPO); 0: no term"
    )
    desirable_weight: NonNegativeFloat = Field(1.0, le=1000, description="weight of desirable examples (kto)")
    undesirable_weight: NonNegativeFloat = Field(1.0, le=1000, description="weight of undesirable examples (kto)")
    margin_key: str | None = Field(
        None,
        description="column of a number by which the chosen score of a reward model should exceed the rejected "
        "one; null: none",
    )
    center_coef: NonNegativeFloat = Field(
        0.0, le=1000, description="weight of (sum of a pair's two scores)^2, which keeps a reward model's scores near 0"
    )
    chosen_key: str = Field(
        "chosen",
        description="column of the better response: text or chat messages. In rows without the column data.prompt_key "
        "the prompt is the common beginning of both responses",
    )
    rejected_key: str = Field("rejected", description="column of the worse response, in the same form")
    completion_key: str = Field(
        "completion",
        description="column of the response of a kto example: text or chat messages; rows without it are pairs, and "
        "each pair gives two examples",
    )
    label_key: str = Field("label", description="column with whether the response of an example is desirable")
    max_tokens: PositiveInt | None = Field(
        None,
        description="maximum tokens of a pair's or example's sequence (prompt and response); longer ones are overlong "
        "(data.overlong); null: the model's limit",
    )

    @property
    def labelled(self) -> bool:
        """Whether training reads single responses with a label, desirable or not (KTO), and not pairs of responses."""
        return self.loss == "kto"

    @property
    def scores(self) -> bool:
        """Whether a reward model is trained, not a policy."""
        return self.loss == "bradley_terry"

    @property
    def means(self) -> bool:
        """Whether log-ratios are means over tokens instead of sums."""
        return self.loss == "ipo" if self.length_normalised is None else self.length_normalised

    def limit(self, positions: int | None) -> int | None:
        """Return the maximum length of a sequence in tokens for a model with `positions` positions; None: no limit."""
        return min((bound for bound in (positions, self.max_tokens) if bound is not None), default=None)


#: Default peak learning rates of fine-tuning: a trained model, adapters, a randomly initialised model.
TRAINED_LR, ADAPTER_LR, FRESH_LR = 1e-5, 1e-4, 1e-3


class SFTConfig(Section):
    """Supervised fine-tuning: a cold start before RL, or `megarl sft` by itself."""

    steps: NonNegativeInt = Field(0, description="number of optimizer steps; 0 skips the phase")
    epochs: PositiveFloat | None = Field(
        None,
        description="passes over the examples, which set `steps` unless a later layer or override sets `steps`; the "
        "next pass fills the last batch; null: use steps",
    )
    batch_size: PositiveInt = Field(64, le=1_000_000_000, description="examples per optimizer step over all ranks")
    response_key: str = Field(
        "answer",
        description="column of the response to train on: text or chat messages. If it is data.prompt_key, the column "
        "holds whole conversations, and the prompt ends before the assistant's first message",
    )
    train_files: list[str] | None = Field(
        None, description="files of examples, in the forms of data.train_files; null: data.train_files"
    )
    max_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of an example (prompt and response); null: the model's limit"
    )
    overlong: Literal["filter", "cut", "error"] | None = Field(
        None,
        description="what happens to longer examples. filter: drop and count them; cut: drop the end of the response, "
        "and count them; error: refuse them; null: as data.overlong",
    )
    optim: OptimConfig = Field(
        default_factory=lambda: OptimConfig(lr=TRAINED_LR),
        description="the optimizer; the default lr is 1e-5 for a trained model, 1e-4 for adapters, 1e-3 for a "
        "randomly initialised model",
    )
    eval_every: NonNegativeInt = Field(
        0, description="optimizer steps between held-out evaluations; 0: only at the end"
    )
    stop_at_accuracy: float | None = Field(
        None, ge=0, le=1, description="greedy accuracy on held-out prompts at which the phase ends; needs eval_every"
    )

    def limit(self, positions: int | None) -> int | None:
        """Return the maximum length of an example in tokens for a model with `positions` positions; None: no limit."""
        return min((limit for limit in (positions, self.max_tokens) if limit is not None), default=None)
