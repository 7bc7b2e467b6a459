"""Replay of routes: a layer uses the experts that the rollout chose for each token (R3, Ma et al. 2025).

The routes come with the stream (`PackedSequences.routes`), also when a layer is recomputed in the backward pass, so no
state outlives a layer's forward pass. The router still computes its scores, and weighs the given experts by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

from megarl.models.packing import PackedSequences


def replay_routes(chunk: Any, sparse: Sequence[bool]) -> None:
    """Make the layers with experts of a pipeline chunk replay the routes of their streams.

    Args:
        chunk: a `PolicyModel`.
        sparse: whether each layer of the whole model has experts.
    """
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        if sparse[number]:
            layer.register_forward_pre_hook(partial(_set_routes, sum(sparse[:number])), with_kwargs=True)
            if layer.mlp.moe_layer_recompute and not chunk.config.fp8:
                _recompute_with_routes(layer.mlp)


def _recompute_with_routes(mlp: Any) -> None:
    """Make an MoE layer that is recomputed in the backward pass reuse the routes of its forward pass: with pipelining,
    the router has meanwhile routed another micro-batch."""
    compute, mlp.moe_layer_recompute = mlp.forward, False

    def forward(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        state = mlp.router.routes, mlp.router.multiplicity

        def run(hidden: Tensor) -> Any:
            mlp.router.routes, mlp.router.multiplicity = state
            return compute(hidden, *arguments, **named)

        return checkpoint(run, False, hidden)

    mlp.forward = forward


def _set_routes(place: int, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Set the routes of the layer's router for this forward pass, and how many samples have each token; `place`: number
    of layers with experts before it."""
    packed: PackedSequences = named["packed_seq_params"]
    router, split = layer.mlp.router, layer.config.sequence_parallel
    share = lambda x: x.chunk(layer.tp_group.size())[layer.tp_group.rank()] if split else x  # noqa: E731
    router.routes = router.multiplicity = None
    if packed.prefixes is not None and router.counts is not None:
        router.multiplicity = share(packed.prefixes.multiplicity).to(router.counts.device)
    if packed.routes is not None:
        chosen = router.rules.chosen
        here = share(packed.routes)[:, place * chosen : (place + 1) * chosen].long()
        router.routes = torch.where(here == router.rules.experts, -1, here)
