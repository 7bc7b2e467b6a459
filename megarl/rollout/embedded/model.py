"""The decoder of generation, which reads the parameters of the training modules without a copy.

    tokens -> [embed] -> layers of chunk 0 -> (next stage) -> ... -> [norm, head] -> logits of this rank's vocabulary

Shapes: n tokens (of any samples), h hidden, G key/value heads of this rank, q query heads per key/value head, D head
size. Hidden states are whole on every tensor-parallel rank, whether or not the modules are sequence parallel.

Copies are made in two cases, and only while `DecoderStage` lives (one call of `generate`): when decoding in another
dtype than the parameters', and on a CPU, where oneDNN re-orders a weight on every call unless it is packed beforehand.
Packing is worth 17% (bf16) to 23% (fp32) of the matmul time at 64 rows and is skipped above `PACK_LIMIT_BYTES`. With
AMX, bf16 weights are packed for kernels/amx.cpp, whose products of 32 rows take two thirds of the time of oneDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels import amx
from megarl.kernels.cpu import CpuKernels, add_norm_reference, silu_mul_reference
from megarl.kernels.cpu import load as load_kernels
from megarl.kernels.gpu import decode_kernels
from megarl.models.head import head_logits
from megarl.models.hf import moe_layers
from megarl.models.layer_forms import bias_of, layer_norms
from megarl.models.layers.attention.decoding import DecodeKernels
from megarl.models.layers.attention.plain import LOCAL_ROPE, Attention
from megarl.models.layers.experts.decoding import Grouped, MoE
from megarl.models.layers.experts.training import group_by_group, grouped_linear
from megarl.models.layers.kinds import KINDS, numbers_of_kinds
from megarl.models.layers.linear import is_summed
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.mlp.geglu import gelu_mul
from megarl.models.layers.passes import Linear, MixerDecoder, Pass, RopeTables
from megarl.models.layers.residual import norms_after
from megarl.models.lora import LinearAdapter, adapter_of
from megarl.models.norm import zero_centered
from megarl.models.soft_cap import capped
from megarl.planning.memory import PACK_LIMIT_BYTES, PACK_STEPS

if TYPE_CHECKING:
    from megarl.architectures.vision_language import VisionEncoder
    from megarl.models.policy import PolicyModel

AMX_ROWS = 256
"""Up to this number of rows kernels/amx.cpp multiplies faster than torch. A decode step has one row per sample, a
prefill one row per token of its prompts. Torch multiplies more rows if the weight is the model's own, so the rounding
of a bf16 result depends on how many rows are multiplied together."""


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this CPU can multiply by packed weights of `dtype`; bf16 needs AVX-512 or newer."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class Recipe:
    """How weights are prepared for decoding: their dtype, and for how many rows they are packed (0: not packed)."""

    dtype: torch.dtype
    pack_rows: int = 0
    zero_centered: bool = False  # norms store their scale minus 1

    def cast(self, weight: Tensor) -> Tensor:
        """Return the weight itself, or a copy in the decoding dtype."""
        return weight.detach().to(self.dtype)

    def norm(self, weight: Tensor) -> Tensor:
        """Return the scale of a norm in the decoding dtype, or in a wider one if norms are zero-centered."""
        return zero_centered(weight.detach()) if self.zero_centered else self.cast(weight)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, is_copy: bool = False) -> Linear:
        """Return the function x [n, in] -> x W^T + b [n, out]; `is_copy`: `weight` was computed for this function, and
        the model does not keep it."""
        w, b = self.cast(weight), None if bias is None else self.cast(bias)
        if not self.pack_rows:
            return lambda x: F.linear(x, w, b)
        kernels = amx.load() if amx.AmxKernels.fits(w) else None
        if kernels is not None:
            tiles = kernels.pack(w)
            if is_copy or w.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                return lambda x: tiles.multiply(x, b)  # of any number of rows: the tiles replace the copy
            return lambda x: tiles.multiply(x, b) if len(x) <= AMX_ROWS else F.linear(x, w, b)
        packed = torch.ops.mkldnn._reorder_linear_weight(w, self.pack_rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, b, "none", [], "")

    def layer(self, linear: Any) -> Linear:
        """Return the function x -> y of one of the model's linear layers, LoRA adapter included.

        If the weight is copied for decoding, the adapter is merged into the copy; otherwise its output is added to y.
        """
        weight, bias, adapter = linear.weight, bias_of(linear), adapter_of(linear)
        if bias is not None and is_summed(linear) and linear.tp_group.rank() > 0:
            bias = None  # the outputs are summed over ranks, so only the first rank adds the bias
        if adapter is None or not adapter.enabled:
            return self.linear(weight, bias)
        if self.pack_rows or self.dtype != weight.dtype:
            return self.linear(adapter.whole(weight), bias, is_copy=True)
        assert isinstance(adapter, LinearAdapter), "adapters of experts are handled by `grouped`"
        product, add = self.linear(weight, bias), adapter.local
        return lambda x: product(x).add_(add(x))

    def merged(self, linear: Any) -> Tensor:
        """Return the weight of a linear layer in the decoding dtype, with its LoRA adapter added."""
        adapter = adapter_of(linear)
        if adapter is None or not adapter.enabled:
            return self.cast(linear.weight)
        return self.cast(adapter.whole(linear.weight))

    def grouped(self, linear: Any) -> Grouped:
        """Return the function of a `GroupedLinear` layer of experts. If the weight is copied for decoding, the adapter
        is merged into the copy; otherwise its output is added.
        """
        weight, adapter = linear.stacked, adapter_of(linear)
        is_copy = False
        if adapter is not None and adapter.enabled:
            if not self.pack_rows and self.dtype == weight.dtype:
                return lambda x, ends: grouped_linear(x, weight.detach(), ends).add_(adapter(x, ends))
            weight, is_copy = linear.stack(adapter.whole(linear.weight)), True
        if not self.pack_rows:
            w = self.cast(weight)
            return lambda x, ends: grouped_linear(x, w, ends)
        products = [self.linear(each, is_copy=is_copy) for each in weight]
        return lambda x, ends: group_by_group(products, x, ends)

    def head(self, weight: Tensor) -> Linear:
        """Return the function x [n, in] -> logits, with the same arithmetic as scoring."""
        if self.pack_rows:
            return self.linear(weight)
        w = self.cast(weight)
        return lambda x: head_logits(x, w)


@dataclass(frozen=True)
class Ops:
    """The residual add with RMS norm and the gated activation, as compiled kernels or torch operations."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor] = add_norm_reference
    silu_mul: Callable[[Tensor], Tensor] = silu_mul_reference


