"""Generation on SGLang servers.

    first rank of a replica:  requests -> client -> servers -> samples      (in a thread)
    every rank:               meet: busy? --(someone is)--> meet again
                                    stuck? -(someone is)--> restart what failed, catch_up, again
                                      '-----(nobody is)---> completions of the replica's first rank

All ranks meet every few seconds while samples are on their way: none of them waits for another so long that it is taken
for dead, however long generation takes, and an error on one rank ends all of them.

A rank is stuck when no server is left that holds the current weights. What is finished stays; the rest goes on after
`catch_up` has brought the restarted servers to those weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.comm import WorkerGroup
from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.errors import ServerError
from megarl.phase import beat
from megarl.rollout.engine import Completion, Generation, Request
from megarl.rollout.rounds import Rounds
from megarl.rollout.sglang.client import GenerationClient
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.samples import ServedSample, samples_of
from megarl.sync.versions import version_tag

_MEET_EVERY_S = 5.0


@dataclass(frozen=True)
class Replica:
    """The ranks that share one set of requests.

    Attributes:
        index: of this replica, among `count`.
        group: the replica's ranks; the first one talks to the servers.
        world: all ranks of the run.
    """

    index: int = 0
    count: int = 1
    group: WorkerGroup = field(default_factory=WorkerGroup.alone)
    world: WorkerGroup = field(default_factory=WorkerGroup.alone)

    @property
    def is_first(self) -> bool:
        """This rank talks to the servers."""
        return self.group.rank == 0


class SglangEngine:
    """A `RolloutEngine` over a Fleet. `generate` is collective over all ranks of the run.

    Args:
        config: concurrency and deadlines.
        fleet: the servers.
        replica: this rank's place.
        catch_up: brings the servers that are not current to the weights of `weight_version`; collective.
        run: this run's name in what servers call their weights (`version_tag`); an answer with others is refused.

    Attributes:
        weight_version: of the weights that samples are to be drawn with; only servers that have acknowledged it are
            asked. Whoever updates the servers sets it.
    """

    def __init__(
        self, config: SGLangConfig, fleet: Fleet, replica: Replica, catch_up: Callable[[], None], run: str
    ) -> None:
        self._config, self._fleet, self._replica, self._catch_up = config, fleet, replica, catch_up
        self._run_name = run
        self._client = GenerationClient(config)
        self.weight_version = 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """See `RolloutEngine`.

        Raises:
            ServerError: no server is left, or one refused a request as wrong.
        """
        samples = samples_of(requests) if self._replica.is_first else []
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        # Every server may be lost as often as it may be restarted; after that `refresh` gives up.
        for _ in range(self._config.count * (self._config.max_restarts + 1) + 1):
            with ThreadPoolExecutor(1, "generate") as pool:
                self._meet(pool.submit(self._run, samples, sampling, stop_ids, advance or _ignore))
            stuck = any(sample.finish_reason is None for sample in samples)
            if not any(self._replica.world.all_gather_json(stuck)):
                return self._share(requests, samples)
            self._fleet.wait_started()
            self._catch_up()
        raise ServerError("servers", "", "generation", "requests do not get done although servers were restarted")

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """See `RolloutEngine`: all ranks of the run generate in rounds; servers cache what came before."""
        world = self._replica.world
        return Rounds(self.generate, lambda busy: any(world.all_gather_json(busy)), sampling, eos_ids)

    def servers(self) -> list[Server]:
        """Servers this replica may ask now, all of which hold the current weights: its own share, or the others'."""
        index, count, total = self._replica.index, self._replica.count, len(self._fleet.servers)
        mine = {n for n in range(total) if n % count == index} or {index % total}
        current = self._fleet.current(self.weight_version)
        return [server for server in current if server.number in mine] or current

    def _meet(self, work: Future[None]) -> None:
        """Wait until every rank is done with its samples. Collective over all ranks of the run.

        Raises:
            ServerError: on every rank, when one of them met an error; any other one is raised as it is where it was
                met.
        """
        while True:
            wait([work], _MEET_EVERY_S)
            beat()
            error = work.exception() if work.done() else None
            fields = None if error is None else _for_others(error)
            reports = self._replica.world.all_gather_json([work.done(), fields])
            if error is not None:
                raise error
            for _, failure in reports:
                if failure is not None:
                    raise ServerError(**failure)
            if all(done for done, _ in reports):
                return

    def _run(
        self, samples: list[ServedSample], sampling: SamplingConfig, stop_ids: list[int], advance: Callable[[int], None]
    ) -> None:
        """Finish as many samples as the servers that are left allow."""
        while any(sample.finish_reason is None for sample in samples) and (servers := self.servers()):
            reachable = {server.number: server.api for server in servers}
            tag = version_tag(self.weight_version, self._run_name)
            for number, why in self._client.run(samples, reachable, sampling, stop_ids, advance, tag).items():
                self._fleet.mark_failed(self._fleet.servers[number], why)

    def _share(self, requests: Sequence[Request], samples: list[ServedSample]) -> list[list[Completion]]:
        """The first rank's completions on all ranks of the replica, grouped by request."""
        done: list[dict[str, Any]] = [asdict(sample.completion()) for sample in samples]
        done = self._replica.group.broadcast_json(done)
        parts = iter(Completion(**fields) for fields in done)
        return [[next(parts) for _ in request.seeds] for request in requests]


def _for_others(error: BaseException) -> dict[str, Any]:
    """Fields of the ServerError that stands for `error` on other ranks."""
    if isinstance(error, ServerError):
        return vars(error)
    return {"server": "the client", "url": "", "phase": "generation", "reason": f"{type(error).__name__}: {error}"}


def _ignore(samples: int) -> None:
    """Nobody wants to know how far generation is."""
