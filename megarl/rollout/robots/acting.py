"""The interface of a policy that acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.simulators.protocol import Numbers, Observation


@dataclass(frozen=True)
class PolicyCall:
    """One question to a policy. Its answer is a function of the weights, of this, and of the sampling settings.

    Attributes:
        prompt_ids: tokens of the instruction.
        observation: the present observation.
        seed: seed of this call, 0 <= seed < 2**63; other calls at the same time do not matter.
    """

    prompt_ids: list[int]
    observation: Observation
    seed: int


@dataclass(frozen=True)
class Chunk:
    """The output of a policy call: K actions of D numbers, sampled as K * D tokens.

    Attributes:
        token_ids: action after action.
        logprobs: of these tokens at the sampling temperature.
        actions: float32 [K, D], as the simulator takes them.
    """

    token_ids: list[int]
    logprobs: list[float]
    actions: Numbers


class ActingPolicy(Protocol):
    """A policy that acts. Every rank of a model replica calls `act` with the same arguments.

    Attributes:
        blank: a chunk that stands where a simulator failed before the first call; nobody trains on it.
    """

    blank: Chunk

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        """Return one chunk for each of `calls`, in their order."""
        ...
