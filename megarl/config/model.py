"""The recipe's sections `model` and `parallel`: the model, and how it is split over processes."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.architectures.tensors import ModelPart
from megarl.config.base import Section
from megarl.system.errors import ConfigError

Dtype = Literal["fp32", "bf16", "auto"]
Target = Literal["attention", "mlp", "experts", "tower", "merger"]
"""Kinds of linear layers that can have low-rank adapters."""


class LoraConfig(Section):
    """Low-rank adapters on a frozen base model (Hu et al. 2021): W x + (alpha / rank) B A x."""

    rank: PositiveInt = Field(16, description="rank of the adapters: rows of A and columns of B")
    alpha: PositiveFloat = Field(32.0, description="numerator of the scale alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of adapters in training; needs tp=1")
    targets: list[Target] | None = Field(
        None,
        description="layers with adapters: attention, mlp (of dense layers), experts (one adapter per expert), and of "
        "a vision encoder tower (its blocks) and merger; null: attention, and mlp where the model has it",
    )
    path: str | None = Field(
        None,
        description="folder of a PEFT adapter to start from, with this rank, alpha and targets; null: start "
        "from new adapters",
    )

    @property
    def scale(self) -> float:
        """The factor alpha / rank of B A."""
        return self.alpha / self.rank

    @property
    def in_tower(self) -> bool:
        """Whether blocks of a vision encoder have adapters."""
        return "tower" in (self.targets or ())


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name, or a randomly initialised model of a Hugging Face config."""

    path: str | None = Field(None, description="Hugging Face folder or hub name with config and safetensors")
    hf_config: dict[str, Any] | None = Field(
        None, description="config of a randomly initialised model, with model_type; used when path is null"
    )
    tokenizer: str | None = Field(
        None,
        description="tokenizer folder or hub name; null: model.path; 'chars:<alphabet>': one token per character; "
        "'words:<word> ...': one token per word",
    )
    init_seed: int = Field(0, description="seed of a randomly initialised model")
    dtype: Dtype = Field(
        "bf16",
        description="compute and parameter dtype; bf16 keeps fp32 master weights. auto: bf16 on GPUs and on "
        "processors with bf16 products (AVX512-BF16, AMX), else fp32; a resumed run keeps its dtype",
    )
    trust_remote_code: bool = Field(False, description="allow code that ships with a checkpoint to run")
    lora: LoraConfig | None = Field(
        None,
        description="train only low-rank adapters, also on the critic; null: train all weights",
    )
    vision: bool | None = Field(
        None,
        description="read, train and export the vision encoder of a vision-language model; false: only its language "
        "model; null: true, but for Qwen3.5 only with data.image_key",
    )
    freeze: list[ModelPart] = Field(
        [],
        description="parts that stay frozen, also in the critic: tower, merger (projectors), action_expert, "
        "language_model",
    )

    @property
    def named_base(self) -> bool:
        """Whether the model's name has the word `base`, which means that it was not trained to chat."""
        path = Path(self.path or "")
        # folder name in the hub's cache
        name = next((part for part in path.parts if part.startswith("models--")), path.name)
        return "base" in re.split(r"[-_.]", name.lower())

    def freeze_problem(self, others: Collection[ModelPart]) -> ConfigError | None:
        """Return the error for an invalid `freeze`, None if it is valid; `others`: the model's parts other than the
        language model."""
        parts = [part for part in get_args(ModelPart) if part in {*others, "language_model"}]
        missing = [part for part in self.freeze if part not in parts]
        frozen, where = list(self.freeze), "model.freeze"
        if missing:
            return ConfigError(
                f"this model has no {' and no '.join(missing)}",
                where=where,
                found=frozen,
                allowed=parts if others else "[], as this model has no part other than its language_model",
                fix="remove the parts that the model does not have",
            )
        if self.freeze and set(parts) == set(self.freeze):
            return ConfigError(
                "all parts are frozen, so nothing would be trained",
                where=where,
                found=frozen,
                allowed="fewer than all parts",
                fix="remove one of them",
            )
        if self.freeze and self.lora is not None:
            return ConfigError(
                "adapters freeze all other weights already",
                where=where,
                found=f"{frozen} with model.lora",
                allowed="either model.freeze or model.lora",
                fix="set model.freeze=[], or model.lora=null",
            )
        return None


