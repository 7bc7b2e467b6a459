"""Scores of a run's batches one after another."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.progress import ProgressScorer, ProgressSettings, progress_scores, shuffled_embeddings
from tests.algorithms.test_progress import batch

WON = batch(1, 12, 4, 2, wins=0.6, invalid=0.0)
LOST = batch(2, 12, 4, 2, wins=0.0, invalid=0.0)


def test_without_a_bank_batches_have_nothing_in_common():
    scorer = ProgressScorer(ProgressSettings(), seed=0)
    assert torch.equal(scorer.score(*WON, step=0).scores, progress_scores(*WON, ProgressSettings()).scores)
    assert not scorer.score(*LOST, step=1).shaped.any()
    assert scorer.state() == {}


def test_a_batch_that_fails_is_scored_by_the_successes_before_it():
    scorer = ProgressScorer(ProgressSettings(bank=4), seed=0)
    assert torch.equal(scorer.score(*WON, step=0).scores, progress_scores(*WON, ProgressSettings()).scores)
    assert scorer.score(*LOST, step=1).shaped.all()


def test_a_resumed_run_scores_as_the_undisturbed_one():
    settings = ProgressSettings(bank=4, shuffled=True)
    whole, first, later = (ProgressScorer(settings, seed=3) for _ in range(3))
    for scorer in (whole, first):
        scorer.score(*WON, step=0)
    later.load_state(first.state())
    assert torch.equal(later.score(*LOST, step=1).scores, whole.score(*LOST, step=1).scores)
    ProgressScorer(ProgressSettings(), seed=3).load_state(first.state())
    ProgressScorer(settings, seed=3).load_state({})


def test_the_control_scores_and_keeps_shuffled_embeddings():
    embeddings, success, task = WON
    moved = shuffled_embeddings(embeddings, task, 3, 5), success, task
    control, plain = ProgressScorer(ProgressSettings(bank=4, shuffled=True), seed=3), ProgressSettings()
    found = control.score(*WON, step=5).scores
    assert torch.equal(found, progress_scores(*moved, plain).scores)
    assert not torch.equal(found, progress_scores(*WON, plain).scores)
    held = ProgressScorer(ProgressSettings(bank=4), seed=0)
    held.score(*moved, step=0)
    assert torch.equal(control.state()["embedding"], held.state()["embedding"])


@pytest.mark.parametrize("bank", [0, 4])
def test_a_later_round_of_a_step_sees_the_successes_of_the_earlier_ones(bank):
    scorer = ProgressScorer(ProgressSettings(bank=bank), seed=0)
    rows, won, none = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False]), torch.zeros(2).bool()
    scorer.score(rows, won, ["a", "a"], step=5)
    assert scorer.score(rows, none, ["a", "a"], step=5).shaped.all()
    assert scorer.score(rows, none, ["b", "b"], step=5).shaped.tolist() == [False, False]
    assert bool(scorer.score(rows, none, ["a", "a"], step=6).shaped.all()) == bool(bank)


def test_the_control_exchanges_differently_in_every_round():
    scorer = ProgressScorer(ProgressSettings(shuffled=True), seed=3)
    rows = torch.arange(1.0, 41.0).reshape(20, 2)
    won = torch.arange(20) < 2
    first, second = (scorer.score(rows, won, ["a"] * 20, step=1).scores.tolist() for _ in range(2))
    assert first != second
    again = ProgressScorer(ProgressSettings(shuffled=True), seed=3)
    assert again.score(rows, won, ["a"] * 20, step=1).scores.tolist() == first
