"""Groups of samples that come and go, over an open `Generation`.

    add(group) --> sequences 0 ... slots-1 --> wait: groups all of whose samples are over
                     ^                |
                     |                '-- interrupt: what was drawn is kept as drafts
                     '------------------- open: drafts go on, with the weights of then

A sample is drawn in stretches: one, unless it is interrupted. The next stretch reads the prompt and what was drawn
before as its context. Every token keeps the log-prob that it was drawn with and the version of the weights that drew
it.

Sequence numbers of the generation are reused: a sample that is over gives its number to the next one, while it waits
for the rest of its group here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.config.rollout import SamplingConfig
from megarl.data.versions import VersionRuns, append_runs
from megarl.rollout.engine import Completion, FinishReason, Generation, RolloutEngine


@dataclass
class Draft:
    """What there is of a sample: `Draft(**json)` of `dataclasses.asdict(draft)` is the draft.

    Attributes:
        token_ids: drawn so far.
        logprobs: of these tokens, as they were drawn.
        versions: of the weights that drew them.
        finish_reason: None: the sample is not over.
        turns: stretches that drew at least a token.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: VersionRuns = field(default_factory=list)
    finish_reason: FinishReason | None = None
    turns: int = 0

    def add(self, drawn: Completion) -> None:
        """Append a stretch; one that drew nothing does not count."""
        if drawn.token_ids:
            self.token_ids += drawn.token_ids
            self.logprobs += drawn.logprobs
            append_runs(self.versions, drawn.versions)
            self.turns += 1
        if drawn.finish_reason != "abort":
            self.finish_reason = drawn.finish_reason

    def copy(self) -> Draft:
        """One that shares no list with this."""
        versions = [list(run) for run in self.versions]
        return replace(self, token_ids=[*self.token_ids], logprobs=[*self.logprobs], versions=versions)


@dataclass(frozen=True)
class _Group:
    """A prompt, and for each of its samples the seeds of its stretches and what there is of it."""

    prompt_ids: list[int]
    seeds: list[Callable[[int], int]]
    drafts: list[Draft]

    def unfinished(self) -> Iterator[int]:
        """Samples that are not over."""
        return (sample for sample, draft in enumerate(self.drafts) if draft.finish_reason is None)

    @property
    def is_over(self) -> bool:
        return next(self.unfinished(), None) is None


