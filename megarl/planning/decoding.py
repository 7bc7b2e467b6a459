"""Seconds of generation: an engine or server prefills prompts and decodes several samples at the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megarl.artifacts.facts import ModelFacts
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.flops import FlopCounter, token_flops
from megarl.planning.hardware import Hardware
from megarl.planning.links import Links
from megarl.planning.oversampling import OversampledRound
from megarl.planning.passes import Cost
from megarl.planning.shards import BYTES, embedding_ranks, key_value_bytes
from megarl.planning.vision import image_flops
from megarl.planning.workload import Workload

_POINTS = 32


@dataclass(frozen=True)
class Decoder:
    """One engine or server: the ranks that decode the same samples."""

    facts: ModelFacts
    dtype: str  # dtype of the weights
    tp: int  # ranks that share every layer
    pp: int  # pipeline stages, which work one after the other
    ep: int  # ranks that share the experts of a layer
    hardware: Hardware  # hardware as a pipeline stage sees it while the others wait
    given: PlanAssumptions
    etp: int = 0  # ranks that share an expert of an embedded engine; 0: a server, whose experts tp always divides
    vpp: int = 1  # parts of each stage, which take turns
    cache_dtype: str = ""  # dtype of the KV cache; empty: the dtype of the weights
    attention_dp: int = 1  # groups of a server's ranks, each of which computes the attention of its own samples

    @cached_property
    def _counter(self) -> FlopCounter:
        return FlopCounter.of(self.facts)

    @cached_property
    def _links(self) -> Links:
        return Links(self.hardware, self.given)

    @cached_property
    def _expert_flops(self) -> float:
        return token_flops(self.facts).get("experts", 0.0)

    @cached_property
    def key_bytes(self) -> float:
        """Bytes of keys and values of one token on a rank, over all layers."""
        return key_value_bytes(self.facts, self._attention_tp, self.cache_dtype or self.dtype)

    @property
    def _attention_tp(self) -> int:
        """Number of ranks that share the attention heads, and the same samples."""
        return max(1, self.tp // self.attention_dp)

    @property
    def _head_copies(self) -> int:
        """Number of ranks of a server that store the same rows of the head. SGLang divides a head of its own among all
        ranks, but takes a tied one from the embedding, which the ranks of each attention group share."""
        if self.attention_dp == 1 or not self.facts.tied:
            return 1
        return self.tp // embedding_ranks(self.facts, self._attention_tp)

    @cached_property
    def _mixing(self) -> tuple[float, float]:
        """The parameters of all layers' mixers, and the FLOPs of their products for one token."""
        kinds, facts = {mixer.kind for mixer in self.facts.mixers}, self.facts
        return sum(facts.parameters_of[kind] for kind in kinds), 2.0 * sum(facts.multiplied_of[kind] for kind in kinds)

    @property
    def _holders(self) -> int:
        """Number of ranks over which one set of all experts is divided."""
        return self.ep * self.etp if self.etp else self.tp

    @property
    def _gathered(self) -> int:
        """Number of ranks whose rows are gathered for the experts of each rank (embedded engine); 1 otherwise."""
        return self._holders if self.etp and self.ep > 1 else 1

    def step(self, running: float, context: float) -> tuple[float, float]:
        """Return the seconds of a decoding step, and the bytes that a rank reads (formula G2 of docs/planning.md).

        Args:
            running: number of samples that are decoded.
            context: their mean number of tokens.
        """
        facts, given, rate = self.facts, self.given, self.hardware.memory_tb_s * 1e12 * self.given.memory_share
        experts = facts.layers * facts.expert_parameters
        mixing, mixing_flops = self._mixing
        read = (facts.parameters - experts - mixing) / self.tp + mixing / self._attention_tp
        read += (self._head_copies - 1) * facts.hidden * facts.dimensions["vocab"] / self.tp
        if experts:
            # All ranks of a tensor-parallel group have the same samples, so gathered rows are those of _gathered / tp
            # groups.
            tokens = running * max(1.0, self._gathered / self.tp)
            read += experts / self._holders * (1 - (1 - facts.experts_per_token / facts.experts) ** tokens)
        group = running / self.attention_dp  # samples of a group of ranks
        weights, caches = read * BYTES[self.dtype], self.key_bytes * context * group
        # Stages work in turn, so a token waits for the bytes and products of all stages.
        peak = self.hardware.peak(self.dtype) * self.tp
        scores = running * sum(
            each * min(context, window or context) for window, each in self._counter.per_decoded_pair.items()
        )
        head = self._head_copies * self._counter.per_head_token
        dense = self._counter.per_token + head - self._expert_flops - mixing_flops
        filling = running + given.gemm_half_rows, group + given.gemm_half_rows
        # A product of `rows` rows reaches gemm_share * rows / (rows + gemm_half_rows) of the peak, so one factor `rows`
        # cancels out in running * FLOPs / (peak * share).
        products = (dense * filling[0] + mixing_flops * self.attention_dp * filling[1]) / (peak * given.gemm_share)
        products += self._expert_products(running)
        # A layer's products and its attention follow each other; each takes the time of its bytes or of its FLOPs,
        # whichever is longer.
        seconds = max(weights / rate, products) + max(caches / rate, scores / (peak * given.gemm_share))
        routers = facts.copies["router"] * facts.experts / self.ep
        layers = facts.layers * given.decode_layer_ms + routers * given.decode_expert_ms
        fixed = (given.decode_ms + layers + running * given.decode_row_us / 1e3) / 1e3 / self.hardware.pace
        return seconds + fixed + self._meeting(running), weights + caches

    def _expert_products(self, running: float) -> float:
        """Return the seconds of a decoding step's matrix products in the experts on a rank, with `running` samples."""
        if not self._expert_flops:
            return 0.0
        facts, given, all_rows = self.facts, self.given, running * self._gathered
        rows = all_rows * facts.experts_per_token / facts.experts
        share = given.expert_share * rows / (rows + given.gemm_half_rows)
        return all_rows * self._expert_flops / self._holders / (self.hardware.peak(self.dtype) * share)

    def _meeting(self, rows: float) -> float:
        """Return the seconds of all communication of a decoding step with `rows` samples: of tensor parallelism, of
        expert parallelism, and between pipeline stages.
        """
        facts, links, mixed, group = self.facts, self._links, self.facts.copies["router"], self._gathered
        whole = rows * facts.hidden * BYTES[self.dtype]

        def sums(number: int, size: int, rows: float = 1) -> float:
            return links.ring(number * 2 * (size - 1) / size * rows * whole, size, steps=2 * number, sums=True)

        if self.attention_dp > 1:
            # The samples of all groups are gathered before each feed-forward part, and its sums are scattered.
            seconds = sums(facts.layers, self.tp) + sums(facts.layers, self._attention_tp, 1 / self.attention_dp)
        else:
            seconds = sums(2 * facts.layers - (mixed if self.etp else 0), self.tp)
        if group > 1:  # the rows of all ranks are gathered, and their sums are scattered back
            seconds += links.ring(mixed * (group - 1) * whole, group, steps=mixed) + sums(mixed, group, group)
        elif mixed and self.etp:
            seconds += sums(mixed, self.etp)
        if self.pp > 1:
            inside = links.inside(2, self.tp)
            each = whole / links.rate(inside=inside) + links.hop(inside=inside)
            seconds += self.pp * self.vpp * each
        return seconds

    def prefill(self, prompts: float, tokens: float) -> float:
        """Return the seconds to prefill `prompts` prompts of `tokens` tokens each (formula G1 of docs/planning.md)."""
        if not prompts:
            return 0.0
        flops, rows = prompts * self._counter.forward([tokens], head_tokens=1), prompts * tokens
        share = self.given.expert_share if self.facts.is_moe else self.given.gemm_share
        filled = rows / (rows + self.given.gemm_half_rows)
        return flops / (self.tp * self.hardware.peak(self.dtype) * share * filled)

    def _see(self, prompts: float, patches: float) -> float:
        """Return the vision encoder's seconds for the images of prompts (formula G1 of docs/planning.md).

        Each rank of an embedded engine encodes all images; the ranks of an SGLang server divide them.
        """
        encoder = self.facts.encoder
        if encoder is None or not patches:
            return 0.0
        rows = prompts * patches
        share = self.given.gemm_share * rows / (rows + self.given.gemm_half_rows)
        ranks = 1 if self.etp else self.tp
        return prompts * image_flops(encoder, [patches]) / (ranks * self.hardware.peak(self.dtype) * share)

    def generate(self, work: Workload, engines: int, slots: float, *, flows: bool = False) -> list[Cost]:
        """Return the costs of a step's generation, whose samples `engines` engines share evenly.

        Formula G3 of docs/planning.md: of an engine's N samples at most S run at the same time. Until the last S have
        begun, S run all the time: for (N - S) / S x mean tokens steps. Then samples end one by one: after t steps N x
        P(length > t) are left. While all slots are taken, longer samples hold them for longer, so contexts have
        E[length^2] / (2 E[length]) tokens on average. With `flows`, samples of the next steps follow at once, so that
        no slot is idle at the end.
        """
        number = work.number / engines
        prompts = work.groups / engines
        side = max(1.0, min(slots, number))
        lengths, prompt = work.lengths, work.prompt
        full = number if flows else number - side
        steps = full / side * lengths.expected
        each, bytes_ = self.step(side, prompt + lengths.expected * (1 + lengths.variation**2) / 2)
        seconds, read = steps * each, steps * bytes_
        for begin, end in [] if flows else steps_of(lengths.longest_of(side)):
            middle = (begin + end) / 2
            running = max(1.0, side * lengths.above(middle)) if lengths.sigma else side
            each, bytes_ = self.step(running, prompt + middle)
            seconds += (end - begin) * each
            read += (end - begin) * bytes_
        filled = self.prefill(prompts, prompt) + self._see(work.seen / engines, work.patches)
        return [
            Cost("G1", f"prefill of {math.ceil(prompts)} prompts", filled),
            Cost("G3", f"decoding of {math.ceil(number)} samples, {math.floor(side)} side by side", seconds, read),
        ]

    def generate_first(self, round_: OversampledRound, engines: int, slots: float) -> list[Cost]:
        """Return the costs of a round of generation that ends when enough groups are complete (formula G5 of
        docs/planning.md).

        With fewer slots (samples that an engine decodes at the same time) than samples, the round takes at least
        all its tokens divided by the slots.
        """
        work, prompt, shortest = round_.work, round_.work.prompt, round_.steps
        side = max(1.0, min(slots, round_.oversample * work.number / engines))
        last = max(shortest, round_.begun / engines * work.lengths.expected / side) if side == slots else shortest
        seconds = read = 0.0
        for begin, end in steps_of(last):
            number, tokens = round_.running((begin + end) / 2, last)
            each, bytes_ = self.step(max(1.0, min(side, number / engines)), prompt + tokens)
            seconds += (end - begin) * each
            read += (end - begin) * bytes_
        again, tokens = round_.continued(last)
        prompts = round_.begun / work.samples / engines
        filled = self.prefill(prompts, prompt) + self.prefill(again / engines, prompt + tokens)
        seen = self._see(work.seen * round_.begun / work.number / engines, work.patches)
        return [
            Cost("G1", f"prefill of {math.ceil(prompts)} prompts", filled + seen),
            Cost("G5", f"{math.ceil(last)} decoding steps, {math.floor(side)} samples side by side", seconds, read),
        ]


def steps_of(last: float) -> list[tuple[float, float]]:
    """Return intervals of equal width that cover the decoding steps from 0 to `last`, to sum costs over."""
    width = last / _POINTS
    return [(at * width, (at + 1) * width) for at in range(_POINTS)]
