"""A CUDA device for machines without one: tensors that say `cuda:0` and are computed on the CPU.

`install()` is called before Megatron is imported, in a process of its own (`tests.dist.run_pretending`): there
`torch.cuda` says that a device is there, so the form of the code that runs on GPUs is what runs. In `with Pretend()`

* factories, `.to`, `.cuda` and collectives make and take `CudaTensor`s, whose numbers a CPU tensor holds;
* a CPU tensor that meets one in an operation raises, as CUDA does (numbers without dimensions are allowed);
* the code on the CPU that waits for the device is counted by place: `item`, `nonzero`, copies between host and device;
* CUDA graphs record operations and run them again on the same memory, and what CUDA refuses in a capture raises.

Not pretended: memory of the device, the order of streams, speed, and how CUDA's kernels round.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operations
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from tests import pretend_torch_cuda, pretend_varlen

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_WAITING = {  # the shape or the value of the result has to reach the host
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten._unique2.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.isin.Tensor_Tensor,  # where it sorts: from some ten test elements on
    aten.equal.default,
}
_REPLACED = {
    torch.ops.torch_attn._varlen_attn.default: pretend_varlen.forward,
    torch.ops.torch_attn._varlen_attn_backward.default: pretend_varlen.backward,
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
}


class Seen:
    """What was noticed since the last `clear`: how often the host waited for the device, by (what, file:line)."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.graph: Graph | None = None  # the capture that is under way

    def wait(self, what: str) -> None:
        """The host waits for the device here."""
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
        self.waits[what, _place()] += 1

    def clear(self) -> None:
        """Forget all waits."""
        self.waits.clear()

    def by_place(self) -> dict[str, int]:
        """Waits for JSON."""
        return {f"{place} {what}": count for (what, place), count in sorted(self.waits.items())}


SEEN = Seen()


def _place() -> str:
    """The innermost line of megarl or Megatron on the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(("megatron.", "megarl.")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


class CudaTensor(Tensor):
    """Says that it is on `cuda:0`; `inner` is the CPU tensor that holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",  # to C++ only: autograd has no queue for a device that is not there
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self) -> CudaTensor:
        return CudaTensor(self.inner.detach())

    @data.setter
    def data(self, value: CudaTensor) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def type(self, dtype: Any = None, **_: Any) -> Any:
        if dtype is not None:
            return self.to(dtype)
        return self.inner.type().replace("torch.", "torch.cuda.")

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        SEEN.wait("tolist")
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: object) -> None: ...

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + (1 << 60)  # an address, and no memory of this process

    def untyped_storage(self) -> Any:
        return CudaStorage(self.inner.untyped_storage())

    def set_(self, source: Any, *args: Any) -> CudaTensor:
        return CudaTensor(self.inner.set_(source.inner, *args))

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> CudaTensor:
        return CudaTensor(self.inner.detach().clone()).requires_grad_(self.requires_grad)


class CudaStorage:
    """Memory of the pretended device."""

    device = CUDA

    def __init__(self, inner: torch.UntypedStorage) -> None:
        self.inner = inner

    def nbytes(self) -> int:
        return self.inner.nbytes()

    size = nbytes

    def resize_(self, nbytes: int) -> None:
        self.inner.resize_(nbytes)

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + (1 << 60)


