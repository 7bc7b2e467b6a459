"""Seconds of a pass of a model over samples: forward, or forward and backward, as a layout divides it.

    micro-batch of one stage   products [T1], element-wise work [T2], fixed time [T3],
                               communication of tp and sp [T4], cp [T5], ep and etp [T6], pp [T7],
                               the vision encoder in front of the first stage [T12], adding gradients [T13]
    a pass                     micro-batches and the bubble of the pipeline [T8]
    an update                  a pass, reduction of gradients [T9], the optimizer's step [T10]

The tags name formulas of docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megarl.artifacts.facts import ModelFacts
from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.flops import FlopCounter, token_flops
from megarl.planning.hardware import Hardware
from megarl.planning.links import Links
from megarl.planning.shards import (
    BYTES,
    GRADIENT,
    decoder_adapters,
    owned_parameters,
    stage_parameters,
    step_bytes,
    trained_parameters,
)
from megarl.planning.vision import image_flops, patch_bytes, patch_tokens
from megarl.planning.workload import Share


@dataclass(frozen=True)
class Cost:
    """The seconds of a phase by one formula of docs/planning.md."""

    formula: str  # tag of the formula in docs/planning.md, such as T4
    what: str  # kind of work
    seconds: float  # seconds of the busiest rank in one step
    # bytes that this rank sends, reads or writes for this work; 0: the cost does not depend on bytes
    bytes: float = 0.0

    def times(self, number: float) -> Cost:
        """Return the cost of `number` repetitions."""
        return Cost(self.formula, self.what, self.seconds * number, self.bytes * number)


def total(parts: Sequence[Cost]) -> float:
    """Return the sum of the seconds of `parts`."""
    return sum(part.seconds for part in parts)


@dataclass(frozen=True)
class ModelPass:
    """The formulas for the seconds of passes through one model, in one layout on one team."""

    facts: ModelFacts
    parallel: ParallelConfig
    devices: int
    engine: EngineConfig
    dtype: str
    hardware: Hardware
    given: PlanAssumptions
    value_head: bool = False  # the model has one value per token in place of a vocabulary
    lora: LoraConfig | None = None  # adapters are trained instead of the weights
    of_draft: bool = False  # this is the layer of a draft head, for which the head's weight is a constant
    # which pipeline stage `_stage` computes. True: the last one, which has the head; False: of the others, the one with
    # most layers
    of_last: bool = True

    @cached_property
    def _links(self) -> Links:
        return Links(self.hardware, self.given)

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.devices // self.parallel.model_parallel_size

    @cached_property
    def _counter(self) -> FlopCounter:
        return FlopCounter.of(self.facts)

    @cached_property
    def _expert_flops(self) -> float:
        return token_flops(self.facts).get("experts", 0.0)

    @property
    def _split_residual(self) -> int:
        """Number of tensor-parallel ranks that split the residual stream's tokens; 1 without sequence parallelism."""
        return self.parallel.tp if self.parallel.splits_tokens(experts=self.facts.is_moe) else 1

    @property
    def _pairs(self) -> int:
        """How many (query, key) pairs attention computes per pair that the causal mask allows: 2 with kernels that also
        compute masked pairs."""
        return 2 if self.parallel.cp > 1 and not (self.hardware.gpu and self.dtype == "bf16") else 1

    @property
    def _element(self) -> int:
        return BYTES[self.dtype]

    def micro_batches(self, share: Share) -> int:
        """Return the number of micro-batches of a replica's samples (formula T8 of docs/planning.md).

        A micro-batch has whole samples up to the token budget, at least one. A prompt's images count once; where
        samples share prefixes, its tokens also count once. With vpp the number is a multiple of pp.
        """
        budget, images = self.engine.micro_batch_tokens, 0.0
        if share.patches:
            images = share.patches * patch_tokens(self.facts, self.parallel, self.engine, learns=self._trains_vision)
        once, each = (images + share.prompt, share.response) if share.once else (images, share.length)
        group = share.group * each + once
        together = budget // group * share.group if group <= budget else (budget - once) // each
        each = max(1.0, together, budget // (share.length + images))
        count = max(1, math.ceil(share.samples / each))
        if self.parallel.vpp:
            count = math.ceil(count / self.parallel.pp) * self.parallel.pp
        return count

    def forward(self, share: Share) -> list[Cost]:
        """Return the costs of one forward pass over samples that computes log-probs or values."""
        return self._passes(share, train=False)

    def update(self, share: Share, epochs: int, updates: int) -> list[Cost]:
        """Return the costs of a step's updates: `epochs` passes over the step's samples, with `updates` optimizer steps
        in each pass. `share`: a replica's samples of one update."""
        times = epochs * updates
        every = [*self._passes(share, train=True), *self._reduce(share), self._optimizer()]
        return [part.times(times) for part in every]

    def _passes(self, share: Share, *, train: bool) -> list[Cost]:
        share = replace(share, once=self.engine.share_prefixes)
        count = self.micro_batches(share)
        micro = replace(share, samples=share.samples / count)
        parts = [part for part in self._micro_batch(micro, train=train) if part.seconds]
        costs = [part.times(count) for part in parts]
        waits = (self.parallel.pp - 1) / (self.parallel.vpp or 1)
        if waits:
            # If the stages' processes share CPU cores, a stage that waits in the pipeline leaves its cores to others.
            hardware = self.hardware.while_others_wait(self.parallel.pp)
            if hardware is not self.hardware:
                parts = replace(self, hardware=hardware)._micro_batch(micro, train=train)
            costs.append(Cost("T8", f"pipeline bubble, {count} micro-batches", waits * total(parts)))
        return costs

    def _micro_batch(self, share: Share, *, train: bool) -> list[Cost]:
        """Return the costs of a micro-batch on the slowest pipeline stage: the last one, which has the head, or another
        one if that has more layers and takes longer."""
        counts = self.parallel.stage_layers(self.facts.layers)
        stages = [self] if counts[-1] == max(counts) else [self, replace(self, of_last=False)]
        return max((stage._stage(share, train=train) for stage in stages), key=total)

    def _stage(self, share: Share, *, train: bool) -> list[Cost]:
        """Return the costs of a micro-batch on the pipeline stage that `of_last` selects."""
        again = train and self.engine.recompute == "full"
        passes = 3 + again if train else 1
        facts, given = self.facts, self.given
        fixed_ms = facts.layers * given.layer_ms + facts.copies["router"] * given.experts_ms
        fixed = fixed_ms / self._stages / 1e3 / self.hardware.pace
        return [
            *self._products(share, passes, train=train),
            Cost("T2", "element-wise work", self._elementwise(share, passes)),
            Cost("T3", "fixed time of layers", passes * fixed),
            self._tensor(share, passes, train=train),
            self._context(share, passes, train=train),
            *self._experts(share, 1 + again, train=train),
            self._pipeline(share, train=train),
            Cost("T12", "vision encoder", self._encoder(share, passes, train=train)),
            *([self._gradients()] if train and self.hardware.gpu and not self.of_draft else []),
            *(self._draft(share) if train and facts.trains_draft and self.of_last else ()),
        ]

    def _draft(self, share: Share) -> list[Cost]:
        """Return the costs of a micro-batch's forward and backward pass of the draft head, on the last stage."""
        layer = replace(self, facts=self.facts.draft_layer, parallel=self.parallel.one_stage(), of_draft=True)
        tokens = share.tokens / self.parallel.cp / self._split_residual
        rate = self.hardware.peak(self.dtype) * self.given.gemm_share * self._filled(tokens)
        parts = [
            Cost("T1", "projection", 3 * 2 * tokens * self.facts.draft_projection / rate),
            *layer._micro_batch(share, train=True),
        ]
        return [replace(part, what=f"the draft head's {part.what}") for part in parts]

    @property
    def _trains_vision(self) -> bool:
        return "tower" not in self.facts.frozen and (self.lora is None or self.lora.in_tower)

    def _encoder(self, share: Share, passes: float, *, train: bool) -> float:
        """Return the seconds of the vision encoder, which each tensor-parallel rank computes whole.

        With pipeline stages, only the seconds by which the first stage (with the encoder) exceeds the last (with the
        head).
        """
        encoder, given, peak = self.facts.encoder, self.given, self.hardware.peak(self.dtype)
        if encoder is None or not share.patches:
            return 0.0
        images = max(1.0, share.samples / share.group)
        times = passes if self._trains_vision else 1.0
        products = images * image_flops(encoder, [share.patches])
        seconds = times * products / (peak * given.gemm_share * self._filled(images * share.patches))
        elements = images * share.patches * patch_bytes(encoder, 1, recompute=False)
        seconds += times / 3 * elements * self._each_element
        seconds += times * encoder.blocks * given.layer_ms / 1e3 / self.hardware.pace
        if self.parallel.pp == 1:
            return seconds
        ranks = self.parallel.tp * self.parallel.cp
        rate = peak * given.gemm_share * self._filled(share.tokens / self.parallel.cp)
        return max(0.0, seconds - self._head_work(share, train=train) / ranks / rate)

    def _head_work(self, share: Share, *, train: bool) -> float:
        """Return the FLOPs of the head (vocabulary or value), summed over the ranks that share it; 0 on a stage without
        a head."""
        if not self.of_last:
            return 0.0
        tokens = share.samples * share.response
        each = 2 * self.facts.hidden if self.value_head else self._counter.per_head_token
        # Logits of several chunks are not kept for the backward pass, so they are computed again.
        chunks = tokens / self.parallel.cp > self.engine.logits_chunk_tokens and not self.value_head
        frozen = 1 if self.of_draft else self._frozen(train)
        return (3 - frozen + chunks if train else 1) * tokens * each

    def _frozen(self, train: bool) -> int:
        """Return how many of the products per weight matrix (forward, gradients of input and of weight) are left out:
        1 when training adapters, or with a frozen language model; otherwise 0."""
        return 1 if train and (self.lora is not None or "language_model" in self.facts.frozen) else 0

    def _products(self, share: Share, passes: float, *, train: bool) -> list[Cost]:
        facts, parallel, given = self.facts, self.parallel, self.given
        ranks = parallel.tp * parallel.cp
        peak = self.hardware.peak(self.dtype)
        tokens = share.tokens
        # `pairs` are all forward FLOPs of a sample; `scores`, without those per token, are the FLOPs of attention.
        pairs = self._counter.forward([share.length], head_tokens=0)
        pairs += self._counter.unevenness(share.length, share.variance)
        scores = share.samples * (pairs - share.length * self._counter.per_token)
        of_prompt = self._counter.forward([share.prompt], head_tokens=0) - share.prompt * self._counter.per_token
        scores = (scores - (share.samples - share.prompts) * of_prompt) * self._pairs
        frozen = self._frozen(train)
        linear = tokens * (self._counter.per_token - self._expert_flops) / self._stages
        again = self.engine.recomputed if train else frozenset()
        once = scores / self._stages if "attention" in again else 0.0
        if "mlp" in again:
            once += tokens * token_flops(facts).get("mlp", 0.0) / self._stages
        rows = tokens / parallel.cp
        work = (passes - frozen) * linear + passes * scores / self._stages + self._adapters(tokens) * passes
        work += self._head_work(share, train=train) + once
        costs = [Cost("T1", "matrix products", work / ranks / (peak * given.gemm_share * self._filled(rows)))]
        if self._expert_flops:
            rows *= facts.experts_per_token * parallel.ep * parallel.expert_tp / (parallel.tp * facts.experts)
            work = (passes - frozen + ("moe" in again)) * tokens * self._expert_flops / self._stages / ranks
            rate = peak * given.expert_share * self._filled(rows)
            costs.append(Cost("T1", "experts' matrix products", work / rate))
        return costs

    @cached_property
    def _stages(self) -> float:
        """The model's number of layers divided by the number of layers of the stage that `of_last` selects; pp if all
        stages have equally many."""
        *others, last = self.parallel.stage_layers(self.facts.layers)
        return self.facts.layers / (last if self.of_last else max(others))

    def _adapters(self, tokens: float) -> float:
        if self.lora is None:
            return 0.0
        dense, expert = decoder_adapters(self.facts, ParallelConfig(), self.lora)
        active = expert / self.facts.experts * self.facts.experts_per_token if expert else 0.0
        return 2 * tokens * (dense + active) / self._stages

    def _filled(self, rows: float) -> float:
        """Return how fast a matrix product with `rows` rows is, as a fraction of the FLOP rate of large products."""
        return rows / (rows + self.given.gemm_half_rows)

    def _elementwise(self, share: Share, passes: float) -> float:
        facts, parallel = self.facts, self.parallel
        width = facts.ffn * (facts.experts_per_token if facts.is_moe else 1)
        attended = (
            count / facts.layers * (2 * q + kv)
            for mixer, count in facts.mixer_counts.items()
            for q, kv in (mixer.attended_elements(1),)
        )
        split = sum(attended) + 3 * width
        elements = share.tokens / parallel.cp * (4 * facts.hidden / self._split_residual + split / parallel.tp)
        if not self.hardware.gpu:  # on a CPU attention also writes its probabilities to memory
            square = share.length**2 + share.variance
            elements += self._pairs * share.samples * facts.heads / parallel.tp * square / parallel.cp
        elements *= facts.layers / self._stages
        if not self.value_head and self.of_last:
            logits = share.samples * share.response * facts.vocab / (parallel.tp * parallel.cp)
            # Recomputation is a fourth pass over the layers, not over the output head.
            elements += self.given.logit_elements * logits * (3 if passes > 1 else 1) / passes
        return elements * passes / 3 * self._each_element

    @property
    def _each_element(self) -> float:
        """Seconds of forward and backward work on one element of an activation that is kept for the backward pass."""
        moved = self.given.element_bytes / (self.hardware.memory_tb_s * 1e12 * self.given.memory_share)
        return max(moved, self.given.element_flops / self.hardware.peak("fp32"))

    def _tensor(self, share: Share, passes: float, *, train: bool) -> Cost:
        """Return the cost of an all-reduce after each mixer and each dense MLP, and of all-reduces of the gradients of
        their inputs; with sp, of a gather before and a scatter after them, and of the reverse."""
        facts, tp, cp, split = self.facts, self.parallel.tp, self.parallel.cp, self._split_residual > 1
        hidden, forwards = facts.hidden, 1 + (train and passes == 4)
        parts = [(m.projected_elements(hidden, cp), m.copied_elements(), n) for m, n in facts.mixer_counts.items()]
        # `_experts` counts what layers with experts send
        parts.append(((hidden,), (), facts.layers - facts.copies["router"]))
        elements = steps = 0
        for projected, copied, count in parts:
            inputs = (*projected, *copied)
            # Widths of what a ring of ranks sends per token; a sum is a scatter and a gather. With sp, a backward pass
            # also gathers the inputs of projections again.
            sent = forwards * ((*inputs, hidden) if split else (hidden, hidden))
            if train:
                sent += (*inputs, hidden, *projected) if split else 2 * inputs
            elements += count * sum(sent)
            steps += count * len(sent)
        nbytes = elements / self._stages * (tp - 1) / tp * share.tokens / cp * self._element
        seconds = self._links.ring(nbytes, tp, steps=steps / self._stages, sums=not split)
        return Cost("T4", "tensor and sequence parallel", seconds, nbytes)

    def _context(self, share: Share, passes: float, *, train: bool) -> Cost:
        """Return the cost of gathering keys and values or exchanging tokens for heads (again when recomputed), and the
        same for the gradients."""
        facts, parallel = self.facts, self.parallel
        cp, times = parallel.cp, passes - 1 if train else 1
        gathered = sum(count * mixer.gathered_elements(parallel.tp, cp) for mixer, count in facts.mixer_counts.items())
        sent = times / self._stages * (cp - 1) / cp * share.tokens * gathered * self._element
        seconds = self._links.ring(sent, cp, parallel.tp, steps=times * 2 * facts.layers / self._stages)
        return Cost("T5", "context parallel", seconds, sent)

    def _experts(self, share: Share, forwards: int, *, train: bool) -> list[Cost]:
        """Return the costs of sending tokens to experts and back; with etp an expert's ranks gather and scatter them.

        The numbers of tokens are sent first; the router's weights, which have a gradient, are sent with the tokens.
        """
        facts, parallel = self.facts, self.parallel
        if not facts.is_moe:
            return []
        ep, etp, layers = parallel.ep, parallel.expert_tp, facts.copies["router"] / self._stages
        times, copies = forwards + train, float(facts.experts_per_token)
        if parallel.dispatch == "deepep":  # one copy of a token for each rank that has some of its experts
            copies = ep * (1 - (1 - 1 / ep) ** copies)
        routed = share.tokens / (parallel.cp * parallel.tp) * copies * facts.hidden * self._element
        sent = times * layers * 2 * routed * (ep - 1) / ep
        seconds = self._links.exchange(sent, ep, etp, steps=layers * (4 * forwards + 3 * train))
        gathered = times * layers * 2 * routed * (etp - 1)
        # gathers of tokens and of the router's weights, a scatter of outputs; without ep also a gather of token counts
        steps = layers * (3 * times + (forwards if ep == 1 else 0))
        seconds += self._links.ring(gathered, etp, steps=steps)
        return [Cost("T6", "experts: all-to-all", seconds, sent + gathered)]

    def _pipeline(self, share: Share, *, train: bool) -> Cost:
        """Return the cost of a stage's messages to the next one, and of the gradient back."""
        parallel = self.parallel
        if parallel.pp == 1:
            return Cost("T7", "between stages", 0.0)
        sends = (2 if train else 1) * (parallel.vpp or 1)
        sent = sends * share.tokens / parallel.cp * self.facts.hidden * self._element / self._split_residual
        stride = self.devices // parallel.pp
        inside = self._links.inside(2, stride)
        seconds = sent / self._links.rate(inside=inside) + sends * self._links.hop(inside=inside)
        return Cost("T7", "between stages", seconds, sent)

    @cached_property
    def _trained(self) -> tuple[float, float]:
        if self.lora is not None:
            return trained_parameters(self.facts, self.parallel, self.lora, value_head=self.value_head)
        return stage_parameters(self.facts, self.parallel, value_head=self.value_head, trained=True)

    def _gradients(self) -> Cost:
        """Return the cost on a GPU of adding a micro-batch's weight gradients to their float32 buffers, in addition to
        the matrix products that compute them: the bytes of reading the gradient and of reading and writing the buffer;
        where the product itself adds to the buffer, only the buffer's, less the gradient that is not written."""
        dense, expert = self._trained
        apart, within = self._element + 2 * GRADIENT, 2 * GRADIENT - self._element
        te = self.engine.layers == "te" or self.engine.fp8 != "none"
        moved = dense * (within if te else apart) + expert * (within if self.dtype == "bf16" else apart)
        rate = self.hardware.memory_tb_s * 1e12 * self.given.memory_share
        return Cost("T13", "gradients added to buffers", moved / rate)

    def _reduce(self, share: Share) -> list[Cost]:
        """Return the cost of reducing fp32 gradients: an all-reduce, or a reduce-scatter and a gather of parameters."""
        parallel, engine = self.parallel, self.engine
        dense, expert = self._trained
        each = GRADIENT + (self._element if engine.distributed_optimizer else GRADIENT)
        experts = parallel.expert_tp * parallel.ep
        groups = [(dense, self.replicas * parallel.cp, parallel.tp)]
        if expert:
            groups.append((expert, max(1, self.devices // (experts * parallel.pp)), experts))
        parts = [(numbers * each * (size - 1) / size, size, stride) for numbers, size, stride in groups]
        sent = sum(part for part, _, _ in parts)
        # CPUs reduce-scatter gradients and gather parameters at the rate of sums (system/compat/gloo.py), but not while
        # the backward pass runs (overlap_grad_reduce).
        sums = not engine.distributed_optimizer or not engine.overlap_grad_reduce
        seconds = sum(self._links.ring(part, size, stride, steps=2, sums=sums) for part, size, stride in parts)
        what = "reduction of gradients"
        if engine.overlap_grad_reduce and seconds:
            # The backward pass hides part of the reduction of gradients, but not the gather of parameters after the
            # update.
            hidden = seconds * GRADIENT / each * self.given.overlap_share
            backward = total(self._passes(share, train=True)) * 2 / 3
            seconds -= min(hidden, backward)
            what += ", overlapped"
        return [Cost("T9", what, seconds, sent)] if seconds else []

    def _optimizer(self) -> Cost:
        """Return the cost of AdamW over gradient, master, moments and parameter; an fp32 parameter is the master."""
        engine = EngineConfig(distributed_optimizer=self.engine.distributed_optimizer)
        sizes = self.facts, self.parallel, engine, self.replicas
        owned = owned_parameters(*sizes, value_head=self.value_head, lora=self.lora)
        read = self._element if self.dtype == "fp32" else 0
        moved = owned * (GRADIENT + 2 * step_bytes(self.engine, self.dtype) + read + self._element)
        rate = self.hardware.memory_tb_s * 1e12 * self.given.memory_share
        return Cost("T10", "optimizer's step", moved / rate, moved)
