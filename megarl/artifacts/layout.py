"""Problems of splitting a model by a layout, for the checks of a recipe and again when a model is built."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.system.errors import ConfigError, count


def layout_problems(key: str, parallel: ParallelConfig, facts: ModelFacts) -> list[ConfigError]:
    """Return every problem of splitting a model by a layout; `key` is the layout's key, such as `actor.parallel`."""
    interleaving = interleaving_problem(key, parallel)
    problems = [sequence_problem(key, parallel), tensor_problem(key, parallel, facts)]
    problems += [pipeline_problem(key, parallel, facts), context_problem(key, parallel, facts)]
    return [problem for problem in (interleaving, *problems, *expert_problems(key, parallel, facts)) if problem]


def makes_replicas(devices: int, parallel: ParallelConfig) -> bool:
    """Return whether this number of workers divides into whole replicas, including whole replicas of experts."""
    experts = parallel.expert_tp * parallel.ep * parallel.pp
    return devices % parallel.model_parallel_size == 0 and devices % experts == 0


def interleaving_problem(key: str, parallel: ParallelConfig) -> ConfigError | None:
    """Return an error for virtual pipeline chunks without pipeline stages, else None."""
    if parallel.vpp is None or parallel.pp > 1:
        return None
    return ConfigError(
        "virtual pipeline chunks need more than one pipeline stage",
        where=f"{key}.vpp",
        found=parallel.vpp,
        allowed="null with pp 1",
        fix=f"set {key}.pp to 2 or more, or {key}.vpp=null",
    )


def sequence_problem(key: str, parallel: ParallelConfig) -> ConfigError | None:
    """Return an error for sequence parallelism without tensor parallelism, else None."""
    if not parallel.sp or parallel.tp > 1:
        return None
    return ConfigError(
        "sequence parallelism needs several tensor-parallel ranks, but tp is 1",
        where=f"{key}.sp",
        found=True,
        allowed="false with tp 1",
        fix=f"set {key}.tp to 2 or more, or {key}.sp=false",
    )


def context_problem(key: str, parallel: ParallelConfig, facts: ModelFacts) -> ConfigError | None:
    """Return an error if context-parallel ranks cannot share the heads of recurrent layers evenly, else None."""
    widths: dict[str, int] = {}
    for mixer in facts.mixer_counts:
        widths |= mixer.context_widths()
    tp, cp = parallel.tp, parallel.cp
    bad = [f"{width} {name}" for name, width in widths.items() if width % (tp * cp)]
    if cp == 1 or not bad:
        return None
    fit = [size for size in divisors(math.gcd(*widths.values())) if all(w % (tp * size) == 0 for w in widths.values())]
    return ConfigError(
        f"tp {tp} * cp {cp} does not divide the model's {', '.join(bad)}; context-parallel ranks share these heads, "
        "because each head reads whole sequences in order",
        where=f"{key}.cp",
        found=cp,
        allowed=fit or [1],
        fix=f"set {key}.cp to {max((size for size in fit if size <= cp), default=1)}",
    )


def tensor_widths(facts: ModelFacts) -> dict[str, int]:
    """Return the widths that tensor parallelism splits, by name."""
    widths: dict[str, int] = {}
    for mixer in facts.mixer_counts:
        widths |= mixer.widths()
    widths.setdefault("attention heads", facts.heads)  # Megatron divides their number even if no layer has heads
    dense = facts.dense_ffn if facts.is_moe else facts.ffn
    return {**widths, "feed-forward width": dense} if dense else widths


def tensor_sizes(facts: ModelFacts) -> list[int]:
    """Return the tensor-parallel sizes that divide every width of `tensor_widths`, ascending."""
    widths = tensor_widths(facts).values()
    return [size for size in divisors(facts.heads) if all(width % size == 0 for width in widths)]


def tensor_problem(key: str, parallel: ParallelConfig, facts: ModelFacts) -> ConfigError | None:
    """Return an error if tensor parallelism does not divide the heads or widths, else None."""
    tp, widths = parallel.tp, tensor_widths(facts)
    bad = {name: width for name, width in widths.items() if width % tp}
    if not bad:
        return None
    fit = tensor_sizes(facts)
    note = " (a key/value head is never copied to several ranks)" if facts.kv_heads < tp else ""
    return ConfigError(
        f"tp {tp} does not divide the model's " + ", ".join(f"{w} {n}" for n, w in bad.items()) + note,
        where=f"{key}.tp",
        found=tp,
        allowed=fit,
        fix=f"set {key}.tp to {max((size for size in fit if size <= tp), default=1)}",
    )


