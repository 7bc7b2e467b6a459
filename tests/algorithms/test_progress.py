"""SRPO's scores against a version in plain Python, and what must hold whatever the embeddings are."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.algorithms.progress import (
    ProgressSettings,
    SuccessBank,
    progress_scores,
    shuffled_embeddings,
    success_centres,
)
from tests.algorithms import progress_oracle as oracle

FORMS = list(itertools.product(["fixed", "scaled", "k_distance"], ["min_max", "z_score"]))


def batch(seed, count, dims, tasks, *, spread=0.3, wins=0.5, invalid=0.1):
    """Episodes whose embeddings lie around three places of their task, some of them invalid."""
    rng = torch.Generator().manual_seed(seed)
    task = torch.randint(tasks, (count,), generator=rng)
    place = torch.randint(3, (count,), generator=rng)
    around = torch.randn(tasks, 3, dims, generator=rng)
    embeddings = around[task, place] + spread * torch.randn(count, dims, generator=rng)
    embeddings[:, 0] = 2.5  # a number that never changes
    success = torch.rand(count, generator=rng) < wins
    for row in (torch.rand(count, generator=rng) < invalid).nonzero().flatten().tolist():
        if row % 2:
            embeddings[row, -1] = [math.nan, math.inf, -math.inf][row % 3]
        else:
            embeddings[row] = 0.0
    return embeddings, success, [f"task {int(t)}" for t in task]


@given(
    st.sampled_from(FORMS),
    st.integers(0, 2**31),
    st.integers(1, 24),
    st.integers(2, 40),
    st.integers(1, 3),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
def test_scores_equal_those_of_the_plain_version(form, seed, count, dims, tasks, spread, wins):
    embeddings, success, task = batch(seed, count, dims, tasks, spread=spread, wins=wins)
    radius, mapping = form
    report = progress_scores(embeddings, success, task, ProgressSettings(radius=radius, mapping=mapping))
    expected, clusters = oracle.scores(embeddings.tolist(), success.tolist(), task, radius=radius, mapping=mapping)
    assert report.clusters == clusters
    assert report.scores.tolist() == pytest.approx(expected, abs=1e-9)


@given(st.sampled_from(FORMS), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_scores_follow_their_episodes_and_no_task_sees_another(form, seed, order):
    embeddings, success, task = batch(seed, 20, 12, 3)
    settings = ProgressSettings(radius=form[0], mapping=form[1])
    whole = progress_scores(embeddings, success, task, settings).scores
    rows = list(range(20))
    order.shuffle(rows)
    moved = progress_scores(embeddings[rows], success[rows], [task[row] for row in rows], settings).scores
    assert moved.tolist() == pytest.approx(whole[rows].tolist(), abs=1e-9)
    mine = [row for row in rows if task[row] == task[0]]
    apart = progress_scores(embeddings[mine], success[mine], [task[0]] * len(mine), settings).scores
    assert apart.tolist() == pytest.approx(whole[mine].tolist(), abs=1e-9)


@given(st.sampled_from(FORMS), st.integers(0, 2**31), st.sampled_from([None, 0.25, 1.0]))
def test_a_nearer_failure_scores_more_and_never_as_much_as_a_success(form, seed, weight):
    embeddings, success, task = batch(seed, 24, 8, 2)
    settings = ProgressSettings(radius=form[0], mapping=form[1], weight=weight)
    report = progress_scores(embeddings, success, task, settings)
    bound = {"min_max": 0.6, "z_score": 0.8}[form[1]] if weight is None else weight
    assert (report.scores[success] == 1).all()
    assert ((report.scores[~success] >= 0) & (report.scores[~success] < bound)).all()
    shaped = [row for row in range(24) if report.shaped[row]]
    for a, b in itertools.permutations(shaped, 2):
        if task[a] == task[b] and report.distances[a] < report.distances[b]:
            assert report.scores[a] >= report.scores[b]
    assert not (report.shaped & report.invalid).any()


def two_ways(dims, spread, count=12):
    """Successes that reach the goal in two ways, which vary by `spread`."""
    rng = torch.Generator().manual_seed(0)
    ways = torch.randn(2, dims, generator=rng)
    return (ways.repeat_interleave(count // 2, 0) + spread * torch.randn(count, dims, generator=rng)).double().numpy()


@pytest.mark.parametrize(
    ("radius", "spread", "found"),
    [("fixed", 0.03, 0), ("scaled", 0.03, 2), ("scaled", 0.3, 0), ("k_distance", 0.03, 2), ("k_distance", 0.3, 2)],
)
def test_only_a_radius_that_grows_with_the_embedding_finds_both_ways(radius, spread, found):
    centres, clusters = success_centres(two_ways(1408, spread), ProgressSettings(radius=radius))
    assert (clusters, len(centres)) == (found, max(found, 1))


@pytest.mark.parametrize("count", [2, 3, 4, 8, 40])
def test_successes_of_one_way_are_one_reference(count):
    rows = torch.randn(count, 1408, generator=torch.Generator().manual_seed(1)).double().numpy()
    centres, clusters = success_centres(rows, ProgressSettings())
    assert clusters == 1
    assert centres[0].tolist() == pytest.approx(rows.mean(0).tolist())


def test_a_success_far_from_all_others_moves_no_reference():
    rows = two_ways(64, 0.1)
    rows[-1] += 100
    assert len(success_centres(rows, ProgressSettings())[0]) == 2
    assert abs(success_centres(rows, ProgressSettings())[0]).max() < 10


ROWS = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])


def scored(success, rows=ROWS, **settings):
    return progress_scores(rows, torch.tensor(success), ["t"] * len(rows), ProgressSettings(**settings))


def test_a_task_without_success_scores_nothing():
    report = scored([False] * 3)
    assert report.scores.tolist() == [0.0] * 3
    assert not report.shaped.any()


def test_a_task_without_failure_scores_ones():
    assert scored([True] * 3).scores.tolist() == [1.0] * 3


@pytest.mark.parametrize(("mapping", "middle"), [("min_max", 0.3), ("z_score", 0.4)])
def test_a_single_failure_and_equal_distances_score_in_the_middle(mapping, middle):
    assert scored([True, True, False], mapping=mapping).scores[2] == pytest.approx(middle)
    same = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    assert scored([True, False, False], same, mapping=mapping).scores[1:].tolist() == pytest.approx([middle] * 2)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_invalid_embeddings_are_no_reference_and_no_signal(bad):
    rows = torch.cat([ROWS, torch.full((2, 2), bad)])
    report = scored([True, False, False, True, False], rows)
    without = scored([True, False, False])
    assert report.scores.tolist() == [*without.scores.tolist(), 1.0, 0.0]
    assert report.invalid.tolist() == [False] * 3 + [True] * 2
    assert report.shaped.tolist() == [*without.shaped.tolist(), False, False]


def test_a_success_without_embedding_shapes_nothing():
    rows = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert scored([True, False], rows).scores.tolist() == [1.0, 0.0]


def test_a_number_beyond_float32_is_infinite():
    rows = torch.tensor([[1e300, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert scored([False, True], rows).invalid.tolist() == [True, False]


def test_equal_successes_are_one_cluster_in_every_form():
    rows = torch.tensor([[1.0, 2.0]] * 3 + [[5.0, 5.0]])
    for radius in ("fixed", "scaled", "k_distance"):
        report = scored([True, True, True, False], rows, radius=radius)
        assert report.clusters == {"t": 1}
        assert report.distances[3] == pytest.approx(5.0)


def test_successes_of_the_bank_are_references():
    bank = SuccessBank(4)
    embeddings, success, task = batch(3, 16, 6, 2, invalid=0.0)
    bank.add(embeddings, torch.ones_like(success), task)
    later, failed, names = batch(4, 8, 6, 2, wins=0.2, invalid=0.0)
    held = {name: rows.tolist() for name in set(names) if (rows := bank.references(name, 6)) is not None}
    for radius, mapping in FORMS:
        settings = ProgressSettings(radius=radius, mapping=mapping)
        got = progress_scores(later, failed, names, settings, bank=bank).scores.tolist()
        expected, _ = oracle.scores(later.tolist(), failed.tolist(), names, radius=radius, mapping=mapping, bank=held)
        assert got == pytest.approx(expected, abs=1e-9)
    none = torch.zeros(8, dtype=torch.bool)
    assert not progress_scores(later, none, names, ProgressSettings()).shaped.any()
    assert progress_scores(later, none, names, ProgressSettings(), bank=bank).shaped.all()


def test_shuffled_embeddings_stay_in_their_task_and_follow_from_the_seed():
    embeddings, _, task = batch(5, 30, 4, 3, invalid=0.0)
    once = shuffled_embeddings(embeddings, task, 7, 1)
    assert torch.equal(once, shuffled_embeddings(embeddings, task, 7, 1))
    assert not torch.equal(once, shuffled_embeddings(embeddings, task, 7, 2))
    assert not torch.equal(once, embeddings)
    for name in set(task):
        rows = [row for row, of in enumerate(task) if of == name]
        assert sorted(once[rows].tolist()) == sorted(embeddings[rows].tolist())
    embeddings[3] = 0.0  # of an episode that could not be played
    again = shuffled_embeddings(embeddings, task, 7, 1)
    assert (again == 0).all(1).nonzero().flatten().tolist() == [3]


def test_the_report_tells_whether_scores_follow_true_progress():
    progress = torch.linspace(0, 1, 20)
    embeddings = torch.stack([progress, torch.ones(20)], 1)
    task, success = ["a"] * 10 + ["b"] * 10, torch.arange(20) % 10 == 9
    report = progress_scores(embeddings, success, task, ProgressSettings())
    assert report.rank_correlations(progress) == {"a": pytest.approx(1), "b": pytest.approx(1)}
    assert report.rank_correlations(-progress)["a"] == pytest.approx(-1)
    assert report.rank_correlations(torch.where(success, progress, math.nan)) == {}
    assert report.rank_correlations(torch.zeros(20)) == {}
    uid = [f"{name}{row % 2}" for row, name in enumerate(task)]
    halves = torch.where(torch.arange(20) % 2 == 0, progress, -progress)  # of the second group the other way round
    expected = {name: pytest.approx(1 if name.endswith("0") else -1) for name in ("a0", "a1", "b0", "b1")}
    assert report.rank_correlations(halves, uid) == expected
    counts, edges = report.histogram(5)
    assert (sum(counts), len(edges)) == (18, 6)
    assert edges[-1] == pytest.approx(float(report.distances[report.shaped].max()))


def spearman(a, b):
    """By its definition: Pearson's correlation of ranks, equal numbers sharing the mean of theirs."""
    ranks = [[sum(o < v for o in n) + (sum(o == v for o in n) - 1) / 2 for v in n] for n in (a, b)]
    (x, y), middle = ranks, (len(a) - 1) / 2
    spread = [math.sqrt(sum((v - middle) ** 2 for v in n)) for n in ranks]
    return sum((v - middle) * (w - middle) for v, w in zip(x, y, strict=True)) / (spread[0] * spread[1])


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlations_are_those_of_the_definition_for_tasks_and_for_start_states(seed):
    embeddings, success, task = batch(seed, 48, 4, 2)
    report = progress_scores(embeddings, success, task, ProgressSettings())
    draw = torch.Generator().manual_seed(seed)
    progress = torch.randint(0, 4, (48,), generator=draw) / 4  # some are equal
    progress[5] = math.nan
    groups = [f"{name}{row % 4}" for row, name in enumerate(task)]
    for names in (task, groups):
        found = report.rank_correlations(progress, names)
        expected = {}
        for name in set(names):
            rows = [row for row in range(48) if names[row] == name and report.shaped[row] and row != 5]
            scores, truth = report.scores[rows].tolist(), progress[rows].tolist()
            if len(set(scores)) > 1 and len(set(truth)) > 1:
                expected[name] = pytest.approx(spearman(scores, truth), abs=1e-12)
        assert len(found) > 1
        assert found == expected


