"""Continuous batching, without tensors: assigns samples to rows, plans prefills, and fills the gaps of finished rows.

The running samples always fill rows 0..len(running)-1 of the cache, so no padded row is ever computed.

    queue --admit--> [prefill prompts that no running row holds] --> rows --decode--> finish: last row fills the hole
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.rollout.engine import Request


@dataclass(frozen=True)
class QueuedSample:
    """One sample to generate; `id` numbers all samples of a call."""

    id: int
    request: int
    prompt_tokens: int


@dataclass
class Prefill:
    """One packed prefill pass: prompts (request numbers) and the cache rows that each prompt fills."""

    requests: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


@dataclass
class Admission:
    """Newly admitted samples, their prefill passes, and the (source, target) rows to copy instead of prefilling."""

    samples: list[QueuedSample] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Assigns queued samples to a fixed number of cache rows, first come, first served.

    Args:
        max_prefill_tokens: maximum number of prompt tokens in one prefill pass, after padding to the longest prompt.
        copies: whether the cache of a prompt can be copied from a running sample to later samples of the prompt; false
            for layers with a recurrent state, which the sample's own tokens have changed.
    """

    def __init__(
        self, requests: Sequence[Request], slots: int, max_prefill_tokens: int, *, copies: bool = True
    ) -> None:
        self._slots, self._budget, self._copies = slots, max_prefill_tokens, copies
        self.samples: list[QueuedSample] = []
        for number, request in enumerate(requests):
            for _ in request.seeds:
                self.samples.append(QueuedSample(len(self.samples), number, len(request.prompt_ids)))
        self._queue = deque(self.samples)
        self.running: list[QueuedSample] = []

    def admit(self) -> Admission | None:
        """Move queued samples into free rows; return None if the queue is empty or no row is free."""
        free = min(self._slots - len(self.running), len(self._queue))
        if free <= 0:
            return None
        admission = Admission()
        holder = {sample.request: row for row, sample in enumerate(self.running)} if self._copies else {}
        fresh: dict[int, list[int]] = {}
        for _ in range(free):
            sample, row = self._queue.popleft(), len(self.running)
            self.running.append(sample)
            admission.samples.append(sample)
            if sample.prompt_tokens == 1:
                continue  # no prefill: the first decode step reads the last prompt token, and there is no earlier one
            if sample.request in holder:
                admission.copies.append((holder[sample.request], row))
            else:
                fresh.setdefault(sample.request, []).append(row)
        admission.prefills = self._pack(fresh)
        return admission

    def _pack(self, fresh: dict[int, list[int]]) -> list[Prefill]:
        """Return prefill passes of prompts of similar length, within the token budget; a longer prompt has its own."""
        passes: list[Prefill] = []
        length = {request: self.running[rows[0]].prompt_tokens - 1 for request, rows in fresh.items()}
        for request in sorted(fresh, key=lambda r: length[r]):
            if not passes or (len(passes[-1].requests) + 1) * length[request] > self._budget:
                passes.append(Prefill())
            passes[-1].requests.append(request)
            passes[-1].rows.append(fresh[request])
        return passes

    def finish(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Remove the samples in the finished `rows`. Return the (source, target) copies, to be made all at once, that
        move samples which still run into the freed rows."""
        gone = set(rows)
        running = len(self.running) - len(gone)
        holes = sorted(row for row in gone if row < running)
        movers = [row for row in range(running, len(self.running)) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[running:]
        return list(zip(movers, holes, strict=True))
