"""A language model that judges responses, served by an OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from megarl.rewards.endpoint import EndpointSettings, NoAnswer, ScoreServer, ask_all
from megarl.rewards.registry import REWARDS
from megarl.rewards.scoring import Sample
from megarl.system.errors import ConfigError
from megarl.system.processes import write_atomically

log = logging.getLogger(__name__)

_PROMPT = """Judge the last answer of a conversation.

Conversation:
{{ conversation }}

Answer to judge:
{{ response }}
{% if answer %}
Reference answer:
{{ answer }}
{% endif %}
Give a short reason, and a score from {{ low }} (worst) to {{ high }} (best)."""
_OBJECT = re.compile(r"\{[^{}]*\}")
_CALLS = "calls"  # file in the cache that counts calls, with one byte per call
_WARNING = threading.Lock()


class JudgeSettings(EndpointSettings):
    """The judge, its prompt, and the limits of its cost."""

    url: str = Field(description="address of the endpoint up to /v1; /chat/completions is appended")
    model: str = Field(description="name of the model that judges")
    prompt: str | None = Field(
        None,
        description="Jinja template of the message to the judge; it can use the sample (response, prompt, answer, "
        "row, ...), `conversation`, low and high; null: conversation, response, answer, and instructions",
    )
    system: str | None = Field(None, description="system message for the judge")
    low: float = Field(0.0, description="worst score of the judge, which becomes reward 0")
    high: float = Field(10.0, description="best score of the judge, which becomes reward 1")
    structured: bool = Field(
        True, description="request JSON with a schema (response_format); false: the prompt has to ask for JSON"
    )
    max_tokens: PositiveInt = Field(512, description="maximum tokens of a verdict")
    temperature: float = Field(0.0, ge=0, le=2, description="sampling temperature of the judge")
    cache: str | None = Field(
        None, description="folder that keeps verdicts, so that the same response is not judged twice"
    )
    budget: PositiveInt | None = Field(
        None,
        description="maximum calls over all ranks and runs that share the cache, attempts included; further samples "
        "fail",
    )

    def problems(self, path: str) -> list[ConfigError]:
        """Return the errors in the address, the scale, the prompt and the budget."""
        errors = super().problems(path)
        if not self.low < self.high:
            problem = "the judge's scale is empty: its best score is not above its worst score"
            errors.append(ConfigError(problem, where=f"{path}.high", found=self.high, allowed=f"above {self.low:g}"))
        if self.budget is not None and self.cache is None:
            problem = "the budget needs a cache, in which calls are counted, and reward.kwargs.cache is not set"
            errors.append(ConfigError(problem, where=f"{path}.budget", found=self.budget, fix=f"set {path}.cache"))
        try:
            _template(self.prompt or _PROMPT)
        except ValueError as error:
            errors.append(
                ConfigError(f"broken template: {error}", where=f"{path}.prompt", fix="correct the Jinja syntax")
            )
        return errors

    def sample_names(self) -> set[str]:
        """Return the names that the prompt needs in every sample; names that it tests with `is defined` may be
        missing."""
        import jinja2
        from jinja2 import meta, nodes

        environment = jinja2.Environment()
        tree = environment.parse(self.prompt or _PROMPT)
        tests = ((nodes.Test, ("defined", "undefined")), (nodes.Filter, ("default", "d")))
        checks = [check for kind, names in tests for check in tree.find_all(kind) if check.name in names]
        tested = {check.node.name for check in checks if isinstance(check.node, nodes.Name)}
        return meta.find_undeclared_variables(tree) - tested - {"conversation", "low", "high", *environment.globals}


@REWARDS.register(
    "judge",
    settings=JudgeSettings,
    batch=True,
    prepare=JudgeSettings.require_key,
    names=JudgeSettings.sample_names,
)
def judge(samples: list[Sample], **settings: Any) -> list[Any]:
    """Return the judge's score of each sample, from 0 to 1, or the failure of the sample. Raise ConfigError if the
    prompt uses a field that a sample lacks, or the environment variable of the key is not set."""
    options = JudgeSettings(**settings)
    server = options.server(f"{options.url.rstrip('/')}/chat/completions")
    render, deadline = _template(options.prompt or _PROMPT), time.monotonic() + options.deadline_s
    bodies = [_body(options, _rendered(render, sample, options)) for sample in samples]
    # A verdict's name in the cache is a hash of server, scale and request.
    requests = (json.dumps([server.url, options.low, options.high, body], sort_keys=True) for body in bodies)
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16) for text in requests)
    keys = [digest.hexdigest() for digest in digests]
    scores = ask_all(
        list(dict(zip(keys, bodies, strict=True)).items()),
        lambda item: [_verdict(item, server, options, deadline)],
        lambda item: 1,
        options.concurrency,
    )
    of = dict(zip(dict.fromkeys(keys), scores, strict=True))
    return [of[key] for key in keys]


def _verdict(item: tuple[str, dict[str, Any]], server: ScoreServer, options: JudgeSettings, deadline: float) -> float:
    """Return the reward, 0 to 1, from the judge's score for one request; cached scores are not requested again."""
    key, body = item
    cached = None if options.cache is None else Path(options.cache).expanduser() / key[:2] / f"{key}.json"
    score = None if cached is None else _read(cached, options)
    if score is None:
        read = partial(_score, low=options.low, high=options.high)
        score = server.ask(body, read, deadline, partial(_count_call, options))
        if cached is not None:
            try:
                write_atomically(cached, json.dumps({"score": score}))
            except OSError as error:
                with _WARNING:  # only one of several threads that fail at the same time warns
                    _warn_not_kept(str(options.cache), error.strerror or str(error))
    return (score - options.low) / (options.high - options.low)


