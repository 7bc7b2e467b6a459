"""One controller per device: it holds this rank's models, data shard and step state, and walks the graph by itself.

              data shard of this rank
                        |
    loader --> [ rollout -> reward -> log-probs -> advantage -> actor_train ] --> metrics
                  |                       |                          |
            embedded engine      reference, critic            actor engine
                  '------------ same parameters ---------------------'

No controller sees another rank's samples; what crosses ranks are gradients, counts, statistics and metrics.
Stages do not see the controller: they are given its `StepContext`, and the roles that they name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.data.loader import PromptLoader
    from megarl.data.prompts import PromptDataset
    from megarl.residency import Residency
    from megarl.rollout.sglang.fleet import Fleet
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole, ModelRole, RolloutRole, ScorerRole
    from megarl.sync.updater import NullSync, WeightSync
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout


@dataclass
class Controller:
    """Everything that a rank works with.

    Attributes:
        context: what stages are given of it.
        rollout: draws samples; `use_servers` may give it another engine.
        scorer: scores them.
        sync: brings the parameters to where samples are drawn; see `megarl.runtime.generation`.
        models: further models by role: those that the graph's nodes work with.
        fleet: the servers that generate, when there are any.
    """

    context: StepContext
    run_dir: Path
    actor: ActorRole
    rollout: RolloutRole
    scorer: ScorerRole
    sync: NullSync | WeightSync
    loader: PromptLoader | None
    val_data: PromptDataset | None
    models: dict[str, ModelRole] = field(default_factory=dict)
    fleet: Fleet | None = None

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        return self.context.config

    @property
    def layout(self) -> Layout:
        """The ranks of the run."""
        return self.context.layout

    @property
    def residency(self) -> Residency:
        """Has on the device what each phase needs."""
        return self.context.residency

    @property
    def hf_config(self) -> PretrainedConfig:
        """Of the policy."""
        return self.context.hf_config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the policy."""
        return self.rollout.tokenizer

    @property
    def roles(self) -> Mapping[str, object]:
        """What stages may name in their signatures, as far as this run has it."""
        return {"actor": self.actor, "rollout": self.rollout, "scorer": self.scorer, **self.models}

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        """The engines that learn, by name: what a checkpoint holds."""
        learns = {"actor": self.actor} | {name: model for name, model in self.models.items() if name == "critic"}
        return {name: model.engine for name, model in learns.items()}

    def close(self) -> None:
        """End the processes and threads this rank started."""
        with contextlib.ExitStack() as stack:  # the last one first, and every one of them
            if self.scorer.runner is not None:
                stack.callback(self.scorer.runner.close)
            if self.rollout.episodes is not None:
                stack.callback(self.rollout.episodes.close)
            if self.fleet is not None:
                stack.callback(self.fleet.close)
            stack.callback(self.sync.close)
