"""Checks that the run fits the machine: processes to cores, and estimated memory to available memory.

Runs that cannot work are refused: more workers than can start within their deadline, or more certain memory than the
machine has. Slow or tight runs get a warning. A dry run may be made on another machine than the run's: there the
machine's own limits only warn, but limits in the recipe (`cluster.device_memory_gb`) still refuse.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

from megarl.checks.checklist import Checklist
from megarl.checks.host import host_memory
from megarl.checks.layout import divides_devices
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.disaggregated.buffer.size import LEAST, refuse_too_large
from megarl.planning.memory import SERVER_CACHE, GpuRoom, Memory, device_memory, planned_fraction, server_bytes
from megarl.planning.outcome import ROOM_KEYS
from megarl.planning.shards import Sizes, key_value_bytes
from megarl.planning.terms import Moment, held
from megarl.system.errors import count
from megarl.system.machine import Machine

TIGHT = 0.9
_START_S = 5.0  # CPU seconds in which a worker imports torch, Megatron and transformers
_SLOW = 4  # number of workers per core above which a warning is shown
_LARGEST_GPU_GB = 288.0  # memory of an NVIDIA B300, taken as the largest GPU


def check_machine(
    config: RunConfig,
    sizes: Sizes,
    placement: Placement | None,
    machine: Machine | None,
    checks: Checklist,
    *,
    launcher: str | None,
    job: str,
    starts: bool,
) -> None:
    """Check the processes and the memory of `job` on a machine."""
    checks = checks.of("machine")
    if machine is None:
        placed = None if config.cluster.device_memory_gb is None else _divided(sizes, placement, checks)
        if placed is not None:
            _check_devices(config, sizes, placed, None, checks, job=job, starts=False)
        return
    cluster = config.cluster
    _check_shared_memory(config, placement, machine, launcher, checks.of("shared memory"), starts)
    wanted = cluster.device_memory_gb
    if launcher == "ray":
        starts = False  # Ray may choose other machines than this one
    if wanted is not None and not machine.has_gpu:
        if starts:
            checks.fail(
                "cluster.device_memory_gb",
                f"the recipe needs {count(cluster.nproc, 'GPU')}, but this machine has none",
                found=wanted,
                allowed="null, to compute on the CPU",
                fix="start it on a machine with GPUs (an NVIDIA driver must be loaded); to run it on the CPU on "
                f"purpose set cluster.device_memory_gb=null, and about one process per core: {machine.cores} here",
            )
            return
        checks.ok(f"for GPUs of {wanted:g} GB, which this machine does not have; nothing is compared")
    gpu = machine.has_gpu or wanted is not None
    if launcher == "ray" and not gpu:
        checks.skip("unknown: Ray chooses the machines")
    elif not gpu:
        _check_cores(config, machine, checks, starts)
    placed = _divided(sizes, placement, checks)
    if placed is None:
        return
    if gpu:
        _check_devices(config, sizes, placed, machine, checks, job=job, starts=starts)
    if not gpu or (machine.has_gpu and starts):
        host = host_memory(config, sizes, placed, gpu=gpu, job=job)
        _judge(host, machine.memory, _HOST, checks, refuse=starts and not gpu)


_HOST = "this machine's memory"


def _divided(sizes: Sizes, placement: Placement | None, checks: Checklist) -> Placement | None:
    """Return the teams if their memory can be estimated; else record a skipped check."""
    unknown = sizes[Role.ACTOR] is None
    if not unknown and placement is not None and all(map(divides_devices, placement.teams)):
        return placement
    checks.of("memory").skip("not known: " + ("the model's sizes" if unknown else "the layout does not divide"))
    return None


def gpu_room(config: RunConfig, machine: Machine | None) -> GpuRoom | None:
    """Return the GPU that the recipe names, or else this machine's; None without either."""
    named = config.cluster.device_memory_gb
    size = named * 1e9 if named is not None else machine.gpu_memory if machine is not None else None
    return None if size is None else GpuRoom(size)


