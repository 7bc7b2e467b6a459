"""Generation on SGLang servers.

The first rank of a replica sends the requests. Replicas generate on their own; all ranks of the run meet to replace
failed servers and at the end, see turns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.data.routes import RouteForm
from megarl.rollout.engine import Completion, Generation, Request, ignore_progress
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, LostServer
from megarl.rollout.sglang.samples import ServedSample
from megarl.rollout.sglang.turns import ServerTurns
from megarl.rollout.stop_strings import StopStrings
from megarl.sync.protocol import version_tag
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from megarl.system.meetings import Meetings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Replica:
    """A replica of the policy, whose ranks send the same requests as one client of the servers.

    Attributes:
        index: index of this replica, among `count`.
        group: the replica's ranks; its first rank sends the requests.
        world: all ranks that generate on the servers.
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
        """Rank in `world` of the replica's first rank."""
        return self.world.ranks.index(self.group.ranks[0]) if self.group.size > 1 else self.world.rank


class SglangEngine:
    """A `RolloutEngine` over a Fleet. `generate` is collective over all ranks of the run.

    Args:
        catch_up: updates servers with older weights to `weight_version`; collective. None: servers cannot be
            updated during generation.
        run: this run's name in the tag of weights (`version_tag`); answers with another run's weights are rejected.
        tokenizer: decodes responses to find stop strings; only needed if sampling has any.
        routes: form of the routes that servers return with samples; None: none.

    Attributes:
        weight_version: weight version to generate with, set after each update of the servers. Requests go only to
            servers that have acknowledged it.
        keeps_tokens: whether samples have, for each token, the ids that the sampling filters (top_k, top_p) kept.
        meetings: lets any rank call a meeting, in which all ranks that generate on the servers exchange reports.
    """

    def __init__(
        self,
        config: SGLangConfig,
        fleet: Fleet,
        replica: Replica,
        catch_up: Callable[[], None] | None,
        run: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        routes: RouteForm | None = None,
    ) -> None:
        self.config, self._fleet, self.replica, self._catch_up = config, fleet, replica, catch_up
        self._run_name, self._tokenizer, self.routes = run, tokenizer, routes
        self._failures: list[LostServer] = []
        self.meetings = Meetings(replica.world, replica.index if replica.is_first else None, replica.count)
        self._drafts = 0, 0
        self.weight_version = 0
        self.keeps_tokens = False

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """Generate all requests on the servers, and return the completions of each request in the order of its seeds.

        Raises:
            ServerError: no server is left, or a server rejected a request as invalid.
        """
        turns = self._turns(sampling, eos_ids, advance)
        turns.submit_all(requests)
        samples, completions = sum(len(request.seeds) for request in requests), dict[int, Completion]()
        try:
            while turns.any_busy(len(completions) < samples):
                completions |= turns.wait()
        finally:
            turns.close()
        numbers = iter(range(samples))
        return [[completions[next(numbers)] for _ in request.seeds] for request in requests]

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """Return a `Generation` that sends turns to the servers."""
        return self._turns(sampling, eos_ids, None)

    def _turns(
        self, sampling: SamplingConfig, eos_ids: Sequence[int], advance: Callable[[int], None] | None
    ) -> ServerTurns:
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        return ServerTurns(self, sampling, stop_ids, StopStrings.of(sampling, self._tokenizer), advance)

    @property
    def tag(self) -> str:
        """The tag of the servers' current weights."""
        return version_tag(self.weight_version, self._run_name)

    def count_drafts(self, samples: Iterable[ServedSample]) -> None:
        """Count the draft tokens of finished samples (speculative decoding)."""
        for proposed, accepted in (sample.drafts for sample in samples):
            self._drafts = self._drafts[0] + proposed, self._drafts[1] + accepted

    def pop_drafts(self) -> tuple[int, int]:
        """Return the numbers of draft tokens that were proposed and accepted since the last call."""
        drafts, self._drafts = self._drafts, (0, 0)
        return drafts

    @property
    def has_failures(self) -> bool:
        """Whether `pop_failures` would return a failure, which all ranks have to exchange in a meeting."""
        return bool(self._failures or self._fleet.ended())

    @property
    def replacing(self) -> bool:
        """Whether servers are starting or can be restarted, so that all ranks must meet every few seconds."""
        return self._fleet.replacing

    def note(self, failures: Sequence[LostServer]) -> None:
        """Send no more requests to these servers until they are restarted; the next `pop_failures` returns them."""
        self._fleet.note(failures)
        self._failures += failures

    def pop_failures(self) -> list[dict[str, Any]]:
        """Return the failures since the last call, as fields of `LostServer`: servers passed to `note`, and servers
        of which a process owned by this rank has ended."""
        failures, self._failures = [*self._failures, *self._fleet.ended()], []
        return [asdict(failure) for failure in failures]

    def replace(self, failures: Iterable[dict[str, Any]], *, fill: bool) -> None:
        """Restart failed servers, and check which of the starting servers answer by now.

        Collective over all ranks of the run, with the same arguments.

        Args:
            failures: the results of `pop_failures` of all ranks.
            fill: whether to send the current weights to servers that answer, because turns are still to be generated.

        Raises:
            ServerError: no server is left, and none may be restarted.
        """
        self._fleet.note([LostServer(**fields) for fields in failures])
        if not self._fleet.replacing:
            return
        self._fleet.refresh()
        waiting = any(server.state == "catching_up" for server in self._fleet.servers)
        if fill and waiting and self._catch_up is not None:
            self._catch_up()

    def leave(self) -> None:
        """Wait at the end of generation for servers that are starting on the trainer's devices.

        A starting server allocates a share of the memory that is free at that moment.

        Collective over all ranks of the run.
        """
        if self.config.colocated and any(server.state == "starting" for server in self._fleet.servers):
            self._fleet.wait_started()

    def recover(self, times: int) -> None:
        """Restart failed servers and update them to the current weights. Collective over all ranks of the run.

        Args:
            times: number of earlier recoveries in this generation.

        Raises:
            ServerError: no server is left, no weights come before the next step, or there were too many recoveries.
        """
        # Each server can be lost at most max_restarts + 1 times, because it is restarted at most max_restarts times.
        if times > self.config.count * (self.config.max_restarts + 1):
            reason = f"samples are not finished after {times} restarts of servers; see the servers' logs"
            raise ServerError("servers", "", "generation", reason)
        if self._catch_up is None:
            reason = (
                "no server is left that holds the weights of this step, and the actor's team sends none before the "
                "next one; see the servers' logs, and continue the run from its checkpoint"
            )
            raise ServerError("servers", "", "generation", reason)
        self._fleet.wait_started()
        self._catch_up()

    @property
    def first_group(self) -> int:
        """The attention group of a server that gets this replica's first prompt: replicas that share a server begin
        with groups that are spread evenly."""
        total = len(self._fleet.servers)
        sharing = -(-self.replica.count // total)
        return self.replica.index // total * self.config.attention_dp // sharing

    def close(self) -> None:
        """Join no further meeting. Not collective."""
        self.meetings.close()

    def servers(self) -> dict[int, ServerApi]:
        """Return the servers to which this replica may send requests now, by number.

        These are the servers with the current weights in this replica's share; if there are none in its share, all
        servers with the current weights.
        """
        index, count, total = self.replica.index, self.replica.count, len(self._fleet.servers)
        share = {number for number in range(total) if number % count == index} or {index % total}
        current = {server.number: server.api for server in self._fleet.current(self.weight_version)}
        return {number: api for number, api in current.items() if number in share} or current
