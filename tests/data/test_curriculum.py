"""Prompts drawn by past success: averages and weights by hand, the same draws on any ranks and after a resume."""

from __future__ import annotations

import json
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megarl.config.data import CurriculumConfig
from megarl.data.curriculum import CurriculumLoader
from megarl.data.loader import PromptLoader
from megarl.system.errors import DataError
from tests.data.test_loader import Numbers, dealt

POOLS = {"hard": {"up_to": 0.2, "weight": 0.5}, "medium": {"up_to": 0.8, "weight": 2.0}, "easy": {"weight": 0.1}}


def loader(size: int, batch_size: int, rank: int = 0, dp: int = 1, seed: int = 0, **settings) -> CurriculumLoader:
    config = CurriculumConfig(**{"pools": POOLS, **settings})
    return CurriculumLoader(Numbers(size), batch_size, rank, dp, seed, settings=config)


def draw(*loaders: CurriculumLoader) -> list[list[int]]:
    """The next global batch: (earlier draws, row) of each prompt."""
    return dealt([next(one)["at"] for one in loaders])


def scores_of(batch: list[list[int]]) -> dict[str, float]:
    """Mean scores of the groups of a batch, which depend on row and draw."""
    return {f"train-{k}-{row}": (row * 7 + k * 3) % 11 / 10 for k, row in batch}


def test_averages_and_chances_are_those_computed_by_hand():
    curriculum = loader(5, 1, decay=0.25, seed=3)
    # row: scores of its groups; rows 0 to 3 end at 0, 0.5, 0.8 (still medium) and 0.95
    curriculum.record({"train-0-0": 0.0, "train-0-1": 0.5, "train-0-2": 0.8, "train-0-3": 0.8})
    recorded = curriculum.record({"train-1-3": 1.0})
    assert [tuple(group) for group in recorded] == [("medium", 1.0)], "the pool is that of the draw"
    exact = Fraction(1, 4) * Fraction(8, 10) + Fraction(3, 4)
    assert curriculum.state_dict()["curriculum"]["rows"] == [], "only drawn rows are saved"
    assert curriculum._averages[3] == pytest.approx(float(exact), abs=1e-15)
    assert curriculum.shares() == {"hard": 0.2, "medium": 0.4, "easy": 0.2, "unseen": 0.2}
    drawn = np.bincount([draw(curriculum)[0][1] for _ in range(4000)], minlength=5) / 4000
    chances = np.array([0.5, 2, 2, 0.1, 1]) / 5.6
    # five standard deviations of a share of 4000 draws
    assert np.all(np.abs(drawn - chances) < 5 * np.sqrt(chances * (1 - chances) / 4000))


def test_a_batch_has_different_rows_of_weight_above_0_and_repeats_them_only_where_there_are_too_few():
    curriculum = loader(6, 4, pools={"solved": {"up_to": None, "weight": 0}})
    curriculum.record({"train-0-0": 1.0, "train-0-1": 1.0, "train-0-2": 1.0})
    batch = draw(curriculum)
    assert len({row for _, row in batch[:3]}) == 3
    assert {row for _, row in batch} == {3, 4, 5}
    assert sorted(map(tuple, batch))[-1][0] == 1, "the row that comes twice has a uid of its own"
    curriculum.record({f"train-0-{row}": 1.0 for row in (3, 4, 5)})
    with pytest.raises(DataError, match=r"data.curriculum.pools: no prompt is left(.|\n)*solved 100%"):
        draw(curriculum)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 6), st.integers(1, 3), st.integers(1, 3))
def test_a_resumed_run_on_other_ranks_draws_the_same_prompts(size, batch_size, steps, dp, other):
    def walk(ranks: int, count: int, state: dict | None = None) -> tuple[list, dict]:
        loaders = [loader(size, batch_size, rank, ranks, seed=5 if state is None else 9) for rank in range(ranks)]
        batches = []
        for one in loaders if state is not None else ():
            one.load_state_dict(state)
        for _ in range(count):
            batches.append(draw(*loaders))
            for one in loaders:
                one.record(scores_of(batches[-1]))
        states = [json.loads(json.dumps(one.state_dict())) for one in loaders]
        assert all(state == states[0] for state in states)
        return batches, states[0]

    whole, end = walk(1, steps + 3)
    first, state = walk(dp, steps)
    rest, resumed_end = walk(other, 3, state)
    assert first + rest == whole
    assert resumed_end == end


def test_a_curriculum_may_begin_and_end_at_a_resume():
    plain = PromptLoader(Numbers(9), 4, seed=5)
    next(plain)
    begun = loader(9, 4)
    begun.load_state_dict(plain.state_dict())
    assert begun.shares()["unseen"] == 1
    draw(begun)
    plain.load_state_dict(begun.state_dict())
    assert (plain.number, plain.seed) == (8, 5)
