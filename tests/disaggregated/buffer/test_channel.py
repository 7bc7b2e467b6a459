"""Teams that walk one graph have what one team has, whatever their layouts."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.dag.executor import Executor
from megarl.data.batch import Batch
from megarl.data.groups import group_places
from megarl.disaggregated.buffer.channel import TeamChannel
from megarl.disaggregated.buffer.core import Core, GroupInfo, HandoverError
from megarl.system.metrics import Metrics
from megarl.system.tracing import drain
from tests.disaggregated.buffer import teams

FIELDS = ("loss", "ref_logp", "values", "response_ids")


def one_team(count: int, replica: int, replicas: int, step: int) -> Batch:
    context = SimpleNamespace(step=step, metrics=Metrics())
    return Executor(teams.pipeline()).run(context, teams.prompts(count, replica, replicas))


def same(a: Batch, b: Batch, names: tuple[str, ...] = FIELDS) -> bool:
    values = [(x[n].values, y[n].values) if n != "loss" else (x[n], y[n]) for x, y in [(a, b)] for n in names]
    return a["sample_id"] == b["sample_id"] and all(torch.equal(x, y) for x, y in values)


@pytest.mark.parametrize("share", ["dealt", "tokens"])
@pytest.mark.parametrize(
    ("train", "ref", "critic", "tp", "count"),
    [
        (1, 1, 1, 1, 4),
        (2, 2, 2, 1, 5),
        (3, 2, 2, 1, 7),
        (2, 3, 1, 1, 5),
        (2, 1, 3, 2, 4),
        (1, 3, 2, 1, 2),
        (3, 1, 1, 1, 2),
    ],
)
def test_teams_have_what_one_team_has(train: int, ref: int, critic: int, tp: int, count: int, share: str) -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, train, ref, critic, share, tp)
    core = Core(placement, count, share)
    ended = teams.walk(graph, placement, core, count, steps=[1, 2])
    for rank, batches in enumerate(ended["train"]):
        for step, (batch, _) in zip([1, 2], batches, strict=True):
            assert same(batch, one_team(count, rank // tp, train, step))
    for name, replicas in (("ref", ref), ("critic", critic)):
        held = [batches[0][0]["uid"] for batches in ended[name][::tp]]
        assert sorted(set().union(*held)) == sorted(f"p{k}" for k in range(count))
        assert sum(len(group_places(uid)) for uid in held) == count
        assert len(held) == replicas
    assert core._steps == {}


def test_equal_layouts_work_on_the_samples_in_the_order_of_one_team() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 2, 2, 2)
    ended = teams.walk(graph, placement, Core(placement, 5, "dealt"), 5, steps=[1])
    for replica in (0, 1):
        whole = one_team(5, replica, 2, 1)
        in_groups = whole.select([place for places in group_places(whole["uid"]) for place in places])
        assert same(ended["critic"][replica][0][0], in_groups, ("ref_logp", "values", "response_ids"))


def test_only_what_is_used_crosses_and_an_optional_field_only_where_it_was_written() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 1, 1)
    ended = teams.walk(graph, placement, Core(placement, 2, "dealt"), 2, steps=[1, 2])
    names = [set(batch.names()) for batch, _ in ended["critic"][0]]
    assert names == [
        {"uid", "sample_id", "ordinal", "prompt_ids", "response_ids", "ref_logp", "values", *more}
        for more in ([], ["note"])
    ]
    assert set(ended["ref"][0][0][0].names()) == {"uid", "sample_id", "ordinal", "response_ids", "ref_logp"}


def test_bytes_given_and_read_are_counted() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 2, 1, 1, tp=2)
    ended = teams.walk(graph, placement, Core(placement, 4, "dealt"), 4, steps=[1])
    totals = {}
    for name, ranks in ended.items():
        metrics = Metrics()
        for batches in ranks:
            metrics.merge(batches[0][1])
        totals[name] = metrics.result()
    given, read = (sum(t.get(f"store/{what}_gb", 0.0) for t in totals.values()) for what in ("given", "read"))
    keys = {one.key: len(one.takers) for one in placement.handovers}
    assert given > 0
    assert read >= 2 * given  # both ranks of every taking replica
    assert set(keys.values()) == {1, 2}


@pytest.mark.parametrize(("train", "ref", "critic"), [(1, 1, 1), (1, 2, 1), (2, 3, 2)])
@pytest.mark.parametrize("share", ["dealt", "tokens"])
def test_every_taker_reads_every_byte_once(
    monkeypatch: pytest.MonkeyPatch, train: int, ref: int, critic: int, share: str
) -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, train, ref, critic, share)
    sizes: Counter[str] = Counter()
    give = teams.HereClient.give

    def noted(self: teams.HereClient, step: int, key: str, groups: Any, payloads: Any) -> int:
        size = give(self, step, key, groups, payloads)
        sizes[key] += size
        return size

    monkeypatch.setattr(teams.HereClient, "give", noted)
    ended = teams.walk(graph, placement, Core(placement, 12, share), 12, steps=[1])  # type: ignore[arg-type]
    metrics = [batches[0][1].result() for ranks in ended.values() for batches in ranks]
    given, read = (sum(one.get(f"store/{what}_gb", 0.0) for one in metrics) for what in ("given", "read"))
    assert given == pytest.approx(sizes.total() / 1e9)
    assert read == pytest.approx(sum(sizes[one.key] * len(one.takers) for one in placement.handovers) / 1e9)


def test_a_wait_names_the_team_that_it_is_for_and_tokens_are_those_of_the_groups_worked_on() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 1, 1)
    core, change = Core(placement, 2, "dealt"), threading.Condition()
    crossings = {}
    drain()
    threads = []
    for name in ("train", "ref", "critic"):
        client: Any = teams.HereClient(core, change, name, 0)
        crossings[name] = TeamChannel(graph, placement, client, 0, True)
        executor = Executor(graph, {}, placement[name].nodes, crossings[name])
        call = SimpleNamespace(step=1, metrics=Metrics()), teams.prompts(2) if name == "train" else None
        threads.append(threading.Thread(target=executor.run, args=call))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    assert {event.waits_for for event in drain()} == {"", "train", "ref", "critic"}
    whole = one_team(2, 0, 1, 1)
    tokens = sum(len(whole[name].values) for name in ("prompt_ids", "response_ids"))
    assert {name: channel.tokens for name, channel in crossings.items()} == dict.fromkeys(crossings, tokens)


# -- what does not fit -------------------------------------------------------------------------------------------------


def crossing_of(placement, team: str, graph=None, answers=None):
    client = SimpleNamespace(team=team, **(answers or {}))
    return TeamChannel(graph or teams.pipeline(), placement, client, 0, True)  # type: ignore[arg-type]


def test_samples_of_another_order_are_refused() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 1, 1)
    batch = one_team(2, 0, 1, 1)
    groups = [SimpleNamespace(uid="p0", sample_ids=("p0#1", "p0#0"))]
    (payload,) = batch.to_blocks([[0, 2]])
    channel = crossing_of(
        placement, "ref", graph, {"assignment": lambda *a: groups, "fetch": lambda step, key, uids: [payload]}
    )
    context = SimpleNamespace(step=3, metrics=Metrics())
    with pytest.raises(
        HandoverError, match=r"step 3, 'pick>.*, team 'ref' replica 0: .* different from number 0 on: found \['p0#0'\]"
    ):
        channel.take(context, graph["ref_logp"], None)


def test_a_column_that_cannot_be_sent_is_named() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 1, 1)
    batch = one_team(2, 0, 1, 2)
    batch.set("note", [object()] * len(batch))
    channel = crossing_of(placement, "train", graph, {"give": lambda step, key, groups, payloads: len(list(payloads))})
    with pytest.raises(HandoverError, match=r"step 2, 'pick>critic'.*column 'note' holds a value of type object"):
        channel.give(SimpleNamespace(step=2, metrics=Metrics()), graph["pick"], batch)


def test_groups_share_blocks_where_the_same_replicas_take_them() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 2, 1)
    groups = [GroupInfo(f"u{k}", k, (f"u{k}#0",), 1) for k in range(4)]
    client: Any = SimpleNamespace(team="train")
    for dealt, expected in ((True, [0, 1, 0, 1]), (False, [])):
        channel = TeamChannel(graph, placement, client, 0, True, dealt=dealt)
        assert channel._together(["ref"], groups) == expected
        assert channel._together(["critic", "ref"], groups) == expected
        assert channel._together(["critic"], groups) == [0] * 4, "one replica takes all"


def test_a_team_that_may_begin_again_keeps_the_samples_of_a_step_until_it_says_that_all_is_told() -> None:
    graph = teams.pipeline()
    placement = teams.placed(graph, 1, 1, 1)
    batch = one_team(2, 0, 1, 1)
    done: list[int] = []
    client: Any = SimpleNamespace(team="ref", give=lambda *rest: 0, done=done.append)
    for stays in (False, True):
        channel = TeamChannel(graph, placement, client, 0, True, stays=stays)
        channel.give(SimpleNamespace(step=3, metrics=Metrics()), graph["ref_logp"], batch)
        assert done == ([] if stays else [3])
        channel.done(3)
        assert done == [3]
        done.clear()