def pipeline_problem(key: str, parallel: ParallelConfig, facts: ModelFacts) -> ConfigError | None:
    """Return an error if a pipeline chunk would have no layers, if all chunks together would not have the model's
    layers, or if a first or last stage is set without pipeline stages.
    """
    chunks = parallel.pp * (parallel.vpp or 1)
    ends = {name: getattr(parallel, name) for name in ("first_stage_layers", "last_stage_layers")}
    ends = {name: count for name, count in ends.items() if count is not None}
    if ends and parallel.pp == 1:
        name, count = ends.popitem()
        return ConfigError(
            f"a model without pipeline stages has no first or last stage, but {name} is set",
            where=f"{key}.{name}",
            found=count,
            allowed="null with pp=1",
            fix=f"remove {key}.{name}, or set {key}.pp",
        )
    counts = parallel.chunk_layers(facts.layers)
    if chunks <= facts.layers and min(counts) > 0 and sum(counts) == facts.layers:
        return None
    if ends and chunks <= facts.layers:
        return ConfigError(
            f"{facts.layers} layers cannot be split into {chunks} chunks with these ends",
            where=f"{key}.{next(iter(ends))}",
            found=", ".join(f"{name}={count}" for name, count in ends.items()),
            allowed="every chunk has at least one layer, and all together have the model's layers",
            fix=f"remove {' and '.join(f'{key}.{name}' for name in ends)}",
        )
    name = "vpp" if parallel.vpp and parallel.pp <= facts.layers else "pp"
    most = facts.layers // parallel.pp if name == "vpp" else facts.layers
    return ConfigError(
        f"{facts.layers} layers are fewer than {chunks} pipeline chunks",
        where=f"{key}.{name}",
        found=getattr(parallel, name),
        allowed=f"at most {most}",
        fix=f"set {key}.{name} to {most} or less",
    )


def expert_problems(key: str, parallel: ParallelConfig, facts: ModelFacts) -> list[ConfigError]:
    """Return the errors for experts that do not split evenly or do not exist."""
    if not facts.is_moe:
        settings = {"ep": parallel.ep if parallel.ep > 1 else None, "etp": parallel.etp}
        return [
            ConfigError(
                f"{name} splits experts, but {facts.model_type} has none",
                where=f"{key}.{name}",
                found=value,
                allowed="1" if name == "ep" else "null",
                fix=f"set {key}.{name}={'1' if name == 'ep' else 'null'}",
            )
            for name, value in settings.items()
            if value is not None
        ]
    etp = parallel.expert_tp
    if facts.experts % parallel.ep:
        return [
            ConfigError(
                f"{facts.experts} experts cannot be split evenly over ep {parallel.ep}",
                where=f"{key}.ep",
                found=parallel.ep,
                allowed=divisors(facts.experts),
            )
        ]
    if facts.ffn % etp:
        return [
            ConfigError(
                f"the expert width {facts.ffn} cannot be split evenly over etp {etp}",
                where=f"{key}.etp",
                found=etp,
                allowed=[size for size in divisors(facts.ffn) if size <= 64],
            )
        ]
    return []


DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Group sizes for which DeepEP, from version 1.2.1 on, has settings (`Buffer.get_dispatch_config`)."""
#: Processes per machine that DeepEP needs for a group of more processes, and its limit of experts per token.
_DEEPEP_MACHINE, _DEEPEP_CHOICES = 8, 32


def dispatch_problem(
    key: str, parallel: ParallelConfig, facts: ModelFacts, dtype: str, here: int
) -> ConfigError | None:
    """Return an error if DeepEP cannot bring tokens to the experts, else None.

    Args:
        dtype: value of `model.dtype`.
        here: processes per machine, with consecutive ranks.
    """
    ranks, choices = parallel.expert_tp * parallel.ep, parallel.expert_tp * facts.experts_per_token
    group = f"the experts are shared by {count(ranks, 'process')} (etp {parallel.expert_tp} * ep {parallel.ep})"
    inside = here % ranks == 0 if ranks <= _DEEPEP_MACHINE else here == _DEEPEP_MACHINE
    obstacle: tuple[str, object, str | Iterable[object]] | None = None
    if not facts.is_moe:
        obstacle = "the model has no experts", facts.model_type, "a mixture of experts"
    elif dtype != "bf16":
        obstacle = "its kernels support bf16 only", dtype, "model.dtype=bf16"
    elif ranks not in DEEPEP_RANKS:
        obstacle = group, ranks, DEEPEP_RANKS
    elif not inside:
        whole = f"a multiple of {ranks}" if ranks <= _DEEPEP_MACHINE else f"{_DEEPEP_MACHINE}"
        obstacle = f"{group} on machines with {here} processes", here, f"{whole} processes on each machine"
    elif facts.hidden % 8:
        obstacle = "it moves blocks of 8 numbers", f"hidden size {facts.hidden}", "a multiple of 8"
    elif choices > _DEEPEP_CHOICES:
        obstacle = "a token has too many experts", f"{choices} (experts of a token * etp)", f"at most {_DEEPEP_CHOICES}"
    if obstacle is None:
        return None
    reason, value, allowed = obstacle
    return ConfigError(
        f"DeepEP cannot bring tokens to these experts: {reason}",
        where=f"{key}.dispatch",
        found=value,
        allowed=allowed,
        fix=f"set {key}.dispatch=alltoall",
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return low + [number // value for value in reversed(low) if value * value != number]
