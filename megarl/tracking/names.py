"""The metrics a person looks at first: how the console, the final table and the report call and print them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["up", "down"] | None


@dataclass(frozen=True)
class Shown:
    """A metric by its full name, its short name in the console, a unit, and which direction is better."""

    name: str
    short: str
    unit: str = ""
    better: Better = None


STEP_LINE = (
    Shown("sft/loss", "loss", better="down"),
    Shown("critic/score/mean", "score", better="up"),
    Shown("actor/pg_loss", "pg"),
    Shown("actor/kl_loss", "kl"),
    Shown("critic/vf_loss", "vf", better="down"),
    Shown("critic/vf_explained_var", "ev", better="up"),
    Shown("actor/entropy", "ent"),
    Shown("response_length/mean", "len"),
    Shown("actor/grad_norm", "grad"),
    Shown("actor/lr", "lr"),
    Shown("perf/throughput", "tok/s"),
    Shown("timing_s/step", "", "s"),
    Shown("val/acc", "val", better="up"),
)

FINAL_TABLE = (
    Shown("val/acc", "validation accuracy", better="up"),
    Shown("critic/score/mean", "score", better="up"),
    Shown("critic/rewards/mean", "reward", better="up"),
    Shown("sft/loss", "SFT loss", better="down"),
    Shown("actor/kl_loss", "KL to reference"),
    Shown("critic/vf_loss", "value loss", better="down"),
    Shown("critic/vf_explained_var", "explained variance", better="up"),
    Shown("actor/entropy", "entropy"),
    Shown("actor/grad_norm", "gradient norm"),
    Shown("response_length/mean", "response length", "tokens"),
    Shown("perf/throughput", "throughput", "tokens/s/device"),
    Shown("perf/mfu", "MFU"),
    Shown("perf/max_memory_gb", "peak memory", "GB"),
    Shown("timing_s/step", "step", "s"),
)


def number(value: float, digits: int = 4) -> str:
    """`digits` significant digits, short.

    >>> [number(x) for x in (0.53124, 12.1, 0.00015, 12345.0, 3.0, 0.0)]
    ['0.5312', '12.1', '1.5e-04', '12.3k', '3', '0']
    """
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1e3:
        return f"{value:.0f}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{digits}g}"