def split_layers(layers: int, chunks: int, first: int = 0, last: int = 0) -> list[int]:
    """Return how many layers each of a model's pipeline chunks has.

    If they cannot have equally many, some have one more: the chunks in the middle come first, the later ones before the
    earlier ones; then the first chunk, which keeps the activations of most micro-batches; then the last, which has the
    head.

    Args:
        first, last: layers of the first and the last chunk; 0: as above.
    """
    sizes = {0: first, chunks - 1: last} if chunks > 1 else {}
    fixed = {chunk: size for chunk, size in sizes.items() if size}
    free = [chunk for chunk in range(chunks) if chunk not in fixed]
    base, more = divmod(layers - sum(fixed.values()), len(free) or 1)
    larger = sorted(free, key=lambda chunk: (chunk == chunks - 1, -chunk))[:more]
    return [fixed.get(chunk, base + (chunk in larger)) for chunk in range(chunks)]


class ParallelConfig(Section):
    """How a model is split over processes. The data-parallel size is processes / (tp * pp * cp)."""

    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    vpp: PositiveInt | None = Field(
        None, description="virtual pipeline chunks per stage; null: one, without interleaving"
    )
    first_stage_layers: PositiveInt | None = Field(
        None,
        description="layers of the first pipeline stage (with vpp: of the first chunk), which also has the embedding; "
        "null: as many as the others, or one less",
    )
    last_stage_layers: PositiveInt | None = Field(
        None,
        description="layers of the last pipeline stage (with vpp: of the last chunk), which also has the head; null: "
        "as many as the others, or one less",
    )
    cp: PositiveInt = Field(1, description="context parallel size")
    ep: PositiveInt = Field(1, description="expert parallel size (mixture of experts only)")
    etp: PositiveInt | None = Field(
        None, description="tensor parallel size inside experts; null: tp when ep is 1, else 1"
    )
    dispatch: Literal["auto", "alltoall", "deepep"] = Field(
        "auto",
        description="how tokens travel between experts: alltoall, or deepep (kernels of the package deep_ep); auto: "
        "deepep for a bf16 model with experts over several machines whose GPUs have it, else alltoall",
    )
    sp: bool = Field(
        False,
        description="sequence parallel: split norms and residuals over the tp ranks; always on for mixtures of experts",
    )

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that hold one replica: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    def splits_tokens(self, *, experts: bool) -> bool:
        """Return whether tensor-parallel ranks split the tokens of norms and residuals; models with `experts` always
        do so, because Megatron does not train them under tensor parallelism otherwise."""
        return self.tp > 1 and (self.sp or experts)

    def one_stage(self) -> ParallelConfig:
        """Return this layout without pipeline stages."""
        update = {"pp": 1, "vpp": None, "first_stage_layers": None, "last_stage_layers": None}
        return self.model_copy(update=update)

    def chunk_layers(self, layers: int) -> list[int]:
        """Return how many of a model's `layers` each pipeline chunk has, in the order of the model.

        A layout with more chunks than layers, which the checks refuse, counts as one with a layer per chunk.
        """
        chunks = min(self.pp * (self.vpp or 1), layers)
        return split_layers(layers, chunks, self.first_stage_layers or 0, self.last_stage_layers or 0)

    def stage_layers(self, layers: int) -> list[int]:
        """Return how many of a model's `layers` each pipeline stage has."""
        chunks = self.chunk_layers(layers)
        return [sum(chunks[stage :: self.pp]) for stage in range(min(self.pp, layers))]

    def most_layers(self, layers: int) -> int:
        """Return how many of a model's `layers` the fullest pipeline stage has."""
        return max(self.stage_layers(layers))

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside experts: `etp` if set, else `tp` when ep is 1, else 1."""
        return self.etp or (self.tp if self.ep == 1 else 1)
