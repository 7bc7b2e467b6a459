"""The buffer as workers use it: a real Ray, each worker a process of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.dag.placement import Placement, place
from megarl.data.wire import Block, Span
from tests.disaggregated.buffer import teams
from tests.ray_forks.clusters import own

pytestmark = [pytest.mark.procs, pytest.mark.wide]  # Ray ends itself where its own processes start slowly

COUNT = 5
TEAMS = {
    "train": {"roles": ["actor", "rollout"], "devices": 2},
    "score": {"roles": ["reference", "critic"], "devices": 1},
}


def placed() -> Placement:
    from megarl.config.run import RunConfig

    return place(teams.pipeline(), RunConfig(name="x", cluster={"nproc": 3}, placement={"teams": TEAMS}))


class Worker:
    """One worker's process."""

    def __init__(self, team: str, rank: int) -> None:
        self._team, self._rank = team, rank
        self._client: Any = None

    def connect(self, name: str, deadline_s: float, start: int = 0) -> str | None:
        """To another buffer; the message of the error, if there was one."""
        from megarl.disaggregated.buffer.client import BufferClient

        def connect() -> None:
            self._client = BufferClient.connect(name, self._team, self._rank, deadline_s, start)

        return self._told(connect)

    def walk(self, steps: list[int], pause_s: float = 0.0) -> list[dict[str, Any]]:
        """This worker's part of the steps; what it had after each. It begins each after a pause."""
        from types import SimpleNamespace

        from megarl.dag.executor import Executor
        from megarl.disaggregated.buffer.channel import TeamChannel
        from megarl.system.metrics import Metrics

        graph, placement = teams.pipeline(), placed()
        channel = TeamChannel(graph, placement, self._client, self._rank, True, dealt=True)
        executor = Executor(graph, {}, placement[self._team].nodes, channel)
        ended = []
        for step in steps:
            time.sleep(pause_s)
            prompts = teams.prompts(COUNT, self._rank, 2) if self._team == "train" else None
            context: Any = SimpleNamespace(step=step, metrics=Metrics())
            batch = executor.run(context, prompts)
            loss = batch["loss"].tolist() if "loss" in batch else None
            ended.append({"sample_id": batch["sample_id"], "loss": loss, **context.metrics.result()})
        return ended

    def call(self, method: str, *arguments: Any) -> Any:
        """What a call returns, or the message of its error."""
        result: list[Any] = []
        error = self._told(lambda: result.append(getattr(self._client, method)(*arguments)))
        return result[0] if error is None else error

    def flags(self, step: int, key: str, uids: list[str]) -> list[bool]:
        """Does what it fetches own its memory, and may it be written to?"""
        flags = [part.flags for part in self._client.fetch(step, key, uids)[0].block.parts]
        return [any(one.owndata for one in flags), any(one.writeable for one in flags)]

    def fetch_but_ones(self, step: int, key: str, uids: list[str]) -> Any:
        """What it fetches, where bytes of ones are lost: Ray may have those of a process a while after its end."""
        from unittest import mock

        import ray

        from megarl.disaggregated.buffer import client

        there = client.payloads_of

        def others(refs: Any, limit_s: float) -> Any:
            found = there(refs, limit_s)
            if any(payload.block.parts[0][0] == 1 for payload in found):
                raise ray.exceptions.OwnerDiedError("00", None, "")
            return found

        with mock.patch.object(client, "payloads_of", others):
            return self.call("fetch", step, key, uids)

    def give_where_nothing_fits(self, step: int, key: str) -> Any:
        """The message of the error."""
        from unittest import mock

        import ray

        with mock.patch.object(ray, "put", side_effect=ray.exceptions.ObjectStoreFullError("full")):
            return self.call("give", step, key, _infos([["u0", 0, ["u0#0"], 5]]), [_payload(9, 0)])

    def work(self, until: str) -> None:
        """Be busy, visibly, until there is a file; another one tells that it has begun."""
        from megarl.system.tracing import phase

        Path(f"{until}.begun").touch()
        while not Path(until).exists():
            with phase("busy"):
                time.sleep(0.1)

    def _told(self, call: Any) -> str | None:
        from megarl.disaggregated.buffer.core import HandoverError
        from megarl.system.tracing import phase

        try:
            with phase("test"):
                call()
        except HandoverError as error:
            return str(error)
        return None


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Any]]:
    import ray

    with own():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=128 << 20,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
    make = ray.remote(Worker).options(num_cpus=0)
    yield {f"{team}{rank}": make.remote(team, rank) for team, rank in (("train", 0), ("train", 1), ("score", 0))}
    ray.shutdown()


@contextlib.contextmanager
def buffer(workers: dict[str, Any], name: str, deadline_s: float) -> Iterator[Any]:
    """A buffer that all workers are connected to."""
    import ray

    from megarl.disaggregated.buffer.actor import start_buffer

    actor = start_buffer(name, placed(), COUNT, "dealt")
    # Deadlines of these tests are shorter than the start of a process.
    ray.get(actor.__ray_ready__.remote(), timeout=400)
    assert ray.get([w.connect.remote(name, deadline_s) for w in workers.values()], timeout=400) == [None] * 3
    yield actor
    ray.kill(actor)


