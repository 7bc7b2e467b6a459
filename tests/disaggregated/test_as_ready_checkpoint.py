"""What was begun comes out of a checkpoint as it went in, whatever number of replicas reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.dag.placement import Handover
from megarl.data.batch import Batch, Jagged
from megarl.data.trajectory import Trajectory
from megarl.disaggregated.as_ready_checkpoint import flow_files, read_buffered_groups
from megarl.disaggregated.buffer.channel import FinishedGroups
from megarl.disaggregated.buffer.core import GroupInfo
from megarl.system.metrics import Metrics

HANDOVERS = (
    Handover("rollout", "draw", ("response_ids", "note"), ("frozen", "train"), "rollout"),
    Handover("reward", "draw", ("score", "optional"), ("train",), "rollout"),
)
FINISHED, UNDER_WAY, BEGUN, LATE = (0, 1, 2, 5, 6), 3, 4, 1
PARTIALS = [
    Trajectory([1], [5, 6], [True] * 2, [-0.5, -1.0], [[0, 1], [1, 1]], [0], segments=2),
    Trajectory([1], [7], [True], [-2.0], [[0, 1]], [0], [1], [0.0], ended_by="done", info={"found": 1.0}, segments=1),
]


def ready(*numbers: int) -> FinishedGroups:
    """Groups of two samples, which the nodes finished together."""
    names = {
        "uid": [f"p{number}" for number in numbers for _ in range(2)],
        "sample_id": [f"p{number}#{sample}" for number in numbers for sample in range(2)],
    }
    rows = [number for number in numbers for _ in range(2)]
    ids = Jagged.from_list([[number] * (place % 2 + 1) for place, number in enumerate(rows)], dtype=torch.int64)
    samples = {
        HANDOVERS[0].key: Batch({"response_ids": ids}, {**names, "note": [{"of": row} for row in rows]}),
        HANDOVERS[1].key: Batch({"score": torch.tensor(rows, dtype=torch.float32)}, names),
    }
    groups = [GroupInfo(f"p{number}", 0, (f"p{number}#0", f"p{number}#1"), 10 * number) for number in numbers]
    return FinishedGroups(list(numbers), groups, samples, counted(len(numbers)))


def counted(groups: int) -> Metrics:
    metrics = Metrics()
    metrics.sum("groups", groups)
    return metrics


def layout(replica: int, *, lead: bool = True) -> SimpleNamespace:
    return SimpleNamespace(dp_rank=replica, is_lead=lead)


def write(folder, *, lead: bool = True) -> None:
    """Two replicas, which had finished groups 0 and 2 together, then 6; and 1 and 5 together."""
    versions = [{0: 1, 2: 1, 6: 2, UNDER_WAY: 2}, {1: 1, 5: 2, BEGUN: 2}]
    for replica, (done, partials) in enumerate(
        [([ready(0, 2), ready(6)], {UNDER_WAY: PARTIALS}), ([ready(1, 5)], {BEGUN: [Trajectory([1]), Trajectory([1])]})]
    ):
        again = [8, 9] if replica == 0 else []
        files = flow_files(layout(replica, lead=lead), done, versions[replica], partials, again, counted(10 + replica))
        for name, content in files.items():
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("now", [1, 2, 3, 8])
def test_every_group_goes_on_at_one_replica(tmp_path, now):
    write(tmp_path)
    held, late, numbers, metrics = read_buffered_groups(tmp_path, 2), [LATE], list[int](), Metrics()
    for replica in range(now):
        mine = held.share_of(replica, now, without=late)
        numbers += mine
        for one in held.finished_of(mine, HANDOVERS):
            (number,) = one.numbers
            wanted = ready(number)
            assert one.groups == wanted.groups
            assert {key: some.to_bytes() for key, some in one.samples.items()} == {
                key: some.to_bytes() for key, some in wanted.samples.items()
            }
            metrics.merge(one.metrics)
    assert sorted(numbers) == sorted({*FINISHED, UNDER_WAY, BEGUN} - {LATE})
    assert held.versions == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}
    assert held.partials == {UNDER_WAY: PARTIALS, BEGUN: [Trajectory([1]), Trajectory([1])]}
    assert held.again == [8, 9]
    assert metrics.result() == {"groups": 3}, "of those that were finished together the first one has them"


def test_what_samples_measured_that_came_to_nothing_is_not_lost(tmp_path):
    write(tmp_path)
    assert read_buffered_groups(tmp_path, 2).carried.result() == {"groups": 10 + 11}


def test_only_the_first_rank_of_a_replica_writes(tmp_path):
    write(tmp_path, lead=False)
    assert list(tmp_path.iterdir()) == []
