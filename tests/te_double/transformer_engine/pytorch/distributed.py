"""Collectives of tensor parallelism, random states, and activation recomputation."""

import contextlib

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    def __init__(self):
        self.reset()

    def reset(self):
        self.states_ = {}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        self.states_[name] = seed

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        yield


class activation_recompute_forward(contextlib.AbstractContextManager, contextlib.ContextDecorator):
    def __init__(self, activation_recompute=False, recompute_phase=False):
        super().__init__()

    def __exit__(self, *exc_details):
        pass


def checkpoint(function, *args, **kwargs):
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    recipe = FP8GlobalStateManager.get_fp8_recipe()

    def under_the_recipe(*args, **kwargs):
        with fp8_autocast(recipe is not None, fp8_recipe=recipe):
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(under_the_recipe, *args, use_reentrant=False, **kwargs)


def gathered(x, group):
    """Parts [n, ...] of all ranks, one below the other."""
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scattered_sum(x, group):
    """This rank's part of the sum of `x` [n, ...] over ranks."""
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


def summed(x, group):
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole


def same(x, group):
    return x


class Exchange(torch.autograd.Function):
    """`there(x, group)`, whose gradient is `back(grad, group)`."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group), None, None, None
