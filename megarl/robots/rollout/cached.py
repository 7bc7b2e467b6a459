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
    """Samples the action tokens of policy calls one after another with a key/value cache (a `SampleTokens`).

    Every rank of a replica makes the same calls.

    Args:
        engine: the policy's training engine, whose weights are used without a copy.
        sequences: the layout of the policy's calls.
    """

    def __init__(self, engine: MegatronEngine, sequences: VLALayout) -> None:
        self._engine, self._sequences, self._mesh = engine, sequences, Mesh.of(engine.layout)

    def __call__(self, batch: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
        """Sample the K * D tokens of each policy call.

        Args:
            batch: rows of policy calls; of `response_ids` only the number of tokens is used.
            seeds: int64 [B], one for each call.
            temperature: sampling temperature; 0: take the most likely tokens.

        Returns:
            Tokens int64, and their log-probs float32 at the temperature, normalised over the action tokens only.
        """
        engine = self._engine
        engine.require(PARAMETERS)
        # steps=0: no weights are packed for decoding, because the packed copies would have to be made for each call
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
        """Sample the tokens of n policy calls, whose keys and values fit in one cache; return tokens and log-probs
        [n, K * D]."""
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
        """Prefill a new cache with all columns (positions) of each call before the prompt's last token.

        Args:
            slots: number of action tokens of a call, K * D.

        Returns:
            The cache, and for each call the prompt's last token and the token's position, int64 [n].
        """
        packed, device = self._sequences.pack(calls), stage.device
        lengths = [length - slots - 1 for length in packed.lengths]  # number of columns of each call to prefill
        longest = max(lengths) + slots
        fixed = device.type == "cuda"
        room = Room(
            len(lengths), cache_length(longest) if fixed else longest, self._mesh.tp.size, stage.dtype, device, fixed
        )
        caches = allocate(stage.mixers, room)
        caches.reserve(0, longest)
        ends = torch.tensor(packed.lengths).cumsum(0)
        last = ends - slots - 1  # index of each prompt's last token in the packed stream
        read = torch.cat([torch.arange(n) < limit for n, limit in zip(packed.lengths, lengths, strict=True)])
        places = read.cumsum(0) - 1  # index of each prefilled column among all prefilled columns
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
    """Divide rows into groups of consecutive rows whose lengths add up to at most `budget`; a longer row is a group of
    its own.

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
