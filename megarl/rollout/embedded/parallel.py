"""The collectives of decoding. Every method is the identity on an axis of size one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it; `group` is None when the size is one."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Axis:
        """The axis of a process group; None or a group of one gives the trivial axis."""
        if group is None or group.size() == 1:
            return cls()
        return cls(group.size(), group.rank(), group)

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum over the axis, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_max(self, value: int, device: torch.device) -> int:
        """Largest of one integer per rank."""
        if self.group is None:
            return value
        box = torch.tensor([value], device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return int(box)

    def gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], in rank order."""
        if self.group is None:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.stack(parts)


@dataclass(frozen=True)
class Mesh:
    """All axes of one process. `expert` spans the ranks that share one set of experts (expert x expert-tensor)."""

    tp: Axis = Axis()
    pp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    etp: Axis = Axis()
    expert: Axis = Axis()

    @classmethod
    def current(cls) -> Mesh:
        """The axes of Megatron's initialised parallel state."""
        from megatron.core import parallel_state as mpu

        return cls(
            tp=Axis.of(mpu.get_tensor_model_parallel_group()),
            pp=Axis.of(mpu.get_pipeline_model_parallel_group()),
            cp=Axis.of(mpu.get_context_parallel_group()),
            ep=Axis.of(mpu.get_expert_model_parallel_group()),
            etp=Axis.of(mpu.get_expert_tensor_parallel_group()),
            expert=Axis.of(mpu.get_expert_tensor_and_model_parallel_group()),
        )

    @property
    def is_trivial(self) -> bool:
        """This process decodes without talking to others."""
        return all(axis.size == 1 for axis in (self.tp, self.pp, self.ep, self.etp))

    @property
    def is_first_stage(self) -> bool:
        """This process embeds tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This process draws tokens."""
        return self.pp.rank == self.pp.size - 1

    def from_last_stage(self, x: Tensor) -> Tensor:
        """Overwrite `x` on every stage with the last stage's."""
        if self.pp.group is not None:
            dist.broadcast(x, src=dist.get_global_rank(self.pp.group, self.pp.size - 1), group=self.pp.group)
        return x

    def send_next(self, hidden: Tensor) -> None:
        """Hand hidden states to the next stage (the last one's next is the first, for interleaved chunks)."""
        peer = dist.get_global_rank(self.pp.group, (self.pp.rank + 1) % self.pp.size)
        dist.send(hidden.contiguous(), dst=peer, group=self.pp.group)

    def recv_prev(self, like: Tensor) -> Tensor:
        """Hidden states of the previous stage, received into `like`."""
        peer = dist.get_global_rank(self.pp.group, (self.pp.rank - 1) % self.pp.size)
        dist.recv(like, src=peer, group=self.pp.group)
        return like
