"""Groups that go to other teams as they get ready: what is put aside of them, and parts of that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.model import ParallelConfig
from megarl.dag.placement import Handover, Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.dag.staleness import StalenessSettings
from megarl.data.batch import Batch, Jagged
from megarl.disaggregated.buffer.channel import FinishedGroups, GroupChannel, unused_groups
from megarl.disaggregated.buffer.core import Core, GroupInfo, HandoverError
from megarl.disaggregated.buffer.flow import Finished, FlowGroup
from megarl.system.metrics import Metrics

PLACED = Placement(
    (
        TeamPlan("train", (Role.ACTOR,), 1, 0, ParallelConfig(), ("train",)),
        TeamPlan("draw", (Role.ROLLOUT,), 1, 1, ParallelConfig(), ("rollout", "reward")),
    ),
    (
        Handover("rollout", "draw", ("response_ids",), ("train",), "rollout"),
        Handover("reward", "draw", ("score",), ("train",), "rollout"),
    ),
)
DRAWN, SCORED = (one.key for one in PLACED.handovers)


def collected(client: Any = None) -> tuple[GroupChannel, FinishedGroups]:
    """Prompts 7, 8 and 9, of two samples each that do not stand together, after all nodes."""
    batch = Batch(
        {
            "prompt_ids": Jagged.from_list([[1]] * 6, dtype=torch.int64),
            "response_ids": Jagged.from_list([[n] * n for n in range(1, 7)], dtype=torch.int64),
        },
        {"uid": ["a", "b", "c"] * 2, "sample_id": [f"{uid}#{i}" for i in range(2) for uid in "abc"]},
    )
    channel = GroupChannel(PLACED, client, True)
    channel.give(None, SimpleNamespace(id="rollout"), batch)  # type: ignore[arg-type]
    batch.set("score", torch.arange(6.0))
    channel.give(None, SimpleNamespace(id="reward"), batch)  # type: ignore[arg-type]
    metrics = Metrics()
    metrics.sum("samples", 6)
    ready = channel.collect([7, 8, 9], batch, metrics)
    assert ready is not None
    return channel, ready


def told(info: GroupInfo) -> tuple[str, tuple[str, ...], int]:
    return info.uid, info.sample_ids, info.tokens


def test_what_each_handover_takes_is_put_aside_with_the_names_of_the_samples():
    channel, ready = collected()
    assert sorted(ready.samples[DRAWN].names()) == ["response_ids", "sample_id", "uid"]
    assert sorted(ready.samples[SCORED].names()) == ["sample_id", "score", "uid"]
    assert [told(group) for group in ready.groups] == [
        ("a", ("a#0", "a#1"), 2 + 1 + 4),
        ("b", ("b#0", "b#1"), 2 + 2 + 5),
        ("c", ("c#0", "c#1"), 2 + 3 + 6),
    ]
    assert channel.tokens == 27


def test_some_of_the_groups_have_the_metrics_if_the_first_one_is_among_them():
    _, ready = collected()
    some = ready.select([9, 7])
    assert (some.numbers, [group.uid for group in some.groups]) == ([9, 7], ["c", "a"])
    assert some.samples[DRAWN]["sample_id"] == ["c#0", "c#1", "a#0", "a#1"]
    assert some.samples[SCORED]["score"].tolist() == [2, 5, 0, 3]
    assert some.metrics.result() == {"samples": 6}
    assert ready.select([8]).metrics.result() == {}


def test_payloads_are_put_group_by_group_under_each_handover():
    class Client:
        def swap(self, finished: Any, payloads: Any, *rest: Any) -> tuple[list[int], int]:
            assert [(one.number, one.info) for one in finished] == list(zip([7, 8, 9], ready.groups, strict=True))
            assert [one.metrics for one in finished] == [json.dumps(ready.metrics.to_json()), None, None]
            assert rest == ([3], 5, 2)
            found = {key: [Batch.from_blocks([one])["sample_id"] for one in some] for key, some in payloads.items()}
            assert found == {key: [["a#0", "a#1"], ["b#0", "b#1"], ["c#0", "c#1"]] for key in (DRAWN, SCORED)}
            return [11, 12], 2 * 10**9

    channel, ready = collected(Client())
    context = SimpleNamespace(metrics=Metrics())
    assert channel.swap(context, [ready], [3], 5, 2) == [11, 12]
    assert context.metrics.result() == {"store/given_gb": 2.0}


def test_what_is_put_comes_back_group_by_group_for_a_checkpoint():
    kept: dict[int, FlowGroup] = {}

    class Client:
        def swap(self, finished: Any, payloads: Any, *_: Any) -> tuple[list[int], int]:
            for place, (number, info, metrics) in enumerate(finished):
                refs = {key: some[place] for key, some in payloads.items()}
                kept[number] = FlowGroup(number, 4 + place, info, refs, metrics)
            return [], 0

        def unused(self, step: int, part: int, parts: int) -> list[FlowGroup]:
            assert step == 3
            return [group for number, group in kept.items() if number % parts == part]

    client: Any = Client()
    channel, ready = collected(client)
    channel.swap(SimpleNamespace(metrics=Metrics()), [ready], [], 0, 0)
    (first, last), versions = unused_groups(client, 3, 1, 2)
    assert versions == {7: 4, 9: 6}
    for own, number in ((first, 7), (last, 9)):
        whole = ready.select([number])
        assert (own.numbers, own.groups) == ([number], whole.groups)
        assert {key: some.to_bytes() for key, some in own.samples.items()} == {
            key: some.to_bytes() for key, some in whole.samples.items()
        }
        assert own.metrics.result() == whole.metrics.result()


def test_a_policy_that_chooses_what_is_too_old_ends_the_run_with_its_name(tmp_path: Path):
    policy = tmp_path / "late.py"
    policy.write_text(
        "from megarl.dag.staleness import AsReady\n"
        "class Late(AsReady):\n"
        "    def forms_step(self, step, under_way, finished):\n"
        "        return super().forms_step(step, under_way, finished) if step < 6 else [0, 0]\n"
    )
    core = Core(PLACED, 2, "dealt", StalenessSettings(f"{policy}:Late", 1, 2, 20))
    core.open_flow(0, 0, [], [])

    def finish_all_of(step: int) -> None:
        core.assignment("train", step, "rollout", 0)
        numbers = core.swap("draw", 0, [], {}, [], step - 1, 9).answer
        finished = [Finished(number, GroupInfo(f"u{number}", 0, (f"u{number}#0",), 5), "{}") for number in numbers]
        core.swap("draw", 0, finished, {key: [None] * len(finished) for key in (DRAWN, SCORED)}, [], step - 1, 0)

    for step in range(1, 6):
        finish_all_of(step)
    with pytest.raises(HandoverError, match=r"async.order: forms_step\(6\) of the policy Late returns \[0, 0\]"):
        finish_all_of(6)


def test_groups_that_go_one_by_one_are_refused_in_one_call():
    core = Core(PLACED, 2, "dealt", StalenessSettings("as_ready", 1, 2, 20))
    core.open_flow(0, 0, [], [])
    core.assignment("train", 1, "rollout", 0)
    numbers = core.swap("draw", 0, [], {}, [], 0, 9).answer
    finished = [Finished(number, GroupInfo(f"u{number}", 0, (f"u{number}#0",), 5), "{}") for number in numbers]
    core.swap("draw", 0, finished, {key: [None] * len(finished) for key in (DRAWN, SCORED)}, [], 0, 0)
    with pytest.raises(HandoverError, match=r"team 'draw' rank 1: this run hands over these groups one by one"):
        core.give("draw", 1, 1, DRAWN, [], [])
