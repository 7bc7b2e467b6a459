"""A session of many turns: sequences are submitted again while others decode, and keep their cached keys and values.

    submit(sequence, tokens so far) --> [ row kept? prefill new tokens : prefill all ] --> decode --> end, row kept

Every process of a replica makes the same calls in the same order, so all of them decode in lockstep. The tokens of a
sequence depend only on its own tokens and seed, as in `Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from megarl.config.rollout import SamplingConfig
from megarl.models.layers.passes import Extension
from megarl.rollout.embedded.model import DecoderStage
from megarl.rollout.embedded.rows import CacheRows, RowAssignment
from megarl.rollout.embedded.session import Session, SessionLimits, seen
from megarl.rollout.embedded.texts import RunningTexts, Sampled
from megarl.rollout.engine import Completion
from megarl.rollout.stop_strings import StopStrings
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

_LOOK_EVERY = 8  # decode steps between two calls of `enough`, which may be collective
_TOGETHER = 8  # `wait` returns once an eighth of the turns ended: prefilling several turns costs little more than one


class TurnSession(Session):
    """A `Generation` that decodes turns for `sequences` sequences, numbered from 0, of at most `longest` tokens each.

    Attributes:
        weight_version: written into completions.
    """

    is_async: ClassVar[bool] = False
    is_batched: ClassVar[bool] = False
    weight_version = 0

    def __init__(
        self,
        stage: DecoderStage,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        limits: SessionLimits,
        sequences: int,
        longest: int,
        strings: StopStrings | None = None,
    ) -> None:
        self._texts = None if strings is None else RunningTexts(strings)
        slots = self._allocate(stage, sampling, stop_ids, limits, [0] * sequences, longest + 1)
        device = stage.device
        self._budget = limits.max_prefill_tokens
        self._rows = CacheRows(slots)
        self._rooms = torch.full((sequences + 1,), sampling.max_new_tokens, dtype=torch.int64, device=device)
        self._room = self._rooms
        self._contexts: dict[int, list[int]] = {}
        self._images: dict[int, ImageSet | None] = {}
        self._cached: dict[int, int] = {}  # sequence -> number of positions in the cache row kept for its next turn
        self._queue: list[int] = []
        self._aborted: set[int] = set()
        self._steps = 0  # decode steps in all calls of `wait`; a single call may end before `_LOOK_EVERY`
        # Rows that pad the batch of a captured graph are, in the cache, rows kept for later turns. So that they do not
        # overwrite these, they write nothing (kernels), or write at a position that no sequence reaches.
        nowhere = self._caches.max_length - 1 if stage.kernels is None else -1
        self._idle = torch.tensor([[sequences], [0], [nowhere], [0]], device=device)

    def submit(
        self, sequence: int, tokens: list[int], seed: int, room: int, images: ImageSet | None = None, begun: int = 0
    ) -> None:
        """Put the next turn of `sequence` into the queue; see `Generation.submit` for the arguments."""
        self._begin_text(sequence, tokens, begun)
        self._contexts[sequence], self._images[sequence] = tokens, images
        self._place_images(sequence, len(tokens), images)
        self._seeds[sequence] = seed
        self._rooms[sequence] = min(room, self._sampling.max_new_tokens)
        self._queue.append(sequence)

    def forget(self, sequence: int) -> None:
        """Free the cache row that was kept for `sequence`."""
        if self._cached.pop(sequence, None) is not None and sequence in self._rows.holders:
            self._rows.forget(sequence)

    def abort(self, sequence: int) -> None:
        """Mark the turn of `sequence` as aborted; the next `wait` returns its partial tokens."""
        self._aborted.add(sequence)

    def any_busy(self, busy: bool) -> bool:
        """Return `busy`, because each replica generates independently."""
        return busy

    def close(self) -> None:
        """Do nothing, because nothing decodes between two calls of `wait`."""

    def wait(self, enough: Callable[[], bool] | None = None) -> dict[int, Completion]:
        """Decode until an eighth of the running turns, at least one, has finished or `enough()` is True; return the
        finished turns by sequence number."""
        return {
            sequence: self.completion(sequence, sampled, 0, self.weight_version)
            for sequence, sampled in self._wait(enough).items()
        }

    @torch.inference_mode()
    def _wait(self, enough: Callable[[], bool] | None) -> dict[int, Sampled]:
        sampled = self._cut_aborted()
        if sampled:
            return sampled
        steps, wanted = 0, 0
        while True:
            beat()
            self._admit_turns()
            rows = self._rows.running
            wanted = max(wanted, rows // _TOGETHER, 1)
            if rows == 0 or (len(sampled) >= wanted):
                return sampled
            self._decode(rows, rows)
            steps, self._steps = steps + 1, self._steps + 1
            if steps % self._check_every == 0:
                sampled |= self._retire_turns(rows)
            if enough is not None and self._steps % _LOOK_EVERY == 0 and enough():
                return sampled

    def _cut_aborted(self) -> dict[int, Sampled]:
        """Return the aborted turns: queued turns without tokens, running turns with their partial tokens."""
        sampled: dict[int, Sampled] = {
            sequence: ([], [], "abort") for sequence in self._queue if sequence in self._aborted
        }
        self._queue = [sequence for sequence in self._queue if sequence not in sampled]
        rows = [row for row, sequence in enumerate(self._rows.holders) if sequence in self._aborted - sampled.keys()]
        self._aborted = set()
        if not rows:
            return sampled
        place = torch.tensor([self._rows.holders[row] for row in rows], device=self._stage.device)
        count, room = self._state.count[rows], self._rooms[place]
        self._rooms[place] = torch.minimum(count, room)
        self._state.done[rows] = True
        cut = set(place[count < room].tolist())
        for sequence, (tokens, logprobs, reason) in self._retire_turns(self._rows.running).items():
            sampled[sequence] = tokens, logprobs, "abort" if reason == "length" and sequence in cut else reason
        return sampled

    def _extent(self, rows: int) -> tuple[int, int]:
        cached = max((self._cached.get(s, 0) for s in self._rows.holders[self._rows.running :]), default=0)
        return len(self._rows.holders), max(self._reach + 1, cached)

    def _admit_turns(self) -> None:
        """Move queued turns into free rows and prefill their tokens that are not cached."""
        if not self._queue or self._rows.running == self._rows.slots:
            return
        first = self._rows.running
        admission = self._rows.admit(self._queue)
        self._move(admission.moves)
        new = {row: sequence for sequence, row in (*admission.reused, *admission.fresh)}
        del self._queue[: len(new)]
        contexts = [self._contexts[new[row]] for row in range(first, self._rows.running)]
        state = [
            [new[row] for row in range(first, self._rows.running)],
            [context[-1] for context in contexts],
            [len(context) - 1 for context in contexts],
            [0] * len(contexts),
        ]
        rows = slice(first, self._rows.running)
        self._state.numbers[:, rows] = torch.tensor(state, device=self._stage.device)
        self._state.done[rows] = False
        self._reach = max(self._reach, *state[2])
        for sequence in [s for s in self._cached if s not in self._rows.holders]:
            del self._cached[sequence]  # another sequence has taken the cache row
        self._caches.reserve(*self._extent(0))
        self._read_fresh(admission)
        self._read_new(admission)

    def _read_fresh(self, admission: RowAssignment) -> None:
        """Prefill sequences from the start, equal sequences once."""
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        sets: dict[tuple[tuple[int, ...], tuple[int, ...]], ImageSet | None] = {}
        for sequence, row in admission.fresh:
            images = self._images[sequence]
            key = tuple(self._contexts[sequence][:-1]), () if images is None else images.digests
            groups.setdefault(key, []).append(row)
            sets[key] = images  # the key has the tokens too, because places depend on the text before the images
        if blank := groups.pop(((), ()), None):
            self._caches.clear(torch.tensor(blank, device=self._stage.device))
        ordered = sorted(groups, key=lambda group: len(group[0]))
        for part in _passes([len(tokens) for tokens, _ in ordered], self._budget):
            batch = ordered[part]
            prompts = [(list(key[0]), sets[key]) for key in batch]
            self._read(prompts, [groups[key] for key in batch], lockstep=0)

    def _read_new(self, admission: RowAssignment) -> None:
        """Prefill sequences that still have a cache from an earlier turn: their tokens after the cached ones, without
        the last token, which the first decode step reads."""
        new = {row: self._contexts[s][self._cached[s] : -1] for s, row in admission.reused}
        starts = {row: self._cached[s] for s, row in admission.reused}
        device = self._stage.device
        ordered = sorted((row for row in new if new[row]), key=lambda row: len(new[row]))
        for part in _passes([len(new[row]) for row in ordered], self._budget):
            rows = ordered[part]
            lengths = [len(new[row]) for row in rows]
            step = Extension(self._caches, lengths, [starts[row] for row in rows], rows)
            tokens = torch.tensor([token for row in rows for token in new[row]], device=device)
            sequences = [self._rows.holders[row] for row in rows]
            ranges = [range(starts[row], starts[row] + len(new[row])) for row in rows]
            sets = [self._images[sequence] for sequence in sequences]
            images, positions = None, torch.cat([torch.arange(part.start, part.stop) for part in ranges])
            if any(image_set is not None for image_set in sets):
                images, positions = seen(list(zip(ranges, sets, strict=True)), self._stage)
            self._stage.forward(tokens, positions.to(device), step, want_logits=False, images=images)

    def _retire_turns(self, rows: int) -> dict[int, Sampled]:
        """End the rows of the cache whose turns are finished; return the turns by sequence.

        The rows stay with their sequences, because the next turn continues them.
        """
        self._read_texts(rows)
        finished = [row for row, done in enumerate(self._state.done[:rows].tolist()) if done]
        if not finished:
            return {}
        sequences = [self._rows.holders[row] for row in finished]
        place = torch.tensor(sequences, device=self._stage.device)
        logprobs = self._mesh.from_last_stage(self._logprobs[place])
        turns = self._cut(sequences, self._tokens[place], logprobs, self._rooms[place].cpu())
        sampled = dict(zip(sequences, turns, strict=True))
        self.read_kept(finished)
        counts = self._state.count[finished].tolist() if self._stage.keeps_state else None
        for sequence, (tokens, _, _) in sampled.items():
            # not the last token: it was sampled, but never an input, so it is not in the cache
            self._cached[sequence] = len(self._contexts[sequence]) + len(tokens) - 1
        moves = self._rows.retire(finished)
        self._move(moves, self._rows.running)
        if counts is not None:
            # A turn may end before tokens that its row has read, such as at a stop string found later. The row's state
            # then includes these tokens, so it cannot be reused.
            for sequence, count in zip(sequences, counts, strict=True):
                if len(sampled[sequence][0]) < count:
                    self.forget(sequence)
        return sampled


def _passes(lengths: Sequence[int], budget: int) -> list[slice]:
    """Split ascending `lengths` into slices of prefill passes, each within `budget` tokens after padding."""
    cuts = [0]
    for place, length in enumerate(lengths):
        if place > cuts[-1] and (place + 1 - cuts[-1]) * length > budget:
            cuts.append(place)
    return [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(lengths)], strict=True) if end > start]
