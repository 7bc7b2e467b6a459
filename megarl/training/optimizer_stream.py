"""An optimizer whose state lies in host memory, and passes through the device piece by piece in each step.

    host    | piece 0 | piece 1 | piece 2 ...
                v  ^       v  ^
    device   AdamW of its parameters, copy of the masters into the model's parameters; one piece at a time

The state (float32 masters and moments, 12 bytes per parameter of a bf16 model) is most of what an update holds. Every
piece runs the same kernels on the same numbers as a whole step does, so results are equal bit for bit. A CPU optimizer
(Megatron's HybridDeviceOptimizer) would read and write as many bytes of host memory, compute there, and round in
another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megarl.planning.shards import MASTER_BYTES, MOMENT_BYTES, STREAMED_BYTES
from megarl.training.host_memory import HostArena
from megarl.training.offload import OffloadedPart, kept_in
from megarl.training.optimizer import parts

_STATE_BYTES = MOMENT_BYTES + MASTER_BYTES["bf16"]
# Attributes of Megatron's distributed optimizer with a rank's share of the parameters: (float32 master copies, the
# model's parameters in the same order), for bf16 parameters and for float32 ones, which are their own master copies.
_OWNED = (("shard_fp32_from_float16_groups", "model_float16_groups"), ("shard_fp32_groups", "model_fp32_groups"))


@dataclass
class _Piece:
    """Some of the optimizer's parameters (master copies), whose state is moved together."""

    parameters: list[Tensor]
    arena: HostArena = field(default_factory=HostArena)
    away: OffloadedPart | None = None

    def restore(self) -> None:
        if self.away is not None:
            self.away.restore()
            self.away = None


class StreamedOptimizer:
    """Keeps the state of Megatron's distributed optimizers in host memory and steps them piece by piece on the device.

    Args:
        wrapped: the model's chunks; state that shares memory with their parameters is not moved.
        optimizer: chain of Megatron's distributed optimizers.
        piece_bytes: maximum bytes of state that are moved to the device at a time.
    """

    def __init__(self, wrapped: Sequence[Any], optimizer: Any, piece_bytes: int = STREAMED_BYTES) -> None:
        self._wrapped, self._optimizer = wrapped, optimizer
        self._pieces = [(part, list(_pieces(part, piece_bytes))) for part in parts(optimizer)]

    def leave(self) -> None:
        """Move the optimizer's state to host memory."""
        shared = {p.untyped_storage().data_ptr() for chunk in self._wrapped for p in chunk.parameters()}
        for part, pieces in self._pieces:
            for piece in pieces:
                self._leave(part, piece, shared)

    def restore(self) -> None:
        """Move the optimizer's whole state to the device."""
        for _, pieces in self._pieces:
            for piece in pieces:
                piece.restore()

    def step(self) -> None:
        """Take an optimizer step with the gradients that are ready, as Megatron's `step_with_ready_grads` does; leave
        the state in host memory."""
        shared = {p.untyped_storage().data_ptr() for chunk in self._wrapped for p in chunk.parameters()}
        with ExitStack() as replaced:
            for part, pieces in self._pieces:
                whole = part.optimizer.step, part._copy_main_params_to_model_params
                replaced.enter_context(
                    _replaced(part.optimizer, "step", partial(self._step, part, pieces, *whole, shared))
                )
                replaced.enter_context(_replaced(part, "_copy_main_params_to_model_params", lambda: None))
            self._optimizer.step_with_ready_grads()  # collective: also on ranks whose optimizers have no parameters

    def _step(
        self, part: Any, pieces: list[_Piece], step: Callable[[], Any], copy: Callable[[], None], shared: set[int]
    ) -> None:
        counts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for piece in pieces:
            piece.restore()
            with _only(part, piece.parameters) as groups:
                step()
                copy()
            counts += groups
            self._leave(part, piece, shared)
        # `step` ran on copies of the groups: take over what it changed in them, such as a group's step count.
        for group, stepped in counts:
            group.update({name: value for name, value in stepped.items() if name != "params"})

    @staticmethod
    def _leave(part: Any, piece: _Piece, shared: set[int]) -> None:
        if piece.away is None:
            states = [part.optimizer.state.get(parameter, {}).values() for parameter in piece.parameters]
            tensors = [*(parameter.data for parameter in piece.parameters), *itertools.chain.from_iterable(states)]
            storages = {t.untyped_storage().data_ptr(): t for t in tensors if isinstance(t, Tensor) and moves(t)}
            piece.away = OffloadedPart(
                kept_in(piece.arena, [tensor for pointer, tensor in storages.items() if pointer not in shared])
            )


def moves(tensor: Tensor) -> bool:
    """Return whether a tensor of the optimizer's state is moved: if it is on a GPU and not a single number, such as a
    step count."""
    return tensor.is_cuda and tensor.numel() > 1


def _pieces(part: Any, piece_bytes: int) -> Iterator[_Piece]:
    """Divide an optimizer's parameters into consecutive pieces with up to `piece_bytes` of state each."""
    parameters, size = list[Tensor](), 0
    for parameter in itertools.chain.from_iterable(group["params"] for group in part.param_groups):
        nbytes = parameter.numel() * _STATE_BYTES
        if parameters and size + nbytes > piece_bytes:
            yield _Piece(parameters)
            parameters, size = [], 0
        parameters.append(parameter)
        size += nbytes
    if parameters:
        yield _Piece(parameters)


@contextmanager
def _only(part: Any, parameters: Sequence[Tensor]) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Restrict an optimizer to `parameters` inside the block; yield pairs of a parameter group and the copy, with only
    these parameters, that takes its place."""
    chosen, inner = set(map(id, parameters)), part.optimizer
    groups, owned = inner.param_groups, {name: getattr(part, name) for pair in _OWNED for name in pair}
    present = [(group, [p for p in group["params"] if id(p) in chosen]) for group in groups]
    pairs_of_groups = [(group, {**group, "params": some}) for group, some in present if some]
    inner.param_groups = [copy for _, copy in pairs_of_groups]
    for mains, models in _OWNED:
        pairs = [
            [(main, model) for main, model in zip(*both, strict=True) if id(main) in chosen]
            for both in zip(owned[mains], owned[models], strict=True)
        ]
        setattr(part, mains, [[main for main, _ in group] for group in pairs])
        setattr(part, models, [[model for _, model in group] for group in pairs])
    try:
        yield pairs_of_groups
    finally:
        inner.param_groups = groups
        for name, value in owned.items():
            setattr(part, name, value)


@contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace the method `name` of the object `owner` inside the block."""
    setattr(owner, name, method)
    try:
        yield
    finally:
        vars(owner).pop(name, None)
