"""Names of metrics: the key metrics of console, final table and report, and names that strict trackers accept."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

Better = Literal["up", "down"] | None


@dataclass(frozen=True)
class Shown:
    """How a metric is displayed: name, short name in the console, unit, better direction, and factor to the unit."""

    name: str
    short: str
    unit: str = ""
    better: Better = None
    scale: float = 1.0


#: Metrics of a step line, the most important first. As many as fit into the line are shown.
STEP_LINE = (
    Shown("sft/loss", "loss", better="down"),
    Shown("preference/loss", "loss", better="down"),
    Shown("critic/score/mean", "score", better="up"),
    Shown("rewards/accuracies", "acc", better="up"),
    Shown("actor/kl_loss", "kl"),
    Shown("critic/vf_loss", "vf", better="down"),
    Shown("response_length/mean", "", "tok"),
    Shown("actor/entropy", "ent"),
    Shown("actor/grad_norm", "grad"),
    Shown("perf/throughput", "", "tok/s"),
    Shown("rewards/margins", "margin", better="up"),
    Shown("critic/vf_explained_var", "ev", better="up"),
    Shown("actor/lr", "lr"),
)

FINAL_TABLE = (
    Shown("val/acc", "validation accuracy", better="up"),
    Shown("critic/score/mean", "score", better="up"),
    Shown("critic/rewards/mean", "reward", better="up"),
    Shown("sft/loss", "SFT loss", better="down"),
    Shown("val/loss", "validation loss", better="down"),
    Shown("preference/loss", "preference loss", better="down"),
    Shown("rewards/accuracies", "preferences ranked right", better="up"),
    Shown("rewards/margins", "reward margin", better="up"),
    Shown("actor/kl_loss", "KL to reference"),
    Shown("critic/vf_loss", "value loss", better="down"),
    Shown("critic/vf_explained_var", "explained variance", better="up"),
    Shown("actor/entropy", "entropy"),
    Shown("actor/grad_norm", "gradient norm"),
    Shown("response_length/mean", "response length", "tokens"),
    Shown("perf/throughput", "throughput", "tokens/s/device"),
    Shown("perf/mfu", "MFU", "%", scale=100.0),
    Shown("perf/max_memory_gb", "peak memory", "GB"),
    Shown("timing_s/step", "one step", "s"),
)


def number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits.

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


_FORBIDDEN = re.compile(r"[^\w\-./ ]", re.ASCII)
_MAX_NAME = 200  # maximum number of characters, including the hash; MLflow allows 250
_HASH_BYTES = 3


def safe_name(name: str) -> str:
    """Return `name` with only characters that every tracker allows; trackers use it as a file name or part of an
    address.

    The result consists of parts between single slashes, with ASCII letters, digits and `_-. `; no part is empty or only
    dots. `@` becomes `_at_`, and empty parts are removed. Any other character becomes `_`; then a hash of `name` is
    appended, so that the result does not depend on other names.

    >>> [safe_name(x) for x in ("val/best@8", "val//test/acc", "/a+b/../c", "")]
    ['val/best_at_8', 'val/test/acc', 'a_b/__/c_5ef7af', '_']
    """
    plain = "/".join(part for part in name.replace("@", "_at_").split("/") if part) or "_"
    parts = [part.strip() for part in _FORBIDDEN.sub("_", plain).split("/")]
    safe = "/".join(part if part.strip(".") else "_" * len(part) for part in parts if part) or "_"
    if safe.startswith(".."):
        safe = f"__{safe[2:]}"  # MLflow uses the name as a path, which must stay in its folder
    if safe == plain and len(safe) <= _MAX_NAME:
        return safe
    return _distinct(safe[: _MAX_NAME - 1 - 2 * _HASH_BYTES], name)


class SafeNames:
    """Maps names through `safe_name` so that no two names collide.

    >>> names = SafeNames()
    >>> [names.of(x) for x in ("val/a@b", "val/a_at_b", "val/a@b")]
    ['val/a_at_b', 'val/a_at_b_751eca', 'val/a_at_b']
    """

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the safe name of `name`, with a hash appended if another name already has it."""
        if name not in self._safe:
            safe = safe_name(name)
            self._safe[name] = _distinct(safe, name) if safe in self._safe.values() else safe
        return self._safe[name]


def _distinct(safe: str, name: str) -> str:
    return f"{safe}_{hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=_HASH_BYTES).hexdigest()}"
