"""Environments of the real package gymnasium, played by hand."""

from __future__ import annotations

import sys

import pytest

from megarl.envs.gymnasium import Gymnasium, GymnasiumSettings
from megarl.envs.protocol import Action
from megarl.envs.seeds import rows
from megarl.system.errors import ConfigError

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
WORDS = {"left": 0, "down": 1, "right": 2, "up": 3}


def played(turns: list[str], seed: int = 5, chat: bool = False, **settings):
    """The first observation and the steps of an episode."""
    game = Gymnasium(GymnasiumSettings(**settings), chat)
    first = game.reset({"seed": seed}, 0)
    return first, [game.step(Action(turn, turn, [], "stop", number)) for number, turn in enumerate(turns)]


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("gymnasium", reason="pip install '.[gymnasium]'")


def test_an_episode_is_read_and_played_in_words():
    turns = [f"so <action>{word}</action>" for word in ["Down", "down", "right", "fly", "right", "down", "right"]]
    first, steps = played(turns, actions=WORDS, invalid_reward=-0.5, chat=True, **LAKE)
    [message] = first
    assert message["role"] == "user"
    assert message["content"].startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n\n")
    assert message["content"].endswith(
        "Answer with <action>ACTION</action>. An action is one of left, down, right, up."
    )
    assert steps[0].observation[0]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [step.reward for step in steps] == [0, 0, 0, -0.5, 0, 0, 1]
    assert steps[3].observation[0]["content"] == "This is not a valid action."
    assert (steps[3].info, steps[-1].done) == ({"invalid": 1.0}, True)
    assert steps[-1].info == {"invalid": 0.0, "terminated": 1.0, "truncated": 0.0}
    assert not any(step.done for step in steps[:-1])


def test_the_end_by_the_number_of_steps_is_no_end_of_the_game():
    _, steps = played(["0", "0", "0"], tag=None, instructions="", id="FrozenLake-v1", kwargs={"max_episode_steps": 3})
    assert [(step.done, step.info["terminated"], step.info["truncated"]) for step in steps][1:] == [
        (False, 0.0, 0.0),
        (True, 0.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("space", "valid", "invalid"),
    [
        ("Discrete(3, start=-1)", ["-1", "1"], ["2", "1.0", "true", '"1"', "", "nan"]),
        ("Box(-1, 1, (2,))", ["[0.5, -1]", "[0, 1]"], ["[0.5]", "0.5", "[2, 0]", "[NaN, 0]", '["0", 0]']),
        ("MultiDiscrete([2, 3])", ["[1, 2]"], ["[1.0, 2]", "[2, 0]", "[1]"]),
        ("MultiBinary(2)", ["[0, 1]"], ["[0, 2]", "[0, 256]"]),
        ("Box(0, 255, (1,), 'uint8')", ["[44]", "[44.0]"], ["[300]", "[-1]", "[0.5]"]),
        ("Tuple((Discrete(2), Box(0, 1, (1,))))", ["[1, [0.25]]"], ["[1]", "[2, [0]]", "[1, [0], 1]"]),
        ("Dict(a=Discrete(2))", ['{"a": 1}'], ['{"a": 2}', '{"a": 1, "b": 1}', "{}", "[1]"]),
        ("Text(3, charset='ab')", ["ab", "aaa"], ["abc", "aaaa"]),
    ],
)
def test_what_names_an_action_of_each_space(space, valid, invalid):
    from gymnasium import spaces

    game = Gymnasium(GymnasiumSettings(id="x"), False)
    game._game = type("Game", (), {"action_space": eval(f"spaces.{space}", {"spaces": spaces, **vars(spaces)})})()
    for text in valid:
        assert game._game.action_space.contains(game._action(text)), text
    for text in invalid:
        assert game._action(text) is None, text


def test_numbers_are_shown_as_json_and_repeat_by_the_seed_of_the_row():
    first, [step] = played(["1"], tag=None, instructions="", id="CartPole-v1")
    again, [same] = played(["1"], tag=None, instructions="", id="CartPole-v1")
    assert (first, step.observation) == (again, same.observation)
    assert first != played([], seed=6, tag=None, instructions="", id="CartPole-v1")[0]
    assert len(first.strip("[]").split(", ")) == 4
    assert all(len(number.partition(".")[2]) <= 6 for number in first.strip("[]").split(", "))
    train, held_out = rows(size=3, seed=2), rows("val", size=3, val_size=2, seed=2)
    assert [row["seed"] for row in train + held_out] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id": "FrozenLak-v1"}, r"env.id: gymnasium cannot make this(?s:.*)Did you mean: `FrozenLake`"),
        ({"id": "FrozenLake-v1", "kwargs": {"size": 9}}, r"env.id: (?s:.*)unexpected keyword argument 'size'"),
        ({"id": "CartPole-v1", "observation": "render"}, r"env.observation: this environment draws no text"),
        ({"id": "FrozenLake-v1", "actions": {"fly": 9}}, r"env.actions.fly: the environment has no such action"),
    ],
)
def test_mistakes_are_named_before_a_run(settings, words):
    with pytest.raises(ConfigError, match=words):
        Gymnasium.check(GymnasiumSettings(**settings))


def test_the_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"gymnasium cannot be imported(?s:.*)pip install '.\[gymnasium\]'"):
        Gymnasium.check(GymnasiumSettings(**LAKE))


@pytest.mark.campaign("connectors")
@pytest.mark.timeout(400)
def test_a_run_plays_a_game(tmp_path):
    from tests.runtime.harness import train, write_recipe

    source = "megarl.envs.seeds:rows"
    steps = train(
        write_recipe(tmp_path),
        tmp_path / "run",
        "env={name: gymnasium, id: FrozenLake-v1, kwargs: {is_slippery: false}, observation: value, tag: null, "
        "instructions: '', invalid_text: '-'}",
        f"data={{train_files: [{source!r}], val_files: [{source!r}], "
        "loader_kwargs: !replace {size: 8, val_size: 4}}",
        "reward=!replace {timeout_s: 100}",
        "rollout={limits: {turns: 3, tokens: 24}, sampling: {max_new_tokens: 2, stop_token_ids: [4, 5, 6, 7]}}",
        "sft.steps=0",
        "trainer.steps=2",
    )
    assert steps[2]["env/turns/max"] == 3
    assert 0 < steps[2]["env/invalid"] < 3
