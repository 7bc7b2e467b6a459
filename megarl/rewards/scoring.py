"""Calls a reward function and validates its results: a finite number per sample, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.rewards.registry import REWARDS, Scorer
from megarl.system.errors import ConfigError, describe, shortened
from megarl.system.imports import location
from megarl.system.plain import Malformed, cut, flag, number, short, text

Sample = dict[str, Any]
Result = dict[str, Any]
ERROR_KEY = "_error"  # marks a result that `on_error` supplied
EXTRACTED_KEY = "extracted"  # the only part that may be text: the answer read from the response, for majority votes
LARGEST = 1e15  # largest absolute value of a score and its parts
# limits of a result: number of parts, characters of a name and of the extracted answer
MAX_PARTS, MAX_NAME, MAX_EXTRACTED = 1000, 200, 4096


@dataclass(frozen=True)
class ScoringFailure:
    """The reason why a sample has no score.

    Attributes:
        where: line of the user's file.
        collateral: another sample is to blame.
        fix: a remedy; None: the usual one.
    """

    reason: str
    where: str | None = None
    collateral: bool = False
    fix: str | None = None


Outcome = Result | ScoringFailure


def score(scorer: Scorer, samples: list[Sample], stop_at_failure: bool) -> Iterator[tuple[int, Outcome]]:
    """Score `samples`; yield (index, outcome) as soon as it is known, each index once.

    With `stop_at_failure`, end after the first failure. Raise ConfigError if a built-in reward cannot score with its
    configuration.
    """
    if scorer.mode == "batch":
        yield from _score_batch(scorer, list(range(len(samples))), samples, stop_at_failure)
        return
    for index, sample in enumerate(samples):
        outcome = _guard(scorer, partial(_call_one, scorer, sample))
        yield index, outcome
        if stop_at_failure and isinstance(outcome, ScoringFailure):
            return


def _score_batch(
    scorer: Scorer, indices: list[int], samples: list[Sample], stop_at_failure: bool
) -> Iterator[tuple[int, Outcome]]:
    """Score all samples with one call. If it raises, calls per sample find the culprits; one call scores the others."""
    raised, results = _call_batch(scorer, [samples[i] for i in indices])
    if raised is None:
        yield from zip(indices, results, strict=True)
        return
    blamed = []
    for index in indices if len(indices) > 1 else []:
        alone, _ = _call_batch(scorer, [samples[index]])
        if alone is not None:
            blamed.append(index)
            yield index, alone
            if stop_at_failure:
                return
    if not blamed:
        for position, index in enumerate(indices):
            many = len(indices) > 1
            reason = f"{raised.reason} (no single sample, only this batch of {len(indices)})" if many else raised.reason
            yield index, ScoringFailure(reason, raised.where, collateral=position > 0)
        return
    rest = [i for i in indices if i not in set(blamed)]
    if rest:
        yield from _score_batch(scorer, rest, samples, stop_at_failure)


def _call_batch(scorer: Scorer, samples: list[Sample]) -> tuple[ScoringFailure | None, list[Outcome]]:
    """Return (None, outcome of each sample), or (failure, []) if the call itself failed."""
    returned: list[Any] = []

    def call() -> None:
        values = scorer.function(samples, **scorer.kwargs)
        if isinstance(values, dict | set | frozenset | str | bytes) or not hasattr(values, "__len__"):
            raise _Refused(
                f"the function returned {shortened(repr(values), 80)} for {len(samples)} samples instead of a list"
            )
        if len(values) != len(samples):
            raise _Refused(f"the function returned {len(values)} results for {len(samples)} samples")
        returned.extend(values)

    failure = _guard(scorer, call)
    if isinstance(failure, ScoringFailure):
        return failure, []
    return None, [
        value if isinstance(value, ScoringFailure) else _guard(scorer, partial(_checked, value)) for value in returned
    ]


def _call_one(scorer: Scorer, sample: Sample) -> Result:
    return _checked(scorer.function(sample, **scorer.kwargs))


class _Refused(Exception):
    """The function returned an invalid reward."""


def _guard(scorer: Scorer, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except _Refused as error:
        return ScoringFailure(str(error))
    # catches SystemExit and KeyboardInterrupt too, which only the function can raise: no signal raises them in this
    # thread
    except BaseException as error:
        if isinstance(error, ConfigError) and scorer.name in REWARDS.names():
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        reason = f"the function raised {describe(error)}"
        return ScoringFailure(f"{reason}{notes}", location(error, scorer.file))


def _checked(value: Any) -> Result:
    """Return what a reward function returned, a number or a dict with `overall`, as a dict of floats.

    Text is allowed under `extracted`. _Refused is raised for anything else, such as a number that is not finite.
    """
    if not isinstance(value, dict):
        return {"overall": _finite(value, "")}
    if "overall" not in value:
        raise _Refused(f"the function returned a dict without 'overall': {shortened(repr(value), 80)}")
    if len(value) > MAX_PARTS:
        raise _Refused(f"the function returned {len(value)} parts; allowed: at most {MAX_PARTS}")
    result: Result = {}
    for name, part in value.items():
        if name == EXTRACTED_KEY:  # a number votes as text: as a number, 0 would count as no vote
            is_text = part is None or isinstance(part, str)
            result[name] = cut(part or "", MAX_EXTRACTED) if is_text else str(_finite(part, f" for part {name!r}"))
        elif len(str(name)) > MAX_NAME:
            raise _Refused(
                f"the function returned a part with a name of {len(str(name))} characters; allowed: at most {MAX_NAME}"
            )
        else:
            result[str(name)] = _finite(part, f" for part {name!r}")
    return result


def _finite(value: Any, part: str) -> float:
    if value is None or isinstance(value, (str, bytes, complex)) or not hasattr(value, "__float__"):
        raise _Refused(f"the function returned {shortened(repr(value), 80)}{part}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise _Refused(f"the function returned {number}{part}, which is not a finite number")
    if abs(number) > LARGEST:
        raise _Refused(
            f"the function returned {number:g}{part}; allowed: -{LARGEST:g} to {LARGEST:g}, so that float32 can hold "
            "its square"
        )
    return number


_REASON, _WHERE = 2000, 1000  # maximum characters of a failure's reason, and of its place
#: A function that checks what a scoring process has sent, and returns it as a result; raises Malformed.
Reading = Callable[[Any], Result]


def plain_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return `outcome` as the fields of a message; long texts of a failure are cut."""
    if not isinstance(outcome, ScoringFailure):
        return {"result": outcome}
    where = None if outcome.where is None else cut(outcome.where, _WHERE)
    return {"failure": {"reason": cut(outcome.reason, _REASON), "where": where, "collateral": outcome.collateral}}


