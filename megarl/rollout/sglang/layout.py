"""How an SGLang server fuses and splits the tensors that it receives, which gives the checksums to expect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import ModelFacts
from megarl.config.sglang import SGLangConfig
from megarl.models.hf import facts_of
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.gated_delta.plain import GatedDelta
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mla.plain import MLA
from megarl.sync.checksum import Checksum, make_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VOCAB_MULTIPLE = 64  # the server pads the rows of embedding and head with zeros to a multiple of this number
_ANY_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
#: Modules whose rows belong to heads. Ranks split them by rows, as they do with modules that the server fuses.
_BY_HEAD = ("in_proj_qkvz", "in_proj_ba", "q_b_proj", "kv_b_proj", "q_proj")
#: Architectures whose routers are float32 parameters of the server, whatever the model's dtype.
_WIDE_ROUTERS = ("glm4_moe", "glm4_moe_lite", "minimax_m2")
_BACKEND = "--moe-runner-backend"
_LATENT = "fused_qkv_a_proj_with_mqa"
#: Linear layers of a vision encoder that are split by rows, and those that are split by columns.
_BY_ROWS = ("gate_proj", "up_proj", "fc1", "merger.mlp.0")
_BY_COLUMNS = ("attn.proj", "down_proj", "fc2", "merger.mlp.2")


@dataclass(frozen=True)
class ServerLayout:
    """A `ReceiverLayout` for servers with `tp` ranks, over which experts are spread `ep` ways.

    Attributes:
        on_gpu: whether the servers compute on GPUs, whose checksum differs from the CPU's.
        attention_dp: number of groups of ranks that each have all heads of the attention, and their own requests.
    """

    tp: int
    ep: int
    facts: ModelFacts
    on_gpu: bool = False
    attention_dp: int = 1

    @classmethod
    def of(
        cls, hf: PretrainedConfig, tp: int = 1, ep: int = 1, *, on_gpu: bool = False, attention_dp: int = 1
    ) -> ServerLayout:
        """Return the layout of this model on servers of `tp` ranks."""
        return cls(tp, ep, facts_of(hf), on_gpu, attention_dp)

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
        if facts.mixture is not None and facts.mixture.stacked and ".experts." in name:
            yield _stacked_part(name, tensor, tp, ep, rank)
            return
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
        module, leaf = name.rsplit(".", 2)[-2:]
        param = name.replace(module, self._fusions.get(module, module))
        if GatedDelta.kind in self._mixers:
            param = param.replace(".self_attn", "")
        part = self._part(rank, module, leaf, tensor)
        rows = self._fused_rows.get(self._fusions.get(module, ""), 2 * len(part))
        yield param, part, part.numel() if module not in self._fusions else rows * math.prod(part.shape[1:])

    def _part(self, rank: int, module: str, leaf: str, tensor: Tensor) -> Tensor:
        """Return the part of a tensor outside experts that `rank` stores, in the dtype of the server's parameter."""
        tp, kv_heads = self.tp, self.facts.kv_heads
        if self.attention_dp > 1 and module not in ("gate_proj", "up_proj", "down_proj", "lm_head"):
            whole = module == "embed_tokens" and ARCHITECTURES[self.facts.model_type].served.whole_embedding
            tp = 1 if whole else tp // self.attention_dp
            rank %= tp
        if module == "gate" and self.facts.model_type in _WIDE_ROUTERS:
            return tensor.float()
        if module in ("k_proj", "v_proj", "k_norm" if self._wide_norms else "") and kv_heads < tp:
            return tensor.chunk(kv_heads)[rank * kv_heads // tp]  # each key/value head is on several ranks
        if module in ("in_proj_qkv", "conv1d"):  # queries, keys and values, each with its heads
            keys, values = (self.facts.dimensions[name] for name in ("delta_keys", "delta_values"))
            return torch.cat([part.chunk(tp)[rank] for part in tensor.split([keys, keys, values])])
        if module == "linear_attn":  # A_log and dt_bias, one number per value head
            return tensor.chunk(tp)[rank].float() if leaf == "A_log" else tensor.chunk(tp)[rank]
        if leaf == "sinks":  # sinks are bfloat16 on the server, whatever the model's dtype
            return tensor.chunk(tp)[rank].bfloat16()
        if module in ("o_proj", "down_proj", "out_proj"):
            return tensor.chunk(tp, 1)[rank] if leaf == "weight" else tensor
        if module in ("embed_tokens", "lm_head"):
            return _padded_rows(tensor, tp, rank)
        by_rows = module in _BY_HEAD or (module in self._fusions and self._fusions[module] != _LATENT)
        return tensor.chunk(tp)[rank] if by_rows or (self._wide_norms and module in ("q_norm", "k_norm")) else tensor

    @cached_property
    def _mixers(self) -> dict[str, Mixer]:
        """One of the model's mixers of each kind, by the kind's name."""
        return {mixer.kind: mixer for mixer in self.facts.mixers}

    @cached_property
    def _wide_norms(self) -> bool:
        """Whether the norms of queries and keys have weights of their own for each head."""
        mixer = self._mixers.get(Attention.kind)
        return isinstance(mixer, Attention) and mixer.wide_norm

    @cached_property
    def _fusions(self) -> dict[str, str]:
        """Module of the checkpoint -> the server's module in which it is fused with other modules."""
        fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        if Attention.kind in self._mixers:
            fused |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
        if GatedDelta.kind in self._mixers:
            fused |= dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz")
            fused |= dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba")
        latent = self._mixers.get(MLA.kind)
        if isinstance(latent, MLA) and latent.q_rank is not None:
            fused |= dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), _LATENT)
        return fused

    @cached_property
    def _fused_rows(self) -> dict[str, int]:
        """The number of rows on a rank of each fused module whose parts have different numbers of rows, by the
        module's name."""
        facts, tp, rows = self.facts, self.tp // self.attention_dp, {}
        for mixer in self._mixers.values():
            if isinstance(mixer, Attention):
                heads = facts.heads // tp * (2 if mixer.gate else 1)
                rows["qkv_proj"] = (heads + 2 * max(facts.kv_heads // tp, 1)) * facts.head_dim
            elif isinstance(mixer, GatedDelta):
                rows["in_proj_qkvz"] = mixer.channels(tp) + mixer.sections(tp)["z"]
            elif isinstance(mixer, MLA) and mixer.q_rank is not None:
                rows[_LATENT] = mixer.q_rank + mixer.cached
        return rows

    def together(self, tensor: str) -> str:
        """Return a name that is the same for tensors that one call of `load_weights` must contain together.

        These are the two projections to latents, which the server joins into one parameter only then.
        """
        for module, fused in self._fusions.items():
            if fused == _LATENT and f".{module}." in tensor:
                return tensor.replace(module, fused)
        return tensor

    def make_checksum(self, nbytes: int) -> Checksum:
        """Return an empty checksum over `nbytes` bytes, of the kind that the servers' device computes."""
        return make_checksum(nbytes, on_gpu=self.on_gpu)


def with_plain_experts(config: SGLangConfig, facts: ModelFacts) -> SGLangConfig:
    """Return the settings of servers that keep stacks of experts as `ServerLayout` describes them.

    The backend that SGLang chooses for them by itself depends on the GPU and on what is installed, and some backends
    keep them transposed or packed."""
    chosen = any(argument.startswith(_BACKEND) for argument in config.extra_args)
    if facts.mixture is None or not facts.mixture.stacked or chosen:
        return config
    return config.model_copy(update={"extra_args": [*config.extra_args, _BACKEND, "triton"]})


def _stacked_part(name: str, tensor: Tensor, tp: int, ep: int, rank: int) -> tuple[str, Tensor, int]:
    """Return (name of the server's parameter, the part of `tensor` that `rank` stores, number of elements of the part).

    `tensor` has the weights of all experts of a layer, [experts, in, out], or their biases, which are float32 on the
    server."""
    tp = tp // ep  # ranks that share the same experts
    tensor, rank = tensor.chunk(ep)[rank // tp], rank % tp
    bias = name.endswith("_bias")
    name = name.removesuffix("_bias")
    stack = tensor.float() if bias else tensor.transpose(1, 2)
    if name.endswith("gate_up_proj"):
        param, part = name.replace("gate_up_proj", "w13_weight"), stack.chunk(tp, 1)[rank]
    else:
        param, part = name.replace("down_proj", "w2_weight"), stack if bias else stack.chunk(tp, 2)[rank]
        if bias and rank:  # the server sums the results of the ranks, so only the first rank has the bias
            part = torch.zeros_like(part)
    return param + ("_bias" if bias else ""), part, part.numel()


def _visual_part(name: str, tensor: Tensor, tp: int, rank: int) -> tuple[str, Tensor, int]:
    """Return (parameter, part of `tensor`, elements of the parameter), as `ServerLayout.parts`, for a vision encoder.

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
    padded = -(-tensor.shape[0] // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    if padded % tp:
        padded = -(-tensor.shape[0] // (_VOCAB_MULTIPLE * tp)) * _VOCAB_MULTIPLE * tp
    rows = padded // tp
    part = tensor[rank * rows : (rank + 1) * rows]
    return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])]) if len(part) < rows else part
