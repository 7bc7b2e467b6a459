"""Memory of an update in addition to the model's state: activations kept for the backward pass, and temporary buffers.

Sizes are of one rank. `t`: tokens of a micro-batch on it (after context parallelism); `s`: tokens whose residual stream
it holds (t / tp under sequence parallelism). `megarl bench plan` and tests/planning/test_activations.py compare these
formulas with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig

FULL = 4
"""Bytes of a float32: row statistics, the router's numbers, scaled logits."""
INDEX, PLACE = 8, 4
"""Bytes of integers: token numbers, and row numbers for GPU kernels."""
WHOLE_PASS, PROBABILITIES = 64, 1024
"""CPU attention is one compiled pass over the packed stream up to the first length, and matrix products that keep the
probabilities up to the second.
"""
_QUERY_BLOCK = 64


@dataclass(frozen=True)
class Passes:
    """The passes through the model in one optimizer step, as one rank sees them."""

    tokens: float  # this rank's tokens of the largest micro-batch
    rows: float  # how many of `tokens` predict a response token; the output layer computes only these
    longest: int  # tokens of the longest sequence, those on other context-parallel ranks included
    count: int = 1  # number of micro-batches


@dataclass(frozen=True)
class Needed:
    """The bytes of activations when forward and backward passes take most memory, in addition to the model's state."""

    kept: float  # activations kept for the backward passes of the micro-batches in flight
    passing: float  # temporary bytes of the layer whose gradient is computed, or of the embedding's gradient
    head: float = 0.0  # temporary bytes of the output head's logits and gradients

    @property
    def bytes(self) -> float:
        """Bytes of all activations together."""
        return self.kept + self.passing + self.head


