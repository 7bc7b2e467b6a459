"""The table of fields: what stages may declare, and what a field may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.dag.guard import ContractError, GuardedBatch
from megarl.dag.node import Node
from megarl.dag.stage import stage
from megarl.data.batch import Batch, Jagged
from megarl.data.fields import FIELDS, known, table
from megarl.data.groups import ORDINAL
from megarl.data.versions import VERSION_FIELDS

RESPONSES = Jagged.from_list([[1, 2], [3]], dtype=torch.int64)


def sets(context, batch):
    """A stage that sets what a test wants."""


@pytest.fixture
def batch() -> Batch:
    node = Node("own", stage(reads=[], writes=[*FIELDS, "end_frames/wrist", "mine"])(sets)).resolved()
    return GuardedBatch.of(Batch({}, {}, size=2), node)


def test_docs_have_the_table():
    assert table() in Path(__file__).parents[2].joinpath("docs/architecture.md").read_text(), (
        "python -m megarl.data.fields prints what docs/architecture.md has to say"
    )


def test_a_misspelt_field_is_found_when_a_stage_is_imported():
    def own(context, batch): ...

    assert stage(reads=["scores"], writes=[])(own) is own, "a user's stage may have fields of its own"
    own.__module__ = "megarl.runtime.stages.own"
    with pytest.raises(ValueError, match=r"megarl\.runtime\.stages\.own.*no such field.*\['scores'\]"):
        stage(reads=["scores"], writes=["advantages"])(own)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("score", torch.zeros(2, dtype=torch.float64), "float64"),
        ("score", [1.0, 0.0], "a column"),
        ("advantages", torch.zeros(2), r"float32, \[2\]"),
        ("response_mask", RESPONSES, "int64, of different lengths"),
        ("uid", torch.zeros(2), "float32"),
        ("frames/wrist", torch.zeros(2, 4, 4, 3, dtype=torch.uint8), r"uint8, \[2, 4, 4, 3\]"),
    ],
)
def test_a_value_of_another_form_is_refused_where_it_is_set(batch, name, value, found):
    with pytest.raises(ContractError, match=rf"'own'.*sets '{name}'(.|\n)*found: +{found}(.|\n)*allowed: "):
        batch.set(name, value)


def test_values_of_the_right_form_and_fields_of_a_users_own_are_set(batch):
    for name, value in {
        "score": torch.zeros(2),
        "response_ids": RESPONSES,
        "uid": ["a", "b"],
        "end_frames/wrist": torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
        "mine": torch.zeros(2, dtype=torch.float16),
    }.items():
        batch.set(name, value)
        assert name in batch


def test_names_that_are_constants_elsewhere_are_in_the_table():
    assert all(known(name) for name in (ORDINAL, *VERSION_FIELDS, "frames/front", "clip/wrist"))
    assert known("scores") is None
    assert known("frames") is None, "of a user's own"
