"""Which tensors of a GPU go to Triton's kernels; their numbers are in test_layers_gpu.py and test_logits_gpu.py."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megarl import kernels
from megarl.kernels import gpu

KERNELS = object()


@pytest.mark.parametrize(
    ("dtypes", "is_cuda", "expected"),
    [
        ((torch.bfloat16, torch.bfloat16), True, KERNELS),
        ((torch.float32,), True, KERNELS),
        ((torch.float32,), False, None),
        ((torch.float64,), True, None),
        ((torch.bfloat16, torch.float32), True, None),
    ],
)
def test_tensors_of_one_narrow_dtype_go_to_kernels(monkeypatch, dtypes, is_cuda, expected):
    monkeypatch.setattr(gpu, "triton_kernels", lambda: gpu.Kernels(layers=KERNELS))
    assert gpu.layer_kernels(*(SimpleNamespace(dtype=dtype, is_cuda=is_cuda) for dtype in dtypes)) is expected


def test_without_triton_there_are_none_and_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("layers_gpu", "logits_gpu"):
        monkeypatch.delattr(kernels, name, raising=False)
        monkeypatch.delitem(sys.modules, f"megarl.kernels.{name}", raising=False)
    found = gpu.triton_kernels.__wrapped__
    with pytest.warns(UserWarning, match="torch operations compute"):
        assert found() == gpu.Kernels()