class Activations:
    """The formulas for the bytes of one model's activations under one layout.

    Args:
        element: bytes of a number of the model's dtype.
        gpu: GPU kernels are used, which do not keep attention probabilities for the backward pass.
        logit_copies: float32 tensors with the size of a chunk's logits, for a head that compares distributions.
    """

    def __init__(
        self,
        facts: ModelFacts,
        parallel: ParallelConfig,
        engine: EngineConfig,
        passes: Passes,
        *,
        element: int,
        gpu: bool,
        value_head: bool = False,
        logit_copies: float = 0,
    ) -> None:
        self.facts, self.parallel, self.engine, self.passes = facts, parallel, engine, passes
        self.element, self.gpu, self.value_head, self.logit_copies = element, gpu, value_head, logit_copies
        self.split_stream = parallel.splits_tokens(experts=facts.is_moe)
        self.held = passes.tokens / (parallel.tp if self.split_stream else 1)
        self.sparse = facts.copies["router"] / facts.layers

    # -- kept for the backward pass -------------------------------------------------------------------------------

    @property
    def attention(self) -> float:
        """Bytes that one layer's mixer and its norm keep for the backward pass; the mean over layers if they
        differ."""
        facts, t, tp = self.facts, self.passes.tokens, self.parallel.tp
        stored = 0.0
        for mixer, count in facts.mixer_counts.items():
            scores = self._scores(facts.heads / tp, *mixer.attended_elements(tp)) if mixer.pair_flops else 0.0
            stored += count / facts.layers * (self.element * t * mixer.kept_elements(tp) + scores)
        return self._norm + stored

    @property
    def _norm(self) -> float:
        """Bytes of a norm's input and, unless it is recomputed, its output."""
        return self.element * (1 if "norm" in self.engine.recomputed else 2) * self.held * self.facts.hidden

    def _scores(self, heads: float, q: float, kv: float) -> float:
        """Return the bytes that attention keeps for the backward pass in addition to its inputs and its result.

        Args:
            q, kv: elements per token of queries, and of keys and values.
        """
        t, longest = self.passes.tokens, self.passes.longest
        sums = FULL * t * heads
        if self.parallel.cp > 1 and self.gpu and self.element < FULL:
            # For this rank's two chunks: copies of queries and outputs (2 q), in place of the rotated queries (q), and
            # copies of all keys and values up to the end of each chunk (cp * kv + kv / 2), in place of the rotated keys
            # (kv / 2).
            return sums + self.element * t * (q + self.parallel.cp * kv)
        if self.parallel.cp > 1:
            # Copies of queries and outputs, grouped by sequences of similar lengths (2 q), in place of the rotated
            # queries (q); keys and values of all ranks (cp * kv) in place of the rotated keys (kv / 2); and a mask that
            # each layer expands (longest).
            keys = self.parallel.cp * kv - kv / 2
            return sums + self.element * t * (q + keys + longest)
        if self.gpu or longest > PROBABILITIES:
            return 0.0 if "attention" in self.engine.recomputed else sums
        if "attention" in self.engine.recomputed:
            return 0.0
        if longest <= WHOLE_PASS:
            return sums + self.element * t * kv / 2  # this attention also keeps a contiguous copy of the values
        blocks = max(1, round(longest / _QUERY_BLOCK))
        return self.element * t * heads * longest / 2 * (1 + 1 / blocks)

    @property
    def feed_forward(self) -> float:
        """Bytes that a layer's MLP or experts keep for the backward pass, including the norm's; the mean over layers if
        they differ."""
        facts, element, s, again = self.facts, self.element, self.held, self.engine.recomputed
        ends = self._norm
        dense_width = facts.dense_ffn if facts.is_moe else facts.ffn
        dense = 0.0 if "mlp" in again else element * 3 * self.passes.tokens * dense_width / self.parallel.tp
        if not facts.is_moe:
            return ends + dense
        # The router's logits, probabilities and expert map.
        router = s * facts.experts * (3 * FULL + 2)
        # Rows in expert order: the input (`hidden`); of width `ffn`, the gate and up projections, their product times
        # the router's weight and, without GPU kernels, the product before this multiplication.
        products = 3 if self.gpu else 4
        experts = element * self.routed * (facts.hidden * self.parallel.expert_tp + products * facts.ffn)
        shared = element * 3 * self.passes.tokens * facts.dimensions["shared_ffn"] / self.parallel.tp
        mixture = 0.0 if "moe" in again else router + self.route + experts + shared
        return ends + self.sparse * mixture + (1 - self.sparse) * dense

    @property
    def route(self) -> float:
        """Bytes of the integers that one layer keeps to map rows to tokens."""
        # Each row's token and expert (one tensor), the position of its router weight and, for GPU kernels, its number.
        local = 3 * INDEX + (PLACE if self.gpu else 0)
        # If ranks exchange rows: their order by expert and the inverse, which GPU kernels keep as row numbers.
        exchanged = INDEX + (PLACE if self.gpu else INDEX)
        parallel = self.parallel
        exchanges = parallel.ep * parallel.expert_tp > 1
        return self.routed * (local + (exchanged * parallel.expert_tp if exchanges else 0))

    @property
    def routed(self) -> float:
        """Rows (token and chosen expert) per layer that one rank's experts compute if the load is balanced."""
        return self.held * self.facts.experts_per_token

    @property
    def layer(self) -> float:
        """Bytes that one layer keeps for the backward pass without recomputation."""
        return self.attention + self.feed_forward

    @property
    def stream(self) -> float:
        """Bytes of the residual stream between two layers."""
        return self.element * self.held * self.facts.hidden

    @property
    def micro_batch(self) -> float:
        """Bytes that the layers of the largest pipeline stage keep of one micro-batch for its backward pass."""
        each = self.stream if self.engine.recompute == "full" else self.layer
        return self.parallel.most_layers(self.facts.layers) * each + self.stream

    def in_flight(self, *, last: bool) -> float:
        """Return the maximum number of micro-batches whose activations one pipeline stage holds at once: the last stage
        if `last`, otherwise the first."""
        pp, vpp = self.parallel.pp, self.parallel.vpp or 1
        if pp == 1:
            return 1.0
        if vpp == 1:
            return 1.0 if last else float(min(pp, self.passes.count))
        # Chunks before the first backward pass, plus the chunk that this pass belongs to.
        ahead = (0 if last else 2 * (pp - 1)) + (vpp - 1) * pp + 1
        return min(ahead, self.passes.count * vpp) / vpp

    # -- temporary memory -----------------------------------------------------------------------------------------

    @property
    def passing(self) -> float:
        """Temporary bytes while the gradient of one layer is computed: its gradients or expert rows, and with full
        recomputation its activations."""
        facts, t, element, tp = self.facts, self.passes.tokens, self.element, self.parallel.tp
        width = (facts.dense_ffn if facts.is_moe else facts.ffn) / tp
        products = 2 * t * width + self.held * facts.hidden
        weights = 2 * width * facts.hidden + t * (facts.hidden + width) if tp > 1 else 0.0
        dense = max(products, weights - 2 * t * width)
        rows = self._expert_rows if facts.is_moe else 0.0
        # Megatron gathers the hidden states of all tensor-parallel ranks in one buffer that all layers share.
        gathered = t * facts.hidden if self.split_stream else 0.0
        most = max(element * dense if self.sparse < 1 else 0.0, rows)
        again = self.layer if self.engine.recompute == "full" else 0.0
        return most + element * gathered + again

    @property
    def _expert_rows(self) -> float:
        """Maximum temporary bytes for the rows that the experts of a layer process: in the backward pass, or while the
        results of experts that are split over ranks are summed."""
        ways, element = self.parallel.expert_tp, self.element
        backward = 4 * element * ways
        # The rows of `ways` ranks: results in expert order and in token order (2 element), the latter also in fp32
        # (FULL). The rows of one rank: two fp32 summands, and the rows as sent and as received.
        forward = (2 * element + FULL) * ways + 2 * FULL + 2 * element if ways > 1 else 0
        return max(backward, forward) * self.routed * self.facts.hidden

    @property
    def embedding(self) -> float:
        """Bytes of the embedding's gradient in the model's dtype, before it is added to its buffer, and of the gradient
        of the embedding's output."""
        return self.element * self._columns * self.facts.hidden + self.stream

    @property
    def _columns(self) -> float:
        return self.facts.vocab / self.parallel.tp

    @property
    def head(self) -> float:
        """Bytes while the output head is computed: logits of a chunk of tokens with their gradient, and the gradients
        of weight and hidden states."""
        n, h, columns, element = self.passes.rows, self.facts.hidden, self._columns, self.element
        if self.value_head:
            return FULL * 4 * self.held * h  # hidden states and their gradients in float32
        weight, rows = h * columns, (element + FULL) * n * h
        each = max(self._logit, FULL * self.logit_copies)
        if self.facts.wiring.logit_cap is not None:
            each += (2 if self.gpu else 1) * FULL  # the soft-cap's derivative, and on a GPU the unrounded gradient
        # A head that compares distributions, and on a CPU any head with several chunks of tokens, sums the weight's
        # gradient in float32. Otherwise the gradient is one matrix product or, on a GPU, one for each block of the
        # vocabulary (`linear_logprob`), without a sum.
        summed = self.logit_copies > 0 or (not self.gpu and n > self.engine.logits_chunk_tokens)
        return each * self._logits + ((FULL if summed else 0) + element) * weight + rows

    @property
    def _logits(self) -> float:
        """Number of logits of a chunk."""
        return min(self.engine.logits_chunk_tokens, self.passes.rows) * self._columns

    @property
    def _logit(self) -> int:
        """Bytes of a logit with its gradient; a CPU also stores its exponential."""
        return FULL + self.element if self.gpu else 3 * FULL

    # -- the draft head -------------------------------------------------------------------------------------------

    @cached_property
    def _draft_layer(self) -> Activations:
        """The formulas for the layer of the draft head."""
        layer, layout = self.facts.draft_layer, self.parallel.one_stage()
        return Activations(layer, layout, self.engine, self.passes, element=self.element, gpu=self.gpu)

    def _draft(self, bytes_before: float) -> list[Needed]:
        """Return two entries: the bytes while the draft head's logits are computed, and while the gradient of its layer
        is computed.

        Its forward pass comes after that of the policy's head, and its backward pass before.

        Args:
            bytes_before: bytes of the policy's own layers and final hidden states.
        """
        layer, n = self._draft_layer, self.passes.rows
        rows = self.element * n * self.facts.hidden
        of_layer = self.stream if self.engine.recompute == "full" else layer.layer
        # 4 streams: the embeddings of the next tokens, these concatenated with the hidden states (2), and the final
        # norm's input. The policy's head adds its rows and, if it computes all logits in one chunk, these logits.
        size = bytes_before + of_layer + 4 * self.stream + rows
        size += FULL * self._logits if n <= self.engine.logits_chunk_tokens else 0.0
        if self.parallel.pp > 1 and not self.facts.tied:  # the last stage gets a copy of the embedding
            size += self.element * self._columns * self.facts.hidden
        return [Needed(size, 0.0, self._logit * self._logits + 2 * rows), Needed(size, layer.passing)]

    # -- peak memory ----------------------------------------------------------------------------------------------

    def needed(self, *, last: bool) -> Needed:
        """Return the bytes when passes take most memory, on a rank of the first stage, or of the last with `last`."""
        alone, flying = self.parallel.pp == 1, self.in_flight(last=last)
        moments = [Needed(flying * self.micro_batch, self.passing)]
        if last or alone:
            gathered = self.element * self.passes.tokens * self.facts.hidden if self.split_stream else 0.0
            moments.append(Needed(flying * self.micro_batch + self.stream, gathered, self.head))
            if self.facts.trains_draft:
                moments += self._draft(flying * self.micro_batch + self.stream)
        if not last or alone:
            done = 1.0 / (self.parallel.vpp or 1)
            moments.append(Needed(max(flying - done, 0.0) * self.micro_batch, self.embedding))
        return max(moments, key=lambda needed: needed.bytes)
