"""Log-probs and samples of the denoising chains of policy calls, as heads of the engine.

A response token is one number of one step's result: S * K * D of a call, step after step, and of a step action after
action. In a cold start it is one number of a velocity: K * D of a call, at one flow time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from megarl.robots.models.flow.expert import ActionExpert, PrefixKeys
from megarl.robots.models.flow.process import Denoising, normal_noise
from megarl.robots.models.vla.vision import Seen

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel
    from megarl.training.microbatch import MicroBatch


@dataclass(frozen=True)
class FlowCalls(Seen):
    """The inputs of B policy calls in addition to tokens: the language model's (`Seen`), and the action expert's."""

    lengths: Tensor  # int64 [B], number of columns (positions) of each call in the packed stream
    robot: Tensor  # float32 [B, state], the robot's state in each call
    # float32 [B, steps + 1, K, D], the points of the denoising chains; [B, 2, K, D] for demonstrations to clone: noise
    # and actions
    chain: Tensor
    times: Tensor  # float32 [B], flow times of demonstrations to clone; [0] for recorded chains


@dataclass(frozen=True)
class ChainLogProbs:
    """The head that computes the log-density and the entropy of each number that the steps of recorded denoising chains
    sampled.

    For demonstrations to clone, the log-prob of a number is -(v - (e - a))^2 / 2, with the expert's velocity v, noise e
    and action a: the log-density of e - a under a normal distribution with mean v and variance 1, without its constant.
    Its negative is pi0's flow-matching loss (Lipman et al. 2023).
    """

    process: Denoising
    entropy: bool = True  # whether to return the entropy too

    @property
    def outputs(self) -> int:
        """Number of values per token: 2 with the entropy, otherwise 1."""
        return 2 if self.entropy else 1

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return (log-probs [n],) or (log-probs [n], entropies [n]) of the micro-batch's n numbers, float32."""
        calls: FlowCalls = micro.packed.seen
        expert, prefix = _parts(model, micro)
        if len(calls.times):
            noise, actions = calls.chain.unbind(1)
            time = calls.times[:, None, None]
            noisy = (time * noise + (1 - time) * actions)[:, None]
            velocity = expert(prefix, calls.robot, noisy, calls.times[:, None]).float()[:, 0]
            logp = -0.5 * (velocity - (noise - actions)).square()
            entropy = torch.zeros_like(logp)
        else:
            starts = calls.chain[:, :-1]
            times = calls.chain.new_tensor(self.process.times).expand(len(starts), -1)
            logp = self.process.log_probs(calls.chain, expert(prefix, calls.robot, starts, times).float())
            entropy = self.process.entropies(logp)
        # The language model's parameters after its last keys have no effect. They get a gradient of zero, because the
        # sum of gradients over replicas expects one for each parameter.
        logp = logp.flatten() + 0.0 * hidden.sum().float()
        return (logp, entropy.flatten()) if self.entropy else (logp,)


@dataclass(frozen=True)
class SampledChains:
    """The head that samples the denoising chain of each policy call; its outputs are all numbers of the points after
    each step, and their log-probs."""

    process: Denoising
    seeds: Tensor  # int64 [B], seed of each row of the batch
    stochastic: bool  # True: the SDE; False: the ODE, which starts from random noise too, with log-probs of 0
    outputs: ClassVar[int] = 2

    def __call__(self, hidden: Tensor, model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the sampled numbers [n] and their log-probs [n], float32; n = B * S * K * D."""
        calls: FlowCalls = micro.packed.seen
        expert, prefix = _parts(model, micro)
        seeds = self.seeds.to(hidden.device)[list(micro.samples)] if micro.samples else hidden.new_zeros(1).long()
        noise = self.noise(seeds, calls.chain.shape[2:])
        points, velocities = [noise[:, 0]], []
        for step, time in enumerate(self.process.times):
            times = calls.chain.new_full((len(seeds), 1), time)
            velocity = expert(prefix, calls.robot, points[-1][:, None], times).float()[:, 0]
            mean = self.process.mean(points[-1], velocity, step, stochastic=self.stochastic)
            points.append(mean + self.process.deviation(step) * noise[:, step + 1] if self.stochastic else mean)
            velocities.append(velocity)
        chain = torch.stack(points, 1)
        logp = self.process.log_probs(chain, torch.stack(velocities, 1))
        return chain[:, 1:].flatten(), (logp if self.stochastic else torch.zeros_like(logp)).flatten()

    def noise(self, seeds: Tensor, chunk: torch.Size) -> Tensor:
        """Return standard normal numbers, float32 [B, S + 1, K, D]: each chain's first point, and each step's noise."""
        shape = (self.process.steps + 1, *chunk)
        return normal_noise(seeds, torch.Size(shape).numel()).view(-1, *shape)


def _parts(model: PolicyModel, micro: MicroBatch) -> tuple[ActionExpert, PrefixKeys]:
    """Return the model's action expert, and the keys and values that it reads: those of the language model for the
    prefix (pictures and instruction) of each call in the micro-batch."""
    keys = PrefixKeys.of_stream(micro.packed.layer_keys or {}, micro.packed.seen.lengths)
    return model.vision.expert, keys
