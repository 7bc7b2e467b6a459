"""The rule by which stand-ins of servers answer: token i of a sample is a function of prompt, seed and i.

So a sample that was lost, doubled, or continued at the wrong place shows in its tokens. This module imports nothing: a
server in a process of its own would import torch otherwise.
"""

from __future__ import annotations

from typing import Any

RUN = "run"
TAG = f"1@{RUN}"  # what they call their weights
PROMPTS = [[10 + i] * (i + 1) for i in range(6)]


def token(prompt: list[int], seed: int, place: int) -> int:
    return (sum(prompt) * 31 + seed * 17 + place * 7) % 1000


def answer(payload: dict[str, Any], verdict: str) -> dict[str, Any]:
    settings, ids = payload["sampling_params"], payload["input_ids"]
    prompt = next((p for p in PROMPTS if p == ids[: len(p)] and (len(ids) == len(p) or ids[len(p)] != p[0])), ids)
    start, count = len(ids) - len(prompt), settings["max_new_tokens"]
    count = {"abort": count // 2, "empty": 0}.get(verdict, count)
    out = [token(prompt, settings.get("sampling_seed", 0), start + i) for i in range(count)]
    return {
        "output_ids": out,
        "meta_info": {
            "finish_reason": {"type": "abort" if verdict == "abort" else "length"},
            "output_token_logprobs": [[-1.0, t, None] for t in out],
            "weight_version": "999@another" if verdict == "foreign" else TAG,
        },
    }
