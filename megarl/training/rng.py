"""Random states of this process: seed them, save them as a file's bytes, load them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes

from megarl.system.compat import megatron as compat
from megarl.system.device import has_cuda

compat.install()

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402  (after install)


def seed_generators(seed: int) -> None:
    """Seed the global random generators of this process; Megatron seeds its own generators by the layout."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_bytes() -> bytes:
    """Return this rank's generator states (Python, numpy, torch, CUDA, Megatron's tracker) as a safetensors file."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(keys.copy())}
    if has_cuda():
        tensors["cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    plain = {"python": random.getstate(), "numpy": [kind, position, has_gauss, gauss]}
    return to_bytes(tensors, metadata={"plain": json.dumps(plain)})


def load_rng(path: Path) -> None:
    """Restore the states of all random generators from a file that contains `rng_bytes`."""
    with safe_open(path, "pt") as file:
        plain = json.loads(file.metadata()["plain"])
        # Clone: the tracker keeps its tensors, and a mapped file may be cut or removed later.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    version, internal, gauss_next = plain["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, position, has_gauss, gauss = plain["numpy"]
    numpy.random.set_state((kind, tensors["numpy"].numpy(), position, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    if has_cuda() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    get_cuda_rng_tracker().set_states(
        {name.removeprefix("tracker."): state for name, state in tensors.items() if name.startswith("tracker.")}
    )
