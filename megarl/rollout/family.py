"""The interface of a kind of generation engine: checks, opening, and how weights reach it.

    megarl/config/engines.py           name -> EngineFacts, for lower layers
    megarl/rollout/families.py         name -> EngineFamily
    megarl/rollout/<engine>/family.py  the family; heavy packages are imported in its methods

A team opens the engine once its models are loaded, and gets a `WeightLink`:

    one team            open           engine, link     publish(t): the engine generates with the weights after step t
    rollout's team      open_receiver  engine, link     publish(t): receives weights t, and generates with them
    actor's team        open_sender            link     publish(t): sends weights t
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from megarl.config.engines import EngineFacts
from megarl.system.processes import LOOPBACK

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
    from megarl.sync.updater import SyncReport
    from megarl.system.errors import ConfigError
    from megarl.system.metrics import Metrics
    from megarl.system.offload_schedule import OffloadSchedule
    from megarl.training.parallel import Layout


class EngineHost(Protocol):
    """The attributes of `RankState` that an engine uses."""

    run_dir: Path
    tokenizer: PreTrainedTokenizerBase

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""

    @property
    def layout(self) -> Layout:
        """The ranks of the team."""

    @property
    def hf_config(self) -> PretrainedConfig:
        """The policy's Hugging Face config."""

    @property
    def offload(self) -> OffloadSchedule:
        """The schedule that moves models, and servers on the same devices, between device and host memory."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of the current step."""

    @property
    def policy(self) -> Sequence[PolicyModel]:
        """This rank's pipeline chunks of the trained policy; only in the actor's team."""

    @property
    def mail(self) -> Mail:
        """The mailbox between teams; only in runs of several teams."""

    def policy_logprobs(self, samples: Batch) -> Jagged:
        """Return the trained policy's log-probs of all response tokens; only in the actor's team. Collective."""

    def team_of(self, role: Role) -> str:
        """Return the name of the team that holds a role."""


class WeightLink:
    """One team's end of the connection through which the actor's weights reach the engine. This class does nothing."""

    def publish(self, version: int) -> None:
        """Send or receive the weights of training step `version`, with which the engine then generates.
        Every team calls this; collective over its ranks.
        """

    def held(self) -> AbstractContextManager[None]:
        """Return a context manager; inside its block this process's engine receives no new weights."""
        return nullcontext()

    def close(self) -> None:
        """End the processes and threads that this link started."""


class ModelLinks(WeightLink):
    """The links of several models, in one."""

    def __init__(self, links: Sequence[WeightLink]) -> None:
        self._links = list(links)

    def publish(self, version: int) -> None:
        """Send or receive the weights of every model."""
        for link in self._links:
            link.publish(version)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all models' weights of now to generate with inside the block, whatever is trained meanwhile."""
        with ExitStack() as stack:
            for link in self._links:
                stack.enter_context(link.held())
            yield

    def close(self) -> None:
        """Close all links."""
        for link in self._links:
            link.close()


class EngineFamily:
    """One kind of generation engine, constructed without arguments; checks pass unless a subclass overrides them."""

    facts: ClassVar[EngineFacts]

    # -- the engine, and weights -------------------------------------------------------------------------------------

    def open(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return the engine and its weight link, in a team that trains and generates.

        The engine may not generate before the first `publish`. Collective over the team.

        Args:
            engine: an embedded engine that decodes with the trained policy's parameters.
        """
        raise NotImplementedError

    def open_receiver(self, host: EngineHost, engine: RolloutEngine) -> tuple[RolloutEngine, WeightLink]:
        """Return the engine and its weight link, in a rollout team that does not train. Collective over the team.

        Args:
            engine: with `EngineFacts.holds_model` an embedded engine, which has no weights yet; else a placeholder.
        """
        raise NotImplementedError

    def open_sender(self, host: EngineHost) -> WeightLink:
        """Return the actor team's link, which sends weights to another team's engine. Collective over the team."""
        raise NotImplementedError

    def most_in_flight(self, config: RunConfig, replicas: int) -> int | None:
        """Return how many sequences each of a team's `replicas` may have in flight; None: there is no limit."""
        return None

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
        """Check that the engine supports the recipe: lengths, sampling, log-probs, partial trajectories.

        Args:
            placement: the teams; None: not known.
            facts: sizes of the policy's layers; None: not known.
            here: whether to check this machine's GPUs and packages too, because the run may be on it.
        """

    def check_images(self, config: RunConfig, encoder: VisionEncoder, checks: Checklist, *, here: bool = True) -> None:
        """Check that the engine supports images with this vision encoder. `here`: as in `check`."""

    def check_receiver(self, config: RunConfig, team: TeamPlan, checks: Checklist) -> None:
        """Check that the engine of a separate rollout team can receive the actor's weights."""

    def check_as_ready(self, config: RunConfig, team: TeamPlan, facts: ModelFacts | None, checks: Checklist) -> None:
        """Check that the rollout team can finish groups one by one (`async.order=as_ready`)."""

    def experts_problems(self, config: RunConfig) -> list[ConfigError]:
        """Return the problems that this engine has with a mixture-of-experts policy; call it for such policies only."""
        return []

    def silent_servers(self, config: RunConfig) -> str | None:
        """Return a warning if servers that the user has started do not answer now; None: all answer."""
        return None


def record_update(host: EngineHost, report: SyncReport) -> None:
    """Record the metrics of a weight update and print its failures; the report is the same on every rank."""
    if not report.updated and not report.failed:
        return
    m = host.metrics
    m.max("sync/gb", report.nbytes / 1e9)
    m.max("sync/seconds", report.seconds)
    m.max("sync/gb_per_s", report.nbytes / 1e9 / max(report.seconds, 1e-9))
    m.max("sync/gather_s", report.gather_s)
    m.max("sync/send_s", report.send_s)
    m.max("sync/servers", len(report.updated))
    m.max("sync/failed", len(report.failed))
    m.max("sync/verified_tensors", report.verified)
    if report.failed and host.layout.rank == 0:
        for number, why in sorted(report.failed.items()):
            print(f"server {number} did not receive weights {report.version}: {why}", flush=True)


def address_of_worker(config: RunConfig) -> str:
    """Return the network address at which workers of other teams reach this worker."""
    if config.cluster.nnodes == 1:
        return LOOPBACK[0]
    import ray

    return str(ray.util.get_node_ip_address())
