"""The device of this process, GPU or CPU. Only this module distinguishes them."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from megarl.system.errors import ConfigError, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def has_cuda() -> bool:
    """Return whether this process computes on CUDA devices."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process: `cuda:LOCAL_RANK` or `cpu`. If only one GPU is visible, it
    belongs to this process, as with Ray. Raise ConfigError if there are more processes than GPUs on this machine.
    """
    if not has_cuda():
        return torch.device("cpu")
    local, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if local >= visible:
        raise ConfigError(
            f"process {local} of this machine has no GPU of its own: {visible} are visible",
            where="cluster.nproc",
            found=os.environ.get("LOCAL_WORLD_SIZE", str(local + 1)),
            allowed=f"at most {visible} on this machine, one process per GPU",
            fix="lower cluster.nproc, or show more GPUs in CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local)


def gpu_id() -> str:
    """Return an id of this process's physical GPU: `machine/uuid`."""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device()).uuid}"


def gpu_name() -> str:
    """Return the name of this process's GPU as CUDA_VISIBLE_DEVICES would list it; empty on a CPU."""
    at = device()
    if at.type == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(at.index) if visible is None else visible.split(",")[at.index].strip()


def refuse_shared_gpu(ids: Sequence[str]) -> None:
    """Raise ConfigError if two ranks compute on the same GPU, because collectives between them would hang or fail.
    `ids` holds the `gpu_id` of all ranks, in rank order.
    """
    for rank, name in enumerate(ids):
        first = ids.index(name)
        if first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same GPU, {name}",
                where="cluster.nproc",
                found=len(ids),
                allowed="one process per GPU",
                fix=f"set cluster.nproc={len(set(ids))}, or show more GPUs in CUDA_VISIBLE_DEVICES",
            )


def dist_backend() -> str:
    """Return the torch.distributed backend for `device()`. Either backend also handles CPU tensors."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def synchronize() -> None:
    """Wait for queued device work, so that time measured on the host includes it."""
    if has_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Return cached device memory to the driver."""
    if has_cuda():
        torch.cuda.empty_cache()


def peak_memory_gb() -> float:
    """Return this process's peak memory in GB: of the CUDA allocator on a GPU, else its resident set."""
    if has_cuda():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclass(frozen=True)
class ProcessState:
    """Global torch settings that affect results and that user code must not change."""

    default_dtype: torch.dtype
    threads: int
    deterministic: bool

    @classmethod
    def now(cls) -> ProcessState:
        """Return torch's settings in this process now."""
        return cls(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())

    def check(self, what: str) -> None:
        """Raise UserError, and restore torch's settings of this process, if the user's code `what` has changed them."""
        now = ProcessState.now()
        if now == self:
            return
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        names = [field.name for field in fields(self) if getattr(now, field.name) != getattr(self, field.name)]
        raise UserError(
            f"{what} changes torch settings of the whole training process",
            found=", ".join(f"{_SET_BY[name]}({getattr(now, name)})" for name in names),
            allowed=", ".join(f"{_SET_BY[name]}({getattr(self, name)})" for name in names),
            fix="remove the call, or undo it before the function returns",
        )


@dataclass(frozen=True)
class RandomStates:
    """The states of the random generators of Python, NumPy and torch (on the CPU) in this process."""

    python: Any
    numpy: Any
    of_torch: torch.Tensor

    @classmethod
    def now(cls) -> RandomStates:
        """Return the present states of the random generators of Python, numpy and torch."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.of_torch)


_SET_BY = {
    "default_dtype": "torch.set_default_dtype",
    "threads": "torch.set_num_threads",
    "deterministic": "torch.use_deterministic_algorithms",
}


class HostCopy:
    """An asynchronous copy of a small tensor to the host. `tolist` waits for the copy, but not for work that the device
    was given after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._event = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> Any:
        """Wait for the copy, and return the tensor's numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
