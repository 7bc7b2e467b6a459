"""Floating-point operations of a decoder, dense or mixture of experts.

Counted are the matrix products (2 per multiply-add): projections, MLPs or the active experts and their router, causal
attention scores and values, and the output head. Norms, softmax, RoPE and the embedding lookup are below a percent. The
backward pass makes two products of each (one for the input's gradient, one for the weight's), so training costs three
forward passes (arXiv:2001.08361); recomputation is not counted, so MFU is model FLOPs utilisation (arXiv:2204.02311).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.artifacts.facts import ModelFacts

BACKWARD = 2
"""Matrix products of the backward pass per product of the forward pass."""
SCORES = "scores"
"""Component of attention over keys and values, which grows with the context."""


def token_flops(facts: ModelFacts, pairs: float = 0.0) -> dict[str, float]:
    """Return the forward FLOPs of one token in all layers and the output head, by component; components without FLOPs
    are left out.

    The token's query sees `pairs` keys, itself included; 0 leaves out attention over keys.
    """
    flops = {name: 2.0 * count for name, count in facts.multiplied_of.items() if count}
    if extra := sum(count * mixer.token_flops for mixer, count in facts.mixer_counts.items()):
        flops["mixers"] = extra
    seen = sum(each * (pairs if window is None else min(pairs, window)) for window, each in pair_flops(facts).items())
    return flops | ({SCORES: seen} if pairs else {})


def pair_flops(facts: ModelFacts, *, decoding: bool = False) -> dict[int | None, float]:
    """Return the forward FLOPs of one (query, key) pair, summed over the layers with the same sliding window: a table
    from the window in tokens (None: full attention) to FLOPs. With `decoding` those of a decoding step.
    """
    flops: dict[int | None, float] = {}
    for mixer, count in facts.mixer_counts.items():
        each = mixer.decoded_pair_flops if decoding else mixer.pair_flops
        flops[mixer.window] = flops.get(mixer.window, 0.0) + count * each
    return flops


@dataclass(frozen=True)
class FlopCounter:
    """Counts the FLOPs of one model."""

    per_token: float  # forward FLOPs of all layers for one token; excludes attention over keys, and the output head
    per_pair: Mapping[
        int | None, float
    ]  # sliding window -> FLOPs of a (query, key) pair in all layers with this window
    per_head_token: float  # FLOPs of the output head for one token
    per_decoded_pair: Mapping[int | None, float]  # as `per_pair`, in a decoding step
    draft: FlopCounter | None = None  # counts the draft head, if the model trains it

    @classmethod
    def of(cls, facts: ModelFacts) -> FlopCounter:
        """Return the FLOP counter of a model of these sizes."""
        work = token_flops(facts)
        head = work.pop("head")
        counter = cls(sum(work.values()), pair_flops(facts), head, pair_flops(facts, decoding=True))
        if not facts.trains_draft:
            return counter
        draft = cls.of(facts.draft_layer)
        return replace(counter, draft=replace(draft, per_token=draft.per_token + 2.0 * facts.draft_projection))

    def forward(self, lengths: Sequence[float], head_tokens: float | None = None) -> float:
        """Return the FLOPs of a forward pass over whole sequences; `head_tokens` (None: all) pass the output head."""
        tokens = sum(lengths)
        scores = sum(_scores(self.per_pair, 0, length) for length in lengths)
        head = tokens if head_tokens is None else head_tokens
        return tokens * self.per_token + scores + head * self.per_head_token

    def unevenness(self, length: float, variance: float) -> float:
        """Return how many more forward FLOPs sequences cost on average than one sequence of their mean length.

        E[n^2] is mean^2 plus the variance, and only attention grows quadratically, if no shorter window limits it.
        """
        grows = sum(each for window, each in self.per_pair.items() if window is None or length <= window)
        return variance / 2 * grows

    def train(self, lengths: Sequence[float], head_tokens: float | None = None) -> float:
        """Return the FLOPs of a forward and backward pass over whole sequences: three times a forward pass."""
        return (1 + BACKWARD) * self.forward(lengths, head_tokens)

    def train_draft(self, lengths: Sequence[float], head_tokens: float) -> float:
        """Return the FLOPs of a forward and backward pass of the draft head over whole sequences; 0: it is not trained.
        The output head, whose weight is a constant here, has one product of a backward pass only."""
        if self.draft is None:
            return 0.0
        return self.draft.train(lengths, head_tokens=0) + BACKWARD * head_tokens * self.per_head_token

    def generate(self, prompt_lengths: Sequence[float], response_lengths: Sequence[Sequence[float]]) -> float:
        """Return the FLOPs of prefilling each prompt once and decoding its samples with a KV cache."""
        total = self.forward(prompt_lengths, head_tokens=len(prompt_lengths))
        for prompt, responses in zip(prompt_lengths, response_lengths, strict=True):
            for response in responses:
                decoded = max(0, response - 1)  # the first token comes from the prefill, not from a decoding step
                total += decoded * (self.per_token + self.per_head_token)
                total += _scores(self.per_decoded_pair, prompt, prompt + decoded)
        return total


def _scores(per_pair: Mapping[int | None, float], start: float, end: float) -> float:
    """Return the FLOPs of attention for the queries at positions start..end-1."""
    return sum(each * pairs_between(start, end, window) for window, each in per_pair.items())


def pairs_between(start: float, end: float, window: int | None = None) -> float:
    """Count the (query, key) pairs of causal attention for queries at positions start..end-1; each query sees the keys
    up to its position, with `window` only the last `window` of them."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) / 2
    full = max(0, end - max(start, window))
    return full * window + (pairs_between(start, window) if start < window else 0)
