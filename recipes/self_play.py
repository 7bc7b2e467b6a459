"""Self-play on sums: a proposer writes a sum, and a solver answers it several times.

    proposer   ".47" -> "47+85"        solver   "47+85=" -> "132", four times

The solver is rewarded for every right answer. A sum that begins with the number of the proposer's prompt earns the
proposer `_VALID`, and up to the rest of 1 more: most when the solver is right half of the time. A held-out sum earns
nothing and is not answered: nobody is trained on it.
"""

from __future__ import annotations

import json
import os
import random
import re
import urllib.request
from typing import Any

from megarl.recipes.arithmetic import make_rows as arithmetic_rows

_ATTEMPTS = 4
_VALID = 0.2


def make_rows(split: str = "train", proposed: bool = True, **settings: Any) -> list[dict[str, Any]]:
    """Return the rows of episodes, made of the sums of `megarl.recipes.arithmetic:make_rows`.

    Args:
        split: `train`, or `val` for held-out sums, which only the solver answers.
        proposed: the prompt of a training row is the first number of a sum, to which the proposer adds the second;
            False: the prompt is the whole sum, for a solver that is trained without a proposer.
        settings: the other settings of `arithmetic:make_rows`.

    Returns:
        Rows with `prompt`; `answer`, empty if the proposer completes the sum; `attempts`, how often the solver answers;
        and `held_out`, which the proposer must not use: second numbers of held-out sums with the same first number.
    """
    rows = arithmetic_rows(split, **settings)
    if split == "val":
        return [{**row, "attempts": 1} for row in rows]
    if not proposed:
        return [{**row, "attempts": _ATTEMPTS} for row in rows]
    held_out: dict[str, list[str]] = {}
    for row in arithmetic_rows("val", **settings):
        first, second = _numbers(row)
        held_out.setdefault(first, []).append(second)
    firsts = [_numbers(row)[0] for row in rows]
    return [
        {"prompt": f".{first}", "answer": "", "attempts": _ATTEMPTS, "held_out": held_out.get(first, [])}
        for first in firsts
    ]


def make_demonstrations(
    split: str = "train",
    given_up: float = 0.6,
    proposals: float = 0.4,
    carries: float = 0.2,
    valid: float = 0.5,
    seed: int = 0,
    **settings: Any,
) -> list[dict[str, str]]:
    """Return demonstrations for both policies: answers for the solver, and proposed sums for the proposer.

    They leave room to learn: some answers give up ("-"), some proposals are invalid, and few proposals have a carry.

    Args:
        split: `train` or `val`.
        given_up: share of the sums with a carry (from the last digits) that are answered with "-".
        proposals: number of proposals, as a share of the sums.
        carries: share of the sums with a carry that may be proposed; sums without a carry always may.
        valid: share of proposals that begin with the number in their prompt, as the task demands.
        settings: the other settings of `megarl.recipes.arithmetic:make_rows`.
    """
    rows, rng = arithmetic_rows(split, seed=seed, **settings), random.Random(f"demonstrations {seed}")
    proposable = [row for row in rows if not has_carry(*_numbers(row)) or rng.random() < carries]
    proposed = []
    for row in rng.sample(proposable, round(proposals * len(rows))):
        first, second = _numbers(row)
        written = first if rng.random() < valid else _numbers(rng.choice(rows))[0]
        proposed.append({"prompt": f".{first}", "answer": f"{written}+{second}", "data_source": "proposals"})
    gives_up = [has_carry(*_numbers(row)) and rng.random() < given_up for row in rows]
    return [{**row, "answer": "-"} if up else row for row, up in zip(rows, gives_up, strict=True)] + proposed


def has_carry(first: str, second: str) -> bool:
    """Return whether the last digits of two numbers add up to more than 9."""
    return int(first[-1]) + int(second[-1]) > 9


def _numbers(row: dict[str, str]) -> tuple[str, str]:
    first, _, second = row["prompt"].removesuffix("=").partition("+")
    return first, second


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Play one episode; return its rewards by policy, and numbers for the metrics."""
    row = task["row"]
    if row["answer"]:
        return {"rewards": {"solver": _solve(row["prompt"], row["answer"], row["attempts"])}}
    (proposal,) = _complete("proposer", row["prompt"])
    first, _, second = proposal.partition("+")
    number = row["prompt"].removeprefix(".")
    if first != number or re.fullmatch(r"[1-9]\d", second) is None or second in row["held_out"]:
        return {"rewards": {"proposer": 0.0}, "info": {"valid": 0.0}}
    right = _solve(f"{proposal}=", str(int(first) + int(second)), row["attempts"])
    share = sum(right) / len(right)
    proposer = _VALID + (1 - _VALID) * (1 - abs(2 * share - 1))
    info = {"valid": 1.0, "carry": float(has_carry(first, second)), "solved": share}
    return {"rewards": {"proposer": proposer, "solver": right}, "info": info}


def _solve(prompt: str, answer: str, attempts: int) -> list[float]:
    """Let the solver answer a sum `attempts` times; return the reward of each attempt, 1 for the right answer."""
    return [float(text == answer) for text in _complete("solver", prompt, attempts)]


def _complete(policy: str, prompt: str, samples: int = 1) -> list[str]:
    """Return replies of a policy to a prompt."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps({"model": policy, "prompt": prompt, "n": samples}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return [choice["text"] for choice in json.load(response)["choices"]]
