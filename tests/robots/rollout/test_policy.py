"""What a policy sees, what it draws, and which start states it is trained on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.data.batch import Batch, Jagged
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.envs import Failure
from megarl.robots.models.vla.actions import ActionCodec, ActionTokens
from megarl.robots.rollout.play import View
from megarl.robots.rollout.policy import PolicyCall, SamplingPolicy
from megarl.robots.rollout.trials import Trials, limited, part_trials, val_sets
from megarl.robots.simulators.protocol import Observation, Outcome, TaskSpec
from megarl.system.errors import ConfigError

SPEC = TaskSpec("pick", "pick it up", 20, 9, 2, 3, {"top": (6, 8), "hand": (4, 4)})


def seen(value: int) -> Observation:
    frames = {name: np.full((*size, 3), value, np.uint8) for name, size in SPEC.cameras.items()}
    return Observation(frames, np.array([value / 10, 0.5, -2.0], np.float32))


@pytest.mark.parametrize(("dim", "chunk"), [(7, 8), (14, 25), (2, 1)])
def test_a_chunk_has_the_tokens_that_were_drawn_for_its_call(dim, chunk) -> None:
    codec = ActionCodec(ActionTokens(600), ActionStatistics.plain(dim))
    slots = dim * chunk
    temperatures: list[float] = []

    def draw(batch: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
        temperatures.append(temperature)
        new = codec.tokens.start + (seeds[:, None] + torch.arange(slots)) % 200
        ids = batch["response_ids"].like(new.flatten())
        return ids, ids.like(-(new.flatten() - codec.tokens.start) / 100)

    policy = SamplingPolicy(draw, codec, ["top"], chunk)
    policy.temperature = 0.6
    chunks = policy.act([PolicyCall([5, 6], seen(n), seed) for n, seed in enumerate((3, 70))])
    for seed, found in zip((3, 70), chunks, strict=True):
        wanted = [(seed + place) % 200 for place in range(slots)]
        assert found.token_ids == [codec.tokens.start + token for token in wanted]
        assert found.logprobs == pytest.approx([-token / 100 for token in wanted])
        assert found.actions.shape == (chunk, dim)
        assert np.array_equal(found.actions, codec.to_actions(found.token_ids))
    assert temperatures == [0.6]
    assert len(policy.blank.token_ids) == slots


def test_a_view_is_of_some_cameras_at_one_size_with_states_in_their_range() -> None:
    numbers = np.array([[0.0, -1.0, -4.0], [10.0, 1.0, 4.0]])
    view = View(["hand"], PicturePipeline(8, resize="bilinear"), ActionStatistics.of(numbers, None, "minmax"))
    shown = view(seen(50))
    assert {name: frame.shape for name, frame in shown.frames.items()} == {"hand": (8, 8, 3)}
    assert shown.frames["hand"].dtype == np.uint8
    assert shown.state.tolist() == pytest.approx([0.0, 0.5, -0.5], abs=1e-6)
    outcome = view.of_answer(Outcome(seen(100), 2, True, True, 1.0))
    assert isinstance(outcome, Outcome)
    assert (outcome.executed, outcome.success, outcome.observation.state[0]) == (2, True, 1.0)
    failure = Failure("crash", "it fell", "pick", 3, 1, "")
    assert view.of_answer(failure) is failure
    assert view.of_task(SPEC).cameras == {"hand": (8, 8)}
    with pytest.raises(ConfigError, match="unknown camera"):
        View(["side"], PicturePipeline(8)).of_task(SPEC)
    with pytest.raises(ConfigError, match="for a robot state of a different size"):
        View(["top"], PicturePipeline(8), ActionStatistics.plain(5)).of_task(SPEC)


def test_start_states_are_parted_by_the_seed_and_the_task() -> None:
    other = TaskSpec("push", "push it", 20, 9, 2, 3, {})
    first = part_trials([SPEC, other], seed=1, held_out=6, trained=None)
    for task in ("pick", "push"):
        held, trained = ([trial for name, trial in first[split] if name == task] for split in ("val", "train"))
        assert sorted(held + trained) == list(range(20))
        assert len(held) == 6
    assert [t for n, t in first["val"] if n == "pick"] != [t for n, t in first["val"] if n == "push"]
    again = part_trials([other], seed=1, held_out=6, trained=4)
    assert [p for p in first["val"] if p[0] == "push"] == again["val"], "whatever other tasks there are"
    assert set(again["train"]) < set(first["train"])
    assert len(again["train"]) == 4
    assert part_trials([SPEC], seed=2, held_out=6, trained=None)["val"] != first["val"][:6]
    with pytest.raises(ConfigError, match="too few start states"):
        part_trials([SPEC], seed=1, held_out=15, trained=6)


def test_validation_has_sets_of_start_states_with_sources_of_their_own() -> None:
    """Held out, trained on (IID), and of the simulator's list for evaluation (OOD), which is never trained on."""
    task = TaskSpec("pick", "pick it", 20, 9, 2, 3, {}, evaluation=5)
    parted = part_trials([task], seed=1, held_out=3, trained=8, val_trained=2, val_evaluation=4)
    sets = val_sets([task], parted)
    assert len(parted["val"]) == 3 + 2 + 4
    assert max(trial for _, trial in parted["train"]) < 15
    by_set = {name: [pair for pair in parted["val"] if sets.get(pair) == name] for name in (None, "train_iid")}
    assert set(by_set["train_iid"]) < set(parted["train"])
    assert not set(by_set[None]) & set(parted["train"])
    assert [pair for pair, name in sets.items() if name == "eval_ood"] == [("pick", n) for n in range(15, 19)]
    trials = Trials("val", parted["val"], {"pick": [1]}, {"pick": "a"}, sets)
    assert trials.describe() == "val: 9 start states of 1 task, 2 of them train_iid, 4 of them eval_ood"
    sources = trials.batch(range(9))["data_source"]
    assert sources == ["pick"] * 3 + ["pick_train_iid"] * 2 + ["pick_eval_ood"] * 4
    few = [sets.get(pair) for pair in limited(parted["val"], 3, sets)]
    assert few == [None, "train_iid", "eval_ood"]
    assert len(part_trials([task], seed=1, held_out=0, trained=None)["val"]) == 5
    lit = replace(task, part="light")
    sets = val_sets([lit], parted)
    assert set(sets.values()) == {"light"}, "all start states of a task in a set of tasks"
    trials = Trials("val", parted["val"], trials.prompts, trials.texts, sets, {"pick": "table/light"})
    assert set(trials.batch(range(9))["data_source"]) == {"table/light"}