def outcome_of(message: dict[str, Any], read: Reading) -> Outcome:
    """Return the outcome in a message. Raise Malformed if the message holds no outcome."""
    if "result" in message:
        return read(message["result"])
    failure = message.get("failure")
    if not isinstance(failure, dict) or failure.keys() != {"reason", "where", "collateral"}:
        raise Malformed("the answer has neither a result, nor a failure with only reason, where and collateral")
    where = None if failure["where"] is None else text(failure["where"], _WHERE, "the field `where` of a failure")
    reason = text(failure["reason"], _REASON, "the field `reason` of a failure")
    return ScoringFailure(reason, where, flag(failure["collateral"], "the field `collateral` of a failure"))


def read_reward(value: Any) -> Result:
    """Return a reward: finite numbers by name, including `overall`, and text under `extracted`. Raise Malformed if the
    value is not a reward."""
    if not isinstance(value, dict) or "overall" not in value or len(value) > MAX_PARTS:
        raise Malformed(f"a reward must be a mapping of at most {MAX_PARTS} parts with `overall`, not {short(value)}")
    reward: Result = {}
    for name, part in value.items():
        if name == EXTRACTED_KEY:
            reward[name] = text(part, MAX_EXTRACTED, f"the part {name!r}")
        else:
            reward[text(name, MAX_NAME, "the name of a part")] = number(part, f"the part {name!r}")
    return reward
