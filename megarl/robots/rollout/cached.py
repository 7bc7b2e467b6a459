"""Samples action tokens one after another with a key/value cache, for policies that predict each from the earlier ones.

    [BOS, patches, state, prompt without its last token]    one pass without logits, which fills the cache
    last token of the prompt, action token 0, 1, ...        one column of every call in each pass, which samples a token

The last action token is not an input. A token depends on its own call and seed only, as in `MegatronEngine.sample`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.models.layers.kinds import allocate
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.passes import Caches, DecodeStep, Prompts, Room
from megarl.rollout.embedded.graphs import cache_length
from megarl.rollout.embedded.model import DecoderStage
from megarl.system.offload_schedule import PARAMETERS
from megarl.training.heads import draw, over_columns

if TYPE_CHECKING:
    from megarl.data.batch import Batch, Jagged
    from megarl.robots.models.vla.sequences import VLALayout
    from megarl.training.engine import MegatronEngine


class CachedSampling:
    """A `SampleTokens` over the parameters of a training engine; every rank of a replica makes the same calls.

    Args:
        engine: the policy's engine, whose weights are read without a copy.
        sequences: the layout of its policy calls.
    """

    def __init__(self, engine: MegatronEngine, sequences: VLALayout) -> None:
        self._engine, self._sequences, self._mesh = engine, sequences, Mesh.of(engine.layout)

    def __call__(self, batch: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
        """Sample the K * D tokens of each policy call.

        Args:
            batch: policy calls; of `response_ids` only the number of tokens is used.
            seeds: int64 [B], one for each call.
            temperature: 0: the most likely tokens.

        Returns:
            Tokens int64, and their log-probs float32 at the temperature, over the action tokens only.
        """
        engine = self._engine
        engine.require(PARAMETERS)
        # Packed weights would be copied again for each call, so none are packed (`steps`).
        stage = DecoderStage(engine.chunks, self._mesh, engine.dtype, rows=len(batch), steps=0)
        parts = [
            self._sample(stage, batch.select(rows), seeds[rows].to(engine.device), temperature)
            for rows in _groups(self._sequences.lengths(batch).tolist(), engine.config.micro_batch_tokens)
        ]
        like = batch["response_ids"]
        tokens, logprobs = (torch.cat(values).flatten().to(like.values.device) for values in zip(*parts, strict=True))
        return like.like(tokens), like.like(logprobs)

    @torch.inference_mode()
    def _sample(self, stage: DecoderStage, calls: Batch, seeds: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probs [n, K * D] of n policy calls, which are in the cache together."""
        slots, columns = self._sequences.dim * self._sequences.chunk, self._sequences.columns
        caches, token, position = self._read(stage, calls, slots)
        model, group = self._engine.chunks[-1], self._engine.layout.tp_group
        tokens, logprobs = list[Tensor](), list[Tensor]()
        for slot in range(slots):
            step = DecodeStep(caches, position, caches.length)
            local = stage.forward(token, position, step, want_logits=True, lockstep=len(token))
            token, logp = torch.empty_like(token), torch.empty(len(token), device=token.device)
            if local is not None:
                logits = over_columns(local, model.vocab_range, columns, group) / (temperature or 1.0)
                token, logp = draw(logits, columns[0], seeds if temperature else None, torch.full_like(token, slot))
            token, position = self._mesh.from_last_stage(token), position + 1
            tokens.append(token)
            logprobs.append(logp)
        return torch.stack(tokens, 1), self._mesh.from_last_stage(torch.stack(logprobs, 1))

    def _read(self, stage: DecoderStage, calls: Batch, slots: int) -> tuple[Caches, Tensor, Tensor]:
        """Put the columns before the last token of each prompt into a new cache.

        Returns:
            The cache, and of each call the prompt's last token and its position, int64 [n].
        """
        packed, device = self._sequences.pack(calls), stage.device
        lengths = [length - slots - 1 for length in packed.lengths]  # columns of each call that this pass reads
        longest = max(lengths) + slots
        fixed = device.type == "cuda"
        room = Room(
            len(lengths), cache_length(longest) if fixed else longest, self._mesh.tp.size, stage.dtype, device, fixed
        )
        caches = allocate(stage.mixers, room)
        caches.reserve(0, longest)
        ends = torch.tensor(packed.lengths).cumsum(0)
        last = ends - slots - 1  # the last token of each prompt, in the stream
        read = torch.cat([torch.arange(n) < limit for n, limit in zip(packed.lengths, lengths, strict=True)])
        places = read.cumsum(0) - 1  # of the columns that are read, in the stream without the others
        seen = replace(
            packed.seen, places=places[packed.seen.places], state_places=places[packed.seen.state_places]
        ).to(device)
        stage.forward(
            packed.tokens[read].to(device),
            torch.cat([torch.arange(n) for n in lengths]).to(device),
            Prompts(caches, lengths, [[row] for row in range(len(lengths))]),
            want_logits=False,
            lockstep=int(read.sum()),
            images=seen,
        )
        return caches, packed.tokens[last].to(device), torch.tensor(lengths, device=device)


def _groups(lengths: list[int], budget: int) -> list[list[int]]:
    """Return consecutive rows in groups whose lengths add up to at most `budget`, or of one row.

    >>> _groups([3, 3, 9, 2], 6)
    [[0, 1], [2], [3]]
    """
    groups, room = list[list[int]](), 0
    for row, length in enumerate(lengths):
        if not groups or length > room:
            groups.append([])
            room = budget
        groups[-1].append(row)
        room -= length
    return groups
