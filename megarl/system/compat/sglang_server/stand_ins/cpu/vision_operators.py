"""Makes a CUDA build of torchvision importable beside a CPU build of torch: its operator library does not load there,
and importing needs the declarations of two operators. Nothing that servers call uses them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare torchvision's operators to torch, unless torchvision has declared them."""
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(package.origin).with_name("_C.so")))
    except OSError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare()
