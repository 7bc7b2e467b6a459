"""Seconds of a run without measurements: rooflines of a device and its links, from a model's sizes.

    training     6 FLOPs per token and parameter that the token uses, at `train_mfu` of the peak; scoring 2
    decoding     reading the weights that a batch uses and the keys and values of all running samples, at `read_share`
                 of the memory's speed, or the FLOPs, whichever is longer; and a fixed part per step
    gradients    a ring: 4 bytes scattered and 2 gathered of a rank's parameters over its link, and a latency per hop
    weights      each device of a server takes its part of them over its own link; a fixed time, and one per server

This is one implementation of `megarl.simulation.seconds.Seconds`; measurements (megarl.simulation.calibrate) are
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role
from megarl.planning.hardware import KINDS
from megarl.planning.shards import key_value_bytes

if TYPE_CHECKING:
    from megarl.artifacts.facts import ModelFacts
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph
    from megarl.planning.lengths import Lengths
    from megarl.simulation.system import System

_BF16 = 2
_H100 = KINDS["h100"]
_SAMPLE_BYTES = 8.0 * 6  # bytes of a token's fields that are sent between teams


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of the formulas. By default devices are H100s, eight per machine."""

    peak_tflops: float = _H100.bf16_tflops  # dense bf16 peak of a device
    train_mfu: float = 0.35  # share of the peak that training and scoring reach
    prefill_mfu: float = 0.4  # share of the peak that prefill and decoding reach
    memory_tb_s: float = _H100.memory_tb_s  # memory bandwidth of a device
    read_share: float = 0.6  # share of the memory bandwidth that decoding reaches
    decode_ms: float = 3.0  # fixed time of a decoding step, which bytes and FLOPs do not explain
    link_gbit: float = _H100.net_gbit  # link of a device to other machines, one way
    link_times: float = 1.0  # factor by which everything sent over links takes longer, also where times were measured
    link_share: float = 0.8  # share of `link_gbit` that is reached
    hop_us: float = 15.0  # latency of one step of a ring collective between machines
    server_push_ms: float = 5.0  # time of the calls to a server for new weights
    push_fixed_s: float = 0.5  # fixed time of a weight update, whatever its size
    call_ms: float = 1.0  # time of a call to the coordinator
    step_s: float = 0.5  # time of a team and step outside all phases: metrics, files, Python
    mean_tokens: float = 0.0  # mean tokens per response; 0: a quarter of the longest
    sigma: float = 0.8  # standard deviation of the logarithm of a response's tokens
    device_hours: float = 0.0  # mean hours until a device fails; 0: no failures
    server_restart_s: float = 120.0  # seconds until a failed server is back
    train_restart_s: float = 300.0  # seconds until the actor's team is back after a failure


@dataclass(frozen=True)
class Planned:
    """Durations computed by formulas from the model's sizes; implements `megarl.simulation.seconds.Seconds`."""

    facts: ModelFacts
    system: System
    lengths: Lengths
    given: Assumptions
    model_parallel: int  # ranks per replica of the actor
    trains: Mapping[str, tuple[int, int]]  # for nodes that train: passes over the samples of a step, and updates
    scores: frozenset[str]  # nodes that only make one forward pass over the samples

    @property
    def _link(self) -> float:
        """Bytes per second of the network link of one device."""
        return self.given.link_gbit * self.given.link_share * 1e9 / 8 / self.given.link_times

    def token(self, running: int) -> float:
        """Return the seconds of a decoding step with `running` samples: a fixed part, and the reading of memory or the
        FLOPs, whichever takes longer."""
        facts, given, devices = self.facts, self.given, self.system.server_devices
        met = facts.parameters
        if facts.is_moe:
            experts = facts.layers * facts.expert_parameters
            share = 1 - (1 - facts.experts_per_token / facts.experts) ** running
            met = round(facts.parameters - experts * (1 - share))
        context = self.system.prompt_tokens + self.lengths.mean / 2
        keys = key_value_bytes(facts, 1, "bf16") * context * running
        read = (met * _BF16 + keys) / (devices * given.memory_tb_s * 1e12 * given.read_share)
        compute = 2 * facts.computing_parameters * running / (devices * given.peak_tflops * 1e12 * given.prefill_mfu)
        return given.decode_ms / 1e3 + max(read, compute)

    def prefill(self, tokens: int) -> float:
        """Return the seconds in which a replica prefills `tokens` tokens."""
        rate = self.system.server_devices * self.given.peak_tflops * 1e12 * self.given.prefill_mfu
        return 2 * self.facts.computing_parameters * tokens / rate

    def node(self, id: str, tokens: float, replicas: int) -> float:
        """Return the seconds of a node whose fullest replica has `tokens` tokens. Nodes that neither train nor score
        take no time."""
        flops = 2 * self.facts.computing_parameters * tokens
        rate = self.model_parallel * self.given.peak_tflops * 1e12 * self.given.train_mfu
        if id in self.scores:
            return flops / rate
        if id not in self.trains:
            return 0.0
        passes, updates = self.trains[id]
        return 3 * passes * flops / rate + updates * self.reduce(replicas)

    def reduce(self, replicas: int) -> float:
        """Return the seconds to reduce-scatter fp32 gradients and all-gather bf16 parameters over replicas."""
        if replicas == 1:
            return 0.0
        parameters = self.facts.parameters / self.model_parallel
        sent = parameters * (4 + _BF16) * (replicas - 1) / replicas
        return sent / self._link + 2 * replicas * self.given.hop_us / 1e6

    def push(self, replicas: int) -> float:
        """Return the seconds until all `replicas` of the rollout have new weights."""
        bytes_ = self.facts.parameters * _BF16 / self.system.server_devices
        return self.given.push_fixed_s + bytes_ / self._link + replicas * self.given.server_push_ms / 1e3

    def handover(self, tokens: float) -> float:
        """Return the seconds in which a replica fetches samples of `tokens` tokens that another team wrote."""
        return tokens * _SAMPLE_BYTES / self._link

    def other(self, team: str) -> float:
        """Return the assumed seconds per step that any team spends outside all nodes."""
        return self.given.step_s

    def call(self) -> float:
        """Return the assumed seconds in which the coordinator process handles one call."""
        return self.given.call_ms / 1e3


def plan_seconds(config: RunConfig, graph: TaskGraph, system: System, lengths: Lengths, given: Assumptions) -> Planned:
    """Return durations by formulas for a recipe. Raise ConfigError if the model's sizes are not known here."""
    from megarl.artifacts.facts import known_facts

    facts = known_facts(config.model, "download the model first, or simulate from measurements with --run RUN_DIR")
    trains, scores = {}, set()
    for node in graph:
        if node.declared.kind is Kind.MODEL_TRAIN:
            section = config.training_of(node.role.value)
            updates = max(1, config.data.batch_size // (section.mini_batch_size or config.data.batch_size))
            trains[node.id] = (section.ppo_epochs, updates * section.ppo_epochs)
        elif node.declared.kind is Kind.MODEL_INFERENCE and node.role is not Role.ROLLOUT:
            scores.add(node.id)
    return Planned(facts, system, lengths, given, config.actor.parallel.model_parallel_size, trains, frozenset(scores))