class Pretend(TorchDispatchMode):
    """Inside, `cuda` is a device of this process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU and answer as CUDA would. Moves between devices do not come here, see `to`."""
    tensors: list[Tensor] = []

    def to_inner(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor.inner if isinstance(tensor, CudaTensor) else tensor

    inner_args, inner_kwargs = _map(Tensor, to_inner, (args, kwargs))
    if any(type(t) not in (Tensor, CudaTensor, torch.nn.Parameter) for t in tensors):
        return NotImplemented  # a subclass of the code under test comes first
    on_device = any(isinstance(t, CudaTensor) for t in tensors)
    _refuse_mixed(func, tensors, args)
    _note_waits(func, args, kwargs)
    wanted = inner_kwargs.get("device")
    inner_kwargs.pop("pin_memory", None)
    if wanted is not None:
        inner_kwargs["device"] = torch.device("cpu")
    if not on_device and (wanted is None or torch.device(wanted).type != "cuda"):
        return func(*args, **inner_kwargs)
    run = _REPLACED.get(func, func)
    if SEEN.graph is not None:
        out = SEEN.graph.record(func, run, inner_args, inner_kwargs)
    else:
        out = run(*inner_args, **inner_kwargs)
    if func is aten.copy_.default and args[0].is_cpu:
        return out
    known = {id(t.inner if isinstance(t, CudaTensor) else t): t for t in tensors}  # what changed in place stays itself
    return _map(Tensor, lambda t: known[id(t)] if id(t) in known else CudaTensor(t), out)


_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _map(kind: type[Tensor], change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each tensor of this kind changed. torch's own function takes longer than the operations do."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([one if type(one) in _LEAVES else _map(kind, change, one) for one in value])
    if isinstance(value, dict):
        return {key: one if type(one) in _LEAVES else _map(kind, change, one) for key, one in value.items()}
    return value


def _refuse_mixed(func: Any, tensors: list[Tensor], args: tuple[Any, ...]) -> None:
    if func in _COPIES:
        return
    if func in _INDEXING and isinstance(args[0], CudaTensor):
        return  # CUDA takes indices from the host
    if func is aten.scatter.src and torch._C._current_graph_task_id() >= 0:
        return  # the gradient of `topk`: C++ of torch 2.11 makes the zeros where it believes the tensors to be
    # Autograd in C++ makes empty gradients where it believes the tensors to be.
    met = [t for t in tensors if isinstance(t, CudaTensor) or (t.dim() and t.numel())]
    kinds = {isinstance(t, CudaTensor) for t in met}
    if len(kinds) > 1:
        shapes = ", ".join(f"{t.device}{tuple(t.shape)}" for t in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {shapes} ({_place()})")


def _note_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    device = isinstance(args[0], CudaTensor) if args else False
    if func in _WAITING and device:
        SEEN.wait(str(func))
    elif func in _INDEXING and device and any(i is not None and i.dtype == torch.bool for i in args[1]):
        SEEN.wait("index by a mask")
    elif func is aten.copy_.default and device != isinstance(args[1], CudaTensor) and not _non_blocking(args, kwargs):
        SEEN.wait("copy to device" if device else "copy to host")


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


class Graph:
    """A CUDA graph: operations in the order of their capture, run again on the same memory by `replay`.

    Nothing runs in a capture on a GPU. Here operations do, so that what follows has shapes, and `end` undoes them.
    """

    def __init__(self) -> None:
        self._steps: list[Any] = []
        self._undo: list[tuple[Tensor, Tensor]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def record(self, func: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and remember it."""
        if func._schema.is_mutable:
            for spec, value in zip(func._schema.arguments, args, strict=False):
                if spec.alias_info is not None and spec.alias_info.is_write:
                    self._undo += [(t, t.clone()) for t in tree_leaves(value)]
            self._undo += [(t, t.clone()) for t in tree_leaves(kwargs.get("out")) if t is not None]
        out = run(*args, **kwargs)
        given = {id(t) for t in tree_leaves((args, kwargs))}
        made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and id(t) not in given]
        if not func.is_view:
            self._steps.append((run, args, kwargs, made))
        return out

    def end(self) -> None:
        for tensor, before in reversed(self._undo):
            tensor.copy_(before)
        self._undo = []

    def replay(self) -> None:
        for run, args, kwargs, made in self._steps:
            out = run(*args, **kwargs)
            for work in tree_leaves(out):
                if isinstance(work, torch.ScriptObject):  # of a collective
                    torch.distributed.Work.unbox(work).wait()
            fresh = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)][-len(made) :] if made else []
            for old, new in zip(made, fresh, strict=True):
                old.copy_(new)


class Capture:
    """`torch.cuda.graph(graph, pool=..., stream=...)`."""

    def __init__(self, graph: Graph, pool: object = None, stream: object = None) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        SEEN.graph = self._graph

    def __exit__(self, *_: object) -> None:
        SEEN.graph = None
        self._graph.end()


def install() -> None:
    """Let torch say that there is one GPU. For ever: only in a process that does nothing else."""
    torch.manual_seed(0)
    sys.modules["triton"] = None  # type: ignore[assignment]  # its kernels are launched by a driver
    pretend_torch_cuda.replace(SEEN, Graph, Capture)
    pretend_torch_cuda.replace_movers(CudaTensor, SEEN)
