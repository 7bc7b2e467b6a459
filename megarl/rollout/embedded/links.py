"""How embedded engines get weights.

In a run of one team the engine decodes with the parameters that are trained. In a separate rollout team it has its own
copy: the team that trains the model sends weights to an inbox, and then posts `WeightsPushed`. Several policies may
have models of different teams, each with a link of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megarl.dag.messages import EngineAddresses, WeightsPushed
from megarl.dag.stage import Role
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.embedded.inbox import WeightInbox
from megarl.rollout.embedded.receiver import EngineReceivers
from megarl.rollout.family import WeightLink, address_of_worker, record_update
from megarl.sync.updater import WeightSync
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError, ServerError, WorkerError
from megarl.system.rendezvous import run_key
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import EngineHost


def _key(host: EngineHost, model: str) -> str:
    """Return the secret of the connections over which the weights of `model` are sent."""
    return run_key(host.run_dir, f"weights of engines: {model}")


class SharedWeights(WeightLink):
    """The link of an engine that decodes with the trained parameters: there is nothing to send."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def publish(self, version: int) -> None:
        """Set the engine's weight version; nothing is sent, because the engine reads the trained parameters."""
        self._engine.weight_version = version


class ReceivedWeights(WeightLink):
    """The rollout team's end of the weight link: receives weights for its engine. Collective over the rollout team.

    It posts the addresses of its inboxes. Each replica is one receiver; replicas that share experts are one receiver
    together.

    Args:
        role: the model whose weights the engine receives.

    Raises:
        ConfigError: replicas that share experts are on several machines.
    """

    def __init__(self, host: EngineHost, engine: RolloutEngine, role: Role = Role.ACTOR) -> None:
        assert isinstance(engine, EmbeddedEngine), "the family's workers hold the model"
        config, layout = host.config, host.layout
        group = layout.world if config.parallel_of("rollout").ep > 1 else layout.mp_group
        inbox = WeightInbox(engine.chunks, _key(host, role.value), group, address_of_worker(config))
        addresses = layout.world.all_gather_json([group.ranks[0], *inbox.address])
        leads = sorted({lead for lead, *_ in addresses})
        engines = [[address for first, *address in addresses if first == lead] for lead in leads]
        apart = next((ranks for ranks in engines if len({address for address, _ in ranks}) > 1), None)
        if apart is not None:
            raise ConfigError(
                "the ranks of a replica, and replicas that share experts, must be on one machine to receive weights",
                where="placement.teams",
                found=", ".join(sorted({address for address, _ in apart})),
                fix="set rollout.parallel so that a replica fits on one machine, with ep=1",
            )
        if layout.rank == 0:
            EngineAddresses(role.value, engines).post(host.mail)
        self._host, self._engine, self._inbox, self._role, self._version = host, engine, inbox, role, 0

    def publish(self, version: int) -> None:
        """Wait until the model's team has sent weights `version`, and load them into the engine."""
        with phase("await_weights", waits_for=self._host.team_of(self._role)):
            WeightsPushed.read(self._host.mail, self._role.value, version)
            self._version = version
            with self.held():
                self._engine.weight_version = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters at the published version inside the block. Collective over the engine.

        Raises:
            WorkerError: the engine does not hold this version within `sync.timeout_s`.
        """
        with self._inbox.generating(self._host.config.sync.timeout_s, version=self._version):
            yield

    def close(self) -> None:
        """Stop receiving weights."""
        self._inbox.close()


class SentWeights(WeightLink):
    """The end of the weight link in the team that trains a model: connects to the rollout team's engines and sends
    weights. Collective.

    Args:
        role: the model.
        chunks: this rank's part of it; None: the actor's.

    Raises:
        WorkerError: an engine does not answer; raised on every rank.
    """

    def __init__(self, host: EngineHost, role: Role = Role.ACTOR, chunks: Sequence[PolicyModel] | None = None) -> None:
        config, world, key = host.config, host.layout.world, _key(host, role.value)
        settings, folder, chunks = config.sync, host.run_dir, host.policy if chunks is None else chunks
        if role.is_further:  # its weight files must not replace those of the actor, so they get another folder
            folder /= f"sync_{role.value}"
            update = {} if settings.folder is None else {"folder": f"{settings.folder}/{role.value}"}
            settings = settings.model_copy(update=update)
        with phase("connect_engines"):
            addresses = EngineAddresses.read(host.mail, role.value).engines
            engines = [[(str(address), int(port)) for address, port in ranks] for ranks in addresses]
            alone = "a worker of another team sees its own GPU only, so it cannot map the trainer's memory"
            receivers, why = None, None
            try:
                receivers = EngineReceivers.connect(
                    engines, key, chunks[0].hf_config, settings.timeout_s, cannot_map=alone if has_cuda() else ""
                )
            except ServerError as error:
                why = str(error)
            whys = [text for text in world.all_gather_json(why) if text is not None]
            if receivers is None or whys:
                raise WorkerError(whys[0])
            self._sync = WeightSync(chunks, receivers, settings, folder, world, config.model.freeze)
        self._host, self._role = host, role

    def publish(self, version: int) -> None:
        """Send the weights to the engines, and post `WeightsPushed`.

        Raises:
            WorkerError: an engine did not receive them; the run ends, because the rollout team cannot generate.
        """
        report = self._sync.push(version)
        if report.failed:
            raise WorkerError(
                f"the rollout team did not receive version {version} of the weights ({self._role.value}):\n"
                + "\n".join(why for _, why in sorted(report.failed.items()))
            )
        if self._host.layout.rank == 0:
            WeightsPushed(self._role.value, version).post(self._host.mail)
        record_update(self._host, report)

    def close(self) -> None:
        """Stop sending weights."""
        self._sync.close()
