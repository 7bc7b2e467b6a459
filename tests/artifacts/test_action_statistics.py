"""Statistics of demonstrations: from arrays, from episodes one by one, from and to the published file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megarl.artifacts.action_statistics import (
    NAMES,
    ActionStatistics,
    DatasetStatistics,
    StatisticsCollector,
    choose_statistics,
    read_statistics,
    write_statistics,
)
from megarl.system.errors import ConfigError, DataError


def values(count: int = 100, dim: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)) * np.arange(1, dim + 1)


def entry(dim: int = 7, **changes) -> dict:
    return {name: [float(i) for i in range(dim)] for name in NAMES} | changes


@pytest.mark.parametrize("dim", [7, 14])
def test_statistics_of_an_array(dim):
    table = values(dim=dim)
    found = ActionStatistics.of(table)
    for name, expected in {
        "mean": [sum(column) / len(column) for column in table.T],
        "std": [(sum((column - column.mean()) ** 2) / len(column)) ** 0.5 for column in table.T],
        "max": [sorted(column)[-1] for column in table.T],
        "min": [sorted(column)[0] for column in table.T],
        # 100 numbers: the 1% quantile lies at place 0.99 of 0 to 99, the 99% one at 98.01
        "q01": [sorted(column)[0] * 0.01 + sorted(column)[1] * 0.99 for column in table.T],
        "q99": [sorted(column)[98] * 0.99 + sorted(column)[99] * 0.01 for column in table.T],
    }.items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9, err_msg=name)
    assert found.mask.tolist() == [True] * dim
    assert found.dim == dim


def test_episodes_one_by_one_give_the_same():
    actions, states = values(90).astype(np.float32), values(90, 8, seed=1).astype(np.float32)
    collector = StatisticsCollector()
    for start, end in [(0, 13), (13, 14), (14, 90)]:
        collector.add(actions[start:end], states[start:end])

    found = collector.finish(mask=[True] * 6 + [False])

    assert (found.transitions, found.trajectories) == (90, 3)
    assert found.action.to_json() == ActionStatistics.of(actions, [True] * 6 + [False]).to_json()
    assert found.state.to_json() == ActionStatistics.of(states).to_json()


def test_ranges_become_one():
    table = values(1000)
    for bounds, low, high in (("q99", "q01", "q99"), ("minmax", "min", "max")):
        found = ActionStatistics.of(table, bounds=bounds)
        ends = np.stack([getattr(found, low), getattr(found, high)])
        np.testing.assert_allclose(found.normalise(ends), [[-1] * 7, [1] * 7], atol=1e-6)
        np.testing.assert_allclose(found.denormalise([[-1] * 7, [1] * 7]), ends, rtol=1e-5)
        inside = np.random.default_rng(0).uniform(*ends, (4, 8, 7))
        np.testing.assert_allclose(found.denormalise(found.normalise(inside)), inside, atol=1e-5)
    assert np.abs(ActionStatistics.of(table).normalise(table * 10)).max() == 1


def test_masked_out_numbers_pass_through_and_constant_ones_become_0():
    table = values(dim=3)
    table[:, 1:] = 5.0
    found = ActionStatistics.of(table, [True, True, False])
    assert found.normalise([[0.0, 5.0, 5.0]])[0, 1:].tolist() == [0.0, 5.0]
    assert found.denormalise([[0.0, 0.0, 5.0]])[0, 1:].tolist() == [5.0, 5.0]


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "dataset_statistics.json"
    written = {
        "libero_goal_no_noops": DatasetStatistics(
            ActionStatistics.of(values(), [True] * 6 + [False]), ActionStatistics.of(values(dim=8)), 100, 4
        ),
        "two_arms": DatasetStatistics(ActionStatistics.of(values(dim=14))),
    }
    write_statistics(path, written)
    content = json.loads(path.read_text())
    assert set(content["libero_goal_no_noops"]) == {"action", "proprio", "num_transitions", "num_trajectories"}
    assert set(content["two_arms"]["action"]) == {*NAMES, "mask"}

    read = read_statistics(path, bounds="minmax")

    assert list(read) == list(written)
    for name, there in read.items():
        assert there.action.to_json() == written[name].action.to_json()
        assert there.action.bounds == "minmax"
        assert (there.transitions, there.trajectories) == (written[name].transitions, written[name].trajectories)
    assert read["libero_goal_no_noops"].state.to_json() == written["libero_goal_no_noops"].state.to_json()
    assert read["two_arms"].state is None


def test_a_published_file_may_lack_a_mask_and_have_more(tmp_path):
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps({"bridge": {"action": entry(), "proprio": entry(8), "more": 1}}))
    assert read_statistics(path)["bridge"].action.mask.all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"dataset_statistics\.json: cannot read the action statistics"),
        ("[]", r"dataset_statistics\.json: the file must map at least one data set to its statistics"),
        ({"goal": {}}, r"json: goal: the statistics of this data set have no 'action'"),
        ({"goal": {"action": {"mean": [0]}}}, r"json: goal\.action: the statistic 'std' is missing"),
        (
            {"goal": {"action": entry(q99=[1.0])}},
            r"(?s)goal\.action: the lists of the statistics differ in length.*'q99': \[1\]",
        ),
        ({"goal": {"action": entry(mask=[1] * 7)}}, r"goal\.action: `mask` must be a list of true and false"),
        ({"goal": {"action": entry(min=["a"] * 7)}}, r"goal\.action: the statistics must be lists of numbers"),
        (
            {"goal": {"action": entry(), "proprio": entry(2, std=[0, float("nan")])}},
            r"goal\.proprio\.std\[1\]: a value is not finite",
        ),
    ],
)
def test_a_broken_file_is_located(tmp_path, content, message):
    path = tmp_path / "dataset_statistics.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_statistics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing/dataset_statistics\.json"):
        read_statistics(tmp_path / "nothing" / "dataset_statistics.json")


def test_one_data_set_is_chosen_by_its_name():
    one, two = (DatasetStatistics(ActionStatistics.of(values(seed=seed))) for seed in (0, 1))
    assert choose_statistics({"a": one}, None, "file") is one
    assert choose_statistics({"a": one, "b": two}, "b", "file") is two


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("libero_goal", r"(?s)file: .*.*'libero_goal'.*bridge, libero_goal_no_noops.*no_noops'"),
        ("nothing", r"(?s)'nothing'.*bridge, libero_goal_no_noops.*to one of them"),
        (None, r"the statistics have several data sets, but none is chosen"),
    ],
)
def test_a_missing_data_set_lists_those_there_are(key, message):
    there = {name: DatasetStatistics(ActionStatistics.of(values())) for name in ("bridge", "libero_goal_no_noops")}
    with pytest.raises(ConfigError, match=message):
        choose_statistics(there, key, "file")


@pytest.mark.parametrize(
    ("actions", "states", "message"),
    [
        (np.zeros((3, 6)), np.zeros((3, 8)), r"(?s)episode 1: actions have a different shape.*\[3, 6\].*\[T, 7\]"),
        (np.zeros((3, 7)), np.zeros((4, 8)), r"(?s)episode 1: states have a different shape.*\[4, 8\].*\[3, 8\]"),
        (np.zeros((3, 7)), None, "episode 1: some episodes have states"),
        (np.zeros((0, 7)), np.zeros((0, 8)), "episode 1: actions have a different shape"),
        (np.full((3, 7), np.nan), np.zeros((3, 8)), r"episode 1: actions\[0, 0\]: a value is not finite"),
    ],
)
def test_a_wrong_episode_is_named_and_not_counted(actions, states, message):
    collector = StatisticsCollector()
    collector.add(np.ones((2, 7)), np.ones((2, 8)))
    with pytest.raises(DataError, match=message):
        collector.add(actions, states)
    assert collector.finish().transitions == 2


def test_no_episodes_have_no_statistics():
    with pytest.raises(DataError, match="cannot compute statistics without episodes"):
        StatisticsCollector().finish()
    with pytest.raises(DataError, match="the lists of the statistics differ in length"):
        ActionStatistics.of(values(), [True])