def _check_cores(config: RunConfig, machine: Machine, checks: Checklist, starts: bool) -> None:
    """Check the number of workers on a machine without GPUs."""
    cluster = config.cluster
    here = -(-cluster.nproc // cluster.nnodes)
    needed = here * _START_S / machine.cores
    if needed > cluster.timeout_s and starts:
        most = max(1, int(machine.cores * cluster.timeout_s / _START_S))
        checks.fail(
            "cluster.nproc",
            f"{here} processes need about {needed:.0f} s to start on {count(machine.cores, 'core')}, and give up after "
            f"cluster.timeout_s = {cluster.timeout_s:g} s",
            found=cluster.nproc,
            allowed=f"at most {most} on this machine; about one per core, {machine.cores}, is quick",
            fix=f"set cluster.nproc={machine.cores}; for GPUs, start it on a machine that has them",
        )
    elif here > _SLOW * machine.cores:
        checks.warn(
            "cluster.nproc",
            f"this machine has no GPU, and {here} processes on {count(machine.cores, 'core')} take turns, which is "
            "slow",
            found=cluster.nproc,
            fix=f"set cluster.nproc={machine.cores}; for GPUs, start it on a machine that has them",
        )
    else:
        note = "; they take turns; about one per core is fast" if here > machine.cores else ""
        checks.ok(f"{count(here, 'process')} on {count(machine.cores, 'core')}, no GPU{note}")
    if cluster.threads is not None and cluster.threads * here > machine.cores and not starts:
        devices = ", and the devices of placement.teams" if config.placement.teams else ""
        checks.warn(  # the launcher warns again when the run starts, by the workers' actual threads
            "cluster.threads",
            f"{count(here, 'process')} of {count(cluster.threads, 'thread')} share {count(machine.cores, 'core')}, "
            "which is many times slower than one thread per core",
            found=cluster.threads,
            fix=f"set cluster.threads={max(1, machine.cores // here)}, or null"
            if cluster.threads > 1
            else f"threads cannot be lowered: use fewer processes (cluster.nproc{devices}), one per core, "
            f"or a machine with {count(here, 'core')}",
        )


def _check_shared_memory(
    config: RunConfig,
    placement: Placement | None,
    machine: Machine,
    launcher: str | None,
    checks: Checklist,
    starts: bool,
) -> None:
    """Check the shared memory for data between teams, where a Ray is started for the run."""
    starts_ray = launcher == "local" or (launcher == "ray" and not os.environ.get("RAY_ADDRESS"))
    if placement is None or not placement.separate or not starts_ray:
        return
    free = machine.shared_memory
    problem = refuse_too_large(config, placement, free)
    # the default size of /dev/shm in containers is below this minimum
    if problem is None and free is not None and free < LEAST:
        checks.warn(
            "placement",
            f"Ray's object store needs at least {LEAST / 1e6:.0f} MB, but /dev/shm has less: the samples between "
            "teams go through files in Ray's temporary folder, which may be slow",
            found=f"{free / 1e6:.0f} MB",
            fix="enlarge /dev/shm (docker run --shm-size=1g)",
        )
    elif problem is None:
        checks.ok("holds the samples between teams, or they may go to disk")
    elif starts:
        checks.from_error(problem)
    else:
        where = problem.where or ""
        checks.warn(where, problem.what, found=f"{problem.found}; here {problem.allowed}", fix=problem.fix)


def _check_devices(
    config: RunConfig,
    sizes: Sizes,
    placement: Placement,
    machine: Machine | None,
    checks: Checklist,
    *,
    job: str,
    starts: bool,
) -> None:
    """Check the GPU memory of every team's rank that needs the most."""
    room = gpu_room(config, machine)
    for team in placement.teams:
        device = device_memory(config, sizes, team, gpu=True, job=job, room=room)
        named = device
        if placement.separate:
            moments = (replace(moment, name=f"team {team.name}: {moment.name}") for moment in device.moments)
            named = replace(device, moments=tuple(moments))
        _check_device(config, named, machine, checks, starts)
        if room is not None and config.rollout.colocated and Role.ROLLOUT in team.roles:
            _check_fraction(config, device, room, checks.of("memory"))
        if room is not None and not config.rollout.sglang.extra_args and device.needed.least <= room.bytes:
            certain = starts and machine is not None and machine.gpu_certain
            refuse = config.cluster.device_memory_gb is not None or certain
            _check_cache(config, sizes, device, checks.of("memory"), refuse=refuse)


def _check_fraction(config: RunConfig, memory: Memory, room: GpuRoom, checks: Checklist) -> None:
    """Warn if servers on the trainer's GPUs have no `rollout.sglang.memory_fraction`, and suggest the value that the
    memory plan leaves them."""
    if config.rollout.sglang.memory_fraction is None:
        share = planned_fraction(memory, TIGHT * room.bytes)
        checks.warn(
            "rollout.sglang.memory_fraction",
            "SGLang chooses the server's share of a GPU as if the trainer were not there",
            fix=f"set rollout.sglang.memory_fraction={share:g}, which the plan leaves to servers"
            if share
            else "free memory on the GPUs: the plan leaves none to servers",
        )


def _check_cache(config: RunConfig, sizes: Sizes, memory: Memory, checks: Checklist, *, refuse: bool) -> None:
    """Check that a server has room for the keys and values of the longest sample."""
    facts, servers = sizes[Role.ACTOR], config.rollout.sglang
    starts = any(part.what == SERVER_CACHE for part in memory.terms())
    if not starts or facts is None or servers.memory_fraction is None:
        return
    token, longest = key_value_bytes(facts, servers.tp_size, config.cache_dtype), config.longest_sequence()
    weights = server_bytes(config, facts)
    room = max(0.0, servers.memory_fraction * memory.free - weights)  # another check compares max_total_tokens
    if room >= longest * token:
        return
    least = math.ceil(100 * (weights + longest * token) / memory.free) / 100 if memory.free else 1.0
    key, fraction, fix = "rollout.sglang.memory_fraction", servers.memory_fraction, f"change one of: {ROOM_KEYS}"
    message = (
        f"a server has room for {int(room / token):,} tokens beside {weights / 1e9:,.1f} GB of weights on a GPU of "
        f"which {memory.free / 1e9:,.1f} GB are free when it starts, but the longest sample has {longest:,}"
    )
    if refuse:
        allowed = f"{least:g} or more" if least < 1 else "none; use more ranks per server, or shorter samples"
        checks.fail(key, message, found=fraction, allowed=allowed, fix=fix)
    else:
        checks.warn(key, message, found=fraction, fix=fix)


def _check_device(config: RunConfig, memory: Memory, machine: Machine | None, checks: Checklist, starts: bool) -> None:
    """Check the rank that needs the most memory against its GPU: the GPU that the recipe names, or this machine's."""
    named = config.cluster.device_memory_gb
    limits = []
    if named is not None:
        limits.append((named * 1e9, f"a GPU of {named:g} GB (cluster.device_memory_gb)", True))
    if machine is not None and machine.gpu_memory is not None and (starts or named is None):
        refuse = starts and machine.gpu_certain
        limits.append((machine.gpu_memory, f"this machine's GPU of {machine.gpu_memory / 1e9:.0f} GB", refuse))
    if not limits:
        limits.append((_LARGEST_GPU_GB * 1e9, "any GPU", True))
    # Refusals come before mere warnings, even if the warning is about less memory.
    refused = [limit for limit in limits if limit[2] and memory.needed.least > limit[0]]
    capacity, name, refuse = min(refused or limits)
    _judge(memory, capacity, name, checks, refuse=refuse)


def _judge(memory: Memory, capacity: float, what: str, checks: Checklist, *, refuse: bool) -> None:
    """Compare an estimate with `capacity` bytes of `what`."""
    checks = checks.of("memory")
    needed = memory.needed
    if needed.least > capacity:
        key, about = _first_key(needed), held(needed.terms)
        estimate = f" (about {about / 1e9:,.1f})" if about > 1.01 * needed.least else ""
        message = (
            f"{needed.name} needs at least {needed.least / 1e9:,.1f} GB{estimate}, but {what} has "
            f"{capacity / 1e9:,.1f}: {_largest(needed)}"
        )
        least, allowed = f"{needed.least / 1e9:,.1f} GB", f"{capacity / 1e9:,.1f} GB"
        fix = f"change the largest parts: {_keys(needed)}"
        if refuse:
            checks.fail(key, message, found=least, allowed=allowed, fix=fix)
        else:
            checks.warn(key, message, found=least, fix=fix)
        return
    # Count only the memory that is certainly used: terms that adapt to the free memory, or sum many others, may need
    # less.
    moments = {moment.name: held(moment.terms) for moment in memory.moments}
    name = max(moments, key=lambda key: moments[key])
    if moments[name] > TIGHT * capacity:
        moment = next(moment for moment in memory.moments if moment.name == name)
        checks.warn(
            _first_key(moment),
            f"{name} may need {moments[name] / 1e9:,.1f} GB, more than {TIGHT:.0%} of the {capacity / 1e9:,.1f} of "
            f"{what}: {_largest(moment)}",
            fix=f"if memory runs out, change: {_keys(moment)}",
        )
    else:
        most = max(moment.bytes for moment in memory.moments)
        more = f", and up to {most / 1e9:,.1f} with caches where there is room" if most > 1.01 * moments[name] else ""
        checks.ok(f"{name} needs about {moments[name] / 1e9:,.1f} of {capacity / 1e9:,.1f} GB of {what}{more}")


def _first_key(moment: Moment) -> str:
    """Return the first recipe key of the term that takes most memory at this moment; `model` if it has no key."""
    key = moment.largest()[0].keys.partition(",")[0]
    return key if "." in key else "model"


def _keys(moment: Moment) -> str:
    return "; ".join(dict.fromkeys(part.keys for part in moment.largest()))


def _largest(moment: Moment) -> str:
    return ", ".join(f"{part.what} {part.least / 1e9:,.1f} GB" for part in moment.largest())