def test_nothing_shaped_is_an_empty_histogram():
    assert scored([False] * 3).histogram(2) == ([0, 0], [0.0, 0.5, 1.0])


def test_an_empty_batch_has_no_scores():
    empty = progress_scores(torch.zeros(0, 4), torch.zeros(0, dtype=torch.bool), [], ProgressSettings())
    assert (len(empty.scores), empty.rank_correlations(torch.zeros(0))) == (0, {})


@pytest.mark.parametrize(
    ("embeddings", "success", "names", "message"),
    [
        (torch.ones(2), torch.ones(2) > 0, ["a"] * 2, r"float \[B, E\]"),
        (torch.ones(2, 3).long(), torch.ones(2) > 0, ["a"] * 2, r"torch\.int64"),
        (torch.ones(2, 3), torch.ones(2), ["a"] * 2, r"bool \[2\]"),
        (torch.ones(2, 3), torch.ones(2) > 0, ["a"], "got 2 and 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(embeddings, success, names, message):
    with pytest.raises(ValueError, match=message):
        progress_scores(embeddings, success, names, ProgressSettings())


@pytest.mark.parametrize("wrong", [{"eps": 0}, {"weight": 1.5}, {"radius": "guess"}, {"bank": -1}])
def test_settings_refuse_what_has_no_meaning(wrong):
    with pytest.raises(ValidationError):
        ProgressSettings(**wrong)


def test_settings_are_read_without_torch():
    code = "import megarl.algorithms.progress, sys; print({'torch', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.strip() == "set()"
