"""The assumptions of `megarl plan`'s formulas, by name; `--assume NAME=VALUE` sets each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from megarl.system.errors import ConfigError, close_matches

T = TypeVar("T")

#: Assumptions (also those of `megarl simulate`) that must not be 0: shares, in addition to names that end with _share,
#: and other numbers.
_SHARES = frozenset(("train_mfu", "prefill_mfu", "server_memory", "kept_groups", "usable_memory"))
_DIVISORS = frozenset(("disk_gb_s", "memory_tb_s", "peak_tflops", "link_gbit", "link_times"))

#: Assumptions for which 0 stands for a value derived from the recipe.
OF_ZERO = {
    "prompt_tokens": "0: half of data.max_prompt_tokens",
    "prompt_patches": "0: half of the maximum number of patches of a prompt's images",
    "mean_tokens": "0: a quarter of the longest response, or all of it with rollout.sampling.ignore_eos",
}


def assume(base: T, values: Mapping[str, str], where: str = "--assume") -> T:
    """Return a copy of the dataclass `base` with the numbers that `values` gives as text, by name of the field.

    Raises:
        ConfigError: a name is not a field of `base`, or a number is invalid for its field.
    """
    names = [field.name for field in fields(base)]  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for name, text in values.items():
        if name not in names:
            near = close_matches(name, names)
            fix = f"did you mean {near[0]}?" if near else None
            raise ConfigError("no assumption has this name", where=where, found=name, allowed=names, fix=fix)
        changed[name] = _number(name, text, where)
    return replace(base, **changed)  # type: ignore[type-var]


def pairs(texts: Sequence[str], where: str = "--assume") -> dict[str, str]:
    """Split `name=value` texts into a mapping. Raise ConfigError if a text has no `=`."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("an assumption has no value", where=where, found=text, allowed="NAME=VALUE")
        values[name] = value
    return values


def _number(name: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name == "overlap_share":  # the only share that may be 0, with which no reduction is hidden
        good, allowed = 0 <= value <= 1, "a number from 0 to 1"
    elif name in _SHARES or name.endswith("_share"):
        good, allowed = 0 < value <= 1, "a number above 0, at most 1"
    elif name in _DIVISORS:
        good, allowed = 0 < value < math.inf, "a number above 0"
    else:
        good, allowed = 0 <= value < math.inf, "a number from 0 on"
    if not good:
        raise ConfigError("the value of an assumption is invalid", where=f"{where} {name}", found=text, allowed=allowed)
    return value


@dataclass(frozen=True)
class PlanAssumptions:
    """Reached shares of the hardware's peak rates, fixed times, and values that a recipe does not set. The defaults are
    for GPUs."""

    gemm_share: float = 0.6  # share of the peak that large matrix products reach
    expert_share: float = 0.4  # share of the peak that the products of experts reach
    gemm_half_rows: float = 256.0  # rows with which a matrix product reaches half of gemm_share or expert_share
    # fixed milliseconds of a layer's forward pass over a micro-batch; the backward pass takes twice that
    layer_ms: float = 0.1
    # further fixed milliseconds of a layer's router and experts in a forward pass, however many they are
    experts_ms: float = 0.07
    element_bytes: float = 20.0  # bytes moved per element kept for the backward pass, in forward and backward together
    # fp32 FLOPs, in forward and backward together, per element kept for the backward pass: an element takes the time of
    # these FLOPs or that of its bytes (`element_bytes`), whichever is longer
    element_flops: float = 0.0
    logit_elements: float = 1.1  # work on a logit, in units of the work on an element kept for the backward pass
    memory_share: float = 0.6  # share of the memory's bandwidth that is reached
    decode_ms: float = 3.0  # fixed milliseconds of a decoding step
    decode_layer_ms: float = 0.0  # fixed milliseconds per layer of a decoding step
    decode_row_us: float = 0.0  # fixed microseconds per running sample of a decoding step
    decode_expert_ms: float = 0.0  # fixed milliseconds of a decoding step for each expert of each layer on a rank
    node_share: float = 0.7  # share of the links inside a machine that is reached
    scatter_share: float = 1.0  # rate of gathers and scatters over a link, as a share of the rate of sums over it
    node_hop_us: float = 3.0  # latency of one step of a ring collective inside a machine
    link_share: float = 0.8  # share of the link to other machines that is reached
    hop_us: float = 15.0  # latency of one step of a ring collective between machines
    # share of the gradients' reduction that the backward pass hides, with overlap_grad_reduce
    overlap_share: float = 0.8
    host_share: float = 0.8  # share of the link to host memory that is reached
    server_memory: float = 0.85  # share of a GPU's free memory that a server takes, if the recipe does not set it
    server_push_ms: float = 5.0  # time of the calls to a server for new weights
    # share of the network's bandwidth that a weight update from trainer shards to server shards reaches
    shard_share: float = 0.85
    shard_fixed_s: float = 0.09  # fixed seconds of such an update, whatever its size: calls, the first and last round
    push_fixed_s: float = 0.5  # fixed seconds of a weight update, whatever its size
    step_s: float = 0.5  # seconds of a step outside all phases: metrics, files, Python
    disk_gb_s: float = 2.0  # GB/s at which a machine writes a checkpoint
    prompt_tokens: float = 0.0  # mean tokens per prompt; 0: half of the longest
    prompt_patches: float = 0.0  # mean image patches per prompt; 0: half of the maximum
    mean_tokens: float = 0.0  # mean tokens per response; 0: a quarter of the longest, or all of it with ignore_eos
    sigma: float = 0.8  # standard deviation of the logarithm of a response's tokens
    kept_groups: float = 0.6  # share of groups that dynamic sampling keeps
    usable_memory: float = 0.9  # share of a device's memory that the search may fill

    @classmethod
    def of(cls, *, gpu: bool) -> PlanAssumptions:
        """Return the default assumptions for GPUs, or for CPUs, which are fitted to measured steps."""
        return cls() if gpu else CPU


CPU = PlanAssumptions(
    gemm_share=1.0,
    expert_share=1.0,
    gemm_half_rows=5.0,
    layer_ms=0.85,
    experts_ms=1.0,
    element_bytes=0.0,
    element_flops=410.0,
    logit_elements=4.5,
    memory_share=0.5,
    decode_ms=0.0,
    decode_layer_ms=0.3,
    decode_row_us=20.0,
    decode_expert_ms=0.7,
    node_share=0.2,
    scatter_share=0.3,
    node_hop_us=450.0,
    link_share=0.8,
    hop_us=300.0,
    push_fixed_s=0.05,
    step_s=0.01,
    disk_gb_s=0.445,
)
