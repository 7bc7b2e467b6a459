"""The state of a rank: its team, models, data shard and step. Every rank walks the graph by itself.

With all roles in one team:

              data shard of this rank
                        |
    loader --> [ rollout -> reward -> log-probs -> advantage -> actor_train ] --> metrics
                  |                       |                          |
            embedded engine      reference, critic            actor engine
                  '------------ same parameters ---------------------'

No rank sees another one's samples; what crosses ranks are gradients, counts, statistics and metrics.
Stages do not see this state: they are given its `StepContext`, and the roles that they name.
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
    from megarl.system.metrics import Metrics
    from megarl.system.offload_schedule import OffloadSchedule
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

R = TypeVar("R")
_TRAINED = ("actor", "critic")


@dataclass(frozen=True)
class TeamContext:
    """The team of this worker, among all of the run.

    Attributes:
        buffer: what the teams exchange goes through it; None: there is only this team.
        restarts: how often this team has begun again because a process of it died.
        begins_again: it may (`megarl.dag.placement.begins_again`).
        finished: with `restarts`, the last step that was over then: it begins after it.
    """

    plan: TeamPlan
    placement: Placement
    buffer: BufferClient | None = None
    restarts: int = 0
    finished: int = 0
    begins_again: bool = False

    @classmethod
    def of_all(cls, config: RunConfig) -> TeamContext:
        """One team of all workers, for work without a graph."""
        placement = together(config)
        return cls(placement.teams[0], placement)

    @property
    def others(self) -> list[TeamPlan]:
        """All teams but this one."""
        return [team for team in self.placement.teams if team.name != self.plan.name]

    @property
    def leads(self) -> bool:
        """It is the team of the actor, which decides where the run starts and keeps its record."""
        return self.holds(Role.ACTOR)

    def holds(self, role: Role) -> bool:
        """Is this model one of this team's?"""
        return role in self.plan.roles

    def of(self, role: Role) -> str:
        """Name of the team that holds this model, which the run has."""
        team = self.placement.of_role(role)
        assert team is not None, f"no team holds the {role.value}"
        return team.name

    @property
    def generates_apart(self) -> bool:
        """Whether this team generates samples, and another one trains on them."""
        return self.holds(Role.ROLLOUT) and not self.leads

    @property
    def generates_elsewhere(self) -> bool:
        """Whether another team generates the run's samples."""
        return self.placement.of_role(Role.ROLLOUT) not in (None, self.plan)

    def queues(self) -> dict[str, int]:
        """Groups of samples that wait for a team, by name (`buffer.core.Core.queues`); one rank calls this."""
        return {} if self.buffer is None else self.buffer.queues()


@dataclass
class RankState:
    """Everything that a rank works with.

    Attributes:
        team: this rank's team; what another one holds is not here.
        held: this team's roles, by the names under which stages take them.
        loader: training data, in the team that generates samples; None: there is none.
        val_data: held-out prompts, as `loader`.
        val_pairs: held-out preference pairs, or labelled examples, where nothing is generated.
        loader_elsewhere: in the team that keeps checkpoints, when another one has the loader.
        link: this team's end of the way of weights to what generates; see `megarl.runtime.generation`.
        frozen: checksums of the models that do not learn, by name, as checkpoints note them.
    """

    team: TeamContext
    context: StepContext
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    held: dict[str, ModelRole | RolloutRole | ScorerRole]
    loader: PromptLoader | None
    val_data: Described | None
    val_pairs: PairDataset | LabelledDataset | None = None
    loader_elsewhere: RemoteLoader | None = None
    link: WeightLink = field(default_factory=WeightLink)
    frozen: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        return self.context.config

    @property
    def layout(self) -> Layout:
        """The ranks of the run."""
        return self.context.layout

    @property
    def offload(self) -> OffloadSchedule:
        """Has on the device what each phase needs."""
        return self.context.offload

    @property
    def hf_config(self) -> PretrainedConfig:
        """Of the policy."""
        return self.context.hf_config

    @property
    def metrics(self) -> Metrics:
        """The metrics of the running step."""
        return self.context.metrics

    @property
    def roles(self) -> Mapping[str, object]:
        """The roles that stages may name in their signatures, as far as this team has them."""
        return self.held

    @property
    def loading(self) -> PromptLoader | RemoteLoader | None:
        """The loader, or its stand-in where another team has it; None: there is no training data."""
        return self.loader or self.loader_elsewhere

    @property
    def mail(self) -> Mail:
        """The mail between this team and the others."""
        return self.team.buffer or NoMail()

    @property
    def buffer(self) -> BufferClient:
        """The buffer between the teams of a run that has several."""
        assert self.team.buffer is not None, "a run of one team has no buffer"
        return self.team.buffer

    @property
    def models(self) -> dict[str, ModelRole]:
        """This team's models."""
        return {name: role for name, role in self.held.items() if isinstance(role, ModelRole)}

    @property
    def actor(self) -> ActorRole:
        """The policy; only in its team."""
        return self._role("actor", ActorRole)

    @property
    def policy(self) -> Sequence[PolicyModel]:
        """The trained policy's chunks; only in the actor's team."""
        return self.actor.chunks

    def policy_logprobs(self, samples: Batch) -> Jagged:
        """Return the trained policy's log-probs of responses; only in the actor's team. Collective."""
        return self.actor.engine.logprobs(samples, entropy=False)[0]

    def team_of(self, role: Role) -> str:
        """Return the name of the team that holds a role."""
        return self.team.of(role)

    @property
    def reference(self) -> ReferenceRole:
        """The frozen policy that training starts from; only in its team."""
        return self._role("reference", ReferenceRole)

    @property
    def rollout(self) -> RolloutRole:
        """Generates samples; only in the team that does. `open_rollout` may give it another engine."""
        return self._role("rollout", RolloutRole)

    @property
    def scorer(self) -> ScorerRole:
        """Scores samples, where they are generated."""
        return self._role("scorer", ScorerRole)

    def _role(self, name: str, kind: type[R]) -> R:
        role = self.held.get(name)
        assert isinstance(role, kind), f"team {self.team.plan.name!r} has no {name}; it has {', '.join(self.held)}"
        return role

    @property
    def trained(self) -> dict[str, MegatronEngine]:
        """The engines that learn, by name: what a checkpoint holds."""
        return {name: model.engine for name, model in self.models.items() if name in _TRAINED}

    def end_generation(self) -> None:
        """Close what samples are generated and scored with: another team does that from here on."""
        with contextlib.ExitStack() as stack:
            self._close_generation(stack)
        self.held = {name: role for name, role in self.held.items() if name not in ("rollout", "scorer")}
        self.val_data = None

    def _close_generation(self, stack: contextlib.ExitStack) -> None:
        if "scorer" in self.held and self.scorer.runner is not None:
            stack.callback(self.scorer.runner.close)
        if "rollout" in self.held and self.rollout.episodes is not None:
            stack.callback(self.rollout.episodes.close)
        if "rollout" in self.held and self.rollout.player is not None:
            stack.callback(self.rollout.player.close)

    def close(self) -> None:
        """End the processes and threads this rank started."""
        with phase("finish"), contextlib.ExitStack() as stack:  # the last one first, and every one of them
            self._close_generation(stack)
            stack.callback(self.link.close)
