"""The table of fields: what stages may declare, and what a field may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.dag.guard import ContractError, GuardedBatch, settle
from megarl.dag.node import Node
from megarl.dag.stage import stage
from megarl.data.batch import Batch, Jagged
from megarl.data.fields import known, page
from megarl.data.groups import ORDINAL
from megarl.data.versions import VERSION_FIELDS

RESPONSES = Jagged.from_list([[1, 2], [3]], dtype=torch.int64)


def sets(context, batch):
    """A stage that sets what a test wants."""


def after_stage(values: dict) -> Batch:
    """The samples after a stage that has set `values`."""
    node = Node("own", stage(reads=[], writes=list(values))(sets)).resolved()
    before = Batch({}, {}, size=2)
    return settle(node, before, GuardedBatch.of(before, node).with_values(values), {})


def test_docs_have_the_page():
    written = Path(__file__).parents[2].joinpath("docs/fields.md").read_text()
    assert f"{page()}\n" == written, "python -m megarl.data.fields > docs/fields.md"


def test_a_misspelt_field_is_found_when_a_stage_is_imported():
    def own(context, batch): ...

    assert stage(reads=["scores"], writes=[])(own) is own, "a user's stage may have fields of its own"
    own.__module__ = "megarl.runtime.stages.own"
    with pytest.raises(ValueError, match=r"megarl\.runtime\.stages\.own.*fields that are missing in.*\['scores'\]"):
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
def test_a_value_of_another_form_is_refused_when_the_stage_returns(name, value, found):
    with pytest.raises(ContractError, match=rf"'own'.*sets '{name}'(.|\n)*found: +{found}(.|\n)*allowed: "):
        after_stage({name: value})


def test_values_of_the_right_form_and_fields_of_a_users_own_are_set():
    values = {
        "score": torch.zeros(2),
        "response_ids": RESPONSES,
        "uid": ["a", "b"],
        "end_frames/wrist": torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
        "mine": torch.zeros(2, dtype=torch.float16),
    }
    assert set(after_stage(values).names()) == set(values)


def test_names_that_are_constants_elsewhere_are_in_the_table():
    assert all(known(name) for name in (ORDINAL, *VERSION_FIELDS, "frames/front", "clip/wrist"))
    assert known("scores") is None
    assert known("frames") is None, "of a user's own"
