"""Converts robots' episodes to policy calls, and these to sequences of the model.

An episode is a sample of several calls (megarl/robots/rollout/episode.py). Its response tokens are those of its calls,
one after another, so a batch of calls has the same tokens in the same order, and only the borders differ:

    samples    response_ids  [ call 0 | call 1 ] [ call 0 | call 1 | call 2 ]      a row per episode
    calls      response_ids  [ call 0 ] [ call 1 ] [ call 0 ] [ call 1 ] [ call 2 ]      a row per call

So values per token of the calls, such as log-probs, are values per token of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.architectures.vision import VisionShape
from megarl.data.batch import Batch, Jagged
from megarl.data.versions import VERSION_FIELDS
from megarl.robots.config import CHAIN, CLIP, FLOW_TIME, FRAMES
from megarl.robots.data.pictures import Normalisation
from megarl.robots.models.vla.calls import CallLayout, PolicyFamily
from megarl.robots.models.vla.vision import Seen
from megarl.training.sequence_layout import PackedRows

#: Fields that are repeated for each policy call, not split into calls, even if they are as long as the response.
_REPEATED = ("prompt_ids", *VERSION_FIELDS)
_PER_CALL = ("states", CHAIN, FLOW_TIME)


def calls_of(samples: Batch) -> Batch:
    """Return one row per policy call of `samples`.

    Fields with one number per response token are split into the numbers of each call. `frames/CAMERA`, `states` and
    denoising chains already have one entry per call. The end of the episode (`end_...`) and its clip are left out. All
    other fields are repeated for each call.
    """
    ends, starts = samples["turn_ends"], samples["turn_starts"]
    calls, tokens = ends.lengths, samples["response_ids"].lengths
    per_call = ends.values - starts.values
    source = torch.repeat_interleave(torch.arange(len(samples)), calls.cpu())
    fields: dict[str, Tensor | Jagged] = {}
    for name, value in samples.fields.items():
        if name.startswith(("end_", CLIP)):
            continue
        if isinstance(value, Jagged):
            if name.startswith(FRAMES) or name in _PER_CALL:
                fields[name] = value.values
            elif name in ("turn_ends", "turn_starts", "call_progress"):
                continue  # these fields have one value per policy call; a returned row is one call, which has no turns
            elif name not in _REPEATED and torch.equal(value.lengths, tokens):
                fields[name] = Jagged.from_lengths(value.values, per_call)
            else:
                fields[name] = value.select(source)
        else:
            fields[name] = value[source]
    columns = {name: [column[place] for place in source.tolist()] for name, column in samples.columns.items()}
    return Batch(fields, columns, size=len(source))


@dataclass(frozen=True)
class VLALayout:
    """The layout of policy calls: rows with `prompt_ids`, `response_ids` (K * D), `frames/CAMERA` and `states`.

    Attributes:
        dim, chunk: components of an action, and actions of a call.
    """

    shape: VisionShape  # the policy's vision part
    family: PolicyFamily  # the conventions of its sequences
    normalise: Normalisation  # turns pictures into the pixels of the policy's towers
    cameras: Sequence[str]  # names of the cameras, in the policy's order
    dim: int
    chunk: int
    columns: tuple[int, int]  # first and one past the last action token
    # whether only the slots and the stop token attend in both directions; otherwise all columns do, as in published
    # policies. Not used if slots are predicted one after another.
    block_only: bool = False

    def rows(self, samples: Batch) -> Batch:
        """Return one row per policy call of the samples; a batch of calls is returned unchanged."""
        return calls_of(samples) if "turn_ends" in samples else samples

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Return the number of columns of each policy call of each sample."""
        more = self._layout(2).length - 2
        calls, prompts = samples["turn_ends"].lengths.tolist(), samples["prompt_ids"].lengths.tolist()
        return [[prompt + more] * count for prompt, count in zip(prompts, calls, strict=True)]

    def lengths(self, batch: Batch) -> Tensor:
        """Return the sequence length (columns) of each policy call, int64 [B]. Raise ValueError if a call does not have
        K * D action tokens, for K actions of D numbers."""
        wrong = (batch["response_ids"].lengths.cpu() != self.dim * self.chunk).nonzero()
        if len(wrong):
            count = int(batch["response_ids"].lengths[int(wrong[0])])
            raise ValueError(
                f"policy call {int(wrong[0])} has {count} tokens; allowed: {self.dim * self.chunk}, for {self.chunk} "
                f"actions of {self.dim} numbers"
            )
        return batch["prompt_ids"].lengths.cpu() + (self._layout(2).length - 2)

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return an empty sequence, because `lengths` counts the patches of pictures as columns."""
        return ()

    def prompts(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Implement `SequenceLayout.prompts`: policy calls never share a prompt's computation."""
        return ()

    def pack(self, rows: Batch) -> PackedRows:
        """Pack policy calls end to end. Raise ValueError if a response has a token that is not an action token."""
        targets = rows["response_ids"].values.cpu()
        outside = ((targets < self.columns[0]) | (targets >= self.columns[1])).nonzero()
        if len(outside):
            call, place = divmod(int(outside[0]), self.dim * self.chunk)
            allowed = f"{self.columns[0]} to {self.columns[1] - 1}"
            raise ValueError(
                f"policy call {call}: token {place} is {int(targets[int(outside[0])])}, not a token of {allowed}"
            )
        pictures = torch.stack([rows[FRAMES + camera] for camera in self.cameras], 1).flatten(0, 1)
        states = rows["states"] if self.shape.state else torch.zeros(0, 0)
        return self._pack([ids.cpu() for ids in rows["prompt_ids"].unbind()], targets, pictures, states)

    def filler(self) -> PackedRows:
        """Return a dummy policy call, with black pictures and the first action token as every target."""
        side, count = self.shape.towers[0].image, len(self.cameras)
        pictures = torch.zeros(count, side, side, 3, dtype=torch.uint8)
        targets = torch.full((self.dim * self.chunk,), self.columns[0])
        return self._pack([torch.zeros(2, dtype=torch.int64)], targets, pictures, torch.zeros(1, self.shape.state))

    def head(self, *, entropy: bool) -> None:
        """Return None, because action tokens are in the vocabulary."""

    def _layout(self, prompt: int) -> CallLayout:
        parallel, state = self.family.parallel, self.shape.state > 0
        return CallLayout(prompt, self.shape.patches, self.dim, self.chunk, len(self.cameras), state, parallel)

    def _pack(self, prompts: Sequence[Tensor], targets: Tensor, pictures: Tensor, states: Tensor) -> PackedRows:
        layouts = [self._layout(len(prompt)) for prompt in prompts]
        tokens = torch.zeros(sum(call.length for call in layouts), dtype=torch.int64)
        sources = torch.empty_like(targets)
        places, state_places, blank = list[Tensor](), list[int](), list[Tensor]()
        start, slots = 0, self.dim * self.chunk
        for number, (prompt, call) in enumerate(zip(prompts, layouts, strict=True)):
            columns = torch.arange(start, start + call.length)
            tokens[start] = prompt[0]
            tokens[columns[call.text]] = prompt[1:]
            targets_here = torch.arange(number * slots, (number + 1) * slots)
            sources[targets_here] = columns[call.predictors]
            if call.stop is None:
                tokens[columns[call.slots]] = targets[targets_here]
            else:
                tokens[start + call.stop] = self.family.stop_token
                blank.append(columns[call.slots])
            places.append(columns[call.visual])
            if call.state_at is not None:
                state_places.append(start + call.state_at)
            start += call.length
        opens: list[int] = []
        if self.family.parallel:
            opens = [call.slots.start if self.block_only else 0 for call in layouts]
        seen = Seen(
            self.normalise(pictures),
            torch.cat(places),
            states,
            torch.tensor(state_places, dtype=torch.int64),
            torch.cat([*blank, torch.zeros(0, dtype=torch.int64)]),
        )
        return PackedRows([call.length for call in layouts], tokens, sources, targets, opens, seen)
