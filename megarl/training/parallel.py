"""The place of this process in its team's layout: a `Layout` of Megatron's groups.

Only this file sets Megatron's global state. Megatron keeps one set of groups per process and sometimes uses torch's
default group. Both are right here because a process belongs to one team, and a team is one torch world: several
teams with their own layouts are several worlds (`megarl.system.rendezvous.join`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megarl.config.model import ParallelConfig
from megarl.system.comm import WorkerGroup
from megarl.system.compat import megatron as compat
from megarl.system.device import device
from megarl.system.errors import ConfigError, count

compat.install()

from megatron.core import parallel_state as mpu  # noqa: E402  (after install)


@dataclass(frozen=True)
class Layout:
    """The split and the replicas of a model in a team: the tp * pp * cp ranks of `mp_group` hold one replica.

    Attributes:
        tp_group, pp_group, cp_group: the groups that split a replica.
        ep_group, etp_group, expert_group: groups that distribute experts, that split each expert, and that do both.
    """

    parallel: ParallelConfig
    world: WorkerGroup  # all ranks of the team
    mp_group: WorkerGroup  # all ranks of one replica; the first one is its lead
    dp_group: WorkerGroup  # ranks that hold the same shard and process different samples
    tp_group: WorkerGroup
    pp_group: WorkerGroup
    cp_group: WorkerGroup
    ep_group: WorkerGroup
    etp_group: WorkerGroup
    expert_group: WorkerGroup
    ends_group: WorkerGroup | None  # the first and the last stage of this rank's pipeline; None: it is in another stage
    _made: list[dist.ProcessGroup] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This process's rank in the team."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the team."""
        return self.world.size

    @property
    def dp_rank(self) -> int:
        """Number of the replica to which this process belongs."""
        return self.dp_group.rank

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.dp_group.size

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.tp_group.rank

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tp

    @property
    def pp_rank(self) -> int:
        """Number of the pipeline stage."""
        return self.pp_group.rank

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel size."""
        return self.parallel.pp

    @property
    def cp_rank(self) -> int:
        """Rank in the context-parallel group."""
        return self.cp_group.rank

    @property
    def cp_size(self) -> int:
        """Context-parallel size."""
        return self.parallel.cp

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank of its replica, which performs work that is done once per replica."""
        return self.mp_group.rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last pipeline stage, where hidden states become log-probs."""
        return self.pp_rank == self.parallel.pp - 1

    def describe(self) -> dict[str, int]:
        """Return the layout's sizes, as written into checkpoints."""
        p = self.parallel
        sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp or 1, "cp": p.cp, "ep": p.ep, "sp": int(p.sp)}
        return {"world_size": self.world_size, "dp": self.dp_size, "etp": p.expert_tp, **sizes}

    def close(self) -> None:
        """Destroy the layout's groups and their threads, so that `init_parallel` can create another one. Collective.

        Engines with this layout can no longer be used. The team's world remains.
        """
        self.world.barrier()  # wait until no rank is in a collective of these groups any more
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
        self.mp_group.close()
        mpu.destroy_model_parallel()


def init_parallel(parallel: ParallelConfig, world: WorkerGroup) -> Layout:
    """Create Megarl's layout and Megatron's process groups for the team `world`, with its deadline. Collective.

    Raises:
        RuntimeError: this process already has a layout; close it with `Layout.close`.
    """
    if mpu.model_parallel_is_initialized():
        raise RuntimeError("cannot create a second layout in this process; close the first one")
    _check_world(parallel, world.size)
    mpu.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=world.deadline_s / 60,
    )
    # The list's first entry, None, stands for the default group.
    made = list(dict.fromkeys(group for group in mpu._global_process_group_list or () if group is not None))

    def named(name: str, group: dist.ProcessGroup) -> WorkerGroup:
        return WorkerGroup(name, group, world.deadline_s)

    ends = mpu.get_embedding_group(check_initialized=False)
    return Layout(
        parallel,
        world,
        mp_group=_replica(world),
        dp_group=named("the data-parallel ranks", mpu.get_data_parallel_group()),
        tp_group=named("the tensor-parallel ranks", mpu.get_tensor_model_parallel_group()),
        pp_group=named("the pipeline", mpu.get_pipeline_model_parallel_group()),
        cp_group=named("the context-parallel ranks", mpu.get_context_parallel_group()),
        ep_group=named("the expert-parallel ranks", mpu.get_expert_model_parallel_group()),
        etp_group=named("the expert-tensor-parallel ranks", mpu.get_expert_tensor_parallel_group()),
        expert_group=named("the ranks that share experts", mpu.get_expert_tensor_and_model_parallel_group()),
        ends_group=None if ends is None else named("the first and the last pipeline stage", ends),
        _made=made,
    )


def _check_world(parallel: ParallelConfig, world: int) -> None:
    needs = {"tp * pp * cp": parallel.model_parallel_size}
    if parallel.ep > 1:
        needs["etp * ep * pp"] = parallel.expert_tp * parallel.ep * parallel.pp
    unit = math.lcm(*needs.values())
    least = max(world // unit, 1)
    for name, size in needs.items():
        if world % size:
            raise ConfigError(
                f"{count(world, 'process')} cannot be split evenly: needs a multiple of {name} = {size}",
                where="cluster.nproc",
                found=world,
                allowed=f"{least * unit}, {(least + 1) * unit}, ...",
            )


def _replica(world: WorkerGroup) -> WorkerGroup:
    """Return the group of ranks that hold the same replica as this rank."""
    replica_here = mpu.get_data_parallel_rank()
    owners = [int(value) for value in world.all_gather(torch.tensor([replica_here], device=device()))]
    members = [[rank for rank in range(world.size) if owners[rank] == replica] for replica in range(max(owners) + 1)]
    groups = [world.subgroup(ranks, "the replica") for ranks in members]  # every rank must create every group
    group = groups[replica_here]
    assert group is not None, "this rank is in its replica's group"
    return group
