"""How an SGLang server fuses and splits the tensors that it receives, which gives the checksums to expect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.artifacts.facts import ModelFacts
from megarl.models.hf import facts_of
from megarl.sync.checksum import Checksum, make_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Kinds of layers (`megarl.models.layers.mixer`) whose tensors `ServerLayout` knows.
SERVED = {"attention"}
_VOCAB_MULTIPLE = 64  # the server pads the rows of embedding and head with zeros to a multiple of it
_ANY_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED["up_proj"] = "gate_up_proj"
#: Linear layers of a vision encoder that are split by rows, and those that are split by columns.
_BY_ROWS = ("gate_proj", "up_proj", "linear_fc1", "merger.mlp.0")
_BY_COLUMNS = ("attn.proj", "down_proj", "linear_fc2", "merger.mlp.2")


@dataclass(frozen=True)
class ServerLayout:
    """A `ReceiverLayout` for servers with `tp` ranks, over which experts are spread `ep` ways.

    Attributes:
        on_gpu: whether the servers compute on GPUs, whose checksum differs from the CPU's.
    """

    tp: int
    ep: int
    facts: ModelFacts
    on_gpu: bool = False

    @classmethod
    def of(cls, hf: PretrainedConfig, tp: int = 1, ep: int = 1, *, on_gpu: bool = False) -> ServerLayout:
        """Return the layout of this model on servers of `tp` ranks."""
        return cls(tp, ep, facts_of(hf), on_gpu)

    @property
    def ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.tp

    def needs(self, rank: int, tensor: str) -> bool:
        """Return whether `rank` holds any part of this tensor.

        Each rank holds an equal block of consecutive experts, which is how a server places them unless it balances
        experts.
        """
        match = _ANY_EXPERT.search(tensor)
        if self.ep == 1 or match is None or self.facts.experts % self.ep:
            return True
        return int(match[1]) // (self.facts.experts // self.ep) == rank // (self.tp // self.ep)

    def parts(self, rank: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yield (name of a server parameter, the part of `tensor` that `rank` stores next in this parameter, number of
        elements of the whole parameter)."""
        facts, tp, ep = self.facts, self.tp, self.ep
        if "visual." in name:
            yield _visual_part(name, tensor, tp, rank)
            return
        name = name.replace("model.language_model.", "model.")
        if match := _EXPERT.fullmatch(name):
            experts, number, kind = match.groups()
            ways, local = tp // ep, facts.experts // ep
            if int(number) // local == rank // ways:
                size = local * facts.hidden * facts.ffn // ways
                if kind in ("down_proj", "w2"):
                    yield f"{experts}.w2_weight", tensor.chunk(ways, 1)[rank % ways], size
                else:
                    yield f"{experts}.w13_weight", tensor.chunk(ways)[rank % ways], 2 * size
            return
        module = name.rsplit(".", 2)[-2]
        param = name.replace(module, _FUSED.get(module, module))
        if module in ("k_proj", "v_proj") and facts.kv_heads < tp:  # each group is on several ranks
            part = tensor.chunk(facts.kv_heads)[rank * facts.kv_heads // tp]
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
            kv = max(facts.kv_heads // tp, 1)
            rows = (facts.heads // tp + 2 * kv) * facts.head_dim if "qkv" in param else 2 * part.shape[0]
            total = rows * math.prod(part.shape[1:])
        yield param, part, total

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return an empty checksum over `nbytes` bytes, of the kind that the servers' device computes."""
        return make_checksum(nbytes, on_gpu=self.on_gpu)


def _visual_part(name: str, tensor: Tensor, tp: int, rank: int) -> tuple[str, Tensor, int]:
    """Return the triple that `ServerLayout.parts` yields for a tensor of the Qwen2.5-VL or Qwen3-VL vision encoder.

    Each linear layer is split by rows or by columns; each rank has the whole bias of a layer that is split by columns.
    """
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
    return param, part, part.numel() * (1 if param == name else 2)


def _padded_rows(tensor: Tensor, tp: int, rank: int) -> Tensor:
    """Return a rank's rows of an embedding or head, padded with zeros."""
    rows = -(-tensor.shape[0] // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp
    part = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])]) if len(part) < rows else part
