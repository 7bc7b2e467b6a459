"""The policy that denoises actions with the trainer's parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megarl.data.batch import Batch, Jagged
from megarl.robots.models.flow.calls import SampledChains
from megarl.robots.models.flow.process import Denoising
from megarl.robots.models.vla.actions import NumberCodec
from megarl.robots.rollout.policy import Chunk, PolicyCall, rows_of
from megarl.training.heads import Head


class DenoisingPolicy:
    """An `ActingPolicy` that denoises the actions of all calls as one batch (flow matching).

    Args:
        evaluate: returns a head's outputs for a batch; see `MegatronEngine.evaluate`.
        codec: converts the policy's numbers to the simulator's actions.
        process: the denoising process.
        cameras: names of the cameras, in the policy's order.
        chunk: number of actions per policy call, K.

    Attributes:
        temperature: 0: denoise by the ODE, without exploration; any other value: by the SDE.
    """

    def __init__(
        self,
        evaluate: Callable[[Batch, Head], Jagged],
        codec: NumberCodec,
        process: Denoising,
        cameras: Sequence[str],
        chunk: int,
    ) -> None:
        self._evaluate, self._codec, self._process, self._cameras = evaluate, codec, process, cameras
        self._shape = (process.steps, chunk, codec.dim)
        self.temperature = 1.0
        zeros = np.zeros((process.steps + 1, chunk, codec.dim), np.float32)
        tokens = zeros[1:].size
        self.blank = Chunk([0] * tokens, [0.0] * tokens, codec.to_actions(zeros[0]), zeros)

    def act(self, calls: Sequence[PolicyCall]) -> list[Chunk]:
        """Denoise the actions of all `calls`, and return one chunk of actions for each call, in order."""
        seeds = torch.tensor([call.seed for call in calls], dtype=torch.int64)
        tokens = len(self.blank.token_ids)
        rows = rows_of(calls, self._cameras, torch.zeros(len(calls) * tokens, dtype=torch.int64))
        head = SampledChains(self._process, seeds, stochastic=self.temperature > 0)
        points, logps = self._evaluate(rows, head).values.view(len(calls), tokens, 2).unbind(2)
        first = head.noise(seeds, torch.Size(self._shape[1:]))[:, :1]
        chains = torch.cat([first, points.reshape(len(calls), *self._shape)], 1).numpy()
        actions = self._codec.to_actions(chains[:, -1])
        zeros = [0] * tokens
        return [Chunk(zeros, *each) for each in zip(logps.tolist(), actions, chains, strict=True)]
