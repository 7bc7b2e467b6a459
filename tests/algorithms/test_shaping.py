"""Overlong penalty and group filter."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.group_filter import (
    accuracy_filter,
    group_filter,
    informative_groups,
    score_histogram,
    truncated_filter,
    uncut_groups,
)
from megarl.algorithms.overlong import overlong_penalty
from megarl.config.run import RunConfig
from megarl.dag.pipeline import Pipeline
from megarl.data.batch import Batch, Jagged
from megarl.runtime.samples import record_episodes
from megarl.runtime.stages.sampling import dynamic_sampling, signal
from megarl.runtime.stages.shaping import filter_samples, overlong, own_filter
from megarl.system.errors import UserError
from megarl.system.metrics import Metrics


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 40), st.floats(0.1, 3))
def test_penalty_equals_its_formula(lengths, buffer, factor):
    got = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), max_length=40, buffer=buffer, factor=factor)
    expected = [min(-((n - (40 - buffer)) / buffer) * factor, 0.0) for n in lengths]
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_penalty_zone_must_fit():
    with pytest.raises(ValueError, match="buffer must be"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=11)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 1.0])), max_size=12))
def test_filter_keeps_exactly_the_groups_that_vary(rows):
    uid, metric = [u for u, _ in rows], [x for _, x in rows]
    expected = [len({x for u, x in rows if u == mine}) > 1 for mine in uid]
    assert group_filter(torch.tensor(metric), uid).tolist() == expected


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=12),
    st.sampled_from([None, 0.0, 0.3, 0.5]),
    st.sampled_from([None, 0.5, 0.7, 1.0]),
)
def test_accuracy_filter_keeps_exactly_the_groups_inside_its_bounds(rows, low, high):
    uid, metric = [u for u, _ in rows], [x for _, x in rows]
    expected = []
    for mine in uid:
        group = [x for u, x in rows if u == mine]
        mean = Fraction(sum(group), len(group))
        above = low is None or mean >= Fraction(str(low))
        expected.append(above and (high is None or mean <= Fraction(str(high))))
    assert accuracy_filter(torch.tensor(metric).float(), uid, low=low, high=high).tolist() == expected


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.3, 1.0]), st.booleans()), min_size=1),
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, 0.7]),
)
def test_samples_that_do_not_count_change_no_group(rows, low, high):
    uid, metric, live = [u for u, _, _ in rows], torch.tensor([x for _, x, _ in rows]), [on for _, _, on in rows]
    places = [place for place, on in enumerate(live) if on]
    mine, names, on = metric[places], [uid[place] for place in places], torch.tensor(live)
    assert group_filter(metric, uid, live=on)[places].tolist() == group_filter(mine, names).tolist()
    found = accuracy_filter(metric, uid, low=low, high=high, live=on)
    assert found[places].tolist() == accuracy_filter(mine, names, low=low, high=high).tolist()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans()), min_size=1, max_size=16),
    st.sampled_from([None, 0.0, 0.1, 0.5]),
    st.sampled_from([None, 0.5, 0.9, 1.0]),
)
def test_groups_are_kept_inside_both_bounds_and_without_bounds_where_they_vary(rows, low, high):
    uid, won = [u for u, _, _ in rows], torch.tensor([x for _, x, _ in rows]).float()
    expected = []
    for mine in uid:
        group = [x for u, x, on in rows if u == mine and on]
        if low is None and high is None:
            expected.append(len(set(group)) > 1)
            continue
        mean = Fraction(sum(group), len(group)) if group else None
        above = mean is not None and (low is None or mean >= Fraction(str(low)))
        expected.append(above and (high is None or mean <= Fraction(str(high))))
    live = torch.tensor([on for _, _, on in rows])
    assert informative_groups(won, uid, low=low, high=high, live=live).tolist() == expected
    if live.all():
        assert informative_groups(won, uid, low=low, high=high).tolist() == expected


def test_one_success_of_ten_and_nine_of_ten_are_inside_the_bounds_of_the_papers():
    won = torch.tensor([1.0] + [0.0] * 9 + [1.0] * 9 + [0.0] + [0.0] * 10 + [1.0] * 10)
    uid = [name for name in "abcd" for _ in range(10)]
    kept = informative_groups(won, uid, low=0.1, high=0.9)
    assert kept.tolist() == [True] * 20 + [False] * 20


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(1, 4), st.booleans()), max_size=16),
)
def test_a_group_is_dropped_whole_where_an_episode_used_all_its_steps(rows):
    uid, steps, limits, live = ([row[k] for row in rows] for k in range(4))
    cut = {u for u, taken, limit, on in rows if on and taken >= limit}
    given = torch.tensor(steps).long(), torch.tensor(limits).long(), uid
    assert uncut_groups(*given, live=torch.tensor(live).bool()).tolist() == [u not in cut for u in uid]
    cut = {u for u, taken, limit, _ in rows if taken >= limit}
    assert uncut_groups(*given).tolist() == [u not in cut for u in uid]


def case(**sections):
    """As much of a controller as stages of this file use."""
    env = {"name": "game.py:Game", "on_error": "mark"}
    rollout = {"sampling": {"n": 2, "max_new_tokens": 4}, "limits": {"tokens": 10}}
    config = RunConfig.model_validate({"name": "r", "env": env, "rollout": rollout, **sections})
    return SimpleNamespace(config=config, metrics=Metrics())


def jagged(*rows):
    return Jagged.from_list([list(row) for row in rows], dtype=torch.bool)


def test_failed_episodes_are_no_signal_and_lower_no_mean():
    mask = jagged([1], [0, 0], [1], [0, 1])
    batch = Batch({"response_mask": mask, "score": torch.tensor([1.0, 0.0, 1.0, 0.0])})
    batch.set("uid", list("aabb"))
    batch.set("finish_reason", ["stop"] * 4)
    assert signal(case(), batch, []) == [False, True]
    kept = filter_samples(case(algorithm={"filter": {"low": 0.8}}), batch)["response_mask"]
    assert kept.values.tolist() == [True, False, False, False, False, False]


EPISODES = {
    "score": torch.tensor([0.2, 0.6, 1.0, 0.3, 1.0, 1.0, 0.5, 0.5]),
    "success": torch.tensor([False, False, True, False, True, True, False, True]),
    "finish_step": torch.tensor([9, 9, 4, 8, 2, 2, 5, 3]),
    "max_steps": torch.tensor([9, 9, 9, 9, 9, 9, 5, 5]),
}


@pytest.mark.parametrize(
    ("settings", "kept", "needed", "message"),
    [
        ({}, [1, 1, 0, 0], ["score"], "scores that differ"),
        ({"metric": "success"}, [0, 1, 0, 1], ["success"], "successes and failures"),
        (
            {"metric": "success", "low": 0.1, "high": 0.9},
            [0, 1, 0, 1],
            ["success"],
            "a mean success of at least 0.1 and at most 0.9",
        ),
        ({"low": 0.5}, [0, 1, 1, 1], ["score"], "a mean score of at least 0.5"),
        (
            {"high": 0.9, "drop_cut": True},
            [0, 1, 0, 0],
            ["score", "finish_step", "max_steps"],
            "a mean score of at most 0.9 and no episode that was cut",
        ),
    ],
)
def test_dynamic_sampling_reads_what_its_settings_judge_groups_by(settings, kept, needed, message):
    c = case(algorithm={"dynamic_sampling": {"enabled": True, **settings}})
    fields = {name: EPISODES[name] for name in needed}
    batch, seen = Batch({"response_mask": jagged(*[[1]] * 8), **fields}), []
    batch.set("uid", list("aabbccdd"))
    assert signal(c, batch, seen) == [bool(on) for on in kept]
    assert seen == EPISODES[needed[0]].float().reshape(4, 2).tolist()
    assert dynamic_sampling.__stage__.needs(c.config) == [*needed, "response_mask"]
    assert c.config.algorithm.dynamic_sampling.kept_groups == message


@pytest.mark.parametrize("metric", ["score", "success"])
@pytest.mark.parametrize("low", [None, 0.0])
def test_a_group_whose_episodes_all_failed_to_run_is_drawn_again(metric, low):
    batch = Batch({"response_mask": jagged([0], [0]), metric: torch.tensor([False, True])})
    batch.set("uid", ["a", "a"])
    assert signal(case(algorithm={"dynamic_sampling": {"metric": metric, "low": low}}), batch, []) == [False]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("score", r"float32 tensor of shape \[2\]"),
        ("offsets.diff() > 1", None),
        ("mask", r"bool tensor of shape \[3\]"),
        ("(offsets.diff() > 1).long()", r"int64 tensor of shape \[2\]"),
        ("[True, False]", "list of 2: bool True, bool False"),
    ],
)
def test_what_a_users_filter_returns_is_whether_each_sample_is_kept(tmp_path, returned, found):
    (tmp_path / "returns.py").write_text(f"def kept(score, uid, *, mask, offsets):\n    return {returned}\n")
    name = f"{tmp_path / 'returns.py'}:kept"
    batch = Batch({"response_mask": jagged([1], [1, 1]), "score": torch.tensor([1.0, 0.0])})
    batch.set("uid", ["a", "a"])
    c = case(algorithm={"filter": {"name": name}})
    if found is None:
        assert filter_samples(c, batch)["response_mask"].values.tolist() == [False, True, True]
        return
    with pytest.raises(
        UserError, match=rf"returns.py:1: the sample filter kept(?s:.*)found: +'{found}'(?s:.*)a bool tensor"
    ):
        filter_samples(c, batch)


def test_a_node_may_have_a_filter_of_its_own(tmp_path):
    """Two of them in one pipeline, which has no section `algorithm.filter`; each reads what its filter does."""
    (tmp_path / "short.py").write_text("def short(score, uid, *, offsets):\n    return offsets.diff() < 3\n")
    length, score = {"name": f"{tmp_path / 'short.py'}:short"}, {"name": "bounds", "high": 0.9}
    p = Pipeline("filtered", "", RunConfig(name="filtered"))
    p.add(filter_samples, "by_length", **own_filter(length)).add(filter_samples, "by_score", **own_filter(score))
    graph = p.build(["score", "uid", "response_mask", "finish_reason"])
    assert "finish_reason" in graph["by_score"].reads
    assert "finish_reason" not in graph["by_length"].reads
    batch = Batch({"response_mask": jagged([1], [1, 1], [1, 1, 1]), "score": torch.tensor([1.0, 0.0, 0.0])})
    batch.set("uid", ["a", "b", "c"])
    batch.set("finish_reason", ["stop"] * 3)
    c = case()
    for node in ("by_length", "by_score"):
        batch = filter_samples(c, batch, **graph[node].config)
    assert batch["response_mask"].values.tolist() == [False, True, True, False, False, False]
    assert c.metrics.result() == {"filter/short/kept": 2 / 3, "filter/bounds/kept": 2 / 3}


def test_episodes_whose_last_turn_was_cut_count_as_cut():
    c, batch = case(), Batch({"turn_ends": Jagged.from_list([[1]] * 4, dtype=torch.int64)})
    batch.set("response_ids", Jagged.from_list([[1], [1, 2], [1, 2, 3], [1]], dtype=torch.int64))
    batch.set("ended_by", ["done", "done", "turns", "error"])
    batch.set("finish_reason", ["stop", "length", "stop", "stop"])
    batch.set("env_error", ["", "", "", "no state"])
    batch.set("env_info", [{}] * 4)
    record_episodes(c, batch)
    assert c.metrics.result()["env/cut"] == 2 / 3
    assert (c.metrics.result()["env/tokens/mean"], c.metrics.result()["env/tokens/max"]) == (2, 3)


def test_episodes_of_several_policies_count_the_turns_of_each_and_their_numbers_once():
    c, names = case(), ["a#0@black", "a#0@white:0", "a#0@white:1", "b#0@black", "b#0@white"]
    batch = Batch({"turn_ends": Jagged.from_list([[1], [1, 2], [1, 2, 3], [1], [1]], dtype=torch.int64)})
    batch.set("lane", torch.zeros(5, dtype=torch.int64))
    batch.set("response_ids", batch["turn_ends"])
    batch.set("episode", names)
    batch.set("policy", [name[4:9] for name in names])
    batch.set("ended_by", ["done"] * 5)
    batch.set("finish_reason", ["stop", "stop", "length", "stop", "stop"])
    batch.set("env_error", ["", "", "", "no state", "no state"])
    batch.set("env_info", [{"calls": 4.0}] * 3 + [{}] * 2)
    record_episodes(c, batch)
    numbers = c.metrics.result()
    assert [numbers[f"{prefix}env/turns/mean"] for prefix in ("", "black/", "white/")] == [2, 1, 2.5]
    assert [numbers[f"{prefix}env/cut"] for prefix in ("", "black/", "white/")] == [1 / 3, 0, 1 / 2]
    assert [numbers[f"env/{name}"] for name in ("errors", "calls", "samples")] == [1, 4, 2.5]


def test_the_penalty_begins_near_the_limit_of_all_turns():
    rewards = Jagged.from_list([[0.0] * 4, [0.0] * 9], dtype=torch.float32)
    samples = overlong(case(algorithm={"overlong": {"buffer_tokens": 2}}), Batch({"token_rewards": rewards}))
    assert samples["token_rewards"].values.tolist() == [0.0] * 12 + [-0.5]


def test_bounds_are_inclusive_in_spite_of_rounding():
    metric, uid = torch.tensor([0.1] * 3 + [0.0, 1.0]), list("aaabb")
    assert accuracy_filter(metric.double(), uid, low=0.1, high=0.5).all()
    assert accuracy_filter(metric, uid, low=0.2).tolist() == [False] * 3 + [True] * 2


def test_truncated_filter_drops_what_the_limit_cut():
    assert truncated_filter(["stop", "length"]).tolist() == [True, False]


@pytest.mark.parametrize("low", [0, -1, 0.25])
def test_histogram_separates_half_right_groups_from_wrong_ones_on_any_scale(low):
    groups = [[low, low], [low, 1.0], [1.0, low], [1.0, 1.0], [0.5, 0.5]]
    assert score_histogram(groups) == {f"all {low}": 1, "between": 3, "all 1": 1}


def test_histogram_of_a_single_score():
    assert score_histogram([[0.5, 0.5]] * 3) == {"all 0.5": 3, "between": 0}
