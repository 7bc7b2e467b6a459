"""Dispatch of tokens to experts on other processes with DeepEP (github.com/deepseek-ai/DeepEP), by NVLink and RDMA.

    tokens -> [dispatch: a row for each process that has experts of a token] -> a row for each expert -> experts
           -> added up for each process -> [combine: added up for each token]

An all-to-all sends a token once for each of its experts. DeepEP sends it once to each process, and over the network
once to each machine. Only the package's `Buffer` is used, with the functions that versions 1.2.1 and 2.1.0 share;
Megatron's dispatcher for DeepEP imports names that 2.1.0 no longer has.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import dispatch_problem
from megarl.config.model import ParallelConfig
from megarl.models.rows import route_of_slots
from megarl.system import device
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError

Dispatch = Literal["alltoall", "deepep"]


def dispatch_of(
    facts: ModelFacts, parallel: ParallelConfig, dtype: torch.dtype, world: WorkerGroup | None = None
) -> Dispatch:
    """Return how tokens travel to the experts of a model in `dtype`; `auto` gives `deepep` if the experts span
    machines.

    All ranks of `world` (None: this process only) return the same; `auto` falls back to `alltoall` if a rank cannot
    use DeepEP. Collective.
    """
    if parallel.dispatch == "alltoall" or not facts.is_moe:
        return "alltoall"
    ranks, here = parallel.ep * parallel.expert_tp, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    required, problem = parallel.dispatch == "deepep", None
    wanted = required or (ranks > here and has_deepep())
    if wanted:
        name = next((name for name, kind in device.DTYPES.items() if kind == dtype), str(dtype))
        problem = dispatch_problem("parallel", parallel, facts, name, here) or _package_problem()
    world = world or WorkerGroup.alone()
    every = world.all_gather_json([wanted, None if problem is None else problem.what])
    if not any(wants for wants, _ in every):
        return "alltoall"
    unable = [(rank, text) for rank, (wants, text) in enumerate(every) if text is not None or not wants]
    if not unable:
        return "deepep"
    rank, text = unable[0]
    text = f"rank {rank}: {text or 'deep_ep is not installed, or all experts are on one machine'}"
    if not required:
        warnings.warn(f"{text}: all-to-alls bring tokens to experts", stacklevel=2)
        return "alltoall"
    fix = "set parallel.dispatch=alltoall"
    raise problem or ConfigError(text, where="parallel.dispatch", found="deepep", allowed="alltoall", fix=fix)


def has_deepep() -> bool:
    """Return whether the package `deep_ep` is installed, without importing it."""
    return importlib.util.find_spec("deep_ep") is not None


def _package_problem() -> ConfigError | None:
    """Return the error if DeepEP cannot be used in this interpreter, else None."""
    reason = None
    if not has_deepep():
        reason = "the package deep_ep is not installed in this interpreter"
    elif not device.has_cuda():
        reason = "it needs a CUDA device, and this process has none"
    else:
        try:
            import_deepep()
        # the package finds the wrong NCCL or no CUDA toolkit, or was built for another torch
        except (ImportError, OSError, AssertionError) as error:
            reason = f"deep_ep does not import: {error}"
    if reason is None:
        return None
    return ConfigError(
        f"DeepEP cannot bring tokens to experts: {reason}",
        where="parallel.dispatch",
        found="deepep",
        allowed="deep_ep of github.com/deepseek-ai/DeepEP from version 1.2.1 on, built for this torch",
        fix="install it as its README says, or set parallel.dispatch=alltoall",
    )


def import_deepep() -> Any:
    """Return the package `deep_ep`."""
    import deep_ep

    return deep_ep


_buffer: Any = None  # memory that the processes of a group share; one for all layers and models


def buffer_of(group: dist.ProcessGroup, hidden: int) -> Any:
    """Return the group's buffer for rows of `hidden` bf16 numbers. If it must be created, the call is collective."""
    global _buffer  # one buffer at a time, because a process cannot initialise NVSHMEM for two
    kind, size, row = import_deepep().Buffer, group.size(), 2 * hidden
    configs = (kind.get_dispatch_config(size), kind.get_combine_config(size))
    fast = max(config.get_nvl_buffer_size_hint(row, size) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row, size) for config in configs)
    if _buffer is None or _buffer.group is not group or _buffer.num_nvl_bytes < fast or _buffer.num_rdma_bytes < far:
        _buffer = None  # free the old buffer before the new one is allocated
        _buffer = kind(group, fast, far)
    return _buffer


