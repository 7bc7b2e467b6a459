"""The family of the embedded engine, which decodes with parameters in the workers' own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megarl.config.engines import ENGINES, EngineFacts

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import EngineHost, WeightLink
    from megarl.system.comm import WorkerGroup
    from megarl.training.parallel import Layout


class EmbeddedFamily:
    """See `EngineFamily`."""

    facts: ClassVar[EngineFacts] = ENGINES["embedded"]

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return the engine as it is: training changes the parameters that it decodes with."""
        from megarl.rollout.embedded.links import SharedWeights

        return engine, SharedWeights(engine)

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """See `EngineFamily`; raises what `ReceivedWeights` raises."""
        from megarl.rollout.embedded.links import ReceivedWeights

        return engine, ReceivedWeights(host, engine)

    def open_sender(self, host: EngineHost) -> WeightLink:
        """See `EngineFamily`; raises what `SentWeights` raises."""
        from megarl.rollout.embedded.links import SentWeights

        return SentWeights(host)

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return the rows of the cache."""
        return config.rollout.max_running

    def meeting(self, layout: Layout) -> WorkerGroup:
        """Return the ranks of the replica."""
        return layout.mp_group
