"""The state of a rank: its team, models, data shard and step. Every rank walks the task graph by itself.

With all roles in one team:

              data shard of this rank
                        |
    loader --> [ rollout -> reward -> log-probs -> advantage -> actor_train ] --> metrics
                  |                       |                          |
            embedded engine      reference, critic            actor engine
                  '------------ same parameters ---------------------'

Samples stay on their rank; ranks exchange gradients, counts, statistics and metrics.
Stages do not get this state, but its `StepContext` and the roles that they name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.dag.messages import NoMail
from megarl.dag.placement import Placement, TeamPlan, together
from megarl.dag.stage import Role
from megarl.rollout.family import WeightLink
from megarl.runtime.roles import ActorRole, ModelRole, ReferenceRole, RolloutRole, ScorerRole
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.dag.messages import Mail
    from megarl.data.batch import Batch, Jagged
    from megarl.data.loader import Described, PromptLoader
    from megarl.data.preferences import LabelledDataset, PairDataset
    from megarl.disaggregated.buffer.client import BufferClient
    from megarl.disaggregated.rollout_team import RemoteLoader
    from megarl.models.policy import PolicyModel
    from megarl.runtime.context import StepContext
    from megarl.runtime.oversampling import Oversampling
    from megarl.system.metrics import Metrics
    from megarl.system.offload_schedule import OffloadSchedule
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

R = TypeVar("R")
_TRAINED = ("actor", "critic")


@dataclass(frozen=True)
class TeamContext:
    """This worker's team, and the information about the run's other teams that the worker needs."""

    plan: TeamPlan  # this team's roles, nodes and ranks
    placement: Placement  # all teams of the run
    # client of the buffer through which teams exchange samples; None: there is only this team
    buffer: BufferClient | None = None
    restarts: int = 0  # how often this team has been restarted because a process of it died
    finished: int = 0  # after a restart, the last finished step: the team begins with the next one
    # whether this team may be restarted without the others (`megarl.dag.placement.begins_again`)
    begins_again: bool = False

    @classmethod
    def of_all(cls, config: RunConfig) -> TeamContext:
        """Return the context of a single team of all workers, for jobs without a task graph."""
        placement = together(config)
        return cls(placement.teams[0], placement)

    @property
    def others(self) -> list[TeamPlan]:
        """The teams of the run other than this team."""
        return [team for team in self.placement.teams if team.name != self.plan.name]

    @property
    def leads(self) -> bool:
        """Whether this is the actor's team, which decides where the run starts and logs its metrics."""
        return self.holds(Role.ACTOR)

    def holds(self, role: Role) -> bool:
        """Return whether this team holds `role`."""
        return role in self.plan.roles

    def of(self, role: Role) -> str:
        """Return the name of the team that holds `role`; some team must hold it."""
        return self.placement.home(role).name

    @property
    def generates_apart(self) -> bool:
        """Whether this team generates samples and another team trains on them."""
        return self.holds(Role.ROLLOUT) and not self.leads

    @property
    def generates_elsewhere(self) -> bool:
        """Whether another team generates the run's samples."""
        return self.placement.of_role(Role.ROLLOUT) not in (None, self.plan)

    def queues(self) -> dict[str, int]:
        """Return how many prompt groups wait in each queue of the buffer; one rank calls this."""
        return {} if self.buffer is None else self.buffer.queues()


