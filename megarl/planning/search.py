"""Ranks the layouts and placements of a recipe on some hardware by the step time that formulas give.

For each placement and layout it finds the fastest way to use memory that fits. Layouts whose parameters, gradients and
optimizer state do not fit are left out at once.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement, place, roles_of
from megarl.dag.stage import Role
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.candidates import RECOMPUTE, Choice, Offload, Space, Spread
from megarl.planning.decoding import Decoder
from megarl.planning.flops import FlopCounter
from megarl.planning.hardware import Hardware
from megarl.planning.memory import planned_fraction
from megarl.planning.outcome import ROOM_KEYS, Filled, StepPlan
from megarl.planning.passes import Cost, total
from megarl.planning.shards import STREAMED_BYTES, Sizes, known_sizes, state_bytes
from megarl.planning.step import StepFormulas
from megarl.planning.workload import Workload
from megarl.system.errors import ConfigError, count
from megarl.system.offload_schedule import GRADIENTS, OPTIMIZER


@dataclass(frozen=True)
class FoundPlan:
    """A variant of the recipe that fits into memory."""

    choice: Choice
    config: RunConfig
    plan: StepPlan


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the fastest plan of a recipe."""

    best: tuple[FoundPlan, ...]  # the best plans, the fastest first
    compared: int  # number of combinations of a placement and a layout that were compared
    without_room: int  # how many of these layouts do not fit into memory; the memory of slower layouts was not checked


@dataclass(frozen=True)
class _Timed:
    """A variant of the recipe and the seconds of its step."""

    step_s: float
    choice: Choice
    formulas: StepFormulas


