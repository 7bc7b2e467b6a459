"""Where this process stands: Megatron's process groups behind one small value, `Layout`."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megarl.compat import megatron as compat
from megarl.config.model import ParallelConfig
from megarl.device import device
from megarl.errors import ConfigError

compat.install()

from megatron.core import parallel_state as mpu  # noqa: E402  (after install)

_current: tuple[ParallelConfig, Layout] | None = None


@dataclass(frozen=True)
class Layout:
    """Ranks and groups of this process. One replica of the model is held by `mp_group`: tp * pp * cp processes.

    Attributes:
        rank, world_size: in the whole job.
        lead_rank: global rank of the first rank of this replica.
        mp_group: all ranks that hold one replica.
        dp_group: ranks that hold the same shard and work on other samples.
        tp_group, pp_group, cp_group: the splits inside a replica.
    """

    parallel: ParallelConfig
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    lead_rank: int
    mp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tp

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel size."""
        return self.parallel.pp

    @property
    def cp_size(self) -> int:
        """Context-parallel size."""
        return self.parallel.cp

    @property
    def is_lead(self) -> bool:
        """True on the first rank of a replica, which speaks for it."""
        return self.rank == self.lead_rank

    @property
    def is_first_stage(self) -> bool:
        """True where the pipeline begins."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the pipeline ends, and with it where hidden states become log-probs."""
        return self.pp_rank == self.parallel.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this process's pipeline."""
        return dist.get_process_group_ranks(self.pp_group)[-1]

    def describe(self) -> dict[str, int]:
        """Sizes, as they are written into checkpoints."""
        p = self.parallel
        sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp or 1, "cp": p.cp, "ep": p.ep, "sp": int(p.sp)}
        return {"world_size": self.world_size, "dp": self.dp_size, "etp": p.expert_tp, **sizes}


def init_parallel(parallel: ParallelConfig, timeout_s: float = 600.0) -> Layout:
    """Make Megatron's process groups; torch.distributed must be initialised. The same layout again is a no-op.

    Raises:
        ConfigError: the number of processes is not a multiple of what the layout needs, or another layout is in use.
    """
    global _current
    if _current is not None and mpu.model_parallel_is_initialized():
        if _current[0] != parallel:
            raise ConfigError(
                "all models of one process share one layout",
                where="actor.parallel, critic.parallel",
                found=parallel.model_dump(),
                allowed=str(_current[0].model_dump()),
            )
        return _current[1]
    _check_world(parallel, dist.get_world_size())
    mpu.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    _current = (parallel, _layout(parallel, timeout_s))
    return _current[1]


def current_layout() -> Layout | None:
    """The layout that `init_parallel` made; None before it was called."""
    return None if _current is None else _current[1]


def leave_parallel() -> None:
    """Give the layout back, so that `init_parallel` can make another one in the same processes. Collective.

    Its groups end, with the threads they hold; engines of the layout cannot be used any more.
    """
    global _current
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    _current = None
    if dist.is_initialized():
        dist.barrier()  # nobody is still inside a collective of these groups
        for group in list(_world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _check_world(parallel: ParallelConfig, world: int) -> None:
    needs = {"tp * pp * cp": parallel.model_parallel_size}
    if parallel.ep > 1:
        needs["etp * ep * pp"] = parallel.expert_tp * parallel.ep * parallel.pp
    for name, size in needs.items():
        if world % size:
            raise ConfigError(
                f"{world} processes are not a multiple of {name} = {size}",
                where="cluster.nproc",
                found=world,
                allowed=f"{max(world // size, 1) * size}, {(world // size + 1) * size}, ...",
            )


def _layout(parallel: ParallelConfig, timeout_s: float) -> Layout:
    rank, world = dist.get_rank(), dist.get_world_size()
    dp_rank = mpu.get_data_parallel_rank()
    members = _replica_members(dp_rank, world)
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]  # every rank must make every group
    return Layout(
        parallel=parallel,
        rank=rank,
        world_size=world,
        dp_rank=dp_rank,
        dp_size=mpu.get_data_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        lead_rank=members[dp_rank][0],
        mp_group=groups[dp_rank],
        dp_group=mpu.get_data_parallel_group(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
    )


def _replica_members(dp_rank: int, world: int) -> list[list[int]]:
    """Global ranks of every replica, by data-parallel rank."""
    mine = torch.tensor([dp_rank], device=device())
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    owners = [int(value) for value in everyone]
    return [[rank for rank in range(world) if owners[rank] == replica] for replica in range(max(owners) + 1)]
