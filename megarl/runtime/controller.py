"""One controller per device: it holds this rank's models, data shard and step state, and walks the graph by itself.

              data shard of this rank
                        |
    loader --> [ rollout -> reward -> log-probs -> advantage -> actor_train ] --> metrics
                  |                       |                          |
            embedded engine      reference, critic            actor engine
                  '------------ same parameters ---------------------'

No controller sees another rank's samples; what crosses ranks are gradients, counts, statistics and metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.run import RunConfig
from megarl.metrics import Metrics
from megarl.residency import Residency

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.algorithms.kl import KLController
    from megarl.data.batch import Batch
    from megarl.data.loader import PromptLoader
    from megarl.data.prompts import PromptDataset
    from megarl.rewards.runner import RewardRunner
    from megarl.rollout.embedded.stale import StaleWeights
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.sglang.fleet import Fleet
    from megarl.runtime.episodes import Episodes
    from megarl.sync.updater import NullSync, WeightSync
    from megarl.tracking.flops import FlopCounter
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout


@contextlib.contextmanager
def no_progress(description: str, total: int | None) -> Iterator[Callable[[float], None]]:
    """Show nothing; see `megarl.tracking.tracker.Tracker.progress`."""
    yield lambda units: None


@dataclass
class Controller:
    """Everything the stages of this rank work with.

    Attributes:
        sync: brings the parameters to where samples are drawn; see `megarl.runtime.generation`.
        residency: has on the device what each phase needs; see there.
        reward: scores samples; only on the first rank of a replica.
        kl_controller: weight of the KL penalty in the reward.
        reference, critic: present when a node of the graph has that role.
        fleet: the servers that generate, when there are any.
        episodes: the recipe's environment; None when a sample is one prompt and one response.
        stale: generates training samples with older weights (`rollout.stale_steps`).
        step: the training step that runs (1-based; 0 before the first).
        metrics: this rank's part of the step's metrics.
        progress: shows long work on the console; only on the rank that has a tracker, while it has one.
        surplus: this rank's share of the scored groups that dynamic sampling left over for the next step.
    """

    config: RunConfig
    run_dir: Path
    layout: Layout
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    actor: MegatronEngine
    rollout: RolloutEngine
    sync: NullSync | WeightSync
    residency: Residency
    reward: RewardRunner | None
    loader: PromptLoader | None
    val_data: PromptDataset | None
    kl_controller: KLController
    reference: MegatronEngine | None = None
    teacher: MegatronEngine | None = None
    critic: MegatronEngine | None = None
    fleet: Fleet | None = None
    episodes: Episodes | None = None
    stale: StaleWeights | None = None
    step: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    progress: Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[float], None]]] = no_progress
    surplus: Batch | None = None

    @property
    def temperature(self) -> float:
        """Temperature that samples are drawn and scored at."""
        return self.config.rollout.sampling.temperature

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end a response: the tokenizer's own."""
        return [self.tokenizer.eos_token_id]

    @cached_property
    def flops(self) -> FlopCounter:
        """Counts what the policy computes, for `perf/flops` and with it MFU."""
        from megarl.tracking.flops import FlopCounter

        return FlopCounter.from_hf(self.hf_config)

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        """The models that learn, by name: what a checkpoint holds."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def count_pass(self, samples: Batch, *, train: bool = False, head: bool = True) -> None:
        """Add one pass over whole samples to `perf/flops`: forward, with `train` also backward, with the vocabulary."""
        responses = samples["response_ids"].lengths
        count = self.flops.train if train else self.flops.forward
        lengths = (samples["prompt_ids"].lengths + responses).tolist()
        self.metrics.sum("perf/flops", count(lengths, head_tokens=int(responses.sum()) if head else 0))

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Response texts without special tokens."""
        if not token_ids:
            return []  # batch_decode takes an empty list for one empty sequence
        return self.tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    def all_sum(self, values: Tensor) -> Tensor:
        """Sum of a small CPU tensor over the data-parallel ranks."""
        return self.layout.dp_group.all_reduce(values.clone())

    def close(self) -> None:
        """End the processes and threads this rank started."""
        with contextlib.ExitStack() as stack:  # the last one first, and every one of them
            if self.reward is not None:
                stack.callback(self.reward.close)
            if self.episodes is not None:
                stack.callback(self.episodes.close)
            if self.fleet is not None:
                stack.callback(self.fleet.close)
            stack.callback(self.sync.close)
