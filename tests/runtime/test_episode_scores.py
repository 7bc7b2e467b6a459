"""What scores of episodes keep in a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.progress import ProgressSettings
from megarl.algorithms.srpo import ProgressScorer
from megarl.errors import ConfigError
from megarl.runtime.episode_scores import EpisodeScores


def scores(embedding):
    scorer = ProgressScorer(ProgressSettings(bank=4), seed=0)
    return EpisodeScores(None, scorer, 1.0, SimpleNamespace(rank=0), embedding), scorer


def test_a_bank_is_read_again_by_a_run_that_compares_the_same(tmp_path):
    first, scorer = scores({"name": "state", "points": 8})
    scorer.score(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False]), ["a", "a"], step=0)
    for name, data in first.files().items():
        (tmp_path / name).write_bytes(data)
    again, later = scores({"points": 8, "name": "state"})
    again.load(tmp_path)
    assert later.state()["embedding"].tolist() == [[1.0, 2.0]]

    other, _ = scores({"name": "state", "points": 4})
    with pytest.raises(ConfigError, match="is of another embedding"):
        other.load(tmp_path)
