"""Lays out the policy calls of a flow-matching policy: the sequence is the prefix that its action expert reads.

    [BOS] [patches of all cameras] [state] [rest of the prompt]

The language model predicts no tokens. The response of a call consists of the numbers of its denoising chain
(megarl/robots/models/flow/calls.py). All of them have the prompt's last token as their column, where a critic reads its
value. `response_ids` are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megarl.architectures.action_expert import ExpertShape
from megarl.architectures.vision import VisionShape
from megarl.data.batch import Batch
from megarl.robots.config import CHAIN, FLOW_TIME, FRAMES
from megarl.robots.data.pictures import Normalisation
from megarl.robots.models.flow.calls import ChainLogProbs, FlowCalls
from megarl.robots.models.flow.process import Denoising
from megarl.robots.models.vla.calls import CallLayout
from megarl.robots.models.vla.sequences import calls_of
from megarl.training.sequence_layout import PackedRows


@dataclass(frozen=True)
class FlowLayout:
    """The layout of a flow-matching policy's calls: rows with `prompt_ids`, `response_ids`, `frames/CAMERA`, `states`,
    and `chain`, the recorded denoising chain.

    The packed columns (positions) are only the language model's: pictures and instruction. Calls that are still to be
    sampled have no `chain`.
    """

    shape: VisionShape  # sizes of the policy's vision part
    expert: ExpertShape  # sizes of its action expert
    normalise: Normalisation  # turns pictures into the pixels of the policy's towers
    cameras: Sequence[str]  # names of the cameras, in the policy's order
    chunk: int  # actions of a call, K
    process: Denoising
    columns: ClassVar[None] = None

    def rows(self, samples: Batch) -> Batch:
        """Return one row per policy call of the samples; a batch of calls is returned unchanged."""
        return calls_of(samples) if "turn_ends" in samples else samples

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Return, for each sample, the number of the language model's columns in each of its policy calls."""
        calls, prompts = samples["turn_ends"].lengths.tolist(), samples["prompt_ids"].lengths.tolist()
        return [[self._columns(prompt)] * count for prompt, count in zip(prompts, calls, strict=True)]

    def lengths(self, batch: Batch) -> Tensor:
        """Return the size of each policy call by which micro-batches are filled, int64 [B]: the columns of the language
        model plus the action expert's tokens in all denoising steps.
        """
        return batch["prompt_ids"].lengths.cpu() + self._columns(0) + self.process.steps * (1 + self.chunk)

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return an empty sequence, because `lengths` counts the patches of pictures as columns."""
        return ()

    def prompts(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Implement `SequenceLayout.prompts`: policy calls never share a prompt's computation."""
        return ()

    def head(self, *, entropy: bool) -> ChainLogProbs:
        """Return the head that computes log-probs of recorded chains."""
        return ChainLogProbs(self.process, entropy)

    def pack(self, rows: Batch) -> PackedRows:
        """Pack policy calls end to end.

        Raises:
            ValueError: a chain has the wrong shape, or a call has not one response token for each number that the steps
                of its chain produced.
        """
        shape = (self.process.steps + 1, self.chunk, self.expert.action)
        chain = rows[CHAIN] if CHAIN in rows else torch.zeros(len(rows), *shape)
        times = rows[FLOW_TIME] if FLOW_TIME in rows else torch.zeros(0)
        wanted = (chain.shape[1] - 1) * shape[1] * shape[2]
        wrong = (rows["response_ids"].lengths.cpu() != wanted).nonzero()
        if len(wrong) or chain.shape[2:] != shape[1:]:
            count = rows["response_ids"].lengths.tolist()[int(wrong[0]) if len(wrong) else 0]
            steps, *sizes = chain.shape[1:]
            raise ValueError(
                f"a policy call has a denoising chain of {steps - 1} steps of {' x '.join(map(str, sizes))} numbers "
                f"and {count} response tokens; allowed: steps of {shape[1]} x {shape[2]} numbers, and {wanted} "
                "response tokens for this many steps"
            )
        pictures = torch.stack([rows[FRAMES + camera] for camera in self.cameras], 1).flatten(0, 1)
        return self._pack([ids.cpu() for ids in rows["prompt_ids"].unbind()], pictures, rows["states"], chain, times)

    def filler(self) -> PackedRows:
        """Return a dummy policy call with black pictures, a state of zeros and a chain of zeros."""
        side, count = self.shape.towers[0].image, len(self.cameras)
        pictures = torch.zeros(count, side, side, 3, dtype=torch.uint8)
        states = torch.zeros(1, self.expert.state)
        chain = torch.zeros(1, self.process.steps + 1, self.chunk, self.expert.action)
        return self._pack([torch.zeros(2, dtype=torch.int64)], pictures, states, chain, torch.zeros(0))

    def _layout(self, prompt: int) -> CallLayout:
        """Return which columns of a call hold pictures, state and prompt. The call ends at `text.stop`: the columns of
        actions, which a `CallLayout` has after it, are not used here."""
        return CallLayout(prompt, self.shape.patches, 1, 1, len(self.cameras), self.shape.state > 0, parallel=False)

    def _columns(self, prompt: int) -> int:
        return self._layout(2).text.stop - 2 + prompt

    def _pack(
        self, prompts: Sequence[Tensor], pictures: Tensor, states: Tensor, chain: Tensor, times: Tensor
    ) -> PackedRows:
        lengths = [self._columns(len(prompt)) for prompt in prompts]
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        places, state_places, last = list[Tensor](), list[int](), list[int]()
        start = 0
        for prompt, length in zip(prompts, lengths, strict=True):
            call, columns = self._layout(len(prompt)), torch.arange(start, start + length)
            tokens[start], tokens[columns[call.text]] = prompt[0], prompt[1:]
            places.append(columns[call.visual])
            if call.state_at is not None:
                state_places.append(start + call.state_at)
            start += length
            last.append(start - 1)
        seen = FlowCalls(
            self.normalise(pictures),
            torch.cat(places),
            states if self.shape.state else torch.zeros(0, 0),
            torch.tensor(state_places, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            torch.tensor(lengths),
            states,
            chain.float(),
            times,
        )
        numbers = chain[0, 1:].numel()
        sources = torch.tensor(last).repeat_interleave(numbers)
        targets = torch.zeros(len(sources), dtype=torch.int64)
        return PackedRows(lengths, tokens, sources, targets, [0] * len(lengths), seen, keeps_keys=True)
