"""The family of the embedded engine, which decodes with parameters in the workers' own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megarl.config.engines import ENGINES, EngineFacts
from megarl.rollout.family import EngineFamily

if TYPE_CHECKING:
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist
    from megarl.config.run import RunConfig
    from megarl.dag.placement import TeamPlan
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import EngineHost, WeightLink
    from megarl.system.errors import ConfigError


class EmbeddedFamily(EngineFamily):
    """Generation by the embedded engine, in the trainer's own processes."""

    facts: ClassVar[EngineFacts] = ENGINES["embedded"]

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return the same engine: it decodes with the parameters that are trained."""
        from megarl.rollout.embedded.links import SharedWeights

        return engine, SharedWeights(engine)

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Implement `EngineFamily.open_receiver`; raises the errors of `ReceivedWeights`."""
        from megarl.rollout.embedded.links import ReceivedWeights

        return engine, ReceivedWeights(host, engine)

    def open_sender(self, host: EngineHost) -> WeightLink:
        """Implement `EngineFamily.open_sender`; raises the errors of `SentWeights`."""
        from megarl.rollout.embedded.links import SentWeights

        return SentWeights(host)

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return the number of rows in the KV cache."""
        return config.rollout.max_running

    def check_receiver(self, config: RunConfig, team: TeamPlan, checks: Checklist) -> None:
        """Implement `EngineFamily.check_receiver`."""
        from megarl.rollout.embedded.checks import check_receiver

        check_receiver(config, team, checks)

    def check_as_ready(self, config: RunConfig, team: TeamPlan, facts: ModelFacts | None, checks: Checklist) -> None:
        """Implement `EngineFamily.check_as_ready`."""
        from megarl.rollout.embedded.checks import check_as_ready

        check_as_ready(config, team, facts, checks)

    def experts_problems(self, config: RunConfig) -> list[ConfigError]:
        """Implement `EngineFamily.experts_problems`."""
        from megarl.rollout.embedded.checks import experts_problems

        return experts_problems(config)
