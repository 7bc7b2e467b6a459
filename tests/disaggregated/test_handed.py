"""What a team handed over, joined for a file and parted again."""

from __future__ import annotations

import pytest
import torch

from megarl.dag.placement import Handover
from megarl.data.batch import Batch
from megarl.disaggregated.buffer.channel import merge_handovers, split_handovers

NAMES = {"uid": ["a", "b"], "sample_id": ["a#0", "b#0"]}
BOTH = Handover("rollout", "draw", ("x",), ("frozen", "train"), "rollout")
ONE = Handover("reward", "draw", ("x", "y"), ("train",), "rollout")


def given() -> dict[str, Batch]:
    return {
        BOTH.key: Batch({"x": torch.tensor([1, 2])}, NAMES),
        ONE.key: Batch({"x": torch.tensor([3, 4])}, NAMES),
    }


def test_fields_of_one_name_stay_those_of_their_nodes():
    batch = merge_handovers(given())
    assert sorted(batch.names()) == ["reward/x", "rollout/x", "sample_id", "uid"]
    found = split_handovers(Batch.from_bytes(batch.to_bytes()), [BOTH, ONE])
    assert {key: some.to_bytes() for key, some in found.items()} == {k: some.to_bytes() for k, some in given().items()}


def test_handovers_may_go_to_other_teams_and_lack_what_was_not_written():
    other = Handover("reward", "draw", ("y",), ("judge",), "rollout")
    found = split_handovers(merge_handovers(given()), [other])
    assert {key: some.names() for key, some in found.items()} == {"reward>judge": ["uid", "sample_id"]}


def test_a_team_that_hands_over_nothing_draws_for_nobody():
    with pytest.raises(AssertionError, match="other teams use every generated sample"):
        merge_handovers({})
