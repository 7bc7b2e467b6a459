"""The collectives of decoding; on an axis of size one they return their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.system.comm import WorkerGroup

if TYPE_CHECKING:
    from megarl.training.parallel import Layout


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it; `group` is None when the size is one."""

    size: int = 1
    rank: int = 0
    group: WorkerGroup | None = None

    @classmethod
    def of(cls, group: WorkerGroup) -> Axis:
        """Return the axis over the ranks of `group`; a group of one rank gives an axis of size one."""
        return cls() if group.size == 1 else cls(group.size, group.rank, group)

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the axis in place and return it."""
        if self.group is not None:
            self.group.all_reduce(x)
        return x

    def all_max(self, value: int, device: torch.device) -> int:
        """Return the largest `value` of all ranks."""
        if self.group is None:
            return value
        return int(self.group.all_reduce(torch.tensor([value], device=device), "max"))

    def gather(self, x: Tensor) -> Tensor:
        """Return the `x` of all ranks, [size, *x.shape], in rank order."""
        if self.group is None:
            return x[None]
        return torch.stack(self.group.all_gather(x.contiguous()))


@dataclass(frozen=True)
class Mesh:
    """All parallel axes of one process.

    `expert` spans the ranks that share one set of experts (expert x expert-tensor).
    """

    tp: Axis = Axis()
    pp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    etp: Axis = Axis()
    expert: Axis = Axis()

    @classmethod
    def of(cls, layout: Layout) -> Mesh:
        """Return this process's axes in the parallel layout of the model."""
        return cls(
            tp=Axis.of(layout.tp_group),
            pp=Axis.of(layout.pp_group),
            cp=Axis.of(layout.cp_group),
            ep=Axis.of(layout.ep_group),
            etp=Axis.of(layout.etp_group),
            expert=Axis.of(layout.expert_group),
        )

    @property
    def is_trivial(self) -> bool:
        """Whether one process holds a whole replica, so that decoding needs no communication."""
        return all(axis.size == 1 for axis in (self.tp, self.pp, self.ep, self.etp))

    @property
    def is_first_stage(self) -> bool:
        """Whether this process embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the last pipeline stage, which samples tokens."""
        return self.pp.rank == self.pp.size - 1

    def from_last_stage(self, x: Tensor) -> Tensor:
        """Overwrite `x` on every pipeline stage with the `x` of the last stage."""
        if self.pp.group is not None:
            self.pp.group.broadcast(x, src=self.pp.size - 1)
        return x

    def send_next(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage (from the last stage to the first, for interleaved chunks)."""
        assert self.pp.group is not None, "there are other stages"
        self.pp.group.send(hidden.contiguous(), dst=(self.pp.rank + 1) % self.pp.size)

    def recv_prev(self, like: Tensor) -> Tensor:
        """Return the hidden states of the previous stage, received into `like`."""
        assert self.pp.group is not None, "there are other stages"
        return self.pp.group.receive(like, src=(self.pp.rank - 1) % self.pp.size)
