"""What a process of the reward pool says of a sample, as a message and read from one: numbers and short texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.rewards.scoring import EXTRACTED_KEY, MAX_EXTRACTED, MAX_NAME, MAX_PARTS, Outcome, Result, ScoringFailure
from megarl.simulators.plain import Malformed, cut, flag, number, short, text

_REASON, _WHERE = 2000, 1000  # characters
#: What a result of this kind of process may be; raises Malformed.
Reading = Callable[[Any], Result]


def plain_outcome(outcome: Outcome) -> dict[str, Any]:
    """The fields of a message that says `outcome`; long texts of a failure are cut."""
    if not isinstance(outcome, ScoringFailure):
        return {"result": outcome}
    where = None if outcome.where is None else cut(outcome.where, _WHERE)
    return {"failure": {"reason": cut(outcome.reason, _REASON), "where": where, "collateral": outcome.collateral}}


def outcome_of(message: dict[str, Any], read: Reading) -> Outcome:
    """The outcome that a message says.

    Raises:
        Malformed: it says none.
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
    """A reward: finite numbers by name, one of them `overall`, and text under `extracted`.

    Raises:
        Malformed: it is none.
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
