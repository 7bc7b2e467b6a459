"""Environments that several policies play, each in conversations of its own."""

from __future__ import annotations

import pytest

from megarl.config.policies import AgentPolicyConfig
from megarl.config.rollout import SamplingConfig
from megarl.data.policies import parts_of
from megarl.data.templates import chat_renderer
from megarl.data.tokenizer import character_tokenizer
from megarl.envs.registry import check_plays_policies, load_environment
from megarl.rollout.groups import EpisodeError
from megarl.system.errors import ConfigError
from tests.envs.playing import EOS
from tests.gateway.playing import Scripted, episodes_of

TOKENIZER = character_tokenizer("0123456789+-=xy")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
#: A proposer, two attempts of a solver of which the first one goes on, and a judge; the row has the rewards.
CLASS = """
from megarl.envs import Ask, EpisodeRewards, SeveralPolicies

class Debate(SeveralPolicies):
    def begin(self, row, seed):
        self.row, self.seen = row, []
        return Ask("proposer", [{"role": "user", "content": row["prompt"]}])

    async def reply(self, policy, action):
        self.seen.append((policy, action.text))
        said = [{"role": "user", "content": self.seen[0][1]}]
        asks = [Ask("solver", said), Ask("solver", said, fresh=True), Ask("solver", said), Ask("judge", said)]
        asks = asks[:self.row.get("turns", 4)]
        if len(self.seen) <= len(asks):
            return asks[len(self.seen) - 1]
        return EpisodeRewards(self.row["rewards"], {"asked": len(self.seen)})
"""
POLICIES = {
    "proposer": AgentPolicyConfig(),
    "solver": AgentPolicyConfig(sampling={"max_new_tokens": 2, "stop": ["9"]}),
    "judge": AgentPolicyConfig(train=False),
}


@pytest.fixture
def debates(tmp_path):
    """debates(row, *lines): the episode in which the policies say these lines."""
    (tmp_path / "debate.py").write_text(CLASS)

    def play(row, *lines, **limits):
        env = {"name": f"{tmp_path / 'debate.py'}:Debate"}
        template, engine = chat_renderer(TOKENIZER, TEMPLATE), Scripted(TOKENIZER, EOS, *lines)
        how = {"env": env, "policies": POLICIES, **limits}
        [episode] = episodes_of(engine, template, TOKENIZER, [EOS], [], [row], SamplingConfig(max_new_tokens=6), **how)
        return episode

    return play


def sequences(episode):
    """What each sequence says, by its policy, in the order of their first turns."""
    lanes = sorted(episode.all_lanes, key=lambda lane: lane.turn_numbers[0])
    return [(lane.policy, TOKENIZER.decode([*lane.prompt_ids, *lane.token_ids])) for lane in lanes]


LINES = ("3", "19", "29", "444", "5")
PAID = {"proposer": 0.25, "solver": [1, 0]}


def test_a_policy_goes_on_with_its_last_conversation(debates):
    episode = debates({"prompt": "0", "rewards": PAID}, *LINES)
    # the solver's turns end after two tokens or with a 9
    assert sequences(episode) == [
        ("proposer", "0=3<eos>"),
        ("solver", "3=19"),
        ("solver", "3=29<eos>3=44"),
        ("judge", "3=5<eos>"),
    ]
    parts = {part.name: part for part in parts_of(episode, "a#0", list(POLICIES))}
    rewards = {name: [sum(row.turn_rewards) for row in part.rows] for name, part in parts.items()}
    assert rewards == {"a#0@proposer": [0.25], "a#0@solver:0": [1], "a#0@solver:1": [0], "a#0@judge": [0]}
    assert [sum(row.sampled) for row in parts["a#0@judge"].rows] == [0], "it is not trained"
    assert (episode.info["asked"], episode.info["limited"]) == (5, 0)


@pytest.mark.parametrize("limits", [{"turns": 3}, {"tokens": 3}])
def test_an_episode_that_a_limit_ends_has_rewards_of_0(debates, limits):
    episode = debates({"prompt": "0", "rewards": PAID}, *LINES, **limits)
    assert (episode.ended_by, episode.info["limited"], episode.rewards) == (
        "done",
        1,
        {"proposer": [0], "solver": [0, 0]},
    )


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"proposer": 1}, "lacks the policy 'solver', which has taken a turn"),
        ({"proposer": 1, "solver": [1]}, "1 numbers for the policy 'solver'; allowed: one number, or 2"),
        ({**PAID, "author": 1}, "names 'author', which is no policy of the run; allowed: proposer, solver, judge"),
        ({**PAID, "proposer": float("nan")}, "allowed: finite numbers"),
        ({**PAID, "proposer": "1"}, "has '1' for 'proposer'; allowed: an int or float"),
    ],
)
def test_rewards_that_do_not_fit_fail_the_episode(debates, rewards, words):
    with pytest.raises(EpisodeError, match=words):
        debates({"prompt": "0", "rewards": rewards}, *LINES)


def test_a_class_and_the_policies_of_a_recipe_come_together(tmp_path):
    (tmp_path / "debate.py").write_text(CLASS)
    kind, _ = load_environment({"name": f"{tmp_path / 'debate.py'}:Debate"})
    check_plays_policies(kind, POLICIES)
    with pytest.raises(ConfigError, match="asks several policies, but the recipe has none"):
        check_plays_policies(kind, ())
    tools, _ = load_environment({"name": "tools"})
    with pytest.raises(ConfigError, match="Tools does not ask several policies"):
        check_plays_policies(tools, POLICIES)
