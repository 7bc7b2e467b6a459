"""Generation on SGLang servers.

    first rank of a replica:  requests -> client -> servers -> samples      (in a thread)
    every rank:               meet: busy? --(someone is)--> meet again
                                    stuck? -(someone is)--> restart what failed, catch_up, again
                                      '-----(nobody is)---> completions of the replica's first rank

All ranks meet every few seconds while samples are on their way: none of them waits for another so long that it is taken
for dead, however long generation takes, and an error on one rank ends all of them.

A rank is stuck when no server is left that holds the current weights. What is finished stays; the rest goes on after
`catch_up` has brought the restarted servers to those weights. Turns of episodes: see `turns.py`.
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
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch, GenerationClient, for_others
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.samples import ServedSample, samples_of
from megarl.rollout.sglang.turns import ServerTurns
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

    @property
    def lead(self) -> int:
        """Rank in `world` of the one that talks to the servers."""
        return self.world.ranks.index(self.group.ranks[0]) if self.group.size > 1 else self.world.rank


class SglangEngine:
    """A `RolloutEngine` over a Fleet. `generate` is collective over all ranks of the run.

    Args:
        config: concurrency and deadlines.
        fleet: the servers.
        replica: this rank's place.
        catch_up: brings the servers that are not current to the weights of `weight_version`; collective.
        run: this run's name in what servers call their weights (`version_tag`); an answer with others is refused.

    Attributes:
        replica: this rank's place.
        weight_version: of the weights that samples are to be drawn with; only servers that have acknowledged it are
            asked. Whoever updates the servers sets it.
    """

    def __init__(
        self, config: SGLangConfig, fleet: Fleet, replica: Replica, catch_up: Callable[[], None], run: str
    ) -> None:
        self._config, self._fleet, self.replica, self._catch_up = config, fleet, replica, catch_up
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
        samples = samples_of(requests) if self.replica.is_first else []
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        times = 0
        while True:
            with ThreadPoolExecutor(1, "generate") as pool:
                self._meet(pool.submit(self._run, samples, sampling, stop_ids, advance or _ignore))
            stuck = any(sample.finish_reason is None for sample in samples)
            if not any(self.replica.world.all_gather_json(stuck)):
                return self._share(requests, samples)
            self.recover(times)
            times += 1

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """See `RolloutEngine`: servers cache what came before, as much as they have room for."""
        return ServerTurns(self, sampling, [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids])

    def call(
        self,
        servers: dict[int, ServerApi],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        done: Callable[[ServedSample], None],
    ) -> Dispatch:
        """Requests to `servers` for the weights of now; `done` is told of every sample that is finished."""
        return Dispatch(
            self._config, servers, sampling, stop_ids, version_tag(self.weight_version, self._run_name), done
        )

    def mark_failed(self, failed: dict[int, str]) -> None:
        """Ask these servers no more until they are restarted."""
        for number, why in failed.items():
            self._fleet.mark_failed(self._fleet.servers[number], why)

    def recover(self, times: int) -> None:
        """Restart failed servers and bring them to the current weights. Collective over all ranks of the run.

        Args:
            times: how often this was done for the same samples.

        Raises:
            ServerError: no server is left, or this was done too often.
        """
        # Every server may be lost as often as it may be restarted; after that `refresh` gives up.
        if times > self._config.count * (self._config.max_restarts + 1):
            reason = "requests do not get done although servers were restarted"
            raise ServerError("servers", "", "generation", reason)
        self._fleet.wait_started()
        self._catch_up()

    def servers(self) -> list[Server]:
        """Servers this replica may ask now, all of which hold the current weights: its own share, or the others'."""
        index, count, total = self.replica.index, self.replica.count, len(self._fleet.servers)
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
            fields = None if error is None else for_others(error)
            reports = self.replica.world.all_gather_json([work.done(), fields])
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
            self.mark_failed(self._client.run(samples, reachable, sampling, stop_ids, advance, tag))

    def _share(self, requests: Sequence[Request], samples: list[ServedSample]) -> list[list[Completion]]:
        """The first rank's completions on all ranks of the replica, grouped by request."""
        done: list[dict[str, Any]] = [asdict(sample.completion()) for sample in samples]
        done = self.replica.group.broadcast_json(done)
        parts = iter(Completion(**fields) for fields in done)
        return [[next(parts) for _ in request.seeds] for request in requests]


def _ignore(samples: int) -> None:
    """Nobody wants to know how far generation is."""
