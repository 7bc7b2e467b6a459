"""Self-play on sums: a proposer writes a sum, and a solver answers it several times.

    proposer   ".47" -> "47+85"        solver   "47+85=" -> "132", four times

The solver is rewarded for every right answer. A sum that begins with the number of the proposer's prompt is worth
`_VALID` to the proposer, and the rest of 1 the more, the closer the solver is to being right half of the time. The data
are sums: training rows give the number, held-out ones test the solver.
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


def make_rows(split: str = "train", **settings: Any) -> list[dict[str, Any]]:
    """Return the sums of `megarl.recipes.arithmetic:make_rows`; training rows have the proposer's prompt and no answer.

    Args:
        split: `train`, or `val` for sums that the solver is tested on.
    """
    rows = arithmetic_rows(split, **settings)
    if split == "val":
        return rows
    return [{"prompt": f".{row['prompt'].partition('+')[0]}", "answer": "", "data_source": "proposals"} for row in rows]


def make_demonstrations(
    split: str = "train", valid: float = 0.5, proposals: float = 0.2, seed: int = 0, **settings: Any
) -> list[dict[str, str]]:
    """Return demonstrations of both policies: answers of sums, and proposals of which a part is invalid.

    Args:
        split: `train` or `val`. Further settings are those of `megarl.recipes.arithmetic:make_rows`.
        valid: share of proposals that begin with the number of their prompt.
        proposals: share of the sums that are also proposed.
    """
    rows, rng = arithmetic_rows(split, seed=seed, **settings), random.Random(f"proposals {seed}")
    proposed = []
    for row in rows[: round(proposals * len(rows))] if split == "train" else []:
        sum_ = row["prompt"].removesuffix("=")
        first = sum_.partition("+")[0] if rng.random() < valid else str(rng.randint(10, 99))
        proposed.append({"prompt": f".{first}", "answer": sum_, "data_source": "proposals"})
    return [*rows, *proposed]


def play(task: dict[str, Any]) -> dict[str, Any]:
    """Play one episode and return the rewards of both policies."""
    row = task["row"]
    if row["answer"]:  # a held-out sum
        return {"rewards": {"solver": float(_complete("solver", row["prompt"])[0] == row["answer"])}}
    (proposal,) = _complete("proposer", row["prompt"])
    number = row["prompt"].removeprefix(".")
    if re.fullmatch(rf"{number}\+[1-9]\d", proposal) is None:
        return {"rewards": {"proposer": 0.0}, "info": {"valid": 0.0}}
    answer = str(sum(map(int, proposal.split("+"))))
    right = [float(text == answer) for text in _complete("solver", f"{proposal}=", _ATTEMPTS)]
    share = sum(right) / _ATTEMPTS
    proposer = _VALID + (1 - _VALID) * (1 - abs(2 * share - 1))
    return {"rewards": {"proposer": proposer, "solver": right}, "info": {"valid": 1.0, "solved": share}}


def _complete(policy: str, prompt: str, samples: int = 1) -> list[str]:
    """Return replies of a policy to a prompt."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps({"model": policy, "prompt": prompt, "n": samples}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return [choice["text"] for choice in json.load(response)["choices"]]
