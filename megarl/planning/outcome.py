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
"""The origin of a server's room for keys and values."""


@dataclass(frozen=True)
class PlannedPhase:
    """A node of the graph, or what lies between steps.

    Attributes:
        name: the node's id; `weights`, `moves` and `other` are no nodes.
        parts: by formula.
        begins: seconds after the step began.
    """

    name: str
    team: str
    parts: tuple[Cost, ...]
    begins: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the slowest rank."""
        return total(self.parts)


@dataclass(frozen=True)
class ServerRoom:
    """The room of an engine or a server for keys and values. [K1]

    Attributes:
        ranks: devices of each engine.
        weights: bytes of weights of a device.
        bytes: bytes of a device, for keys and values.
        tokens: that fit into one engine.
        slots: samples that it decodes side by side; 1 where not even one fits.
        longest: tokens of the longest sample, prompt included.
        certain: the recipe says how much of a device a server takes; else it is SGLang's choice.
    """

    engines: int
    ranks: int
    weights: float
    bytes: float
    tokens: float
    slots: float
    longest: float
    certain: bool = True

    @property
    def fits(self) -> bool:
        """True when the longest sample fits."""
        return self.tokens >= self.longest


@dataclass(frozen=True)
class StepPlan:
    """The expected costs of a recipe's step.

    Attributes:
        devices: that it occupies, servers' included.
        phases: in the order of the graph.
        step_s: seconds of a step. [S1]
        tokens: tokens of a step, prompts and responses. [S2]
        generated: those of them that are generated.
        flops: FLOPs of the policy in a step. [F2]
        filled: the fullest device of each team in each of its moments. [M1]
        room: room of the engine or servers for keys and values.
        checkpoint: bytes and seconds of the machines' disks, and seconds that training stands still. [C1]
        sft: one step of supervised fine-tuning, whose examples are taken to be as long as samples; none: there is none.
    """

    hardware: Hardware
    devices: int
    placement: Placement
    phases: tuple[PlannedPhase, ...]
    step_s: float
    tokens: float
    generated: float
    flops: float
    dtype: str
    filled: tuple[Filled, ...]
    room: ServerRoom
    checkpoint: tuple[float, float, float]
    sft: tuple[Cost, ...]
    given: PlanAssumptions

    def __getitem__(self, name: str) -> PlannedPhase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, by its name."""
        return {phase.name: phase.seconds for phase in self.phases}

    @property
    def tokens_per_s(self) -> float:
        """Prompt and response tokens of a step over its seconds. [S2]"""
        return self.tokens / self.step_s

    @property
    def per_device(self) -> float:
        """`perf/throughput`. [S2]"""
        return self.tokens_per_s / self.devices

    @property
    def mfu(self) -> float:
        """`perf/mfu`. [S3]"""
        return self.flops / self.step_s / self.devices / self.hardware.peak(self.dtype)

    @property
    def taken(self) -> float:
        """The bytes that the fullest device takes, as a dry run shows them. [M1]"""
        return max(one.taken for one in self.filled)

    @property
    def fullest(self) -> Filled:
        """The device that holds most. [M1]"""
        return max(self.filled, key=lambda one: one.bytes)


@dataclass(frozen=True)
class Filled:
    """A device at a moment of the step.

    Attributes:
        team: whose device.
        moment: the memory that is held, by term.
        gpu: the device is one.
    """

    team: str
    moment: Moment
    gpu: bool

    @property
    def bytes(self) -> float:
        """The bytes of all terms, where flexible ones have their least: whether the moment fits goes by them."""
        return held(self.moment.terms)

    @property
    def parts(self) -> list[tuple[Term, float]]:
        """The terms with their bytes as they are shown, the largest first."""
        parts = [(part, taken(part, gpu=self.gpu)) for part in self.moment.terms]
        return sorted(parts, key=lambda part: -part[1])

    @property
    def taken(self) -> float:
        """The bytes of all terms as they are shown, and as a dry run shows them."""
        return sum(size for _, size in self.parts)
