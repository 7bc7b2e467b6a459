"""The recipe's sections `model` and `parallel`: which model, and how it is split over processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.architectures.tensors import ModelPart
from megarl.config.base import Section
from megarl.system.errors import ConfigError

Dtype = Literal["fp32", "bf16", "auto"]
Target = Literal["attention", "mlp", "experts"]
"""Linear layers that low-rank adapters may be on."""


class LoraConfig(Section):
    """Low-rank adapters on a base model that stays as it is (Hu et al. 2021): W x + (alpha / rank) B A x."""

    rank: PositiveInt = Field(16, description="rows of A and columns of B, for each projection")
    alpha: PositiveFloat = Field(32.0, description="numerator of the scale alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of an adapter's input that training drops; only tp=1")
    targets: list[Target] | None = Field(
        None,
        description="layers with adapters: attention, mlp (of dense layers), experts (one adapter each); null: "
        "attention, and mlp where the model has it",
    )
    path: str | None = Field(
        None, description="folder of a PEFT adapter to start from, of this rank, alpha and targets; null: a fresh one"
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class ModelConfig(Section):
    """The policy: a Hugging Face folder or hub name, or a new random model made from a Hugging Face config."""

    path: str | None = Field(None, description="Hugging Face folder or hub name with config and safetensors")
    hf_config: dict[str, Any] | None = Field(
        None, description="config of a fresh random model, with model_type; used when path is null"
    )
    tokenizer: str | None = Field(
        None,
        description="tokenizer folder or hub name; null: model.path; 'chars:<alphabet>': one token per character; "
        "'words:<word> ...': one per word",
    )
    init_seed: int = Field(0, description="seed of a fresh random model")
    dtype: Dtype = Field(
        "bf16",
        description="compute and parameter dtype; bf16 keeps fp32 master weights. auto: bf16 on GPUs and on processors "
        "with bf16 products (AVX512-BF16, AMX), else fp32; a run that is continued keeps its own",
    )
    trust_remote_code: bool = Field(False, description="run code that ships with a checkpoint; off unless asked")
    lora: LoraConfig | None = Field(
        None,
        description="train only low-rank adapters, also of the critic; null: train all weights",
    )
    freeze: list[ModelPart] = Field(
        [],
        description="frozen parts, also of the critic: tower, merger (projectors), language_model",
    )

    @property
    def named_base(self) -> bool:
        """Whether the model's own name says that it was not trained to chat: `base` is a word of it."""
        path = Path(self.path or "")
        name = next((part for part in path.parts if part.startswith("models--")), path.name)  # of the hub's cache
        return "base" in re.split(r"[-_.]", name.lower())

    def freeze_problem(self, *, sees: bool) -> ConfigError | None:
        """Return why the parts in `freeze` cannot stay as they are; `sees`: the model has a vision part."""
        parts = ["tower", "merger", "language_model"] if sees else ["language_model"]
        missing = [part for part in self.freeze if part not in parts]
        found, where = list(self.freeze), "model.freeze"
        if missing:
            return ConfigError(
                f"this model has no {' and no '.join(missing)}",
                where=where,
                found=found,
                allowed=parts if sees else "[], as this model has no other part than its language_model",
                fix="remove what is not there",
            )
        if self.freeze and set(parts) == set(self.freeze):
            return ConfigError(
                "nothing would learn", where=where, found=found, allowed="not all parts", fix="remove one of them"
            )
        if self.freeze and self.lora is not None:
            return ConfigError(
                "adapters leave all weights as they are already",
                where=where,
                found=f"{found} with model.lora",
                allowed="one of the two",
                fix="set model.freeze=[], or model.lora=null",
            )
        return None


class ParallelConfig(Section):
    """The split of a model over processes. The data-parallel size is the rest: processes / (tp * pp * cp)."""

    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    vpp: PositiveInt | None = Field(None, description="virtual pipeline chunks per stage; null: no interleaving")
    cp: PositiveInt = Field(1, description="context parallel size")
    ep: PositiveInt = Field(1, description="expert parallel size (mixture of experts only)")
    etp: PositiveInt | None = Field(None, description="tensor parallel size inside experts; null: tp, or 1 when ep > 1")
    dispatch: Literal["auto", "alltoall", "deepep"] = Field(
        "auto",
        description="exchange of tokens between experts: all-to-alls, or DeepEP's kernels (package deep_ep); auto: "
        "deepep for a bf16 model with experts over several machines whose GPUs have it, else alltoall",
    )
    sp: bool = Field(
        False, description="sequence parallel: split norms and residuals over tp; mixtures of experts always do"
    )

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one replica: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside experts: `etp`, else tp, or 1 when experts are spread over processes."""
        return self.etp or (self.tp if self.ep == 1 else 1)
