"""Outcomes of samples as messages of a reward process: numbers and short texts, validated when read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.rewards.scoring import EXTRACTED_KEY, MAX_EXTRACTED, MAX_NAME, MAX_PARTS, Outcome, Result, ScoringFailure
from megarl.simulators.plain import Malformed, cut, flag, number, short, text

_REASON, _WHERE = 2000, 1000  # characters
#: Validates the results of one kind of process; raises Malformed.
Reading = Callable[[Any], Result]


def plain_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of a message for `outcome`; long texts of a failure are cut."""
    if not isinstance(outcome, ScoringFailure):
        return {"result": outcome}
    where = None if outcome.where is None else cut(outcome.where, _WHERE)
    return {"failure": {"reason": cut(outcome.reason, _REASON), "where": where, "collateral": outcome.collateral}}


def outcome_of(message: dict[str, Any], read: Reading) -> Outcome:
    """Return the outcome in a message.

    Raises:
        Malformed: it holds none.
    """
    if "result" in message:
        return read(message["result"])
    failure = message.get("failure")
    if not isinstance(failure, dict) or failure.keys() != {"reason", "where", "collateral"}:
        raise Malformed("an answer with neither a result nor a failure")
    where = None if failure["where"] is None else text(failure["where"], _WHERE, "the place of a failure")
    reason = text(failure["reason"], _REASON, "the reason of a failure")
    return ScoringFailure(reason, where, flag(failure["collateral"], "the blame for a failure"))


def read_reward(value: Any) -> Result:
    """Return a reward: finite numbers by name, one of them `overall`, and text under `extracted`.

    Raises:
        Malformed: the value is no reward.
    """
    if not isinstance(value, dict) or "overall" not in value or len(value) > MAX_PARTS:
        raise Malformed(f"a result that is no reward: {short(value)}")
    found: Result = {}
    for name, part in value.items():
        if name == EXTRACTED_KEY:
            found[name] = text(part, MAX_EXTRACTED, f"the part {name!r}")
        else:
            found[text(name, MAX_NAME, "the name of a part")] = number(part, f"the part {name!r}")
    return found