@cache
def _warn_not_kept(folder: str, why: str) -> None:
    """Warn, once per cause, that verdicts cannot be cached and will be requested again."""
    log.warning("reward.kwargs.cache: cannot save verdicts of the judge in %s: %s", folder, why)


def _count_call(options: JudgeSettings) -> None:
    """Count one call against the budget, if there is one, or raise NoAnswer."""
    if options.budget is None or options.cache is None:
        return
    calls = Path(options.cache).expanduser() / _CALLS
    try:
        left = _append(calls, options.budget)
    except OSError as error:
        problem = error.strerror or error
        raise NoAnswer(f"the file {calls}, which counts the judge's calls, cannot be written: {problem}") from error
    if not left:
        raise NoAnswer(
            f"the judge's budget of {options.budget} calls is used up ({calls} counts them); raise its setting `budget`"
        )


def _append(calls: Path, budget: int) -> bool:
    """Count one call by a byte in the file `calls`, and return whether it is within the budget. Several ranks may read
    the same file size, but appending is atomic, so the position of its byte decides whether a rank may call."""
    calls.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if os.fstat(file).st_size >= budget:
            return False
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR) <= budget
    finally:
        os.close(file)


def _read(kept: Path, options: JudgeSettings) -> float | None:
    """Return the score in a cache file; None if the file is missing or damaged, or the score out of range."""
    try:
        score = float(json.loads(kept.read_text())["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if options.low <= score <= options.high else None


def _score(answer: Any, low: float, high: float) -> float:
    """Return the score in a chat completion; raise ValueError, KeyError, IndexError or TypeError if there is none."""
    text = answer["choices"][0]["message"]["content"]
    # The verdict may be inside other text: the last JSON object with a score counts.
    candidates = [text, *reversed(_OBJECT.findall(text))]
    for candidate in candidates:
        try:
            verdict = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(verdict, dict) and "score" in verdict:
            score = float(verdict["score"])
            if not low <= score <= high:
                raise ValueError(f"the judge's score {score:g} is not between {low:g} and {high:g}")
            return score
    raise ValueError(f"the judge's reply has no JSON object with a score: {text!r:.200}")


def _body(options: JudgeSettings, question: str) -> dict[str, Any]:
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    body: dict[str, Any] = {
        "model": options.model,
        "messages": [*messages, {"role": "user", "content": question}],
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    if options.structured:
        scale = f"from {options.low:g} to {options.high:g}"
        schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "number", "description": scale}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }
        form = {"name": "verdict", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def _template(text: str) -> Any:
    """Return the compiled template; raise ValueError if it is invalid."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the template is invalid: {error.message}") from error


def _rendered(template: Any, sample: Sample, options: JudgeSettings) -> str:
    import jinja2

    text = sample.get("messages")
    turns = [f"{turn['role']}: {turn['content']}" for turn in text] if text else [str(sample["prompt"])]
    scale = {"low": f"{options.low:g}", "high": f"{options.high:g}"}
    try:
        return str(template.render({**sample, "conversation": "\n".join(turns), **scale}))
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the judge's prompt fails on this sample: {error}",
            where="reward.kwargs.prompt",
            allowed=f"conversation, low, high, {', '.join(map(str, sample))}",
            fix="correct the template",
        ) from error