def assert_all_arrived(steps: list[int], ended: list[Any]) -> None:
    """Every worker had after each step what it has when there are no processes."""
    from megarl.disaggregated.buffer.core import Core

    placement = placed()
    here = teams.walk(teams.pipeline(), placement, Core(placement, COUNT, "dealt"), COUNT, steps)
    for (name, rank), mine in zip((("train", 0), ("train", 1), ("score", 0)), ended, strict=True):
        for told, (batch, metrics) in zip(mine, here[name][rank], strict=True):
            loss = batch["loss"].tolist() if "loss" in batch else None
            assert told == {"sample_id": batch["sample_id"], "loss": loss, **metrics.result()}


def test_batches_cross_both_ways(workers: dict[str, Any]) -> None:
    import ray

    steps = [1, 2]
    with buffer(workers, "both", 200.0):
        ended = ray.get([w.walk.remote(steps) for w in workers.values()], timeout=300)
    assert_all_arrived(steps, ended)


def test_bytes_that_went_with_their_process_are_waited_for_until_its_team_gives_them_again(
    workers: dict[str, Any],
) -> None:
    import ray

    key = placed().given("ref_logp")[0].key
    group = _infos([["u0", 0, ["u0#0"], 5]])
    with buffer(workers, "lost", 60.0) as actor:
        givers = [ray.remote(Worker).options(num_cpus=0).remote("score", 0) for _ in range(2)]
        first, second = givers
        assert ray.get(first.connect.remote("lost", 60.0), timeout=400) is None
        ray.get(first.call.remote("give", 1, key, group, [_payload(1 << 20, 1)]), timeout=400)
        ray.get(first.call.remote("post", "m", "first"), timeout=400)
        ray.kill(first)
        waiting = workers["train0"].fetch_but_ones.remote(1, key, ["u0"])
        assert ray.wait([waiting], timeout=2.0)[0] == []
        assert ray.get(actor.restart_team.remote("score", 1, 60.0), timeout=400) is None
        told = ray.get(workers["score0"].call.remote("give", 1, key, group, [_payload(1, 0)]), timeout=400)
        assert "this process of team 'score', rank 0, must end" in told, "it is to be gone"
        assert ray.get(second.connect.remote("lost", 60.0, 1), timeout=400) is None
        assert ray.wait([waiting], timeout=1.0)[0] == [], ray.get(waiting)
        ray.get(second.call.remote("post", "m", "second"), timeout=400)
        ray.get(second.call.remote("give", 1, key, group, [_payload(1 << 20, 2)]), timeout=400)
        (found,) = ray.get(waiting, timeout=400)
        assert {*bytes(found.block)} == {2}
        assert ray.get(workers["train1"].call.remote("read", "m"), timeout=400) == "first"
        ray.kill(second)


def test_readers_map_the_givers_bytes(workers: dict[str, Any]) -> None:
    import ray

    with buffer(workers, "mapped", 60.0):
        group = [["u0", 0, ["u0#0"], 5]]
        key = placed().given("pick")[0].key
        ray.get(workers["train1"].call.remote("give", 1, key, [], []), timeout=400)
        block = Block((np.zeros(1 << 20, np.uint8), np.zeros(1 << 18, np.uint8)))
        ray.get(workers["train0"].call.remote("give", 1, key, _infos(group), [Span(block, 0, 1)]), timeout=400)
        assert ray.get(workers["score0"].flags.remote(1, key, ["u0"]), timeout=400) == [False, False]


def _payload(size: int, value: int) -> Span:
    return Span(Block((np.full(size, value, np.uint8),)), 0, 1)


def _infos(rows: list[list[Any]]) -> list[Any]:
    from megarl.disaggregated.buffer.core import GroupInfo

    return [GroupInfo(uid, ordinal, tuple(ids), tokens) for uid, ordinal, ids, tokens in rows]


def test_waits_end_when_no_other_team_moves_and_say_where_they_stand(workers: dict[str, Any]) -> None:
    import ray

    with buffer(workers, "nobody", 2.0):
        start = time.monotonic()
        calls = [
            workers["train0"].call.remote("read", "weights/9"),  # waiting is no progress
            workers["score0"].call.remote("assignment", 3, "pick", 0),
        ]
        train, score = ray.get(calls, timeout=400)
        assert time.monotonic() - start >= 2
    assert "team 'score' rank 0 in phase test timed out waiting for the groups of 'pick' in step 3 after" in score
    assert "no other team has made progress for 2 s (cluster.timeout_s)\n  team 'train' rank " in score
    assert "timed out waiting for mail 'weights/9' after" in train
    assert "team 'score' rank 0: in phase test at step 0, waiting for the groups of 'pick' in step 3, last pro" in train


