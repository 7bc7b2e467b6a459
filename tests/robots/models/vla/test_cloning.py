"""Policy calls of demonstrations: windows of actions, what was seen, and where it is read from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.data.loader import PromptLoader
from megarl.robots.data.demonstrations import (
    Demonstration,
    OpenDemonstration,
    open_demonstrations,
    write_demonstrations,
)
from megarl.robots.data.pictures import PicturePipeline
from megarl.robots.models.vla.actions import GRIPPER_RULES, ActionCodec, ActionTokens
from megarl.robots.models.vla.cloning import CloningExamples, cloning_statistics
from megarl.robots.models.vla.sequences import calls_of
from megarl.system.errors import ConfigError, DataError
from tests.robots.opened import opened

K, D, S = 3, 2, 4
LENGTHS = (5, 2, 0, 7)  # of one no environment step is left
PROMPTS = {"push": [1, 7, 9], "reach": [1, 8]}
PICTURES = PicturePipeline(4, rotate=True)


def demonstrations() -> list[Demonstration]:
    random = np.random.default_rng(3)
    found = []
    for number, steps in enumerate(LENGTHS):
        frames = {c: random.integers(0, 255, (steps, 4, 4, 3), np.uint8) for c in ("top", "wrist", "spare")}
        states, actions = (random.normal(size=(steps, width)).astype(np.float32) for width in (S, D))
        found.append(Demonstration(("push", "reach")[number % 2], frames, states, actions))
    return found


def all_opened(shown: list[Demonstration]) -> list[OpenDemonstration]:
    return [opened(one, f"demonstration {number}") for number, one in enumerate(shown)]


def codec_of(shown: list[OpenDemonstration]) -> ActionCodec:
    return ActionCodec(ActionTokens(300, 64), cloning_statistics(shown, GRIPPER_RULES["none"]).action)


def examples(shown: list[OpenDemonstration], **given) -> CloningExamples:
    own = {"cameras": ["wrist", "top"], "chunk": K, "states": lambda states: 2 * states} | given
    codec = own.pop("codec", None) or codec_of(shown)
    return CloningExamples(shown, own.pop("prompts", PROMPTS), codec, PICTURES, **own)


def test_an_example_is_a_window_of_actions_and_what_was_seen_at_its_start() -> None:
    shown = demonstrations()
    codec = codec_of(all_opened(shown))
    every = examples(all_opened(shown))
    assert len(every) == sum(LENGTHS)
    batch = every.batch(range(len(every)), epoch=2)
    fields = [batch[f"frames/{camera}"].unbind() for camera in ("top", "wrist")]
    row = 0
    for one in shown:
        for step in range(len(one)):
            actions = [one.actions[min(step + k, len(one) - 1)] for k in range(K)]
            assert batch["response_ids"].unbind()[row].tolist() == codec.to_tokens(np.stack(actions)).tolist()
            mask = [step + k < len(one) for k in range(K) for _ in range(D)]
            assert batch["response_mask"].unbind()[row].tolist() == mask
            assert batch["prompt_ids"].unbind()[row].tolist() == PROMPTS[one.task]
            assert torch.equal(batch["states"].unbind()[row], torch.from_numpy(2 * one.states[None, step]))
            for camera, field in zip(("top", "wrist"), fields, strict=True):
                turned = np.ascontiguousarray(one.frames[camera][None, step, ::-1, ::-1])
                assert torch.equal(field[row], torch.from_numpy(turned))
            assert (batch["turn_starts"].unbind()[row].tolist(), batch["turn_ends"].unbind()[row].tolist()) == (
                [0],
                [K * D],
            )
            assert (batch["task"][row], batch["uid"][row]) == (one.task, f"train-2-{row}")
            row += 1
    assert batch["sample_id"] == batch["uid"]
    assert "frames/spare" not in batch
    calls = calls_of(batch)
    assert len(calls) == len(batch)
    assert torch.equal(calls["states"], batch["states"].values)


@pytest.mark.parametrize(("keep", "reads"), [(4 << 30, 3), (0, 6), (2 * 2 * 4 * 4 * 3, 4)])
def test_pictures_are_read_once_as_far_as_they_fit(tmp_path, keep, reads) -> None:
    write_demonstrations(tmp_path, demonstrations())
    asked = []

    def counted(one: OpenDemonstration) -> OpenDemonstration:
        def frame(camera: str, step: int) -> np.ndarray:
            asked.append(camera)
            return one.frame(camera, step)

        return replace(one, frame=frame)

    files = examples([counted(one) for one in open_demonstrations(tmp_path)], keep=keep)
    memory = examples(all_opened(demonstrations()))
    assert files.fingerprint == memory.fingerprint
    assert asked == []
    for epoch in range(2):
        found, expected = files.batch([13, 5, 6], epoch), memory.batch([13, 5, 6], epoch)
        for camera in ("top", "wrist"):
            assert torch.equal(found[f"frames/{camera}"].values, expected[f"frames/{camera}"].values)
    assert asked.count("top") == asked.count("wrist") == reads


def test_a_loader_draws_the_same_for_every_number_of_ranks() -> None:
    every = examples(all_opened(demonstrations()))
    whole = next(PromptLoader(every, 4))["uid"]
    parts = [next(PromptLoader(every, 4, rank, 2))["uid"] for rank in range(2)]
    assert [parts[n % 2][n // 2] for n in range(4)] == whole
    assert len(every.batch([])) == 0


@pytest.mark.parametrize("change", ["chunk", "prompts", "actions", "states"])
def test_the_fingerprint_is_that_of_what_is_learned(change) -> None:
    shown = demonstrations()
    given = {"chunk": {"chunk": 4}, "prompts": {"prompts": PROMPTS | {"push": [1, 7]}}}.get(change, {})
    if change in ("actions", "states"):
        shown[0] = replace(shown[0], **{change: -getattr(shown[0], change)})
    assert examples(all_opened(shown), **given).fingerprint != examples(all_opened(demonstrations())).fingerprint


def test_what_cannot_be_learned_is_refused_with_its_place() -> None:
    shown = all_opened(demonstrations())
    with pytest.raises(ConfigError, match=r"demonstration 1: the policy has no prompt(.|\n)*reach"):
        examples(shown, prompts={"push": [1]})
    with pytest.raises(DataError, match=r"demonstration 0: (.|\n)*'front'(.|\n)*top, wrist, spare"):
        examples(shown, cameras=["front"])
    narrow = replace(shown[3], states=shown[3].states[:, 1:])
    with pytest.raises(DataError, match=r"demonstration 3: (.|\n)*\(2, 3\)(.|\n)*\(2, 4\)"):
        examples([*shown[:3], narrow], codec=codec_of(shown))
    with pytest.raises(DataError, match="no examples to clone"):
        CloningExamples(shown[2:3], PROMPTS, codec_of(shown), PICTURES, cameras=[], chunk=1, states=np.asarray)
    with pytest.raises(DataError, match=r"demonstration 0: actions\[4, 1\]: a value is not a finite number"):
        replace(shown[0], actions=np.where(np.arange(10).reshape(5, 2) == 9, np.nan, shown[0].actions))


def test_statistics_are_those_of_all_steps_with_grippers_as_a_policy_says_them() -> None:
    random = np.random.default_rng(0)
    shown = []
    for steps in (40, 61):
        actions = random.normal(size=(steps, 7)).astype(np.float32)
        actions[:, -1] = random.choice([-1, 1], steps)
        frames = {"top": np.zeros((steps, 1, 1, 3), np.uint8)}
        shown.append(Demonstration("t", frames, random.normal(size=(steps, 8)).astype(np.float32), actions))
    found = cloning_statistics(all_opened(shown), GRIPPER_RULES["libero"])
    actions = np.concatenate([one.actions for one in shown]).astype(np.float64)
    actions[:, -1] = (1 - actions[:, -1]) / 2
    states = np.concatenate([one.states for one in shown]).astype(np.float64)
    for mine, table in ((found.action, actions), (found.state, states)):
        ordered = np.sort(table, axis=0)  # of 101 numbers, the quantiles are the second and the last but one
        np.testing.assert_allclose(mine.q01, ordered[1], rtol=1e-12)
        np.testing.assert_allclose(mine.q99, ordered[99], rtol=1e-12)
        np.testing.assert_allclose(mine.mean, table.sum(0) / 101, atol=1e-12)
    assert found.action.mask.tolist() == [True] * 6 + [False]
    assert (found.transitions, found.trajectories) == (101, 2)


def test_a_number_of_which_the_quantiles_leave_nothing_is_refused() -> None:
    actions = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    actions[:, 1] = -1
    actions[7, 1] = 1
    shown = [Demonstration("t", {}, np.zeros((300, 0), np.float32), actions)]
    with pytest.raises(DataError, match=r"dimension 1 of the actions is -1(.|\n)*minmax"):
        cloning_statistics(all_opened(shown), GRIPPER_RULES["none"])
    found = cloning_statistics(all_opened(shown), GRIPPER_RULES["none"], "minmax")
    assert found.state is None
    assert found.action.normalise([[0, 1]])[0, 1] == 1


def test_the_log_says_what_is_there_and_what_is_kept() -> None:
    text = examples(all_opened(demonstrations()), keep=10 * 2 * 4 * 4 * 3).describe()
    assert "14 policy calls of 3 demonstrations (push 1, reach 2)" in text
    assert "those of 4 examples are processed each time" in text