class Search:
    """Compares variants of one recipe (`Choice`) by the seconds of their steps.

    Args:
        hardware: the hardware; every variant uses all of its devices.
    """

    def __init__(
        self, config: RunConfig, graph: TaskGraph, sizes: Sizes, hardware: Hardware, given: PlanAssumptions
    ) -> None:
        self._config, self._graph, self._sizes, self._hardware, self._given = config, graph, sizes, hardware, given
        self._facts = known_sizes(sizes, Role.ACTOR)
        self.space = Space(config, roles_of(graph), self._facts, hardware)
        self.limit = given.usable_memory * hardware.memory_gb * 1e9
        self._memo: dict[tuple[object, ...], list[Cost]] = {}
        self._caches: dict[tuple[object, ...], float] = {}
        self._generates: dict[Spread, float] = {}  # the least seconds of generation
        self._nearest: tuple[float, Choice, Filled | None] | None = None
        # whether a candidate was dropped only because its servers have no memory for the samples
        self._only_samples = False

    def run(self, top: int = 10) -> SearchResult:
        """Return the `top` fastest choices that fit, at most one per placement and layout.

        Raises:
            ConfigError: no layout divides the recipe, or none fits into memory.
        """
        best: list[_Timed] = []
        compared = without_room = 0
        floors = {spread: self.floor(spread) for spread in self.space.spreads()}
        for spread in sorted(floors, key=floors.__getitem__):
            for parallel in self.space.layouts(spread):
                compared += 1
                bound = best[-1].step_s if len(best) == top else math.inf
                if floors[spread] >= bound:
                    continue
                fastest = self._fastest(spread, parallel, bound)
                if fastest is None:
                    without_room += 1
                elif fastest.step_s < bound:
                    bisect.insort(best, fastest, key=lambda timed: timed.step_s)
                    del best[top:]
        if not compared:
            raise self._undivided()
        if not best:
            raise self._without_room(compared)
        plans = tuple(FoundPlan(timed.choice, timed.formulas.config, timed.formulas.plan()) for timed in best)
        return SearchResult(plans, compared, without_room)

    def floor(self, spread: Spread) -> float:
        """Return a lower bound on the step seconds of all layouts of a placement (formula S4 of docs/planning.md).

        It counts the matrix products of the actor's updates at the best assumed share of the peak rate, and the
        generation of servers as if they had memory for as many samples at once as the recipe allows.
        """
        given = self._given
        rate = self._hardware.peak(self._config.model.dtype) * max(given.gemm_share, given.expert_share)
        return self._step_floor(spread, self._training_flops / (rate * spread.trainers()))

    def _step_floor(self, spread: Spread, trains: float) -> float:
        """Return a lower bound on the step seconds of a placement whose trainers compute for at least `trains` s."""
        if spread not in self._generates:
            self._generates[spread] = self._generation_floor(spread)
        generates = self._generates[spread]
        return max(trains, generates) if self._config.async_.max_staleness else trains + generates

    def _generation_floor(self, spread: Spread) -> float:
        given, config = self._given, self._config
        # There is no simple bound without new servers, and none for oversampled rounds, which overlap.
        if not spread.servers or config.rollout.oversamples:
            return 0.0
        servers, work = config.rollout.sglang, Workload.of(config, given)
        ep, groups = (math.gcd(size, spread.tp_size) for size in (servers.ep_size, servers.attention_dp))
        sizes, cache = (config.rollout_dtype, spread.tp_size, 1, ep), config.cache_dtype
        decoder = Decoder(self._facts, *sizes, self._hardware, given, cache_dtype=cache, attention_dp=groups)
        flows = not config.async_.in_order
        most = servers.max_concurrency or work.number
        return total(decoder.generate(work, spread.servers, most, flows=flows))

    @cached_property
    def _training_flops(self) -> float:
        """The FLOPs of the actor's updates in a step, without the head."""
        work, config = Workload.of(self._config, self._given), self._config
        once = FlopCounter.of(self._facts).forward([work.prompt + work.lengths.expected], head_tokens=0)
        return 3 * config.actor.ppo_epochs * work.number * once

    def _fastest(self, spread: Spread, parallel: ParallelConfig, bound: float) -> _Timed | None:
        """Return the fastest choice of a placement and layout that fits, or one that takes `bound` seconds or longer;
        None if no choice fits.

        More recomputation takes longer, so it is tried only if less does not fit.
        """
        if not self._state_fits(spread, parallel):
            return None
        tokens, offload = self.space.budgets(spread)[0]
        choice = Choice(spread, parallel, tokens, RECOMPUTE[0], offload)
        config = choice.apply(self._config, self._hardware, self.space.trains)
        first = self._formulas(config, place(self._graph, config))
        least = self._least_seconds(choice, first)
        if least >= bound:  # most layouts; their memory and generation need not be computed
            return _Timed(least, choice, first)
        first.step_seconds()  # compute what all choices share once
        waiting = [(timed.step_s, number, timed) for number, timed in enumerate(self._timed(choice, first))]
        heapq.heapify(waiting)
        number = len(waiting)
        while waiting:
            _, _, timed = heapq.heappop(waiting)
            if timed.step_s >= bound or self._fits(timed.choice, timed.formulas):
                return timed
            after = RECOMPUTE.index(timed.choice.recompute) + 1
            if after < len(RECOMPUTE):
                more = self._retimed(replace(timed.choice, recompute=RECOMPUTE[after]), timed.formulas)
                number += 1
                heapq.heappush(waiting, (more.step_s, number, more))
        return None

    def _retimed(self, choice: Choice, formulas: StepFormulas) -> _Timed:
        """Return `choice` with the predicted seconds of its step. `formulas` are those of another choice with the same
        placement and layout; what the two have in common is not computed again."""
        other = formulas.again(choice.apply_engine(formulas.config, self.space.trains))
        return _Timed(other.step_seconds(), choice, other)

    def _state_fits(self, spread: Spread, parallel: ParallelConfig) -> bool:
        """Return whether the actor's parameters, gradients and optimizer state fit on a device together, as they must
        with every choice.

        With a streamed optimizer, an update needs only a piece of the optimizer state on the device, and a checkpoint
        needs all of it but no gradients.
        """
        replicas = spread.trainers() // parallel.model_parallel_size
        engine, dtype = self._config.actor.engine, self._config.model.dtype
        lora = self._config.model.lora
        state = state_bytes(self._facts, parallel, engine, dtype, replicas, lora=lora)
        size = sum(state.values())
        if engine.stream_optimizer and self._hardware.gpu:
            piece = min(state[OPTIMIZER], STREAMED_BYTES)
            size = max(size - state[OPTIMIZER] + piece, size - state[GRADIENTS])
        if size <= self.limit:
            return True
        if self._nearest is None or (self._nearest[2] is None and size < self._nearest[0]):
            choice = Choice(spread, parallel, engine.micro_batch_tokens, "full", self._hardware.gpu)
            self._nearest = (size, choice, None)
        return False

    def _least_seconds(self, choice: Choice, first: StepFormulas) -> float:
        """Return a lower bound on the step seconds of all choices of a placement and layout, from the passes of the
        actor's team without recomputation, one after the other. `first` has the formulas of `choice`."""
        team = first.placement.home(Role.ACTOR)
        passes = [first.pass_seconds(team)]
        for tokens in {tokens for tokens, _ in self.space.budgets(choice.spread)} - {choice.micro_batch_tokens}:
            other = replace(choice, micro_batch_tokens=tokens)
            formulas = first.again(other.apply_engine(first.config, self.space.trains))
            passes.append(formulas.pass_seconds(team))
        return self._step_floor(choice.spread, min(passes))

    def _timed(self, choice: Choice, first: StepFormulas) -> Iterator[_Timed]:
        """Yield the choices with the placement and layout of `choice` without recomputation, with the seconds of their
        steps. Choices whose servers have no room for the cache of one sample are left out."""
        fractions: dict[Offload, float | None] = {}
        for tokens, offload in self.space.budgets(choice.spread):
            other = replace(choice, micro_batch_tokens=tokens, offload=offload)
            if offload not in fractions:
                again = first.again(other.apply_engine(first.config, self.space.trains))
                fractions[offload] = self._fraction(again)
                if fractions[offload] == 0:
                    self._note(other, again)
            if fractions[offload] != 0:
                yield self._retimed(replace(other, memory_fraction=fractions[offload]), first)

    def _formulas(self, config: RunConfig, placement: Placement) -> StepFormulas:
        """Return the planner's formulas for a variant of the recipe; the search's variants share cached results."""
        results = (self._memo, self._caches)
        return StepFormulas(config, self._graph, placement, self._sizes, self._hardware, self._given, *results)

    def _fraction(self, formulas: StepFormulas) -> float | None:
        """Return `memory_fraction` for servers on the trainer's devices, from the memory that generation leaves them.

        None: servers do not share devices. 0: there is no room for weights and the cache of one sample.
        """
        if not formulas.config.rollout.colocated:
            return None
        team = next(team for team in formulas.placement.teams if Role.ROLLOUT in team.roles)
        memory = formulas.memory[team.name]
        fraction, free = planned_fraction(memory, self.limit), memory.free
        config = formulas.config
        longest = config.data.max_prompt_tokens + config.response_tokens(config.rollout.sampling)
        needed = formulas.server_weights + formulas.decoder.key_bytes * longest
        return fraction if fraction * free >= needed else 0.0

    def _fits(self, choice: Choice, formulas: StepFormulas) -> bool:
        fullest = max(formulas.filled(), key=lambda device: device.bytes)
        if fullest.bytes > self.limit:
            self._note(choice, formulas)
            return False
        self._only_samples |= not formulas.room.fits
        return formulas.room.fits

    def _note(self, choice: Choice, formulas: StepFormulas) -> None:
        """Remember the choice that came nearest to fitting; a choice whose state fits is always nearer than one whose
        state does not."""
        fullest = max(formulas.filled(), key=lambda device: device.bytes)
        if self._nearest is None or self._nearest[2] is None or fullest.bytes < self._nearest[0]:
            self._nearest = (fullest.bytes, choice, fullest)

    # -- nothing found -------------------------------------------------------------------------------------------

    def _undivided(self) -> ConfigError:
        config, hardware = self._config, self._hardware
        minis = {"data.batch_size": config.data.batch_size, "actor.mini_batch_size": config.actor.mini_batch_size}
        minis |= {"sft.batch_size": config.sft.batch_size if config.sft.steps else None}
        batches = ", ".join(f"{key}={size}" for key, size in minis.items() if size)
        return ConfigError(
            "no layout divides the devices, the model and the batches",
            where="--search",
            found=f"{hardware.describe()}: {hardware.devices} devices; {self._facts.layers} layers, "
            f"{self._facts.heads} heads, {self._facts.kv_heads} key/value heads; {batches}",
            allowed="replicas of tp * pp * cp devices, whose number divides all batches",
            fix="change the batch sizes, or the number of devices",
        )

    def _without_room(self, compared: int) -> ConfigError:
        if self._only_samples:
            return ConfigError(
                f"servers have no room for the longest sample in any of {compared} layouts",
                where="--search",
                found="too little room for keys and values",
                fix=f"change one of: {ROOM_KEYS}",
            )
        assert self._nearest is not None, "a choice that does not fit was noted"
        size, choice, fullest = self._nearest
        if fullest is None:
            parts = "parameters, gradients and optimizer state of the actor"
            keys = "more devices, or ones with more memory"
        else:
            largest = sorted(fullest.moment.terms, key=lambda part: -part.bytes)[:3]
            parts = f"{fullest.moment.name}: " + ", ".join(
                f"{part.what} {part.bytes / 1e9:,.1f} GB" for part in largest
            )
            keys = "; ".join(dict.fromkeys(part.keys for part in largest)) + "; or more devices"
        parallel = describe_layout(choice.parallel, choice.spread.trainers())
        return ConfigError(
            f"none of {compared} layouts fits into memory; the nearest ({parallel}, {choice.spread.describe()}) needs "
            f"{size / 1e9:,.1f} GB: {parts}",
            where="--search",
            found=f"{size / 1e9:,.1f} GB",
            allowed=f"{self.limit / 1e9:,.1f} GB: usable_memory {self._given.usable_memory:g} of "
            f"{self._hardware.memory_gb:g} GB",
            fix=f"change one of: {keys}",
        )


def describe_layout(parallel: ParallelConfig, devices: int) -> str:
    """Return a short text of a layout, without sizes of 1 except the data-parallel size."""
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "vpp": parallel.vpp, "cp": parallel.cp, "ep": parallel.ep}
    sizes |= {"etp": parallel.etp, "dp": devices // parallel.model_parallel_size}
    text = " ".join(f"{name}{size}" for name, size in sizes.items() if size not in (None, 1) or name == "dp")
    if parallel.last_stage_layers is not None:
        text += f", {count(parallel.last_stage_layers, 'layer')} in the last stage"
    return f"{text} sp" if parallel.sp else text
