"""Groups of training samples for the report: what a line says of a sample and its tokens."""

from types import SimpleNamespace

import pytest
import torch

from megarl.config.task import TEXT
from megarl.data.batch import Batch
from megarl.data.jagged import Jagged
from megarl.runtime.training_samples import group_rows, shows_groups


class Tokenizer:
    """Token 7 is the text "t7"."""

    def decode(self, tokens):
        return " ".join(f"t{token}" for token in tokens)

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


def rank(groups=2, every=5, steps=12, task=TEXT):
    config = SimpleNamespace(
        tracking=SimpleNamespace(training_groups=groups),
        validation=SimpleNamespace(every=every),
        trainer=SimpleNamespace(steps=steps),
        task=task,
    )
    return SimpleNamespace(config=config, context=SimpleNamespace(step=4), tokenizer=Tokenizer())


def samples():
    """Two samples of one prompt around one of another; the last token of the first one is not trained on."""
    floats = {
        "advantages": [[0.5, 0.5, 9.0], [-1.0], [-0.5, 0.12345]],
        "rollout_logp": [[-1.0, -1.0, 0.0], [-2.0], [-1.0, -1.0]],
        "old_logp": [[-1.0, -0.5, 0.0], [-2.0], [-2.0, -1.0]],
        "token_rewards": [[0.0, 1.0, 0.0], [0.0], [0.0, 0.25]],
    }
    batch = Batch({"uid": ["a", "b", "a"], "answer": ["1", "2", "1"]})
    for name, values in floats.items():
        batch.set(name, Jagged.from_list(values, torch.float32))
    whole = {"prompt_ids": [[1, 2], [3], [1, 2]], "response_ids": [[4, 5, 6], [7], [8, 9]]}
    for name, tokens in (whole | {"weight_versions": [[1, 3], [3], [2]], "version_tokens": [[2, 1], [1], [2]]}).items():
        batch.set(name, Jagged.from_list(tokens, torch.int64))
    batch.set("response_mask", Jagged.from_list([[True, True, False], [True], [True, True]], torch.bool))
    return batch


def test_a_line_has_the_sample_and_its_tokens():
    first, second, third = group_rows(rank(), samples())
    assert first == {
        "group": "a",
        "prompt": "t1 t2",
        "answer": "1",
        "tokens": 3,
        "advantage": 0.5,
        "score": 1.0,
        "pieces": ["t4", "t5", "t6"],
        "advantages": [0.5, 0.5, None],
        "ratios": [1.0, 1.65, None],
        "ages": [2, 2, None],
    }
    assert (second["group"], second["pieces"], second["ratios"], second["ages"]) == (
        "a",
        ["t8", "t9"],
        [0.368, 1.0],
        [1, 1],
    )
    assert second["advantages"] == [-0.5, 0.123]
    assert third["group"] == "b"


def test_as_many_groups_are_kept_as_the_recipe_says():
    assert [row["group"] for row in group_rows(rank(groups=1), samples())] == ["a", "a"]


def test_what_a_team_does_not_know_is_left_out():
    batch = samples().drop(["old_logp", "weight_versions", "token_rewards", "answer"])
    row = group_rows(rank(), batch)[0]
    assert not {"ratios", "ages", "score", "answer"} & row.keys()
    assert group_rows(rank(), batch.drop(["advantages"])) == []


@pytest.mark.parametrize(("settings", "steps"), [({}, [1, 5, 10, 12]), ({"every": 0}, [1, 12]), ({"groups": 0}, [])])
def test_the_steps_whose_groups_are_kept(settings, steps):
    config = rank(**settings).config
    assert [step for step in range(1, 13) if shows_groups(config, step)] == steps
    assert shows_groups(config, 3, early=True) == bool(steps)
