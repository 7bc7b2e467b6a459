"""The memory that the caches of one engine may use."""

from __future__ import annotations

import os

import torch

from megarl.system.machine import free_host_memory


def free_bytes(device: torch.device, sessions: int = 1) -> float:
    """Return the bytes that one cache may use: its share of 80% of the free memory.

    Args:
        device: device of the cache. A GPU belongs to one process; the LOCAL_WORLD_SIZE processes of the machine (or
            container) share host memory.
        sessions: number of caches that this process holds at the same time.
    """
    if device.type == "cuda":
        # The driver's free bytes, and the unused whole blocks that torch's allocator can release. The unused rest of a
        # block that is partly in use (`inactive_split`) cannot hold a cache.
        stats = torch.cuda.memory_stats(device)
        unused = stats["reserved_bytes.all.current"] - stats["active_bytes.all.current"]
        releasable = max(0, unused - stats["inactive_split_bytes.all.current"])
        return 0.8 * (torch.cuda.mem_get_info(device)[0] + releasable) / sessions
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 0.8 * free_host_memory() / (processes * sessions)
