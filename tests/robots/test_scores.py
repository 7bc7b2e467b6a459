"""What scores of episodes keep in a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.progress import ProgressScorer, ProgressSettings
from megarl.data.batch import Batch
from megarl.robots.scores import EpisodeScores
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics


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
    with pytest.raises(ConfigError, match="made with a different embedding"):
        other.load(tmp_path)


class Embedder:
    """Embeds an episode by its progress, and counts how often it learns."""

    learned = 0

    def learn(self, samples, step):
        self.learned += 1

    def embed(self, samples):
        return torch.stack([samples["progress"], torch.ones(len(samples))], 1)


def test_rounds_of_a_step_share_one_encoder_and_its_successes():
    embedder, group = Embedder(), WorkerGroup.alone()
    layout = SimpleNamespace(rank=0, dp_rank=0, dp_group=group, mp_group=group)
    scorer = EpisodeScores(embedder, ProgressScorer(ProgressSettings(), seed=0), 1.0, layout, {"name": "own"})
    names = {"task": ["a"] * 4, "env_error": [""] * 4, "uid": ["p0", "p0", "p1", "p1"]}

    def scored(step, success):
        metrics, progress = Metrics(), torch.tensor([0.1, 0.2, 0.4, 0.3])
        samples = Batch({"success": torch.tensor(success), "progress": progress}, names, size=4)
        return scorer.score(samples, step, metrics), metrics

    scores, metrics = scored(1, [False, False, False, True])
    assert embedder.learned == 1
    assert scores[3] == 1 > scores[1] > scores[0] > 0
    assert metrics.result()["srpo/rank_correlation/in_group"] == pytest.approx(1)
    assert (scored(1, [False] * 4)[0] > 0).all(), "by the success of the round before"
    assert embedder.learned == 1
    assert (scored(2, [False] * 4)[0] == 0).all()
    assert embedder.learned == 2
