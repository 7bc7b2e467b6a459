"""A family of generation engines: everything that the rest of megarl asks of an engine before and around generation.

    megarl/config/engines.py           name -> EngineFacts, which the layers below know it by
    megarl/rollout/families.py         name -> EngineFamily
    megarl/rollout/<engine>/family.py  the family; imports nothing heavy before it is used

A team opens the engine once its models are loaded, and gets its end of the way that weights take to the engine:

    one team            open           engine, link     publish(t): the engine generates with the weights after step t
    rollout's team      open_receiver  engine, link     publish(t): takes weights t, and generates with them
    actor's team        open_sender            link     publish(t): sends weights t
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from megarl.config.engines import EngineFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.architectures.vision_language import VisionEncoder
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist
    from megarl.config.run import RunConfig
    from megarl.dag.messages import Mail
    from megarl.dag.placement import Placement, TeamPlan
    from megarl.dag.stage import Role
    from megarl.data.batch import Batch, Jagged
    from megarl.models.policy import PolicyModel
    from megarl.rollout.engine import RolloutEngine
    from megarl.system.comm import WorkerGroup
    from megarl.system.errors import ConfigError
    from megarl.system.metrics import Metrics
    from megarl.system.offload_schedule import OffloadSchedule
    from megarl.training.parallel import Layout


class EngineHost(Protocol):
    """The parts of a rank that an engine works with; `RankState` has them."""

    run_dir: Path
    tokenizer: PreTrainedTokenizerBase

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        ...

    @property
    def layout(self) -> Layout:
        """The ranks of the team."""
        ...

    @property
    def hf_config(self) -> PretrainedConfig:
        """The policy's Hugging Face config."""
        ...

    @property
    def offload(self) -> OffloadSchedule:
        """Moves models, and servers that share their devices, between device and host."""
        ...

    @property
    def metrics(self) -> Metrics:
        """The metrics of the running step."""
        ...

    @property
    def policy(self) -> Sequence[PolicyModel]:
        """The trained policy's chunks; only in the actor's team."""
        ...

    @property
    def mail(self) -> Mail:
        """The mail between teams; only where there are several."""
        ...

    def policy_logprobs(self, samples: Batch) -> Jagged:
        """Return the trained policy's log-probs of responses; only in the actor's team. Collective."""
        ...

    def team_of(self, role: Role) -> str:
        """Return the name of the team that holds a role."""
        ...


class WeightLink:
    """One team's end of the way that weights take from the actor to the engine. This one has nothing to do."""

    def publish(self, version: int) -> None:
        """Generate with the weights after step `version` from here on. Every team calls; collective over its ranks."""

    def held(self) -> AbstractContextManager[None]:
        """Return a block in which no new weights come to the engine of this process."""
        return nullcontext()

    def close(self) -> None:
        """End the processes and threads of this end."""


class EngineFamily:
    """One kind of generation engine. A recipe makes one without arguments; checks that a family leaves out pass."""

    facts: ClassVar[EngineFacts]

    # -- the engine, and weights -------------------------------------------------------------------------------------

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return the engine that generates, and the way of weights to it, in a team that trains and generates.

        The engine has no usable weights before the first `publish`. Collective over the team.

        Args:
            engine: an embedded engine on the trained policy, which has generated so far.
        """
        raise NotImplementedError

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Do as `open`, in a rollout's team that does not train.

        Args:
            engine: where the family's workers hold the model (`EngineFacts.holds_model`) an embedded engine on it,
                whose weights are to come; else a stand-in.
        """
        raise NotImplementedError

    def open_sender(self, host: EngineHost) -> WeightLink:
        """Return the way of weights to the engine of another team, in the actor's team. Collective over the team."""
        raise NotImplementedError

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return how many sequences each of a team's replicas may have in flight; None: as many as there are."""
        return None

    def meeting(self, layout: Layout) -> WorkerGroup:
        """Return the ranks that generate together: those of a replica, or more."""
        return layout.mp_group

    # -- checks before a start ---------------------------------------------------------------------------------------

    def check(
        self,
        config: RunConfig,
        placement: Placement | None,
        facts: ModelFacts | None,
        checks: Checklist,
        launcher: str | None = None,
        *,
        here: bool = True,
    ) -> None:
        """Check that the engine can do what the recipe asks of it: lengths, sampling, log-probs, partial samples.

        Args:
            placement: the teams; None: they are not known.
            facts: sizes of the policy; None: they are not known here.
            here: the run may be on this machine, whose GPUs and packages count.
        """

    def check_images(self, config: RunConfig, encoder: VisionEncoder, checks: Checklist) -> None:
        """Check that the engine takes the images of this vision encoder."""

    def check_receiver(self, config: RunConfig, team: TeamPlan, checks: Checklist) -> None:
        """Check that the engine of a rollout's team that does not train can receive the actor's weights."""

    def check_as_ready(self, config: RunConfig, team: TeamPlan, facts: ModelFacts | None, checks: Checklist) -> None:
        """Check that groups of a rollout's team can finish one by one (`async.order=as_ready`)."""

    def experts_problems(self, config: RunConfig) -> list[ConfigError]:
        """Return the problems of a policy with experts, which may be known only when it is loaded."""
        return []

    def silent_servers(self, config: RunConfig) -> str | None:
        """Return a warning about servers that run already and do not answer now; None: there are none."""
        return None
