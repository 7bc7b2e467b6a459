"""The interface of policies that choose actions, and the policy that uses the trainer's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged
from megarl.robots.config import FRAMES
from megarl.robots.models.vla.actions import ActionCodec
from megarl.robots.simulators.protocol import Numbers, Observation


@dataclass(frozen=True)
class PolicyCall:
    """The input of one policy call. Its result depends only on this, the weights and the sampling settings."""

    prompt_ids: list[int]
    observation: Observation
    seed: int  # seed, 0 <= seed < 2**63; samples depend on it, not on calls that run at the same time


@dataclass(frozen=True)
class Chunk:
    """The output of a policy call: K actions of D numbers, sampled as K * D tokens or by S denoising steps."""

    token_ids: list[int]  # tokens of all actions, one action after another
    logprobs: list[float]  # log-probs of these tokens at the sampling temperature
    actions: Numbers  # float32 [K, D], as the simulator takes them
    # float32 [S + 1, K, D], the points of the denoising chain; `logprobs` are then those of its S * K * D sampled
    # numbers. None: actions are tokens
    chain: Numbers | None = None


class ActingPolicy(Protocol):
    """A policy that acts. Every rank of a model replica calls `act` with the same arguments."""

    # the recorded chunk of an episode whose simulator failed before it executed any action; not trained on
    blank: Chunk

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        """Return one chunk for each of `calls`, in their order."""
        ...


def rows_of(calls: Sequence[PolicyCall], cameras: Sequence[str], responses: Tensor) -> Batch:
    """Return policy calls as a batch for the engine, one row per call; `responses`, the response tokens of all calls,
    are divided into equal parts."""
    fields: dict[str, Tensor | Jagged] = {
        "prompt_ids": Jagged.from_list([call.prompt_ids for call in calls], dtype=torch.int64),
        "response_ids": Jagged.from_lengths(responses, [len(responses) // len(calls)] * len(calls)),
        "states": torch.from_numpy(np.stack([call.observation.state for call in calls])),
    }
    for camera in cameras:
        fields[FRAMES + camera] = torch.from_numpy(np.stack([call.observation.frames[camera] for call in calls]))
    return Batch(fields)


class SampleTokens(Protocol):
    """A function that samples the response tokens of policy calls, such as `MegatronEngine.sample` or an object of
    `CachedSampling`."""

    def __call__(self, batch: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
        """Return the sampled tokens and their log-probs; of the tokens in `batch` only the number is used."""
        ...


class SamplingPolicy:
    """An `ActingPolicy` that samples the action tokens of all calls as one batch.

    Args:
        sample: samples the response tokens of a batch.
        codec: converts tokens to the simulator's actions.
        cameras: names of the cameras, in the policy's order.
        chunk: number of actions per policy call, K.

    Attributes:
        temperature: sampling temperature of the next calls; 0: greedy.
    """

    def __init__(self, sample: SampleTokens, codec: ActionCodec, cameras: Sequence[str], chunk: int) -> None:
        self._sample, self._codec, self._cameras = sample, codec, cameras
        self._slots = chunk * codec.dim
        self.temperature = 1.0
        first = np.full(self._slots, codec.tokens.start)
        self.blank = Chunk(first.tolist(), [0.0] * self._slots, codec.to_actions(first))

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        """Sample the tokens of all `calls`, and return one chunk of actions for each call, in order."""
        start, count = self._codec.tokens.start, len(calls)
        tokens_before = torch.full((count * self._slots,), start, dtype=torch.int64)
        rows = rows_of(calls, self._cameras, tokens_before)
        seeds = torch.tensor([call.seed for call in calls], dtype=torch.int64)
        tokens, logp = self._sample(rows, seeds, self.temperature)
        sampled = tokens.values.view(count, self._slots).numpy()
        actions = self._codec.to_actions(sampled)
        return [
            Chunk(ids.tolist(), values.tolist(), chunk)
            for ids, values, chunk in zip(sampled, logp.values.view(count, self._slots), actions, strict=True)
        ]