class _Dispatch(torch.autograd.Function):
    """Sends tokens to the processes that have their experts; the gradients of all copies are added up."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, experts: Tensor, every: int, buffer: Any) -> tuple[Any, ...]:
        """Return received rows, their probabilities and local experts, the number of rows of each expert, and a handle.

        Rows are [m, h]; probabilities float32 [m, k]; experts int64 [m, k] are numbers within this process, -1 for an
        expert of another process. `_Combine` needs the handle to return the rows.

        Args:
            tokens: [n, h].
            probs: float32 [n, k].
            experts: int64 [n, k], numbers of experts below `every`.
        """
        to_rank, to_machine, to_expert, is_sent, _ = buffer.get_dispatch_layout(experts, every)
        rows, experts_here, shares, counts, handle, _ = buffer.dispatch(
            tokens,
            topk_idx=experts,
            topk_weights=probs,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_machine,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=to_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(experts_here)
        return rows, shares, experts_here, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, shares: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of `tokens` and `probs`."""
        tokens, probs, _event = ctx.buffer.combine(rows.contiguous(), ctx.handle, topk_weights=shares.contiguous())
        return tokens, probs, None, None, None


class _Combine(torch.autograd.Function):
    """Sums the results of each token's copies; the backward pass sends the token's gradient to each copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Any, buffer: Any) -> Tensor:
        """Return [n, h], the sums of rows [m, h] that arrived by the dispatch with this handle."""
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `rows`."""
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


class DeepEPDispatcher(MoETokenDispatcher):
    """Sends tokens to their experts with DeepEP and sums the results; Megatron's MoELayer calls the methods in order.

    Expert-tensor-parallel ranks hold slices of the same experts: each of them gets the token and returns its part of
    the sum.

    Args:
        experts: number of experts of this process.
    """

    def __init__(self, experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._experts, self._every = experts, experts * self.tp_ep_group.size()

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [n, h] and the probabilities of their experts [n, k * etp]; store which experts they go to.

        Args:
            tokens: [s, b, h] of n tokens.
            routing_map: bool [n, experts], k in each row.
            probs: float32 [n, experts].
        """
        self._shape = tokens.shape
        tokens = tokens.view(-1, tokens.shape[-1])
        chosen = torch.nonzero_static(routing_map, size=len(tokens) * self.config.moe_router_topk)[:, 1]
        chosen = chosen.view(len(tokens), -1)
        # In the group's order of ranks, the expert-tensor-parallel rank changes fastest, so the `tp_size` slices of an
        # expert are on consecutive ranks.
        owners, numbers = chosen // self._experts, chosen % self._experts
        slices = torch.arange(self.tp_size, device=tokens.device)
        ranks = owners[..., None] * self.tp_size + slices
        self._chosen = (ranks * self._experts + numbers[..., None]).flatten(1)
        return tokens, probs.gather(1, chosen).repeat_interleave(self.tp_size, 1)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens to the processes of their experts. The host waits for the number of received rows."""
        self._buffer = buffer_of(self.tp_ep_group, tokens.shape[1])
        rows, shares, self._mine, self._counts, self._handle = _Dispatch.apply(
            tokens.contiguous(), probs.contiguous(), self._chosen, self._every, self._buffer
        )
        return rows, shares

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received rows grouped by expert, the number of rows of each expert, and their probabilities."""
        self._arrived = len(rows)
        experts = self._mine.flatten()
        order = experts.where(experts >= 0, self._experts).argsort(stable=True)[: sum(self._counts)]
        self._route = route_of_slots(order, self._arrived, self._mine.shape[1], rows)
        counts = torch.tensor(self._counts, device=rows.device)
        return self._route.spread(rows), counts, probs.flatten().index_select(0, order)

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Return, for each received row, the sum of the outputs of this process's experts."""
        return self._route.collect(rows, self._arrived)

    def token_combine(self, rows: Tensor) -> Tensor:
        """Return rows to the process of their token, and sum them by token."""
        # The layer does not keep the buffer: a wider model's buffer is allocated after the memory of this one is freed.
        buffer, self._buffer = self._buffer, None
        return _Combine.apply(rows, self._handle, buffer)

    def combine_postprocess(self, tokens: Tensor) -> Tensor:
        """Reshape the tokens to [s, b, h]."""
        return tokens.view(self._shape)
