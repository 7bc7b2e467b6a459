"""Training examples of the flow-matching loss: policy calls of demonstrations, each at one flow time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.robots.config import CHAIN, FLOW_TIME
from megarl.robots.models.flow.process import example_times, normal_noise
from megarl.robots.models.vla.actions import NumberCodec
from megarl.robots.models.vla.cloning import CloningExamples


class FlowExamples(CloningExamples):
    """Demonstrations for a flow-matching policy to clone: each example has the field `chain` [1, 2, K, D], noise and
    actions, and the field `flow_time` [1].

    Noise and flow time of an example depend only on its number and the epoch, so they are the same in a resumed run.
    """

    codec: NumberCodec

    def encode(self, actions: NDArray[np.float32]) -> NDArray[Any]:
        """Return the normalised action of each environment step, float32 [N, D]."""
        return self.codec.to_numbers(actions[:, None])[:, 0]

    def targets(self, actions: NDArray[Any], indices: Sequence[int], epoch: int) -> dict[str, Tensor]:
        """Return the fields from which the policy learns: `chain` (noise and actions), `flow_time`, and `response_ids`,
        which only have the right number of tokens."""
        numbers = torch.from_numpy(actions)
        seeds = torch.tensor(indices, dtype=torch.int64) + epoch * len(self)
        noise = normal_noise(seeds, numbers[0].numel()).view_as(numbers)
        return {
            "response_ids": torch.zeros(numbers.shape, dtype=torch.int64).flatten(1),
            CHAIN: torch.stack([noise, numbers], 1),
            FLOW_TIME: example_times(seeds),
        }

    def settings(self) -> list[str]:
        """Return what the examples' fingerprint includes in addition to the data: only that actions are numbers, since
        these examples use no tokens for actions."""
        return ["flow"]
