"""Tokens of actions: OpenVLA's rule number by number, and the way from tokens to a simulator and back."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.robots.config import RobotConfig
from megarl.robots.models.vla.actions import GRIPPER_RULES, ActionCodec, ActionTokens, GripperRule
from megarl.system.errors import ConfigError, DataError

TOKENS = ActionTokens(vocab_size=32000)


def openvla_number(token: int, vocab: int) -> float:
    """What OpenVLA reads a token as: one centre of 255 intervals between 256 edges."""
    interval = min(max(vocab - token - 1, 0), 254)
    edges = [-1 + 2 * i / 255 for i in range(256)]
    return (edges[interval] + edges[interval + 1]) / 2


def openvla_token(number: float, vocab: int) -> int:
    """What OpenVLA writes a number as: the vocabulary's size less the number of edges that are not above it."""
    number = min(max(number, -1.0), 1.0)
    return vocab - sum(edge <= number for edge in np.linspace(-1, 1, 256))


def statistics(dim: int, mask: list[bool] | None = None, **settings) -> ActionStatistics:
    generator = np.random.default_rng(dim)
    return ActionStatistics.of(generator.normal(1.0, 2.0, (200, dim)), mask, **settings)


def test_every_token_is_read_as_openvla_reads_it():
    ids = np.arange(31744, 32000)
    np.testing.assert_allclose(TOKENS.decode(ids), [openvla_number(int(i), 32000) for i in ids], atol=1e-7)


def test_numbers_are_written_as_openvla_writes_them():
    numbers = np.concatenate([np.random.default_rng(0).uniform(-1.2, 1.2, 300), [-1, 1, 0, 0.5, -2, 2]])
    assert TOKENS.encode(numbers).tolist() == [openvla_token(float(x), 32000) for x in numbers]


def test_a_token_is_read_and_written_again():
    ids = np.arange(31745, 32000)
    assert np.array_equal(TOKENS.encode(TOKENS.decode(ids)), ids)
    assert TOKENS.encode(TOKENS.decode(31744)) == 31745  # two tokens are read as the last interval


def test_a_number_comes_back_within_half_an_interval():
    numbers = np.random.default_rng(0).uniform(-1, 1, (5, 25, 14))
    assert np.abs(TOKENS.decode(TOKENS.encode(numbers)) - numbers).max() <= 1 / 255 + 1e-6


@pytest.mark.parametrize(("vocab", "padded", "bins"), [(32000, 32064, 256), (300, 300, 16)])
def test_columns_are_the_action_tokens_without_the_padding(vocab, padded, bins):
    tokens = ActionTokens(vocab, bins)
    columns = np.arange(padded)[tokens.columns(padded)]
    assert columns.tolist() == list(range(tokens.start, tokens.start + bins))
    assert columns[-1] == tokens.encode(-1.0)
    if padded == 32064:
        assert np.array_equal(columns, np.arange(padded)[-320:-64])


def test_logits_without_the_action_columns_are_refused():
    with pytest.raises(ConfigError, match="fewer columns than the vocabulary has tokens"):
        TOKENS.columns(31999)
    with pytest.raises(ConfigError, match="number of bins does not fit"):
        ActionTokens(255)


def test_the_rule_of_a_checkpoint():
    config = {"text_config": {"vocab_size": 32064}, "pad_to_multiple_of": 64, "n_action_bins": 256}
    assert ActionTokens.of_checkpoint(config, "config.json") == TOKENS
    with pytest.raises(ConfigError, match=r"config\.json.*n_action_bins"):
        ActionTokens.of_checkpoint({key: config[key] for key in ("text_config", "pad_to_multiple_of")}, "config.json")


@pytest.mark.parametrize("token", [31743, 32000, 32063, 0, -1])
def test_a_token_of_no_action_is_named_with_its_place(token):
    ids = np.full((3, 56), 31800)
    ids[2, 17] = token
    with pytest.raises(DataError, match=rf"(?s)tokens\[2, 17\].*{token}.*31744 to 31999"):
        TOKENS.decode(ids)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_none_is_named_with_its_place(number):
    actions = np.zeros((2, 8, 7))
    actions[1, 3, 6] = number
    with pytest.raises(DataError, match=r"actions\[1, 3, 6\]: a value of an action is not a finite number"):
        TOKENS.encode(actions)


