"""The result of planning a step."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.dag.placement import Placement
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.hardware import Hardware
from megarl.planning.passes import Cost, total
from megarl.planning.terms import Moment, Term, held, taken

ROOM_KEYS = (
    "rollout.sglang.memory_fraction, rollout.sglang.max_total_tokens, rollout.sglang.tp_size, "
    "rollout.sampling.max_new_tokens"
)
"""Recipe keys that determine a server's room for keys and values."""


@dataclass(frozen=True)
class PlannedPhase:
    """A node of the graph, or work between steps."""

    # the node's id, or for work that belongs to no node `weights` (their transfer), `moves` (offloading) or `other`
    name: str
    team: str
    parts: tuple[Cost, ...]  # the phase's costs, by formula and kind of work
    begins: float = 0.0  # seconds from the step's start to the phase's start

    @property
    def seconds(self) -> float:
        """The seconds of the slowest rank."""
        return total(self.parts)


@dataclass(frozen=True)
class ServerRoom:
    """The memory of an engine or a server for keys and values (formula K1 of docs/planning.md)."""

    engines: int
    ranks: int  # devices per engine
    weights: float  # bytes of weights per device
    bytes: float  # bytes per device for keys and values
    tokens: float  # tokens that fit into one engine, or into one attention group of a server
    slots: float  # samples that an engine decodes at the same time; 1 if not even one fits
    longest: float  # tokens of the longest sample, prompt included
    certain: bool = True  # False: SGLang, or its extra arguments, choose how much of a device a server takes

    @property
    def fits(self) -> bool:
        """Whether the keys and values of the longest sample fit into one engine."""
        return self.tokens >= self.longest


@dataclass(frozen=True)
class StepPlan:
    """The expected costs of a recipe's step. Names such as S1 refer to the formulas in docs/planning.md."""

    hardware: Hardware
    devices: int  # devices in use, including those of servers
    placement: Placement
    phases: tuple[PlannedPhase, ...]  # phases in the order of the graph
    step_s: float  # seconds per step (formula S1)
    tokens: float  # prompt and response tokens per step, for formula S2
    generated: float  # generated tokens per step
    flops: float  # FLOPs of policy, critic and reference in a step (formula F2)
    dtype: str
    filled: tuple[Filled, ...]  # memory of each team's fullest device in each moment of a step (formula M1)
    room: ServerRoom  # room of the engine or servers for keys and values
    # costs of a checkpoint (formula C1): bytes, seconds of the machines' disks, and seconds that training waits
    checkpoint: tuple[float, float, float]
    # costs of one step of supervised fine-tuning, with examples as long as samples; empty without such a phase
    sft: tuple[Cost, ...]
    given: PlanAssumptions

    def __getitem__(self, name: str) -> PlannedPhase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by name."""
        return {phase.name: phase.seconds for phase in self.phases}

    @property
    def tokens_per_s(self) -> float:
        """Prompt and response tokens of a step divided by its seconds (formula S2 of docs/planning.md)."""
        return self.tokens / self.step_s

    @property
    def per_device(self) -> float:
        """The metric `perf/throughput` (formula S2 of docs/planning.md)."""
        return self.tokens_per_s / self.devices

    @property
    def mfu(self) -> float:
        """The metric `perf/mfu` (formula S3 of docs/planning.md)."""
        return self.flops / self.step_s / self.devices / self.hardware.peak(self.dtype)

    @property
    def taken(self) -> float:
        """The bytes in use on the fullest device, as a dry run shows them (formula M1 of docs/planning.md)."""
        return max(device.taken for device in self.filled)

    @property
    def fullest(self) -> Filled:
        """The device with the most bytes (formula M1 of docs/planning.md)."""
        return max(self.filled, key=lambda device: device.bytes)


@dataclass(frozen=True)
class Filled:
    """The memory in use on a team's fullest device at one moment of the step."""

    team: str  # team that the device belongs to
    moment: Moment  # the memory in use, by term
    gpu: bool  # whether the device is a GPU

    @property
    def bytes(self) -> float:
        """The bytes that decide whether the moment fits: of all terms, with `Term.shrinks` at their minimum."""
        return held(self.moment.terms)

    @property
    def parts(self) -> list[tuple[Term, float]]:
        """The memory terms of this moment, the largest first, each with the bytes that a dry run shows for it."""
        parts = [(part, taken(part, gpu=self.gpu)) for part in self.moment.terms]
        return sorted(parts, key=lambda part: -part[1])

    @property
    def taken(self) -> float:
        """The bytes of all terms together; on a GPU those with `Term.shrinks` at their minimum, as in a dry run."""
        return sum(size for _, size in self.parts)
