"""Reads the result that a program leaves: a number, or {"reward": number, "info": {name: number}}.

With several policies it is {"rewards": {"proposer": 0.3, "solver": [1, 0]}, "info": {name: number}}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.envs.several import RewardsError, check_rewards

if TYPE_CHECKING:
    from megarl.config.policies import AgentPolicyConfig
    from megarl.gateway.record import Record

#: Names and beginnings of names of metrics `env/<name>` that megarl writes itself.
RESERVED = (
    *("calls", "undelivered", "refused_calls", "overflows", "retries", "timeouts", "samples", "branches/", "limits/"),
    *("untrained_calls", "cached", "cut", "errors", "greedy_errors", "tokens/", "turns/"),
)
_MOST_NUMBERS = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}")


class ResultError(Exception):
    """A result that cannot be used."""


def parse_result(text: str, *, scored: bool) -> tuple[float, dict[str, float]]:
    """Return the reward and the numbers of a result.

    Args:
        scored: the program gives the score, so the result must have one.

    Raises:
        ResultError: the result has another form, or names of numbers that are not allowed.
    """
    try:
        value = json.loads(text)
        fields = value if isinstance(value, dict) else {"reward": value}
        reward = float(fields.get("reward", math.nan if scored else 0.0))
        info = _numbers(fields)
    except (ValueError, TypeError, OverflowError, RecursionError):
        reward, info = math.nan, {}
    if not math.isfinite(reward):
        raise ResultError(
            f'{_shown(text)}; allowed: a number, or an object {{"reward": number, "info": {{name: number}}}}'
        )
    _check_info(info)
    return reward, info


def parse_rewards(
    text: str, policies: Mapping[str, AgentPolicyConfig], record: Record
) -> tuple[dict[str, float | list[float]], dict[str, float]]:
    """Parse the result of an episode of several policies: return `Trajectory.rewards`, and numbers to log.

    Raises:
        ResultError: the result has another form, or rewards that do not fit the episode (`check_rewards`); or as
            `parse_result`.
    """
    try:
        fields = json.loads(text)
        rewards: dict[str, float | list[float]] = {
            str(name): [float(number) for number in value] if isinstance(value, list) else float(value)
            for name, value in fields["rewards"].items()
        }
        info = _numbers(fields)
        if not all(
            math.isfinite(x) for value in rewards.values() for x in (value if isinstance(value, list) else [value])
        ):
            raise ValueError("a reward is not finite")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ResultError(
            f"{_shown(text)}; allowed: an object "
            f'{{"rewards": {{policy: number or list of numbers}}, "info": {{name: number}}}} with the policies '
            f"{', '.join(policies)}"
        ) from None
    _check_info(info)
    try:
        begun = {name: len(record.roots(name)) for name in policies}
        check_rewards("`rewards` in the file MEGARL_RESULT", rewards, policies, begun)
    except RewardsError as error:
        raise ResultError(str(error)) from None
    return rewards, info


def _numbers(fields: dict[str, Any]) -> dict[str, float]:
    return {str(name): float(number) for name, number in dict(fields.get("info") or {}).items()}


def _shown(text: str) -> str:
    return f"the file MEGARL_RESULT has {text[:100]!r}" if text else "the file MEGARL_RESULT is missing or empty"


def _check_info(info: Mapping[str, float]) -> None:
    if len(info) > _MOST_NUMBERS:
        raise ResultError(f"`info` in the file MEGARL_RESULT has {len(info)} numbers; allowed: {_MOST_NUMBERS}")
    for name, number in info.items():
        if not _NAME.fullmatch(name):
            raise ResultError(
                f"`info` in the file MEGARL_RESULT has the name {name[:100]!r}; allowed: letters, digits and _ . / -, "
                "up to 100 of them, of which the first is a letter, a digit or _"
            )
        if not math.isfinite(number):
            raise ResultError(f"`info` in the file MEGARL_RESULT has {name}={number}; allowed: finite numbers")
        if any(name == reserved or (reserved[-1] == "/" and name.startswith(reserved)) for reserved in RESERVED):
            raise ResultError(
                f"`info` in the file MEGARL_RESULT has the name {name!r}, which megarl writes itself; allowed: names "
                "other than " + ", ".join(f"{reserved}*" if reserved[-1] == "/" else reserved for reserved in RESERVED)
            )
