"""File descriptors of a rank: each gloo group of n ranks has a socket to each of the other n - 1.

Measured with torch 2.13 on 4 processes: a group of n costs n - 1 descriptors, since groups share a device
(megarl/system/compat/gloo.py), and the first rank has one more for each connection to torch's store: a rank's
main thread, and two that report progress, have one each (megarl/system/store.py). With TORCH_GLOO_LAZY_INIT=1 a
connection of a group is opened at its first use. Every group has gloo, also on GPUs: metrics and other
plain data travel as CPU tensors.
"""

from __future__ import annotations

import resource

from megarl.checks.checklist import Checklist
from megarl.checks.layout import divides_devices
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, devices_key
from megarl.launchers.common import LAZY_FROM

# descriptors of a process other than sockets between ranks: 17 in a bare process, more with servers and reward
# processes
_OTHERS = 128
_STORE = 3  # connections of a rank to torch's store, at most
_USUAL = 1024  # limit of descriptors with which most systems start processes


def group_sizes(nproc: int, parallel: ParallelConfig) -> list[int]:
    """Return the size of each process group of a rank: Megatron's groups and the replica's group, without the world.
    This is the largest count of any rank, that of the first pipeline stage; other ranks are in fewer groups.
    """
    tp, pp, cp, ep, etp = parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.expert_tp
    dp, expert_dp = nproc // parallel.model_parallel_size, nproc // (etp * ep * pp)
    dense = [tp, pp, cp, dp, dp, dp * cp, dp * cp, tp * pp, tp * cp, tp * dp, tp * dp * cp, min(pp, 2), 1]
    experts = [ep, etp, etp * ep, etp * ep * pp, expert_dp, expert_dp]
    return [*dense, *experts, nproc, tp * pp * cp]


def descriptors(nproc: int, parallel: ParallelConfig) -> int:
    """Return the largest number of file descriptors that any rank has open: that of the first rank, which has torch's
    store.
    """
    sizes = [*group_sizes(nproc, parallel), nproc]
    return sum(_connections(size, nproc >= LAZY_FROM) for size in sizes) + _STORE * nproc + _OTHERS


def _connections(size: int, lazy: bool) -> int:
    """Return a rank's connections in a group; if lazy, only those of rings (2), trees and barriers (2 per doubling of
    the size).
    """
    return min(size - 1, 2 + 2 * size.bit_length()) if lazy else size - 1


def check_descriptors(config: RunConfig, placement: Placement, checks: Checklist) -> None:
    """Compare the file descriptors that a rank needs with this machine's hard limit, to which workers raise their soft
    limit.
    """
    checks = checks.of("file descriptors")
    teams = [team for team in placement.teams if divides_devices(team)]
    if not teams:
        return
    fullest = max(teams, key=lambda team: descriptors(team.devices, team.parallel))
    needed, (_, hard) = descriptors(fullest.devices, fullest.parallel), resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= _USUAL // 2:
        return
    text = f"about {needed} per rank; the limit here is {'none' if hard == resource.RLIM_INFINITY else hard}"
    if hard == resource.RLIM_INFINITY or needed <= hard:
        checks.ok(text)
        return
    checks.fail(
        devices_key(config, fullest),
        f"a rank needs about {needed} file descriptors, but the hard limit here is {hard}",
        found=fullest.devices,
        allowed=f"a hard limit of {needed} or more on every machine",
        fix="raise the limit (ulimit -Hn, LimitNOFILE= of a service, nofile in /etc/security/limits.conf)",
    )
