"""Stand-in for torchvision, which SGLang imports only for multimodal models: every name exists, and none works."""

from __future__ import annotations

import sys
import types
from typing import Any

__version__ = "0.0"
_MODULES = ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Absent(metaclass=_AnyName):
    """A stand-in for every name in torchvision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("torchvision is not installed: this server is for text models")


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


for _name in _MODULES:
    _module = _Module(f"{__name__}.{_name}")
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
