"""The part of `pretend_cuda` that changes torch's own functions: `torch.cuda`, factories, `.to`, `Module.to`."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from typing import Any

import torch
from torch import Tensor

_FACTORIES = ("zeros", "ones", "empty", "full", "arange", "rand", "randn", "zeros_like", "empty_like", "ones_like")


class Stream:
    """Everything is in order, as on the only stream of a CPU."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: object = None) -> Event:
        return Event()

    def synchronize(self) -> None: ...
    def is_capturing(self) -> bool:
        return False


class Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def replace(seen: Any, graph: type, capture: type) -> None:
    """`torch.cuda` of one device."""
    cuda, stream, generator = torch.cuda, Stream(), torch.Generator()
    stream.is_capturing = lambda: seen.graph is not None

    # A function of its own for every name: the compiler of torch 2.11 keeps a table by function, and refuses doubles.
    def nothing() -> Any:
        return lambda *_, **__: None

    def states() -> dict[str, Any]:
        return {
            "get_rng_state": lambda *_, **__: generator.get_state(),
            "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        }

    for module, found in {
        cuda: {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: seen.graph is not None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: "pretended",
            "get_device_properties": lambda *_: types.SimpleNamespace(name="pretended", uuid="0"),
            "mem_get_info": lambda *_: (10**9, 10**9),
            "max_memory_allocated": lambda *_: 0,
            "memory_stats": lambda *_: Counter(),
            "default_generators": (generator,),
            **states(),
            "manual_seed": generator.manual_seed,
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "stream": lambda *_: contextlib.nullcontext(),
            "synchronize": lambda *_: seen.wait("synchronize"),
            "nvtx": types.SimpleNamespace(range_push=nothing(), range_pop=nothing()),
            "cudart": lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
            "CUDAGraph": graph,
            "graph": capture,
        },
        cuda.random: states(),
        torch.accelerator: {"current_stream": lambda *_: stream},  # where optimizers of torch 2.14 look for a capture
    }.items():
        for name, value in found.items():
            setattr(module, name, value)
    for name in ("_lazy_init", "set_device", "empty_cache"):
        setattr(cuda, name, nothing())
    torch.inference_mode = _without_gradients
    torch.compile = lambda fn=None, **_: fn  # Megatron compiles small functions; the compiler knows nothing of all this


def _without_gradients(mode: Any = True) -> Any:
    """`torch.inference_mode` as code calls it; tensor subclasses do not live in inference mode."""
    if callable(mode):  # @torch.inference_mode
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def replace_movers(cuda_tensor: Any, seen: Any) -> None:
    """What C++ decides before an operation is dispatched: where a tensor is, and whether to move it."""
    to = Tensor.to

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target, rest, non_blocking = _parse(args, dict(kwargs))
        if target is None or (target.type == "cuda") == isinstance(self, cuda_tensor):
            return to(self, **rest) if rest else self
        if not non_blocking:
            seen.wait(f"copy to {'device' if target.type == 'cuda' else 'host'}")
        other = _Across.apply(self, cuda_tensor)
        return to(other, **rest) if rest else other

    class _Across(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kind: Any) -> Tensor:
            return x.inner.detach().clone() if isinstance(x, kind) else kind(x.detach().clone())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return _Across.apply(grad, cuda_tensor), None

    Tensor.to = moved
    Tensor.cuda = lambda self, *_, **kwargs: self.to("cuda", **kwargs)
    torch.nn.Module._apply = functools.partialmethod(_move_module, cuda_tensor)
    make = Tensor._make_wrapper_subclass

    def make_here(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu" if _device(kwargs["device"]).type == "cuda" else kwargs["device"]
        return make(*args, **kwargs)  # other wrappers (of code under test) stay on the only device that C++ knows

    Tensor._make_wrapper_subclass = make_here
    plain = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = plain(_numbers(data), *args, **kwargs)
        return made if device is None else made.to(_device(device))

    torch.tensor = tensor
    for name in _FACTORIES:
        setattr(torch, name, _with_device(getattr(torch, name)))


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _with_device(factory: Any) -> Any:
    """C++ takes a bare number for the index of an accelerator, and finds none."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _device(kwargs["device"])
        return factory(*args, **kwargs)

    return make


def _numbers(data: Any) -> Any:
    """`torch.tensor` of a list of tensors reads each of them."""
    if isinstance(data, Tensor) and data.dim() == 0:
        return data.item()
    return [_numbers(x) for x in data] if isinstance(data, (list, tuple)) else data


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, dict[str, Any], bool]:
    """Device that a call of `.to` names, or None; its other arguments; whether it does not block."""
    target, flags = kwargs.pop("device", None), []
    for arg in args:
        if isinstance(arg, Tensor):
            target, kwargs["dtype"] = arg.device, arg.dtype
        elif isinstance(arg, torch.dtype):
            kwargs["dtype"] = arg
        elif isinstance(arg, bool):
            flags.append(arg)
        elif arg is not None:
            target = arg
    kwargs |= dict(zip(("non_blocking", "copy"), flags, strict=False))
    non_blocking = kwargs.pop("non_blocking", False)
    rest = {key: value for key, value in kwargs.items() if value is not None and value is not False}
    return None if target is None else _device(target), rest, non_blocking


def _move_module(self: torch.nn.Module, cuda_tensor: Any, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`. A CPU parameter cannot become one of the device in place here, so a new one takes its place."""
    for child in self.children():
        child._apply(fn)
    with torch.no_grad():
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            moved = fn(parameter)
            if isinstance(moved, cuda_tensor) == isinstance(parameter, cuda_tensor):
                parameter.data = moved
                continue
            made = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)
            made.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != "inner"})
            self._parameters[name] = made
        for name, buffer in list(self._buffers.items()):
            self._buffers[name] = None if buffer is None else fn(buffer)
    return self
