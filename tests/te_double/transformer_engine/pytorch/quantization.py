"""The state of FP8: which recipe counts where. `rounded` does to a tensor what a cast to FP8 and back does."""

import contextlib
import math
from typing import ClassVar

import torch


class FP8GlobalStateManager:
    _recipe = None
    used: ClassVar[set[str]] = set()  # of the double: recipes that linear layers have computed under

    @classmethod
    def is_fp8_enabled(cls):
        return cls._recipe is not None

    @classmethod
    def get_fp8_recipe(cls):
        return cls._recipe


@contextlib.contextmanager
def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    before = FP8GlobalStateManager._recipe
    FP8GlobalStateManager._recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager._recipe = before


@contextlib.contextmanager
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    raise NotImplementedError("parameters in FP8")
    yield


def is_fp8_available(return_reason=False):
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason=False):
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason=False):
    return (True, "") if return_reason else True


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax().clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


def rounded(x):
    """`x` as FP8 holds it, where a recipe counts. One scale for the whole tensor, whatever the recipe."""
    recipe = FP8GlobalStateManager._recipe
    if recipe is None:
        return x
    kinds = {"delayed": recipe.delayed(), "blockwise": recipe.float8_block_scaling(), "mxfp8": recipe.mxfp8()}
    FP8GlobalStateManager.used.update(kind for kind, is_it in kinds.items() if is_it)
    if math.prod(x.shape[:-1]) % 8 or x.shape[-1] % 16:
        raise AssertionError(
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last "
            f"dimension to be divisible by 16, but got tensor with dims={list(x.size())}"
        )
    return _Rounded.apply(x)