class Stream:
    """Draws groups of samples that come and go. Every rank of a model replica makes the same calls in the same order.

    Replicas that generate together, on servers (`Generation.goes_on`) or in rounds (`Generation.in_rounds`), also call
    `open`, `wait` and `interrupt` equally often and in the same order; what they `add` differs. A replica that has
    nothing under way joins the others in these calls. Between two calls none may be kept by other things for long: the
    others wait for it.

    A sample that is never interrupted is the one that `RolloutEngine.generate` draws with the seed of its stretch 0.

    Args:
        engine: draws; `weight_version` of the time of `open` counts until `interrupt`.
        sampling: `n` is not read. `min_new_tokens` would count from the start of each stretch: whoever interrupts
            refuses such settings.
        eos_ids: end tokens in addition to those of `sampling`.
        slots: sequences under way, at most.
        longest: tokens of a prompt and its sample, at most.
    """

    def __init__(
        self, engine: RolloutEngine, sampling: SamplingConfig, eos_ids: Sequence[int], slots: int, longest: int
    ) -> None:
        self._engine, self._sampling, self._eos_ids = engine, sampling, list(eos_ids)
        self._slots, self._longest = slots, longest
        self._stop_ids = frozenset() if sampling.ignore_eos else frozenset([*eos_ids, *sampling.stop_token_ids])
        self._groups: dict[int, _Group] = {}
        self._generation: Generation | None = None
        self._sample_of: dict[int, tuple[int, int]] = {}  # sequence -> group and sample
        self._unused: list[int] = []  # a heap of sequences

    @property
    def busy(self) -> bool:
        """Groups were added that `wait` has not returned."""
        return bool(self._groups)

    @property
    def free(self) -> int:
        """Samples that may be added now."""
        return self._slots - sum(1 for group in self._groups.values() for _ in group.unfinished())

    def open(self) -> None:
        """Begin to generate with the weights of now, and go on with what was interrupted.

        Raises:
            RuntimeError: it is open.
        """
        if self._generation is not None:
            raise RuntimeError("the stream is open; interrupt() or close() it first")
        self._generation = self._engine.open(self._sampling, self._eos_ids, self._slots, self._longest)
        self._unused = list(range(self._slots))
        for number, group in sorted(self._groups.items()):
            for sample in group.unfinished():
                self._submit(self._generation, number, sample)

    def add(
        self,
        number: int,
        prompt_ids: Sequence[int],
        seeds: Sequence[Callable[[int], int]],
        drafts: Sequence[Draft] | None = None,
    ) -> None:
        """Ask for a group of `len(seeds)` samples, now or, when it is not open, with `open`.

        Args:
            number: of the group; none that is under way has it.
            seeds: `seeds[i](k)` is the seed of stretch k of sample i, in [0, 2**63).
            drafts: what there is of the samples; None: nothing.

        Raises:
            ValueError: more samples than are `free`, a number that is under way, or not a draft per sample.
        """
        if number in self._groups:
            raise ValueError(f"group {number} is under way")
        if drafts is not None and len(drafts) != len(seeds):
            raise ValueError(f"group {number} has {len(seeds)} samples and {len(drafts)} drafts")
        kept = [Draft() for _ in seeds] if drafts is None else [draft.copy() for draft in drafts]
        group = _Group(list(prompt_ids), list(seeds), kept)
        for draft in kept:
            self._end_if_full(draft)
        needed = sum(1 for _ in group.unfinished())
        if needed > self.free:
            raise ValueError(f"group {number} needs {needed} sequences, and {self.free} of {self._slots} are free")
        self._groups[number] = group
        if self._generation is not None:
            for sample in group.unfinished():
                self._submit(self._generation, number, sample)

    def wait(self, enough: Callable[[], bool] | None = None) -> list[tuple[int, list[Completion]]]:
        """Groups all of whose samples are over, in the order of their numbers, each once.

        It waits until there is at least one, or nothing is under way. Replicas that generate together return together:
        on servers after a few tenths of a second at most, in rounds after a round, perhaps with nothing. When the
        stream is not open it gives what is complete at once, by itself.

        Args:
            enough: asked now and then, collective over the replica and the same on its ranks: true ends the waiting.
                Not asked where replicas generate together.
        """
        generation = self._generation
        if generation is not None:
            if generation.goes_on:
                # One meeting of all ranks for each call. Nothing is lost by it: turns go on, and the calls of ranks
                # that have something under way and of those that have nothing pair off.
                self._collect(generation, generation.wait(lambda: True))
            elif generation.in_rounds:
                if generation.any_busy(bool(self._sample_of)):
                    self._collect(generation, generation.wait())
            else:
                self._decode(generation, enough or (lambda: False))
        return self._take_complete()

    def interrupt(self) -> None:
        """End everything under way with what there is of it, keep that, and stop generating.

        A sample that came to its own end is over. One of which nothing was drawn keeps the number of its stretch, and
        so its seed: it is as if it had begun only with the next `open`. Where samples are drawn in rounds, which end
        with all samples over, only what was added after the last `wait` is under way.

        Raises:
            RuntimeError: it is not open.
        """
        generation = self._generation
        if generation is None:
            raise RuntimeError("the stream is not open; nothing is under way that could be interrupted")
        for sequence in sorted(self._sample_of):
            generation.abort(sequence)
        while generation.any_busy(bool(self._sample_of)):
            self._collect(generation, generation.wait())
        self._generation = None
        generation.close()

    def drafts(self) -> dict[int, list[Draft]]:
        """What there is of every group that `wait` has not returned, for `add` of another stream.

        Raises:
            RuntimeError: it is open: what is there of the samples is known only after `interrupt`.
        """
        if self._generation is not None:
            raise RuntimeError("the stream is open; interrupt() it first: drafts lack what is being drawn")
        return {number: [draft.copy() for draft in group.drafts] for number, group in sorted(self._groups.items())}

    def close(self) -> None:
        """Give up everything. Not collective."""
        generation, self._generation = self._generation, None
        self._groups, self._sample_of = {}, {}
        if generation is not None:
            generation.close()

    def _submit(self, generation: Generation, number: int, sample: int) -> None:
        """Ask for the next stretch of a sample."""
        group, sequence = self._groups[number], heapq.heappop(self._unused)
        draft = group.drafts[sample]
        self._sample_of[sequence] = number, sample
        generation.submit(
            sequence,
            [*group.prompt_ids, *draft.token_ids],
            group.seeds[sample](draft.turns),
            self._sampling.max_new_tokens - len(draft.token_ids),
        )

    def _decode(self, generation: Generation, enough: Callable[[], bool]) -> None:
        """Wait until a group is complete, nothing is under way, or `enough()`."""
        told = False

        def ask() -> bool:
            nonlocal told
            told = enough()
            return told

        while self._sample_of and not told and not any(group.is_over for group in self._groups.values()):
            self._collect(generation, generation.wait(ask))

    def _collect(self, generation: Generation, over: Mapping[int, Completion]) -> None:
        """Take stretches that are over into their drafts; their sequences are free."""
        for sequence, drawn in over.items():
            generation.forget(sequence)
            heapq.heappush(self._unused, sequence)
            number, sample = self._sample_of.pop(sequence)
            draft = self._groups[number].drafts[sample]
            draft.add(drawn)
            self._end_if_full(draft)

    def _end_if_full(self, draft: Draft) -> None:
        """An end token or the limit of tokens may have been reached just when the sample was interrupted."""
        if draft.finish_reason is None and draft.token_ids:
            if draft.token_ids[-1] in self._stop_ids:
                draft.finish_reason = "stop"
            elif len(draft.token_ids) >= self._sampling.max_new_tokens:
                draft.finish_reason = "length"

    def _take_complete(self) -> list[tuple[int, list[Completion]]]:
        complete = sorted(number for number, group in self._groups.items() if group.is_over)
        return [(number, [_completion(draft) for draft in self._groups.pop(number).drafts]) for number in complete]


def _completion(draft: Draft) -> Completion:
    assert draft.finish_reason is not None, "its group is complete"
    return Completion(draft.token_ids, draft.logprobs, draft.finish_reason, draft.versions)
