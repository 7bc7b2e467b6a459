"""Turns of episodes: the states in which they begin."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from megarl.dag.stage import Role, stage
from megarl.data.fields import DIGESTS, GRIDS

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext


@stage(
    reads=["prompt_ids", "response_ids", "turn_starts", "turn_ends"],
    optional=[GRIDS, DIGESTS],
    writes=["turn_keys"],
    role=Role.ADVANTAGE,
)
def turn_keys(c: StepContext, samples: Batch) -> Batch:
    """Write a hash of the observation before each turn (its tokens and images) at the turn's first token."""
    import torch

    responses, keys = samples["response_ids"], torch.zeros_like(samples["response_ids"].values)
    fields = [samples[name].unbind() for name in ("prompt_ids", "response_ids", "turn_starts", "turn_ends")]
    images = [samples[name].unbind() for name in (GRIDS, DIGESTS)] if DIGESTS in samples else []
    for first, prompt, response, starts, ends, *pictures in zip(
        responses.offsets[:-1].tolist(), *fields, *images, strict=True
    ):
        tokens, begin = torch.cat([prompt, response]), 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            stop = len(prompt) + start
            parts = [tokens[begin:stop]]
            if pictures:
                grids, digests = pictures
                parts.append(digests[(grids[:, 0] >= begin) & (grids[:, 0] < stop)])
            if start < len(response):
                digest = blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=8).digest()
                keys[first + start] = int.from_bytes(digest, "little", signed=True) or 1  # 0 stands for no turn
            begin = len(prompt) + end
    samples.set("turn_keys", responses.like(keys))
    return samples