class Layer:
    """One transformer layer over a Megatron module's weights.

    A call takes the hidden states and, separately, the previous layer's output, so that one kernel can add the two
    and apply the next norm.
    """

    def __init__(self, module: Any, mixer: MixerDecoder, config: Any, mesh: Mesh, recipe: Recipe, ops: Ops) -> None:
        self._mixer, self._mesh, self._eps, self._ops = mixer, mesh, config.layernorm_epsilon, ops
        mlp = module.mlp
        weights = (*layer_norms(module), *norms_after(module))
        norms = [None if weight is None else recipe.norm(weight) for weight in weights]
        self._attn_norm, self._mlp_norm, *self._after = norms
        self._factor, self._gated = config.wiring.residual, ops.silu_mul
        if config.wiring.activation == "gelu_tanh":
            self._gated = gelu_mul
        self._moe = MoE(mlp, mesh, recipe, ops.silu_mul) if hasattr(mlp, "router") else None
        if self._moe is None:
            self._up, self._down = recipe.layer(mlp.linear_fc1), recipe.layer(mlp.linear_fc2)

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device or other ranks in every decode step because of the layer's experts."""
        return self._moe is not None and self._moe.waits

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: Pass, lockstep: int) -> Tensor:
        """Add `delta` and the mixer's output to `hidden` [n, h] in place; return the MLP's output [n, h].

        The next layer adds the MLP's output, which it receives as `delta`.

        Args:
            lockstep: largest n of the ranks that share experts with this one.
        """
        if not len(hidden):
            return hidden if self._moe is None else self._moe(hidden, lockstep)
        x = self._enter(hidden, delta, self._attn_norm)
        delta = self._leave(self._mesh.tp.all_sum(self._mixer(x, step)), self._after[0])
        x = self._enter(hidden, delta, self._mlp_norm)
        if self._moe is not None:
            return self._leave(self._moe(x, lockstep, step.routes), self._after[1])
        return self._leave(self._mesh.tp.all_sum(self._down(self._gated(self._up(x)))), self._after[1])

    def _enter(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add the previous result `delta` to the residual stream `hidden` in place; return the normed input of the
        mixer or MLP."""
        if norm is not None:
            return self._ops.add_norm(hidden, delta, norm, self._eps)
        return hidden if delta is None else hidden.add_(delta)

    def _leave(self, result: Tensor, norm: Tensor | None) -> Tensor:
        """Return the result of the mixer or MLP as it is added to the hidden states: normed and scaled, if the model
        does so."""
        if norm is not None:
            result = self._ops.add_norm(result, None, norm, self._eps)
        return result if self._factor == 1 else result.mul_(self._factor)


class DecoderStage:
    """The model layers of this process, prepared to decode during one call of `generate`.

    Args:
        chunks: pipeline chunks of this stage, in order.
        rows: maximum number of sequences decoded together.
        steps: expected number of decode steps; weights are packed only if there are many.

    Attributes:
        mixers: the mixers of this process's layers.
        expert_layers: indices of this process's layers with experts, counted over all such layers of the model.
        is_moe: whether the model has experts, here or on another stage.
        keeps_state: whether some layer, here or on another stage, has a state: what the tokens so far have left, which
            cannot be taken back to an earlier token.
    """

    def __init__(self, chunks: Sequence[PolicyModel], mesh: Mesh, dtype: torch.dtype, *, rows: int, steps: int) -> None:
        self.mesh, self.dtype, self._config = mesh, dtype, chunks[0].config
        first = next(chunks[0].parameters())
        self.device = first.device
        size = sum(p.numel() for chunk in chunks for p in chunk.parameters()) * dtype.itemsize
        pack = self.device.type == "cpu" and can_pack(dtype) and steps >= PACK_STEPS
        rows = rows if pack and size <= PACK_LIMIT_BYTES else 0
        recipe = Recipe(dtype, rows, self._config.layernorm_zero_centered_gamma)
        self.kernels = self._load_kernels()
        ops = Ops() if self.kernels is None else Ops(self.kernels.add_norm, self.kernels.silu_mul)
        modules = [module for chunk in chunks for module in chunk.decoder.layers]
        self.mixers = [self._config.mixers[module.layer_number - 1] for module in modules]
        layers = iter(
            Layer(
                module,
                KINDS[mixer.kind].decoder(module.self_attention, mixer, number, mesh, recipe, self.kernels),
                self._config,
                mesh,
                recipe,
                ops,
            )
            for module, mixer, number in zip(modules, self.mixers, numbers_of_kinds(self.mixers), strict=True)
        )
        self._chunks = [[next(layers) for _ in chunk.decoder.layers] for chunk in chunks]
        sparse = [number for number, has_experts in enumerate(moe_layers(chunks[0].hf_config)) if has_experts]
        numbers = [module.layer_number - 1 for module in modules]
        self.expert_layers = [sparse.index(number) for number in numbers if number in sparse]
        self.is_moe = self._config.num_moe_experts is not None
        self.keeps_state = any(mixer.state_bytes(1, 1) for mixer in self._config.mixers)
        self._first: Any = chunks[0]
        self._rope, self._local_rope, self._add_norm = chunks[0].rope, chunks[0].local_rope, ops.add_norm
        self._without_rope = any(isinstance(mixer, Attention) and mixer.rope is None for mixer in self.mixers)
        self._embedding = chunks[0].embedding.word_embeddings.weight.detach() if mesh.is_first_stage else None
        last = chunks[-1]
        self.vocab_size = last.hf_config.vocab_size
        self.shard = last.vocab_size // mesh.tp.size
        if mesh.is_last_stage:
            self._final_norm = recipe.norm(last.decoder.final_layernorm.weight)
            self._head = recipe.head(last.lm_head_weight)

    def _load_kernels(self) -> DecodeKernels | None:
        """Return the GPU's Triton kernels or the CPU's compiled kernels; None if they do not support this model."""
        if any(isinstance(mixer, Attention) and mixer.cap is not None for mixer in self._config.mixers):
            return None
        if self.device.type == "cuda":
            return decode_kernels(self.dtype)
        config, tp = self._config, self.mesh.tp.size
        shared = config.moe_shared_expert_intermediate_size or 0
        widths = config.hidden_size, config.ffn_hidden_size // tp, shared // tp
        fits = CpuKernels.supports(self.dtype, config.kv_channels, *widths)
        return load_kernels() if self.device.type == "cpu" and fits else None

    @property
    def encoder(self) -> VisionEncoder | None:
        """The model's vision encoder; None: a text model."""
        return getattr(self._first, "encoder", None)

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can capture a decode step: no pipeline stages, no layers where the host waits."""
        return self.mesh.pp.size == 1 and not any(layer.waits for layers in self._chunks for layer in layers)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: Pass,
        *,
        want_logits: bool,
        lockstep: int = 0,
        images: Any = None,
    ) -> Tensor | None:
        """Run n tokens through all stages.

        Args:
            tokens: int64 [n]; n may be 0 on a rank that only runs its experts for other ranks.
            step: which sequences the tokens belong to, in prefill or decoding, see `megarl.models.layers.passes`.
            positions: int64 [n], or [3, n] if rotary positions are (time, height, width).
            images: images whose features replace image tokens among `tokens`, in the form that the model's
                `insert_for_decoding` takes; None: there are no images.
            lockstep: the largest n on any of the ranks that share experts with this rank.

        Returns:
            Logits [n, V / tp] on the last stage if `want_logits`, else None.
        """
        tables = self._rope.cos_sin if positions.dim() == 1 else self._rope.cos_sin_of_three
        step.rope, deeper = RopeTables(*tables(positions, self.dtype)), list[Tensor]()
        if self._local_rope is not None:
            step.other_ropes[LOCAL_ROPE] = RopeTables(*self._local_rope.cos_sin(positions, self.dtype))
        if self._without_rope:  # kernels rotate in every layer; in a layer without RoPE by an angle of 0
            step.other_ropes[None] = RopeTables(torch.ones_like(step.rope.cos), torch.zeros_like(step.rope.sin))
        hidden = torch.empty(len(tokens), self._config.hidden_size, dtype=self.dtype, device=self.device)
        for number, layers in enumerate(self._chunks):
            if self.mesh.is_first_stage and number == 0:
                hidden = self._embed(tokens)
                if self._first.embedding_factor != 1:
                    hidden = hidden * self._first.embedding_factor
                if images is not None:
                    deeper = self._first.insert_for_decoding(hidden, images)
            elif len(tokens):
                hidden = self.mesh.recv_prev(torch.empty_like(hidden))
            delta = None
            for layer in layers:
                delta = layer(hidden, delta, step, lockstep)
                if deeper and images is not None:
                    delta.index_add_(0, images.places, deeper.pop(0))
            final = self.mesh.is_last_stage and number == len(self._chunks) - 1
            if not final and len(tokens):
                self.mesh.send_next(hidden if delta is None else hidden.add_(delta))
        if not (want_logits and self.mesh.is_last_stage and len(tokens)):
            return None
        hidden = self._add_norm(hidden, delta, self._final_norm, self._config.layernorm_epsilon)
        divisor = self._config.wiring.logits
        return capped(self._head(hidden if divisor == 1 else hidden / divisor), self._config.wiring.logit_cap)

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self._embedding is not None, "only the first stage embeds"
        if self.mesh.tp.size == 1:
            return F.embedding(tokens, self._embedding).to(self.dtype)
        local = tokens - self.mesh.tp.rank * len(self._embedding)
        outside = (local < 0) | (local >= len(self._embedding))
        hidden = F.embedding(local.masked_fill(outside, 0), self._embedding).masked_fill(outside[:, None], 0)
        return self.mesh.tp.all_sum(hidden).to(self.dtype)
