"""Generation on SGLang servers.

    first rank of a replica:  requests -> client -> servers -> samples      (in a thread)
    every rank:               meet: failed? -(some server)-> kill it, restart it, catch_up when it answers
                                    busy? --(some rank)--> meet again
                                    stuck? -(some rank)--> wait for restarted servers, catch_up, generate again
                                      '-----(no rank)----> completions from the replica's first rank

All ranks meet every few seconds while samples are in flight, so that no collective times out however long generation
takes, and an error on one rank ends all ranks.

A failed server is replaced while the others generate, and gets samples as soon as it holds the current weights. A rank
is stuck when no server with the current weights is left. Finished samples are kept; the others continue after
`catch_up` has updated the restarted servers. Turns of episodes: see `turns.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Completion, Generation, Request, ignore_progress
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch, GenerationClient, for_others
from megarl.rollout.sglang.fleet import Fleet, LostServer, Server
from megarl.rollout.sglang.samples import ServedSample, samples_of
from megarl.rollout.sglang.turns import ServerTurns
from megarl.rollout.stop_strings import StopStrings
from megarl.sync.protocol import version_tag
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEET_EVERY_S = 5.0


@dataclass(frozen=True)
class Replica:
    """The ranks that share one set of requests.

    Attributes:
        index: index of this replica, among `count`.
        group: the replica's ranks; its first rank sends the requests.
        world: all ranks of the run.
    """

    index: int = 0
    count: int = 1
    group: WorkerGroup = field(default_factory=WorkerGroup.alone)
    world: WorkerGroup = field(default_factory=WorkerGroup.alone)

    @property
    def is_first(self) -> bool:
        """Whether this rank sends the replica's requests."""
        return self.group.rank == 0

    @property
    def lead(self) -> int:
        """Rank in `world` of the replica's first rank, which sends its requests."""
        return self.world.ranks.index(self.group.ranks[0]) if self.group.size > 1 else self.world.rank


