"""The family of SGLang servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from megarl.config.engines import ENGINES, EngineFacts
from megarl.rollout.family import EngineFamily

if TYPE_CHECKING:
    from megarl.architectures.vision_language import VisionEncoder
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import EngineHost, WeightLink


class SglangFamily(EngineFamily):
    """Generates on SGLang servers, which `open` starts or connects to; `open` ignores its argument `engine`."""

    facts: ClassVar[EngineFacts] = ENGINES["sglang"]

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Start the servers, and return their engine and the link that sends them weights. Collective over the team."""
        from megarl.rollout.sglang.links import OwnServers

        link = OwnServers(host)
        return link.engine, link

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Start the servers, and return their engine and the link by which they get the actor's weights. Collective
        over the rollout team."""
        from megarl.rollout.sglang.links import PumpedServers

        link = PumpedServers(host)
        return link.engine, link

    def open_sender(self, host: EngineHost) -> WeightLink:
        """Wait until the rollout team has started its servers, and return the link that sends them weights. Collective
        over the actor's team."""
        from megarl.rollout.sglang.links import FilledServers

        return FilledServers(host)

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return a replica's share of the requests that all servers accept at a time; None: there is no limit."""
        servers = config.rollout.sglang
        return None if servers.max_concurrency is None else servers.max_concurrency * servers.count // replicas

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
        """Check all settings of the recipe's servers except images; `EngineFamily.check` explains the arguments."""
        from megarl.rollout.sglang.checks import check_servers

        check_servers(config, placement, facts, checks, launcher, here=here)

    def check_images(self, config: RunConfig, encoder: VisionEncoder, checks: Checklist, *, here: bool = True) -> None:
        """Check that the servers can generate from images with this vision encoder."""
        from megarl.rollout.sglang.checks import check_images

        check_images(config, encoder, checks, here=here)

    def silent_servers(self, config: RunConfig) -> str | None:
        """Return a warning about addresses of `rollout.sglang.urls` that accept no connection now; None when all do."""
        from megarl.rollout.sglang.checks import silent_servers

        return silent_servers(config)
