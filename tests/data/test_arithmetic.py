"""The arithmetic task: what is held out stays held out, and shares keep what they say."""

from collections import Counter

import pytest

from megarl.recipes.arithmetic import make_rows


@pytest.mark.parametrize("arguments", [{}, {"ops": ["+", "*"], "shares": {"*": 0.07}}], ids=["sums", "mixed"])
def test_splits_are_disjoint_and_answers_right(arguments):
    train, val = make_rows(**arguments), make_rows("val", **arguments)
    assert len(val) == 512
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    assert all(int(row["answer"]) == eval(row["prompt"][:-1]) for row in train + val)


def test_shares_and_sources():
    rows = make_rows(ops=["+", "*"], shares={"*": 0.07}) + make_rows("val", ops=["+", "*"], shares={"*": 0.07})
    assert Counter(row["data_source"] for row in rows) == {"sums": 8100, "products": 567}
    assert {row["data_source"] for row in make_rows()} == {"arithmetic"}


@pytest.mark.parametrize("shares", [{"*": 0.5}, {"+": 0.0}, {"+": 1.5}])
def test_strange_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        make_rows(shares=shares)