@dataclass
class RankState:
    """The state of one rank: configuration, process groups, roles, data and metrics."""

    team: TeamContext  # this rank's team
    context: StepContext
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    # this team's roles, by the names under which stages take them
    held: dict[str, ModelRole | RolloutRole | ScorerRole]
    loader: PromptLoader | None  # training data; in the team that generates samples or learns from preferences
    val_data: Described | None  # held-out prompts; only in the team that generates samples, else None
    # held-out preference pairs or labelled examples of a run that generates nothing
    val_pairs: PairDataset | LabelledDataset | None = None
    loader_elsewhere: RemoteLoader | None = None  # stands for another team's loader in the team that saves checkpoints
    # sends or receives this team's weight updates for the rollout engine
    link: WeightLink = field(default_factory=WeightLink)
    frozen: dict[str, Any] = field(default_factory=dict)  # checksums of frozen models by name, for checkpoints

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.context.config

    @property
    def layout(self) -> Layout:
        """The process groups of this rank's team."""
        return self.context.layout

    @property
    def offload(self) -> OffloadSchedule:
        """The schedule that moves model state on and off the device for each phase."""
        return self.context.offload

    @property
    def hf_config(self) -> PretrainedConfig:
        """The policy's Hugging Face configuration."""
        return self.context.hf_config

    @property
    def metrics(self) -> Metrics:
        """This rank's metrics of the current step."""
        return self.context.metrics

    @property
    def roles(self) -> Mapping[str, object]:
        """This team's roles, by the names under which stages take them."""
        return self.held

    @property
    def loading(self) -> PromptLoader | RemoteLoader:
        """The data loader, or a stand-in if another team has it; only in the actor's team of a run that trains."""
        loader = self.loader or self.loader_elsewhere
        assert loader is not None, "a run that trains has training data"
        return loader

    @property
    def mail(self) -> Mail:
        """The mailbox for messages between teams; a stand-in if there is only one team."""
        return self.team.buffer or NoMail()

    @property
    def buffer(self) -> BufferClient:
        """The client of the buffer between teams; only in a run of several teams."""
        assert self.team.buffer is not None, "a run of one team has no buffer"
        return self.team.buffer

    @property
    def models(self) -> dict[str, ModelRole]:
        """This team's models, by role."""
        return {name: role for name, role in self.held.items() if isinstance(role, ModelRole)}

    @property
    def actor(self) -> ActorRole:
        """The trained policy; only in the actor's team."""
        return self._role("actor", ActorRole)

    @property
    def policy(self) -> Sequence[PolicyModel]:
        """The model chunks of the trained policy; only in the actor's team."""
        return self.actor.chunks

    def policy_logprobs(self, samples: Batch) -> Jagged:
        """Return the trained policy's log-probs of responses; only in the actor's team. Collective."""
        return self.actor.engine.logprobs(samples, entropy=False)[0]

    def team_of(self, role: Role) -> str:
        """Return the name of the team that holds a role."""
        return self.team.of(role)

    @property
    def reference(self) -> ReferenceRole:
        """The frozen reference policy; only in the team that holds it."""
        return self._role("reference", ReferenceRole)

    @property
    def rollout(self) -> RolloutRole:
        """The role that generates samples; it exists only in the team that holds it. `open_rollout` may replace its
        engine."""
        return self._role("rollout", RolloutRole)

    @property
    def oversampling(self) -> Oversampling | None:
        """The part that carries groups in flight from step to step (`rollout.oversample`); None: the run does not
        oversample, or another team generates."""
        return self.rollout.oversampling if "rollout" in self.held else None

    @property
    def scorer(self) -> ScorerRole:
        """The role that scores samples; only in the team that generates them."""
        return self._role("scorer", ScorerRole)

    def _role(self, name: str, kind: type[R]) -> R:
        role = self.held.get(name)
        assert isinstance(role, kind), f"team {self.team.plan.name!r} has no {name}; it has {', '.join(self.held)}"
        return role

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        """The trained engines of this team, by role: actor, critic and further models; checkpoints hold their state."""
        further = [name for name, settings in self.config.models.items() if settings.train]
        return {name: model.engine for name, model in self.models.items() if name in (*_TRAINED, *further)}

    def end_generation(self) -> None:
        """Close rollout and scorer after a cold start, because another team generates samples from now on."""
        with contextlib.ExitStack() as stack:
            self._close_generation(stack)
        self.held = {name: role for name, role in self.held.items() if name not in ("rollout", "scorer")}
        self.val_data = None

    def _close_generation(self, stack: contextlib.ExitStack) -> None:
        if "scorer" in self.held and self.scorer.runner is not None:
            stack.callback(self.scorer.runner.close)
        if "rollout" in self.held and self.rollout.episodes is not None:
            stack.callback(self.rollout.episodes.close)
        if self.oversampling is not None:
            stack.callback(self.oversampling.close)
        if "rollout" in self.held and self.rollout.player is not None:
            stack.callback(self.rollout.player.close)

    def close(self) -> None:
        """Stop the processes and threads that this rank started."""
        with phase("finish"), contextlib.ExitStack() as stack:  # an error in one call does not skip the others
            self._close_generation(stack)
            stack.callback(self.link.close)
            if self.loader is not None:
                stack.callback(self.loader.close)
