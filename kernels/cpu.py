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

    Args:
        threads: number of parts into which work is divided whose sums depend on the division; None: torch's number of
            threads at the time of a call.
    """

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        self._fixed_threads = threads
        self._attend, self._stream = library.megarl_attend, library.megarl_stream
        self._add_norm, self._norm_backward = library.megarl_add_norm, library.megarl_norm_backward
        self._silu_mul, self._silu_mul_backward = library.megarl_silu_mul, library.megarl_silu_mul_backward
        self._statistics, self._gradients = library.megarl_statistics, library.megarl_gradients
        self._draw = library.megarl_draw
        self._attend.argtypes = [_B, *[_P] * 9, *[_I] * 7, _F, _F]
        self._stream.argtypes = [_B, *[_P] * 4, *[_I] * 5, _F]
        self._add_norm.argtypes = [_B, *[_P] * 4, _I, _I, _F]
        self._norm_backward.argtypes = [_B, *[_P] * 5, _I, _I, _I, _F]
        self._silu_mul.argtypes = [_B, _P, _P, _I, _I]
        self._silu_mul_backward.argtypes = [_B, _P, _P, _P, _I, _I]
        self._statistics.argtypes = [_B, *[_P] * 3, _I, _B, *[_I] * 4, _F]
        self._gradients.argtypes = [_B, _B, *[_P] * 4, *[_I] * 4, _F]
        self._draw.argtypes = [_B, *[_P] * 4, *[_I] * 4, _F]
        for function in (self._add_norm, self._norm_backward, self._silu_mul, self._silu_mul_backward):
            function.restype = None
        for function in (self._statistics, self._gradients, self._draw):
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
        dx, wide, threads = torch.empty_like(x), weight.float(), self._threads
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

    def stream_forward(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, parents: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of a packed stream to itself: a token sees its node up to itself, and the nodes before it.

        Args:
            q: [t, heads, D].
            k, v: [t, groups, D].
            starts: int64 [nodes + 1], first token of each node, and t; no node is empty.
            parents: int64 [nodes], the node before each node, -1 for none; nodes lie depth first. None: no node has
                one before it, and each is a sequence.

        Returns:
            Context like `q`, and float32 [t, heads], logsumexp of each query's scores.
        """
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run_stream((q, k, v, out, None, None, None, None), lse, starts, parents, scale)
        return out, lse

    def stream_backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        starts: Tensor,
        parents: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the inputs q, k and v of `stream_forward` from its outputs and the output's
        gradient."""
        dq, dk, dv = (torch.empty_like(x) for x in inputs)
        self._run_stream((*inputs, out, grad, dq, dk, dv), lse, starts, parents, scale)
        return dq, dk, dv

    def statistics(
        self,
        logits: Tensor,
        targets: Tensor,
        out: Tensor,
        *,
        start: int,
        inverse_temperature: float,
        entropy: bool,
    ) -> None:
        """Write max, sum of exp, sum of exp times shifted logit, and target logit (or 0) of each row to `out`.

        Args:
            logits: [n, V] of any width, rows contiguous; they are divided by the temperature.
            targets: int64 [n], indices into the whole vocabulary.
            out: float32 [4, n], contiguous in its last dimension; row 2 is not written without `entropy`.
            start: vocabulary index of the first column.
        """
        targets = targets.contiguous()  # the variable keeps a copy alive while the kernel reads from its pointer
        self._statistics(
            *(logits.dtype == torch.bfloat16, *_pointers(logits, targets, out), out.stride(0), entropy),
            *(*_sizes(logits), start, inverse_temperature),
        )

    def gradients(
        self,
        logits: Tensor,
        targets: Tensor,
        log_z: Tensor,
        entropy: Tensor | None,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        dtype: torch.dtype,
        *,
        start: int,
        inverse_temperature: float,
    ) -> Tensor:
        """Return the gradient [n, V] in `dtype`, float32 or bfloat16, of the logits before the division by the
        temperature.

        Args:
            logits: [n, V] of any width, rows contiguous.
            targets: int64 [n], indices into the whole vocabulary.
            log_z, entropy: float32 [n], computed over the whole vocabulary.
            grad_logp, grad_entropy: float32 [n], gradients of both results; None: no gradient. The gradient of the
                entropy counts only if `entropy` is given.
            start: vocabulary index of the first column.
        """
        out, targets = torch.empty(logits.shape, dtype=dtype), targets.contiguous()
        rows = [None if x is None else x.contiguous() for x in (log_z, entropy, grad_logp, grad_entropy)]
        table = (ctypes.c_void_p * len(rows))(*_pointers(*rows))
        self._gradients(
            *(logits.dtype == torch.bfloat16, dtype == torch.bfloat16, logits.data_ptr()),
            *(targets.data_ptr(), table, out.data_ptr()),
            *(*_sizes(logits), start, inverse_temperature),
        )
        return out

    def draw(
        self, logits: Tensor, seeds: Tensor, index: Tensor, *, start: int, inverse_temperature: float, greedy: bool
    ) -> Tensor:
        """Sample from the logits: return the token with the largest logit plus noise (`megarl.models.noise`).

        Args:
            logits: [n, V] of any width, over this rank's vocabulary; rows contiguous.
            seeds, index: int64 [n], each sample's seed, and the number of the token within the sample.
            start: vocabulary id of the first column.
            inverse_temperature: factor of the logits.
            greedy: return the token with the largest logit, without noise.

        Returns:
            float64 [1, n, 4]: the sampled token's score, vocabulary id and logit, and logsumexp of the logits, all
                after the factor. Float64 is exact for ids.
        """
        out = torch.empty(1, len(logits), 4, dtype=torch.float64)
        keys = (None, None) if greedy else (seeds.contiguous(), index.contiguous())
        pointers = _pointers(logits, *keys, out)
        self._draw(logits.dtype == torch.bfloat16, *pointers, *_sizes(logits), start, inverse_temperature)
        return out

    @property
    def _threads(self) -> int:
        return self._fixed_threads or torch.get_num_threads()

    def _run_stream(
        self, tensors: tuple[Tensor | None, ...], lse: Tensor, starts: Tensor, parents: Tensor | None, scale: float
    ) -> None:
        q, k = tensors[:2]
        assert q is not None
        assert k is not None
        table = (ctypes.c_void_p * len(tensors))(*_pointers(*tensors))
        groups = k.shape[1]
        sizes = (len(starts) - 1, groups, q.shape[1] // groups, q.shape[2], self._threads)
        failed = self._stream(q.dtype == torch.bfloat16, table, *_pointers(lse, starts, parents), *sizes, scale)
        assert not failed, "callers check supports()"


def _check_width(width: int) -> None:
    assert width % LANES == 0, f"callers check supports(): rows of {width} numbers"


def _sizes(logits: Tensor) -> tuple[int, int, int]:
    """Return rows, columns and the distance of rows of `logits`, whose rows the kernels read as contiguous."""
    assert logits.shape[1] < 2 or logits.stride(1) == 1, "callers check it"
    return *logits.shape, logits.stride(0)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    """Return the tensors' data pointers as arguments of a C function; None (a null pointer) for None."""
    return [None if x is None else x.data_ptr() for x in tensors]


@functools.cache
def load() -> CpuKernels | None:
    """Return the kernels, compiled if they are not cached; None if there is no compiler or, with one warning, if
    compiling or the check fails."""
    from megarl.kernels.cpu_check import check  # imported here, because cpu_check imports this module

    library = compiled(_SOURCE, check)
    return None if library is None else CpuKernels(library)


def kernels_for(x: Tensor, width: int) -> CpuKernels | None:
    """Return the CPU kernels if they are available and support rows of `width` numbers like those of `x`, else None."""
    if not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16) or width % LANES:
        return None
    return load()


def logit_kernels(logits: Tensor) -> CpuKernels | None:
    """Return the CPU kernels if they are available and support these logits [n, V] of any width, else None."""
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        return None
    return load()


def rows(x: Tensor) -> Tensor:
    """Return `x` [..., n] as a contiguous matrix for the kernels; copies only if necessary."""
    return x.reshape(-1, x.shape[-1]).contiguous()
