"""Scores from a server: a served reward model, or any program that scores samples."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import Field, PositiveInt

from megarl.rewards.endpoint import EndpointSettings, ask_all
from megarl.rewards.registry import KWARGS, REWARDS
from megarl.rewards.scoring import Sample
from megarl.system.errors import ConfigError


class HttpSettings(EndpointSettings):
    """The format of requests to a server that scores samples."""

    protocol: Literal["json", "sglang"] = Field(
        "json",
        description="json: post {samples: [{FIELD: value}]} and read {scores: [...]}, with a number or {overall, "
        "part, ...} per sample; sglang: /classify of an SGLang server with a reward model (--is-embedding)",
    )
    fields: list[str] = Field(
        ["prompt", "response", "answer"],
        min_length=1,
        description="fields of a sample that json sends; `row` has all columns",
    )
    end: str = Field("", description="text appended after prompt and response (sglang), such as the model's end token")
    batch_size: PositiveInt = Field(32, le=65536, description="samples per request")

    def posts_to_url(self) -> bool:
        """Return whether requests go to `url` itself; for SGLang /classify is appended."""
        return self.protocol == "json"

    def sample_names(self) -> list[str]:
        """Return the fields that `json` requests contain, and that every sample must therefore have; else none."""
        return self.fields if self.protocol == "json" else []


@REWARDS.register(
    "http",
    settings=HttpSettings,
    batch=True,
    prepare=HttpSettings.require_key,
    names=HttpSettings.sample_names,
)
def http(samples: list[Sample], **settings: Any) -> list[Any]:
    """Return the server's score of each sample, or the failure of the sample. Raise ConfigError if samples lack a
    field, or the environment variable of the key is not set."""
    options = HttpSettings(**settings)
    url = options.url.rstrip("/")
    if options.protocol == "sglang" and not url.endswith("/classify"):
        url += "/classify"
    server, deadline = options.server(url), time.monotonic() + options.deadline_s
    size = options.batch_size
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]

    def ask(part: list[Sample]) -> list[Any]:
        if options.protocol == "sglang":
            texts = [f"{sample['prompt']}{sample['response']}{options.end}" for sample in part]
            return server.ask({"text": texts}, lambda answer: _sglang(answer, len(part)), deadline)
        body = {"samples": [{name: _field(sample, name) for name in options.fields} for sample in part]}
        return server.ask(body, lambda answer: _scores(answer, len(part)), deadline)

    return ask_all(parts, ask, len, options.concurrency)


def _field(sample: Sample, name: str) -> Any:
    if name not in sample:
        raise ConfigError(
            f"samples have no field {name!r}",
            where=f"{KWARGS}.fields",
            found=name,
            allowed=sorted(map(str, sample)),
            fix="correct or remove the name",
        )
    return sample[name]


def _scores(answer: Any, count: int) -> list[Any]:
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list) or len(scores) != count:
        reply = f"{len(scores)} scores" if isinstance(scores, list) else f"{answer!r:.200}"
        raise ValueError(f"the server returned {reply} for {count} samples; allowed: a list with one score per sample")
    return scores


def _sglang(answer: Any, count: int) -> list[float]:
    """Return the scores in an SGLang reply, which has one object with `embedding` per text."""
    given = _scores(answer if isinstance(answer, list) else [answer], count)
    scores = [entry["embedding"] for entry in given]
    for score in scores:
        if not isinstance(score, list) or len(score) != 1:
            returned = f"{len(score)} numbers" if isinstance(score, list) else f"{score!r:.80}"
            raise ValueError(
                f"the served model returns {returned} for a text, but a reward model returns a list of one number: "
                "serve a reward model"
            )
    return [score[0] for score in scores]