def test_liberos_gripper_is_binary_and_of_the_other_sign():
    actions = np.zeros((1, 5, 7), dtype=np.float32)
    actions[..., -1] = [1.0, 0.998, 0.6, 0.4, 0.0]  # 1: open
    executed = GRIPPER_RULES["libero"].to_simulator(actions)
    assert executed[0, :, -1].tolist() == [-1, -1, -1, 1, 1]
    assert np.array_equal(executed[..., :-1], actions[..., :-1])
    assert actions[0, 1, -1] == np.float32(0.998)


@pytest.mark.parametrize("dims", [(-1,), (6, 13)])
def test_recorded_grippers_come_back(dims):
    rule = GripperRule(dims, unit=True, binarise=True, invert=True)
    actions = np.random.default_rng(0).normal(size=(9, 14)).astype(np.float32)
    actions[:, list(dims)] = np.random.default_rng(1).choice([-1.0, 1.0], (9, len(dims)))
    said = rule.to_policy(actions)
    assert set(np.unique(said[:, list(dims)])) == {0.0, 1.0}
    assert np.array_equal(rule.to_simulator(said), actions)


def test_without_a_rule_nothing_happens():
    actions = np.random.default_rng(0).normal(size=(8, 14)).astype(np.float32)
    assert np.array_equal(GRIPPER_RULES["none"].to_simulator(actions), actions)
    assert np.array_equal(GRIPPER_RULES["none"].to_policy(actions), actions)
    assert GRIPPER_RULES["none"].mask(14) == [True] * 14
    assert GRIPPER_RULES["libero"].mask(7) == [True] * 6 + [False]


def test_recipes_may_name_every_rule_and_no_other():
    assert set(get_args(RobotConfig.model_fields["gripper"].annotation)) == set(GRIPPER_RULES)


@pytest.mark.parametrize(("dim", "chunk"), [(7, 8), (14, 25), (7, 25), (14, 8)])
@pytest.mark.parametrize("bounds", ["q99", "minmax"])
def test_actions_of_a_call_one_by_one(dim, chunk, bounds):
    mask = [place % 7 != 6 for place in range(dim)]
    codec = ActionCodec(TOKENS, statistics(dim, mask, bounds=bounds))
    ids = np.random.default_rng(0).integers(31744, 32000, (3, chunk * dim))

    actions = codec.to_actions(ids)

    low, high = codec.statistics.range
    assert actions.shape == (3, chunk, dim)
    assert actions.dtype == np.float32
    for call, k, d in np.ndindex(3, chunk, dim):
        number = openvla_number(int(ids[call, k * dim + d]), 32000)
        expected = 0.5 * (number + 1) * (high[d] - low[d] + 1e-8) + low[d] if mask[d] else number
        assert actions[call, k, d] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("dim", "chunk"), [(7, 8), (14, 25)])
def test_demonstrations_become_tokens_that_act_like_them(dim, chunk):
    rule = GRIPPER_RULES["libero"]
    codec = ActionCodec(TOKENS, statistics(dim, rule.mask(dim)), rule)
    low, high = codec.statistics.range
    actions = np.random.default_rng(0).uniform(low, high, (4, chunk, dim))
    actions[..., -1] = np.random.default_rng(1).choice([-1, 1], (4, chunk))

    ids = codec.to_tokens(actions)

    assert ids.shape == (4, chunk * dim)
    difference = np.abs(codec.to_actions(ids) - actions)
    assert (difference[..., :-1] <= (high - low)[:-1] / 2 / 255 + 1e-5).all()
    assert (difference[..., -1] == 0).all()


def test_tokens_of_no_whole_number_of_actions_are_refused():
    codec = ActionCodec(TOKENS, statistics(7))
    for ids in (np.full(55, 31800), np.array(31800), np.empty((2, 0), int)):
        with pytest.raises(DataError, match=r"\[\.\.\., K \* 7\]"):
            codec.to_actions(ids)
    with pytest.raises(DataError, match=r"\[8, 6\]"):
        codec.to_tokens(np.zeros((8, 6)))
