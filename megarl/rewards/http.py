"""Scores of a server: a reward model that is served, or any program that scores samples."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import Field, PositiveInt

from megarl.rewards.endpoint import EndpointSettings, ask_all
from megarl.rewards.registry import KWARGS, REWARDS
from megarl.rewards.scoring import Sample
from megarl.system.errors import ConfigError


class HttpSettings(EndpointSettings):
    """The form of requests to a server that scores samples."""

    protocol: Literal["json", "sglang"] = Field(
        "json",
        description="json: posts {samples: [{FIELD: value}]} and reads {scores: [...]}, a number or {overall, part, "
        "...} of each sample; sglang: /classify of SGLang's server of a reward model (--is-embedding)",
    )
    fields: list[str] = Field(
        ["prompt", "response", "answer"], min_length=1, description="what json sends of a sample; `row` has all columns"
    )
    end: str = Field("", description="text after prompt and response (sglang), such as the model's end token")
    batch_size: PositiveInt = Field(32, le=65536, description="samples of one request")

    def posts_to_url(self) -> bool:
        """Return whether `url` is the whole address; SGLang's goes on with /classify."""
        return self.protocol == "json"

    def sample_names(self) -> list[str]:
        """Return the names that samples must have."""
        return self.fields if self.protocol == "json" else []


@REWARDS.register(
    "http",
    settings=HttpSettings,
    batch=True,
    prepare=HttpSettings.require_key,
    names=HttpSettings.sample_names,
)
def http(samples: list[Sample], **settings: Any) -> list[Any]:
    """Return the server's score of each sample, or why it has none.

    Args:
        samples: as reward functions get them.
        settings: those of `HttpSettings`.

    Raises:
        ConfigError: samples have no such field, or the variable with the key is not set.
    """
    options = HttpSettings(**settings)
    url = options.url.rstrip("/")
    if options.protocol == "sglang" and not url.endswith("/classify"):
        url += "/classify"
    server, deadline = options.server(url), time.monotonic() + options.deadline_s
    size = options.batch_size
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]

    def ask(some: list[Sample]) -> list[Any]:
        if options.protocol == "sglang":
            texts = [f"{sample['prompt']}{sample['response']}{options.end}" for sample in some]
            return server.ask({"text": texts}, lambda answer: _sglang(answer, len(some)), deadline)
        body = {"samples": [{name: _field(sample, name) for name in options.fields} for sample in some]}
        return server.ask(body, lambda answer: _scores(answer, len(some)), deadline)

    return ask_all(parts, ask, len, options.concurrency)


def _field(sample: Sample, name: str) -> Any:
    if name not in sample:
        raise ConfigError(
            f"samples have no {name!r}", where=f"{KWARGS}.fields", found=name, allowed=sorted(map(str, sample))
        )
    return sample[name]


def _scores(answer: Any, count: int) -> list[Any]:
    """Return the scores in a server's answer; ValueError where they are none."""
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"{answer!r:.200}"
        raise ValueError(f"{found} for {count} samples")
    return scores


def _sglang(answer: Any, count: int) -> list[float]:
    """Return the scores in an answer of SGLang, one object with `embedding` per text."""
    given = _scores(answer if isinstance(answer, list) else [answer], count)
    scores = [one["embedding"] for one in given]
    if any(not isinstance(score, list) or len(score) != 1 for score in scores):
        raise ValueError(f"the served model gives {len(scores[0])} numbers, and a reward model gives one")
    return [score[0] for score in scores]
