from itertools import combinations, product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.evaluation import (
    Scored,
    best_at_k,
    from_reward,
    majority,
    pass_at_k,
    validation_metrics,
    worst_at_k,
)
from megarl.evaluation.metrics import metric_names, selected_at_k
from megarl.system.errors import ConfigError


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=7), st.data())
def test_best_and_worst_equal_the_mean_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    subsets = list(combinations(values, k))
    assert best_at_k(values, k) == pytest.approx(mean(map(max, subsets)), abs=1e-9)
    assert worst_at_k(values, k) == pytest.approx(mean(map(min, subsets)), abs=1e-9)


def test_pass_at_k_equals_enumeration():
    for n in range(1, 7):
        for outcome in product([0, 1], repeat=n):
            for k in range(1, n + 1):
                expected = mean(float(any(s)) for s in combinations(outcome, k))
                assert pass_at_k(n, sum(outcome), k) == pytest.approx(expected, abs=1e-15)
                assert best_at_k(outcome, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_is_finite():
    assert 0 < pass_at_k(2000, 1, 1000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


def group(*pairs):
    return [Scored("p", value, vote) for vote, value in pairs]


@pytest.mark.parametrize(
    ("samples", "value"),
    [
        (group(("a", 1), ("a", 1), ("b", 0)), 1),
        (group(("a", 1), ("b", 0), ("b", 0)), 0),
        (group(("a", 1), ("b", 0)), 0.5),
        (group(("a", 1), ("b", 0), ("c", 0)), 1 / 3),
        (group((None, 0), ("", 0), ("a", 1)), 1),
        (group((None, 0), (None, 1)), 0.5),
        (group(("a", 1), ("a", 0.5)), 0.75),
    ],
)
def test_majority(samples, value):
    assert majority(samples) == pytest.approx(value)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_names_of_metrics_are_known_beforehand(n):
    found = validation_metrics(Scored("a", 1.0, "1", "math") for _ in range(n)).result()
    assert set(found) == {f"{where}/{name}" for where in ("val", "val/math") for name in metric_names(n)}


def test_validation_metrics_by_source_and_overall():
    samples = [
        *(Scored("p1", v, t, "math") for v, t in [(1, "a"), (0, "b"), (1, "a")]),
        *(Scored("p2", v, t, "code") for v, t in [(0, "x"), (0, "x"), (1, "y")]),
    ]
    result = validation_metrics(samples).result()
    assert result["val/acc"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result["val/math/acc"] == pytest.approx(2 / 3)
    assert result["val/best@3"] == 1.0
    assert result["val/best@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert result["val/worst@3"] == 0.0
    assert result["val/maj@3"] == 0.5
    assert result["val/code/maj@3"] == 0.0
    assert result["val/pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert (result["val/prompts"], result["val/samples"]) == (2, 6)


def test_sets_of_data_sources_have_metrics_of_their_own():
    told = [("a_iid", "iid", 1.0), ("b_iid", "iid", 0.0), ("b_iid", "iid", 1.0), ("a", "", 0.0)]
    samples = [Scored(n, value, None, source, part) for n, (source, part, value) in enumerate(told)]
    found = validation_metrics(samples).result()
    assert found["val/acc"] == 0.5
    assert found["val/iid/acc"] == pytest.approx(2 / 3)
    assert (found["val/a_iid/acc"], found["val/b_iid/acc"], found["val/a/acc"]) == (1.0, 0.5, 0.0)
    assert (found["val/prompts"], found["val/iid/prompts"]) == (4, 3)


def test_one_sample_per_prompt_gives_accuracy_only():
    result = validation_metrics([Scored(i, float(i % 2), None) for i in range(4)]).result()
    assert result == {"val/acc": 0.5, "val/prompts": 4, "val/samples": 4}


def test_merging_ranks_is_exact():
    samples = [Scored(f"p{i // 4}", float(i % 3 == 0), str(i % 2), "s") for i in range(24)]
    whole = validation_metrics(samples).result()
    parts = validation_metrics(samples[:8]).merge(validation_metrics(samples[8:])).result()
    assert parts == pytest.approx(whole)


def test_from_reward_prefers_the_accuracy_part_and_the_extracted_answer():
    assert from_reward("u", {"overall": 0.4, "acc": 1.0, "extracted": "24"}, "is 24", "s") == Scored(
        "u", 1.0, "24", "s"
    )
    assert from_reward("u", {"overall": 0.4}, " is 24 ") == Scored("u", 0.4, "is 24")


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_prompts_with_different_numbers_of_samples_count_alike(groups, shuffle):
    samples = [Scored(uid, value, None) for uid, values in enumerate(groups) for value in values]
    shuffle.shuffle(samples)
    numbers = validation_metrics(samples).result()
    wanted: dict[str, list[float]] = {"val/acc": [mean(values) for values in groups]}
    for values in groups:
        for k in {2, 4, len(values)} & set(range(2, len(values) + 1)):
            subsets = list(combinations(values, k))
            wanted.setdefault(f"val/pass@{k}", []).append(mean(max(some) for some in subsets))
    assert {name for name in numbers if "pass" in name} == {name for name in wanted if "pass" in name}
    for name, shares in wanted.items():
        assert numbers[name] == pytest.approx(mean(shares)), name


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6), st.data())
def test_the_selected_of_k_samples_is_the_mean_over_all_subsets_and_ties(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    chosen = []
    for subset in combinations(samples, k):
        best = max(rank for rank, _ in subset)
        chosen.append(mean(value for rank, value in subset if rank == best))
    found = selected_at_k([rank for rank, _ in samples], [value for _, value in samples], k)
    assert found == pytest.approx(mean(chosen), abs=1e-12)


def test_a_part_of_the_reward_may_select_among_the_samples_of_a_prompt():
    told = [(1.0, 0.3), (0.0, 0.9), (0.0, 0.1), (1.0, 0.8)]
    results = [{"overall": right, "liked": liked} for right, liked in told]
    scored = [from_reward("p", result, "x", select_by="liked") for result in results]
    found = validation_metrics(scored).result()
    assert found["val/selected@4"] == 0.0
    assert found["val/selected@2"] == pytest.approx(3 / 6)  # of six pairs, three prefer a right answer
    assert {name.rpartition("/")[2] for name in found} == {*metric_names(4, ranked=True)}
    with pytest.raises(ConfigError, match=r"validation\.select_by(?s:.*)allowed: liked, overall"):
        from_reward("p", results[0], "x", select_by="like")


@pytest.mark.parametrize(("values", "graded"), [([0.0, 1.0], None), ([0.5, 1.0], 1), ([-1.0], 1)])
def test_prompts_with_scores_that_are_no_share_of_right_answers_are_counted(values, graded):
    samples = [Scored("p", value, None) for value in values]
    assert validation_metrics(samples).result().get("val/graded") == graded
