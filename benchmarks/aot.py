"""Compiles all Triton kernels for GPUs that this machine does not have: `python -m megarl.benchmarks.aot`.

Each kernel is compiled as the functions of `megarl.kernels` launch it, with ptxas from Triton's wheel, for compute
capabilities 8.0, 9.0, 10.0 and 12.0. The table shows registers of a thread, bytes of shared memory of a program, and
bytes of the stack of a thread, to which registers are spilled. Without --json the exit code is 1 if a kernel spills
registers or needs more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

#: Compute capability -> bytes of shared memory that a program may have (CUDA C++ Programming Guide, table of compute
#: capabilities).
LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: `functools.partial`, whose keyword arguments are dicts here.
_call: Any = functools.partial
_USED = re.compile(r"REG:(\d+) STACK:(\d+)")


class Compiled(NamedTuple):
    """A kernel, compiled for one kind of GPU."""

    call: str  # the function that launches it, with dtype and sizes
    kernel: str
    capability: int
    registers: int
    shared: int
    stack: int

    @property
    def fits(self) -> bool:
        """Whether no register is spilled and its shared memory is available."""
        return self.stack == 0 and self.shared <= LIMITS[self.capability]


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every call of a kernel that a GPU run can make, with few rows: kernels are compiled by dtype, by options,
    and by the powers of two of widths."""
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        for what, call in (*_layers(dtype), *_experts(dtype), *_decoding(dtype), *_logits(dtype)):
            yield f"{what}, {name}", call


def _draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _layers(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megarl.kernels import layers_gpu

    draw, scale = _call(_draw, dtype), torch.zeros(4)
    for width in (768, 6144, 14336):
        x, grad = draw(4, 2 * width), draw(4, width)
        yield f"swiglu {width}", _call(layers_gpu.swiglu, x)
        yield f"swiglu backward {width}", _call(layers_gpu.swiglu_backward, x, grad)
        yield f"scaled swiglu {width}", _call(layers_gpu.swiglu, x, scale)
        yield f"scaled swiglu backward {width}", _call(layers_gpu.scaled_swiglu_backward, x, grad, scale)
    for width in (64, 128, 2048, 4096, 8192):
        x, weight = draw(8, width), draw(width)
        yield f"norm {width}", _call(layers_gpu.rms_norm, x, weight, 1e-6)
        # The number of programs is that of multiprocessors.
        yield f"norm backward {width}", _call(layers_gpu.rms_norm_backward, x, x, weight, 1e-6)
    for size in (64, 128):
        x, angles = draw(4, 2, size), draw(4, size // 2)
        yield f"rope {size}", _call(layers_gpu.rope, x, angles, angles, 1.0)


def _experts(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megarl.kernels import experts_gpu

    rows = _draw(dtype, 32, 2048)
    for each in (1, 4, 8):
        places = torch.zeros(4, each, dtype=torch.int32)
        yield f"sum of {each} rows", _call(experts_gpu.sum_rows, rows, places)
    if dtype == torch.bfloat16:
        grads, ends, total = _draw(dtype, 32, 1536), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1536, 2048)
        yield "gradients of experts", _call(experts_gpu.add_products, grads, rows, ends, total)


def _decoding(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megarl.kernels import decode_gpu

    draw = _call(_draw, dtype)
    for width in (1024, 4096, 8192):
        hidden, weight = draw(2, width), draw(width)
        for delta in (None, hidden):
            yield f"norm and sum {width}", _call(decode_gpu.add_norm, hidden.clone(), delta, weight, 1e-6)
    for size, per in itertools.product((64, 128, 256), (1, 8)):
        yield f"attention of {per} queries of {size}", _call(_attend, dtype, size, per)
    if dtype == torch.float32:
        logits, seeds = draw(2, 151_936), torch.zeros(2, dtype=torch.int64)
        for greedy in (False, True):
            given = {"start": 0, "inverse_temperature": 1.0, "greedy": greedy}
            yield "sampling", _call(decode_gpu.draw, logits, seeds, seeds, **given)


def _attend(dtype: torch.dtype, size: int, per: int) -> None:
    """Launch attention with norms, and with a window and sinks."""
    from megarl.kernels import decode_gpu

    draw, positions = _call(_draw, dtype), torch.zeros(2, dtype=torch.int64)
    qkv, angles = draw(2, 1, per + 2, size), draw(1024, size // 2)
    keys, values = draw(2, 2, 1, 1024, size)
    given = (angles, angles), keys, values, positions
    decode_gpu.attend(qkv, draw(2, size), *given, window=None, scale=1.0, eps=1e-6)
    decode_gpu.attend(qkv, None, *given, window=128, scale=1.0, eps=1e-6, sinks=torch.zeros(per))


def _logits(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    from megarl.kernels import logits_gpu

    targets, row = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    given = {"start": 0, "inverse_temperature": 1.0}
    for columns, entropy in itertools.product((4096, 151_936), (None, row)):
        logits, out = torch.zeros(2, columns), torch.zeros(4, 2)
        if dtype == torch.float32:
            settings = {**given, "entropy": entropy is not None}
            call = _call(logits_gpu.statistics, logits, targets, out, **settings)
            yield f"log-probs {columns}", call
        call = _call(logits_gpu.gradients, logits, targets, row, entropy, row, entropy, dtype, **given)
        yield f"gradient of log-probs {columns}", call


def compile_all(capability: int, only: str = "") -> Iterator[Compiled]:
    """Compile the kernels of every call whose name contains `only` for GPUs of a compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, Any]] = []

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **settings: Any) -> None:
            launched.append((kernel.__name__, kernel.run(*given, grid=grid, warmup=True, **settings)))

        return launch

    driver.set_active(_NoDriver(GPUTarget("cuda", capability, 32)))
    properties = mock.Mock(multi_processor_count=132)
    with (
        mock.patch.object(JITFunction, "__getitem__", compile_only),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        for name, call in calls():
            if only in name:
                launched.clear()
                call()
                yield from (_measured(name, kernel, capability, made) for kernel, made in launched)


class _NoDriver:
    """A driver of Triton that names a kind of GPU and launches nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _measured(call: str, kernel: str, capability: int, made: Any) -> Compiled:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USED.search(text)
    assert found is not None, f"cuobjdump shows no registers: {text}"
    registers, stack = map(int, found.groups())
    return Compiled(call, kernel, capability, registers, made.metadata.shared, stack)


def main(argv: list[str] | None = None) -> int:
    """Print the table, and what does not fit; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--only", default="", help="calls whose names contain this")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    args = parser.parse_args(argv)
    every = [made for capability in args.capability for made in compile_all(capability, args.only)]
    if args.json:
        print(json.dumps([made._asdict() for made in every]))
        return 0
    print(f"{'call':44s} {'kernel':26s} {'sm':>4s} {'registers':>9s} {'shared':>7s} {'stack':>6s}")
    for made in every:
        row = f"{made.call:44s} {made.kernel:26s} {made.capability:4d} {made.registers:9d}"
        print(f"{row} {made.shared:7d} {made.stack:6d}" + ("" if made.fits else "  <-"))
    return int(not all(made.fits for made in every))


if __name__ == "__main__":
    sys.exit(main())
