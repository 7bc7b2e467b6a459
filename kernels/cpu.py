"""CPU kernels for the work of decoding and training between matmuls, in one pass each, with torch references.

cpu.cpp is compiled for the machine's instruction set on first use and cached in ~/.cache/megarl. It has a plain C
interface and uses the OpenMP runtime that torch has loaded. Without a C++ compiler, or for sizes other than multiples
of 16, callers use torch operations; results agree to rounding.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.kernels.build import compiled

LANES = 16
"""Numbers that the kernels process at once: they would write past the end of a row whose width is not a multiple."""
HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
_SOURCE = Path(__file__).with_suffix(".cpp")
_P, _I, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


def add_norm_reference(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Compute hidden [n, h] += delta (when given), in place; return hidden / rms(hidden) * weight in its dtype.

    The weight may have a wider dtype, in which the product is then computed.
    """
    if delta is not None:
        hidden += delta
    return F.rms_norm(hidden.to(weight.dtype), (hidden.shape[-1],), weight, eps).to(hidden.dtype)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Return silu(first half) * second half over the last dimension: [n, 2f] -> [n, f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class CpuKernels:
    """The compiled kernels. Tensors are contiguous float32 or bfloat16 on the CPU, all of one dtype; no autograd.

    Weights of norms may also be float32 beside bfloat16.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._stream = library.megarl_attend, library.megarl_stream
        self._add_norm, self._norm_backward = library.megarl_add_norm, library.megarl_norm_backward
        self._silu_mul, self._silu_mul_backward = library.megarl_silu_mul, library.megarl_silu_mul_backward
        self._attend.argtypes = [_B, *[_P] * 9, *[_I] * 7, _F, _F]
        self._stream.argtypes = [_B, *[_P] * 3, *[_I] * 5, _F]
        self._add_norm.argtypes = [_B, *[_P] * 4, _I, _I, _F]
        self._norm_backward.argtypes = [_B, *[_P] * 5, _I, _I, _I, _F]
        self._silu_mul.argtypes = [_B, _P, _P, _I, _I]
        self._silu_mul_backward.argtypes = [_B, _P, _P, _P, _I, _I]
        for function in (self._add_norm, self._norm_backward, self._silu_mul, self._silu_mul_backward):
            function.restype = None

    @staticmethod
    def supports(dtype: torch.dtype, head_dim: int, *widths: int) -> bool:
        """Return whether the kernels support the dtype, the head size and the `widths` of hidden states and MLPs."""
        return (
            dtype in (torch.float32, torch.bfloat16) and head_dim in HEAD_SIZES and not any(w % LANES for w in widths)
        )

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Compute hidden [n, h] += delta (when given), in place; return hidden / rms(hidden) * weight, by one
        kernel."""
        out, wide = torch.empty_like(hidden), weight.float()
        rows, width = hidden.shape
        _check_width(width)
        self._add_norm(hidden.dtype == torch.bfloat16, *_pointers(hidden, delta, wide, out), rows, width, eps)
        return out

    def norm_backward(self, x: Tensor, grad: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the gradients of x / rms(x) * weight: of `x` [n, h] in its dtype, of `weight` [h] in float32."""
        rows, width = x.shape
        _check_width(width)
        dx, wide, threads = torch.empty_like(x), weight.float(), torch.get_num_threads()
        parts = torch.zeros(threads, width)
        pointers = _pointers(x, grad, wide, dx, parts)
        self._norm_backward(x.dtype == torch.bfloat16, *pointers, rows, width, threads, eps)
        return dx, parts.sum(0)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half over the last dimension, [n, 2f] -> [n, f], by one kernel."""
        rows, width = gate_up.shape
        _check_width(width // 2)
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul(gate_up.dtype == torch.bfloat16, *_pointers(gate_up, out), rows, width // 2)
        return out

    def silu_mul_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of `gate_up` [n, 2f] from the gradient `grad` [n, f] of its gated product."""
        out, (rows, width) = torch.empty_like(gate_up), gate_up.shape
        _check_width(width // 2)
        self._silu_mul_backward(gate_up.dtype == torch.bfloat16, *_pointers(gate_up, grad, out), rows, width // 2)
        return out

    def attend(
        self,
        qkv: Tensor,
        norm: Tensor | None,
        rope: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        window: int | None,
        scale: float,
        eps: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate new heads, append keys and values to the cache, and attend. Scores and sums are fp32.

        Args:
            qkv: [n, G, q + 2, D], for each group its q query heads, its key and its value.
            norm: [2, D], weights of the RMS norms of query and key heads; None: no norms.
            rope: cos and sin, [n, R / 2] each; the first R numbers of a head are rotated.
            keys, values: caches [rows >= n, G, L, D], written at `positions`.
            positions: int64 [n], below L.
            window: newest positions that a query sees, itself included; None for all.
            sinks: float32 [G * q], a further score of each head in its softmax, whose value is zero; None: no sinks.

        Returns:
            [n, G * q * D].
        """
        n, groups, heads, size = qkv.shape
        out = qkv.new_empty(n, groups * (heads - 2) * size)
        wide = None if norm is None else norm.float()
        pointers = _pointers(qkv, wide, *rope, keys, values, positions, out, sinks)
        sizes = (n, groups, heads - 2, size, keys.shape[2], window or 0, rope[0].shape[1])
        failed = self._attend(qkv.dtype == torch.bfloat16, *pointers, *sizes, scale, eps)
        assert not failed, "callers check supports()"
        return out

    def causal_forward(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute causal attention of each sequence of a packed stream to itself.

        Args:
            q: [t, heads, D].
            k, v: [t, groups, D].
            starts: int64 [sequences + 1], first token of each sequence, and t.
            longest: tokens of the longest sequence.

        Returns:
            Context like `q`, and float32 [t, heads], logsumexp of each query's scores.
        """
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run_stream((q, k, v, out, None, None, None, None), lse, starts, longest, scale)
        return out, lse

    def causal_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        starts: Tensor,
        longest: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from inputs, outputs and the output's gradient of `causal_forward`."""
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        self._run_stream((q, k, v, out, grad, dq, dk, dv), lse, starts, longest, scale)
        return dq, dk, dv

    def _run_stream(
        self, tensors: tuple[Tensor | None, ...], lse: Tensor, starts: Tensor, longest: int, scale: float
    ) -> None:
        q, k = tensors[:2]
        assert q is not None
        assert k is not None
        table = (ctypes.c_void_p * len(tensors))(*_pointers(*tensors))
        groups = k.shape[1]
        sizes = (len(starts) - 1, groups, q.shape[1] // groups, q.shape[2], longest)
        failed = self._stream(q.dtype == torch.bfloat16, table, *_pointers(lse, starts), *sizes, scale)
        assert not failed, "callers check supports()"


def _check_width(width: int) -> None:
    assert width % LANES == 0, f"callers check supports(): rows of {width} numbers"


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    """Return the tensors' data pointers as arguments of a C function; None (a null pointer) for None."""
    return [None if x is None else x.data_ptr() for x in tensors]


@functools.cache
def load() -> CpuKernels | None:
    """Return the kernels, compiled if they are not cached; None if there is no compiler or, with one warning, if
    compiling or the check fails."""
    from megarl.kernels.cpu_check import check  # cpu_check imports this module

    library = compiled(_SOURCE, check)
    return None if library is None else CpuKernels(library)


def kernels_for(x: Tensor, width: int) -> CpuKernels | None:
    """Return the CPU kernels if they are available and support rows of `width` numbers like those of `x`, else None."""
    if not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16) or width % LANES:
        return None
    return load()


def rows(x: Tensor) -> Tensor:
    """Return `x` [..., n] as a contiguous matrix for the kernels; copies only if necessary."""
    return x.reshape(-1, x.shape[-1]).contiguous()
