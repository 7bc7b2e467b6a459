"""The family of the embedded engine, which decodes with parameters in the workers' own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megarl.config.engines import ENGINES, EngineFacts
from megarl.rollout.family import EngineFamily

if TYPE_CHECKING:
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement, TeamPlan
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import EngineHost, WeightLink
    from megarl.system.errors import ConfigError


class EmbeddedFamily(EngineFamily):
    """Generation by the embedded engine, in the trainer's own processes."""

    facts: ClassVar[EngineFacts] = ENGINES["embedded"]

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return `engine`, which decodes with the parameters that are trained, and a link that has nothing to send."""
        from megarl.rollout.embedded.links import SharedWeights

        return engine, SharedWeights(engine)

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return `engine`, and the link by which it receives the actor's weights. Collective over the rollout
        team. Raise ConfigError if a replica, or replicas that share experts, are on several machines."""
        from megarl.rollout.embedded.links import ReceivedWeights

        return engine, ReceivedWeights(host, engine)

    def open_sender(self, host: EngineHost) -> WeightLink:
        """Connect to the engines of the rollout team, and return the link that sends them the actor's weights.
        Collective over the actor's team. Raise WorkerError on every rank if an engine does not answer."""
        from megarl.rollout.embedded.links import SentWeights

        return SentWeights(host)

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return the largest number of rows in the KV cache of a replica."""
        return config.rollout.max_running

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
        """Check that the recipe can use `rollout.oversample`: a round of generation must be able to end before all of
        its groups are complete."""
        from megarl.rollout.embedded.checks import check_oversample

        check_oversample(config, facts, checks)

    def check_receiver(self, config: RunConfig, team: TeamPlan, checks: Checklist) -> None:
        """Check that the engine of a separate rollout team can receive the actor's weights: their dtype, and the
        machines of a replica."""
        from megarl.rollout.embedded.checks import check_receiver

        check_receiver(config, team, checks)

    def check_as_ready(self, config: RunConfig, team: TeamPlan, facts: ModelFacts | None, checks: Checklist) -> None:
        """Check that groups can finish one by one: not with context parallelism or experts, which generate in
        rounds."""
        from megarl.rollout.embedded.checks import check_as_ready

        check_as_ready(config, team, facts, checks)

    def experts_problems(self, config: RunConfig) -> list[ConfigError]:
        """Return an error if a setting needs groups to finish one by one (`async.order=as_ready`,
        `rollout.oversample`), which a mixture-of-experts policy cannot do in this engine."""
        from megarl.rollout.embedded.checks import experts_problems

        return experts_problems(config)