def test_a_wait_lasts_while_another_team_moves(workers: dict[str, Any], tmp_path: Path) -> None:
    import ray

    with buffer(workers, "busy", 4.0):
        busy = workers["train0"].work.remote(str(tmp_path / "over"))
        while not (tmp_path / "over.begun").exists():
            assert ray.wait([busy], timeout=0.1)[0] == []
        waiting = workers["score0"].call.remote("read", "weights/1")
        assert ray.wait([waiting], timeout=7.0)[0] == []
        ray.get(workers["train1"].call.remote("post", "weights/1", '{"x": [1, null]}'), timeout=400)
        assert ray.get(waiting, timeout=400) == '{"x": [1, null]}'
        (tmp_path / "over").touch()
        ray.get(busy, timeout=400)


def test_a_buffer_that_dies_is_named_at_once(workers: dict[str, Any]) -> None:
    import ray

    with buffer(workers, "dying", 600.0) as actor:
        waiting = workers["score0"].call.remote("read", "weights/1")
        end = actor.end.remote()  # the call by which a launcher notices
        assert ray.wait([waiting, end], timeout=1.0)[0] == []
        ray.kill(actor)
        told = ray.get(waiting, timeout=400)
        assert ray.wait([end], timeout=400)[0] == [end]
    assert "team 'score' rank 0 in phase test, waiting for mail 'weights/1': the buffer 'dying' is gone" in told


def test_a_buffer_that_was_never_started_is_named(workers: dict[str, Any]) -> None:
    import ray

    told = ray.get(workers["score0"].connect.remote("no-such", 2.0), timeout=400)
    assert "team 'score' rank 0: Ray has no buffer 'no-such'" in told


def test_an_object_store_that_is_full_is_named(workers: dict[str, Any]) -> None:
    import ray

    key = placed().given("pick")[0].key
    with buffer(workers, "full", 60.0):
        told = ray.get(workers["train0"].give_where_nothing_fits.remote(1, key), timeout=400)
    assert f"9 bytes of {key!r} of step 1 do not fit into this machine's object store: " in told


def test_mail_that_comes_is_noticed_without_a_call_for_every_look(workers: dict[str, Any]) -> None:
    import ray

    with buffer(workers, "noticed", 10.0):
        reader, writer = workers["train0"], workers["score0"]
        looks = [ray.get(reader.call.remote("has_arrived", "wanted/1")) for _ in range(100)]
        assert looks == [False] * 100
        ray.get(writer.call.remote("post", "wanted/1", "{}"))
        end = time.monotonic() + 30
        while not ray.get(reader.call.remote("has_arrived", "wanted/1")):
            assert time.monotonic() < end, "nobody noticed the mail in 30 s"
        assert ray.get(reader.call.remote("has_arrived", "wanted/2")) is False


def test_calls_leave_no_records_in_rays_control_store(workers: dict[str, Any]) -> None:
    """A step makes dozens of calls, and Ray keeps a record of a kB or two of each of the last 100,000."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    def calls() -> list[str]:
        events = state._connect_and_get_accessor().get_task_events()
        return [gcs_pb2.TaskEvents.FromString(event).task_info.func_or_class_name for event in events]

    with buffer(workers, "unrecorded", 60.0):
        assert ray.get(workers["train1"].call.remote("post", "m", "1"), timeout=180) is None
        assert ray.get(workers["train1"].work.remote("/"), timeout=180) is None
        end = time.monotonic() + 120
        while "Worker.work" not in (made := calls()):
            assert time.monotonic() < end, "no process reports its calls"
            time.sleep(0.1)
    assert not [call for call in made if call.startswith("BufferActor.")]


def test_a_refusal_says_who_was_refused(workers: dict[str, Any]) -> None:
    import ray

    with buffer(workers, "refusing", 60.0):
        told = [ray.get(workers["train0"].call.remote("post", "m", "1"), timeout=400) for _ in range(2)]
    refusal = "the buffer 'refusing' rejected the request: the message 'm' has already been posted\n  fix:"
    assert told[0] is None
    assert told[1].startswith(f"team 'train' rank 0 in phase test, waiting for the buffer to post 'm': {refusal}")


def test_a_block_is_one_object_however_many_groups_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.disaggregated.buffer import client as module

    objects: list[Block] = []
    monkeypatch.setattr(module, "put_object", lambda block: objects.append(block) or len(objects) - 1)
    client = module.BufferClient.__new__(module.BufferClient)
    one, other = (Block((np.zeros(4, np.uint8), np.zeros(size, np.uint8))) for size in (5, 6))
    pieces, size = client._put_all("x", [Span(one, 0, 2), Span(other, 0, 1), Span(one, 2, 5)])
    assert (objects, size) == ([one, other], 9 + 10)
    assert pieces == [(0, 0, 2), (1, 0, 1), (0, 2, 5)]