def test_tasks_that_are_only_measured_are_ood_and_the_others_iid() -> None:
    tasks = [SPEC, replace(SPEC, name="push"), replace(SPEC, name="open")]
    given = {"seed": 1, "held_out": 4, "trained": 5, "val_trained": 1}
    parted = part_trials(tasks, **given, held_out_tasks=["push"])
    plain = part_trials(tasks, **given)
    assert {task for task, _ in parted["train"]} == {"pick", "open"}
    assert [pair for pair in plain["train"] if pair[0] != "push"] == parted["train"]
    texts = {task.name: task.name for task in tasks}
    sources = Trials("val", parted["val"], {name: [1] for name in texts}, texts, val_sets(tasks, parted, ["push"]))
    rows = sources.batch(range(len(parted["val"])))
    counts = Counter(rows["data_source"])
    assert counts == {"pick_iid": 4, "pick_train_iid": 1, "push_ood": 4, "open_iid": 4, "open_train_iid": 1}
    assert Counter(rows["set"]) == {"iid": 8, "ood": 4, "train_iid": 2}
    with pytest.raises(ConfigError, match=r"the held-out task push needs(.|\n)*1 to 20"):
        part_trials(tasks, seed=1, held_out=0, trained=5, val_trained=1, held_out_tasks=["push"])
    with pytest.raises(ConfigError, match=r"robot.held_out_tasks: tasks cannot be held out.*pick belongs to 'light'"):
        part_trials([replace(SPEC, part="light"), *tasks[1:]], **given, held_out_tasks=["push"])


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"held_out": 13, "trained": 3}, "robot.held_out"),
        ({"held_out": 0, "trained": 3, "val_evaluation": 0}, "robot.held_out"),
        ({"held_out": 1, "trained": 3, "val_trained": 4}, "robot.val_trained"),
        ({"held_out": 1, "trained": 3, "val_evaluation": 6}, "robot.val_evaluation"),
    ],
)
def test_sets_that_a_task_has_too_few_start_states_for_are_refused(given, key) -> None:
    task = TaskSpec("pick", "pick it", 20, 9, 2, 3, {}, evaluation=5)
    with pytest.raises(ConfigError, match=r"too few start states|measures no start state") as caught:
        part_trials([task], seed=1, **given)
    assert key in str(caught.value)


def test_rows_of_start_states_name_task_and_trial() -> None:
    trials = Trials("train", [("pick", 3), ("push", 0)], {"pick": [1, 2], "push": [4]}, {"pick": "a", "push": "b"})
    batch = trials.batch([1, 0], 2)
    assert batch["uid"] == ["train-2-1", "train-2-0"]
    assert batch["row"] == [{"task": "push", "trial": 0}, {"task": "pick", "trial": 3}]
    assert [ids.tolist() for ids in batch["prompt_ids"].unbind()] == [[4], [1, 2]]
    assert batch["prompt_text"] == ["b", "a"]
    assert trials.describe() == "train: 2 start states of 2 tasks"
    assert trials.fingerprint != Trials("train", [("pick", 4), ("push", 0)], trials.prompts, trials.texts).fingerprint


def test_a_limit_of_held_out_start_states_takes_as_many_of_every_task():
    pairs = [("a", 3), ("a", 5), ("a", 9), ("b", 1), ("b", 2), ("c", 4)]
    assert limited(pairs, None) == pairs
    assert limited(pairs, 4) == [("a", 3), ("a", 5), ("b", 1), ("c", 4)]
    assert limited(pairs, 100) == pairs
    sources = {"a": "first", "b": "first", "c": "second"}
    assert limited(pairs, 2, sources=sources) == [("a", 3), ("c", 4)], "tasks of one source count as one"
