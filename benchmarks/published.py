"""Published figures of others and ours beside them: the same work on the same number of GPUs of the same kind.

Tokens per second and GPU are those of whole steps: prompts and responses of all samples, over all seconds of a step and
all GPUs, as NeMo-RL counts them. Missing measurements have no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.yamlio import read_yaml

FILE = Path(__file__).parent / "published.yaml"
NOT_MEASURED = "not measured"
#: Keys that choose how the work is done, but change neither the work nor its precision (unlike rollout.dtype, sync.fp8
#: and perhaps rollout.sglang.extra_args). A key that ends in a dot stands for all keys below it.
_HOW = (
    *("actor.parallel.", "actor.engine.", "reference.parallel.", "rollout.parallel.", "cluster.", "launch."),
    *("rollout.engine", "rollout.max_running", "rollout.max_prefill_tokens", "rollout.cuda_graphs"),
    *(f"rollout.sglang.{key}" for key in ("python", "urls", "api_key_env", "host", "gpus", "servers", "colocated")),
    *(f"rollout.sglang.{key}" for key in ("tp_size", "ep_size", "dp_size", "memory_fraction", "max_total_tokens")),
    *(f"rollout.sglang.{key}" for key in ("attention_backend", "max_concurrency", "start_timeout_s")),
    *(f"rollout.sglang.{key}" for key in ("request_timeout_s", "health_timeout_s", "max_restarts")),
    *(f"sync.{key}" for key in ("transport", "bucket_mb", "pause", "verify", "timeout_s", "address", "folder")),
)


@dataclass(frozen=True)
class Figure:
    """One published figure.

    Attributes:
        system: program and version.
        policy: `on`, or off by how many steps.
        gpu: a part of the GPUs' name.
        gpus: number of GPUs of the run, including those for generation.
        mean_tokens: mean tokens per sample, according to the page.
        case: our benchmark case with the same work.
    """

    system: str
    published: str
    page: str
    model: str
    policy: str
    gpu: str
    gpus: int
    tokens_per_s_per_gpu: float
    step_s: float
    mean_tokens: int
    layout: str
    recipe: str
    case: str

    def ours(self, history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the fastest line of the newest commit that has measured the same work on such GPUs."""
        same = [line for line in history if self._is_same(line)]
        newest = [line for line in same if line["commit"] == same[-1]["commit"]]
        return max(newest, key=per_gpu, default=None)

    def _is_same(self, line: Mapping[str, Any]) -> bool:
        kinds = line["machine"]["gpus"]
        return (
            line["case"] == self.case
            and line["dtype"] == "bf16"
            and line.get("gpus") == self.gpus
            and bool(kinds)
            and all(self.gpu in kind for kind in kinds)
            and all(_is_how(override) for override in line["overrides"])
        )


def _is_how(override: str) -> bool:
    """Return whether `key=value` changes only how the work is done; the key may also be a whole section."""
    key = override.partition("=")[0]
    return any(key in (how, how.removesuffix(".")) or (how.endswith(".") and key.startswith(how)) for how in _HOW)


def per_gpu(line: Mapping[str, Any]) -> float:
    """Return tokens per second and GPU from a line of the history; 0 without GPUs."""
    return line["tokens_per_s"] / line["gpus"] if line.get("gpus") else 0.0


def figures() -> list[Figure]:
    """Return the figures of published.yaml."""
    data = read_yaml(FILE).data
    made = []
    for given in data["figures"]:
        source = data["sources"][given["source"]]
        named = {key: source[key] for key in ("system", "published", "page")}
        made.append(Figure(**named, **{key: value for key, value in given.items() if key != "source"}))
    return made


COLUMNS = ("published by", "model", "policy", "GPUs", "tokens/s/GPU", "ours", "ours / theirs")


def rows(history: Sequence[Mapping[str, Any]], cases: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """Return a row for each figure, in the order of COLUMNS; `cases`: only of these cases of ours."""
    made: list[tuple[str, ...]] = []
    for figure in figures():
        if cases is not None and figure.case not in cases:
            continue
        line = figure.ours(history)
        ours = (NOT_MEASURED, "")
        if line is not None:
            ours = (f"{per_gpu(line):,.0f} ({line['commit']})", f"{per_gpu(line) / figure.tokens_per_s_per_gpu:.2f}")
        theirs = f"{figure.tokens_per_s_per_gpu:,.0f}"
        gpus = f"{figure.gpus} x {figure.gpu}"
        made.append((f"{figure.system}, {figure.published}", figure.model, figure.policy, gpus, theirs, *ours))
    return made