class SglangEngine:
    """A `RolloutEngine` over a Fleet. `generate` is collective over all ranks of the run.

    Args:
        catch_up: updates the servers that are not current to `weight_version`; collective. None: servers cannot be
            updated during generation.
        run: this run's name in the tag of weights (`version_tag`); answers with another run's weights are rejected.
        tokenizer: decodes responses to find stop strings; only needed if sampling has any.

    Attributes:
        weight_version: weight version to generate with, set after each update of the servers. Requests go only to
            servers that have acknowledged it.
    """

    def __init__(
        self,
        config: SGLangConfig,
        fleet: Fleet,
        replica: Replica,
        catch_up: Callable[[], None] | None,
        run: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._config, self._fleet, self.replica, self._catch_up = config, fleet, replica, catch_up
        self._run_name, self._tokenizer = run, tokenizer
        self._client = GenerationClient(config)
        self._untold: list[LostServer] = []
        self._drafts = 0, 0
        self.weight_version = 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """Implement `RolloutEngine.generate`.

        Raises:
            ServerError: no server is left, or one refused a request as wrong.
        """
        strings = StopStrings.of(sampling, self._tokenizer)
        samples = samples_of(requests, strings) if self.replica.is_first else []
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]

        def begin(pool: ThreadPoolExecutor) -> Future[None] | None:
            """Generate what is left; None: nothing is, or there is no server for it."""
            servers = {server.number: server.api for server in self.servers()}
            if not servers or all(sample.finish_reason is not None for sample in samples):
                return None
            tag = version_tag(self.weight_version, self._run_name)
            return pool.submit(self._client.run, samples, servers, sampling, stop_ids, advance, tag)

        times = 0
        while True:
            with ThreadPoolExecutor(1, "generate") as pool:
                self._meet(lambda: begin(pool))
            stuck = any(sample.finish_reason is None for sample in samples)
            if not any(self.replica.world.all_gather_json(stuck)):
                return self._share(requests, samples)
            self.recover(times)
            times += 1

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """Implement `RolloutEngine.open`: servers cache what came before, as much as they have room for."""
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        return ServerTurns(self, sampling, stop_ids, StopStrings.of(sampling, self._tokenizer))

    def call(
        self,
        servers: dict[int, ServerApi],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        done: Callable[[ServedSample], None],
        failures: deque[LostServer],
    ) -> Dispatch:
        """Return the requests to `servers` for the weights of now; see `Dispatch` for `done` and `failures`."""
        tag = version_tag(self.weight_version, self._run_name)
        return Dispatch(self._config, servers, sampling, stop_ids, tag, done, failures)

    def count_drafts(self, samples: Iterable[ServedSample]) -> None:
        """Count the drafts of speculative decoding in finished samples."""
        for proposed, taken in (sample.drafts for sample in samples):
            self._drafts = self._drafts[0] + proposed, self._drafts[1] + taken

    def pop_drafts(self) -> tuple[int, int]:
        """Return the tokens that drafts have proposed since the last call, and how many of them the model has taken."""
        counted, self._drafts = self._drafts, (0, 0)
        return counted

    def note(self, failures: Sequence[LostServer]) -> None:
        """Ask these servers no more until they are restarted. Other ranks learn it when they meet."""
        self._fleet.note(failures)
        self._untold += failures

    def tell(self) -> list[dict[str, Any]]:
        """Return the fields of `LostServer` of what was noted since the last call, or has lost a process of this rank,
        for the other ranks' `replace`."""
        told, self._untold = [*self._untold, *self._fleet.ended()], []
        return [asdict(failure) for failure in told]

    def replace(self, told: Iterable[dict[str, Any]], *, fill: bool) -> None:
        """Start servers that have failed again, and see which of those that were answer by now.

        Collective over all ranks of the run, with the same arguments.

        Args:
            told: the messages of all ranks (`tell`).
            fill: bring those that answer to the current weights; samples are still to be generated.

        Raises:
            ServerError: no server is left, and none may be started again.
        """
        self._fleet.note([LostServer(**fields) for fields in told])
        if not self._fleet.replacing:
            return
        self._fleet.refresh()
        waiting = any(server.state == "catching_up" for server in self._fleet.servers)
        if fill and waiting and self._catch_up is not None:
            self._catch_up()

    def leave(self) -> None:
        """End generation. Servers on the trainer's devices that are starting take their share before it goes on.

        Collective over all ranks of the run.
        """
        if self._config.colocated and any(server.state == "starting" for server in self._fleet.servers):
            self._fleet.wait_started()

    def recover(self, times: int) -> None:
        """Restart failed servers and bring them to the current weights. Collective over all ranks of the run.

        Args:
            times: number of times that this was done for the same samples.

        Raises:
            ServerError: no server is left, nobody brings it weights before the next step, or this was done too often.
        """
        # Every server may be lost as often as it may be restarted; after that `refresh` gives up.
        if times > self._config.count * (self._config.max_restarts + 1):
            reason = "requests do not get done although servers were restarted"
            raise ServerError("servers", "", "generation", reason)
        if self._catch_up is None:
            reason = (
                "no server is left that holds the weights of this step, and the actor's team pushes none before the "
                "next one; see the servers' logs, and continue the run from its checkpoint"
            )
            raise ServerError("servers", "", "generation", reason)
        self._fleet.wait_started()
        self._catch_up()

    def servers(self) -> list[Server]:
        """Return the servers this replica may ask now, all of which hold the current weights: its own share, or the
        others'."""
        index, count, total = self.replica.index, self.replica.count, len(self._fleet.servers)
        mine = {n for n in range(total) if n % count == index} or {index % total}
        current = self._fleet.current(self.weight_version)
        return [server for server in current if server.number in mine] or current

    def _meet(self, begin: Callable[[], Future[None] | None]) -> None:
        """Wait until every rank has generated what it can. Collective over all ranks of the run.

        Args:
            begin: begins with what is left of this rank's samples, on servers that are left.

        Raises:
            ServerError: on every rank, when one of them met an error, or no server is left; any other error is raised
                as it is where it was met.
        """
        work = begin()
        while True:
            if work is not None:
                wait([work], _MEET_EVERY_S)
            beat()
            error = work.exception() if work is not None and work.done() else None
            self.note(self._client.failures())
            if error is None and (work is None or work.done()):
                work = begin()
            fields = None if error is None else for_others(error)
            reports = self.replica.world.all_gather_json([work is None, fields, self.tell()])
            if error is not None:
                raise error
            for _, failure, _ in reports:
                if failure is not None:
                    raise ServerError(**failure)
            over = all(done for done, _, _ in reports)
            self.replace([one for _, _, told in reports for one in told], fill=not over)
            if over:
                self.leave()
                return
            self._client.add({server.number: server.api for server in self.servers()})

    def _share(self, requests: Sequence[Request], samples: list[ServedSample]) -> list[list[Completion]]:
        """Return the first rank's completions on all ranks of the replica, grouped by request."""
        self.count_drafts(samples)
        done: list[dict[str, Any]] = [asdict(sample.completion()) for sample in samples]
        done = self.replica.group.broadcast_json(done)
        parts = iter(Completion(**fields) for fields in done)
        return [[next(parts) for _ in request.seeds] for request in requests]
