"""The way an SGLang server fuses and splits the tensors it is sent, so that the trainer knows what it must hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.hf import expert_ffn, head_dim, num_experts
from megarl.sync.checksum import Checksum, make_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VOCAB_MULTIPLE = 64  # the server pads the rows of embedding and head to it, with zeros
_ANY_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED["up_proj"] = "gate_up_proj"
#: Linear layers of a vision encoder that are split by rows, and by columns.
_BY_ROWS = ("gate_proj", "up_proj", "linear_fc1", "merger.mlp.0")
_BY_COLUMNS = ("attn.proj", "down_proj", "linear_fc2", "merger.mlp.2")


@dataclass(frozen=True)
class _Sizes:
    """The sizes that decide how a server splits the model."""

    head: int
    query_heads: int
    kv_heads: int
    experts: int
    expert_ffn: int
    ffn: int
    hidden: int

    @classmethod
    def of(cls, hf: PretrainedConfig) -> _Sizes:
        return cls(
            head_dim(hf),
            hf.num_attention_heads,
            hf.num_key_value_heads,
            num_experts(hf) or 0,
            expert_ffn(hf),
            hf.intermediate_size,
            hf.hidden_size,
        )


@dataclass(frozen=True)
class ServerLayout:
    """A `ReceiverLayout`: `tp` ranks, whose experts are spread `ep` ways.

    Attributes:
        on_gpu: the servers compute on GPUs, which have another checksum.
    """

    tp: int
    ep: int
    sizes: _Sizes
    on_gpu: bool = False

    @classmethod
    def of(cls, hf: PretrainedConfig, tp: int = 1, ep: int = 1, *, on_gpu: bool = False) -> ServerLayout:
        """Return the layout of this model on servers of `tp` ranks."""
        return cls(tp, ep, _Sizes.of(hf), on_gpu)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self.tp

    def needs(self, rank: int, tensor: str) -> bool:
        """Return whether `rank` holds any part of this tensor.

        Experts lie in equal consecutive blocks over the ranks, as the server places them unless it balances experts.
        """
        found = _ANY_EXPERT.search(tensor)
        if self.ep == 1 or found is None or self.sizes.experts % self.ep:
            return True
        return int(found[1]) // (self.sizes.experts // self.ep) == rank // (self.tp // self.ep)

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Implement `ReceiverLayout.parts`."""
        return _parts(name, tensor, self.sizes, self.tp, self.ep, rank)

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return the checksum of the servers' device."""
        return make_checksum(nbytes, on_gpu=self.on_gpu)


def _parts(name: str, tensor: Tensor, sizes: _Sizes, tp: int, ep: int, rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield for server rank `rank`: (name of a server parameter, the part of `tensor` that is stored next in it,
    elements of the whole parameter)."""
    if "visual." in name:
        yield from _visual_parts(name, tensor, tp, rank)
        return
    name = name.replace("model.language_model.", "model.")
    if found := _EXPERT.fullmatch(name):
        yield from _expert_parts(found, tensor, sizes, tp, ep, rank)
        return
    module = name.rsplit(".", 2)[-2]
    param = name.replace(module, _FUSED.get(module, module))
    if module in ("k_proj", "v_proj") and sizes.kv_heads < tp:  # each group is on several ranks
        part = tensor.chunk(sizes.kv_heads)[rank * sizes.kv_heads // tp]
    elif module in _FUSED:
        part = tensor.chunk(tp)[rank]
    elif module in ("o_proj", "down_proj"):
        part = tensor.chunk(tp, 1)[rank]
    elif module in ("embed_tokens", "lm_head"):
        part = _padded_rows(tensor, tp, rank)
    else:
        part = tensor
    total = part.numel()
    if param != name:
        kv = max(sizes.kv_heads // tp, 1)
        rows = (sizes.query_heads // tp + 2 * kv) * sizes.head if "qkv" in param else 2 * part.shape[0]
        total = rows * math.prod(part.shape[1:])
    yield param, part, total


def _visual_parts(name: str, tensor: Tensor, tp: int, rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """Return the same for a tensor of the vision encoder, of Qwen2.5-VL or Qwen3-VL: each linear layer is split by its
    rows or by its columns, and of the latter each rank has the whole bias."""
    name = name.removeprefix("model.").replace("attn.qkv.", "attn.qkv_proj.")
    module, _, kind = name.rpartition(".")
    if module.endswith("qkv_proj"):  # query, key and value, each with its heads
        part = torch.cat([third.chunk(tp)[rank] for third in tensor.chunk(3)])
    elif module.endswith(_BY_ROWS):
        part = tensor.chunk(tp)[rank]
    elif module.endswith(_BY_COLUMNS) and kind == "weight":
        part = tensor.chunk(tp, 1)[rank]
    elif module.endswith("pos_embed"):
        part = _padded_rows(tensor, tp, rank)
    else:
        part = tensor
    param = re.sub("(gate|up)_proj", "gate_up_proj", name)
    yield param, part, part.numel() * (1 if param == name else 2)


def _padded_rows(tensor: Tensor, tp: int, rank: int) -> Tensor:
    """Return a rank's rows of an embedding or head, and zeros where they end."""
    rows = -(-tensor.shape[0] // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp
    part = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])]) if len(part) < rows else part


def _expert_parts(
    found: re.Match[str], tensor: Tensor, sizes: _Sizes, tp: int, ep: int, rank: int
) -> Iterator[tuple[str, Tensor, int]]:
    ways = tp // ep
    local = sizes.experts // ep
    if int(found[2]) // local != rank // ways:
        return
    size = local * sizes.hidden * sizes.expert_ffn // ways
    if found[3] in ("down_proj", "w2"):
        yield f"{found[1]}.w2_weight", tensor.chunk(ways, 1)[rank % ways], size
    else:
        yield f"{found[1]}.w13_weight", tensor.chunk(ways)[rank % ways], 2 * size
