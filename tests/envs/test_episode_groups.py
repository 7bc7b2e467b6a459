"""Episodes with a scripted engine, and with the embedded one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs import Action, Environment, EnvSettings, Step
from megarl.envs.host import Host
from megarl.envs.protocol import SingleTurn
from megarl.envs.registry import load_environment
from megarl.rollout.batched import BatchedGeneration
from megarl.rollout.engine import Completion, Request
from megarl.rollout.groups import EpisodeError, Group
from tests.envs.playing import EOS, TOKENIZER, group, play, rules_of

SAMPLING = SamplingConfig(max_new_tokens=4)


class Scripted:
    """Says the next of its lines in every turn, whatever it is asked."""

    weight_version = 7

    def __init__(self, *lines: str) -> None:
        self.lines, self.asked = list(lines), list[Request]()

    def generate(self, requests, sampling, eos_ids, advance=None):
        ids = TOKENIZER(self.lines[min(len(self.lines) - 1, self._turn())], add_special_tokens=False)["input_ids"]
        self.asked += requests
        out = []
        for request in requests:
            said = [*ids, EOS][: request.room]
            reason = "stop" if said[-1] == EOS else "length"
            out.append([Completion(said, [-0.5] * len(said), reason, [[7, len(said)]]) for _ in request.seeds])
        return out

    def _turn(self) -> int:
        return len(self.asked)

    def open(self, sampling, eos_ids, sequences, longest):
        return BatchedGeneration(self.generate, lambda busy: busy, sampling, eos_ids)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def start(uid: str = "train-0-0", prompt: str = "1+1=", seed: int = 0, samples: int = 1) -> Group:
    return group(uid, {"prompt": prompt}, ids(prompt), seed, *[lambda turn: 100 * seed + turn] * samples)


Player = Callable[..., list[Trajectory]]


@pytest.fixture
def player():
    """player(engine, environment, settings, on_error, limits...) -> `play` of groups."""
    hosts: list[Host] = []

    def make(
        engine: Any, kind: type[Environment], settings: Any = None, on_error: str = "fail", **limits: Any
    ) -> Player:
        hosts.append(Host(kind, settings or kind.Settings()))
        return partial(play, engine, rules_of(hosts[-1], on_error, **limits))

    yield make
    for host in hosts:
        host.close()


class Echo(Environment):
    """Says `+<turn>` for two turns; every reward is the turn's number."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        await asyncio.sleep(0)
        return row["prompt"] + str(seed)

    def step(self, action: Action) -> tuple[Any, ...]:
        return f"+{action.turn}", float(action.turn), action.turn == 2, {"said": len(action.text)}


def test_tokens_of_the_environment_are_masked_and_rewards_sit_on_turns(player):
    engine = Scripted("1", "22", "3")
    [trajectory] = player(engine, Echo)([start()], SAMPLING, [EOS])
    expected = [*ids("1"), EOS, *ids("+0"), *ids("22"), EOS, *ids("+1"), *ids("3"), EOS]
    assert trajectory.prompt_ids == ids("1+1=0")
    assert trajectory.token_ids == expected
    assert trajectory.sampled == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert trajectory.logprobs == [-0.5 if drawn else 0.0 for drawn in trajectory.sampled]
    assert trajectory.versions == [[7, len(expected)]]
    assert trajectory.turn_starts == [0, 4, 9]
    assert trajectory.turn_ends == [2, 7, 11]
    assert trajectory.turn_rewards == [0.0, 1.0, 2.0]
    assert (trajectory.ended_by, trajectory.finish_reason, trajectory.info) == ("done", "stop", {"said": 4.0})


def test_a_turn_that_a_stop_string_ended_gets_the_end_token_of_the_template_with_the_answer(player):
    class Talks(Echo):
        def step(self, action: Action) -> tuple[Any, ...]:
            return [{"role": "tool", "content": "1"}], 0.0, action.turn == 1, {}

    class Cut(Scripted):
        """Ends its first turn without an end token."""

        def generate(self, requests, sampling, eos_ids, advance=None):
            [[done]] = super().generate(requests, sampling, eos_ids, advance)
            count = len(done.token_ids) - (len(self.asked) == 1)
            return [[replace(done, token_ids=done.token_ids[:count], logprobs=done.logprobs[:count])]]

    template = "{% for m in messages %}{{ m.content|replace('x', '1')|replace('y', '1') }}<eos>={% endfor %}"
    render = chat_renderer(TOKENIZER, template)
    made = player(Cut("12", "3"), Talks)
    turns = Turns(TOKENIZER, lambda messages: render(messages, Row({}, "here", 0)), [EOS])
    [trajectory] = partial(play, made.args[0], replace(made.args[1], turns=turns))([start()], SAMPLING, [EOS])
    assert trajectory.token_ids == [*ids("12"), EOS, *ids("=1"), EOS, *ids("="), *ids("3"), EOS]
    assert trajectory.sampled[:3] == [True, True, False]


def test_every_turn_begins_with_the_tokens_so_far_and_a_seed_of_its_own(player):
    engine = Scripted("1", "22", "3")
    [trajectory] = player(engine, Echo)([start(seed=3)], SAMPLING, [EOS])
    assert [request.seeds for request in engine.asked] == [[300], [301], [302]]
    assert [request.prompt_ids for request in engine.asked] == [
        trajectory.prompt_ids + trajectory.token_ids[:end] for end in (0, 4, 9)
    ]


def test_samples_of_a_prompt_share_a_request_while_they_are_alike(player):
    engine = Scripted("1")
    player(engine, Echo)([start(seed=1, samples=2), start(seed=2)], SAMPLING, [EOS])
    assert [request.seeds for request in engine.asked[:2]] == [[100, 100], [200]]


@pytest.mark.parametrize(
    ("limits", "turns", "ended_by", "reason"),
    [
        ({"turns": 2}, 2, "turns", "stop"),
        ({"tokens": 5}, 2, "tokens", "length"),
        ({"tokens": 3}, 1, "tokens", "stop"),
    ],
)
def test_limits_end_an_episode_after_a_turn_of_the_policy(player, limits, turns, ended_by, reason):
    [trajectory] = player(Scripted("1"), Echo, **limits)([start()], SAMPLING, [EOS])
    assert (trajectory.turns, trajectory.ended_by, trajectory.finish_reason) == (turns, ended_by, reason)
    assert trajectory.sampled[-1]
    assert len(trajectory.token_ids) <= limits.get("tokens", 40)


class Faulty(Environment):
    """Fails in the way that its prompt says."""

    class Settings(EnvSettings):
        """None."""

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.kind = row["prompt"]
        return "1" * 17 if self.kind == "long" else None

    def step(self, action: Action) -> Any:
        if self.kind == "raises":
            raise ValueError("no such state")
        answers = {
            "nan": Step("+", float("nan")),
            "nothing": Step(),
            "object": Step(observation={"image": 1}),
            "letters": Step("abc"),
            "tuple": (1, 2),
        }
        return answers.get(self.kind, Step(done=True))


REASONS = {
    "raises": r"step \(turn 0\) raised ValueError: no such state .*test_episode_groups.py:\d+",
    "nan": "the reward nan, which is not a finite number",
    "nothing": "no observation or an empty one, but the episode is not done",
    "object": "allowed: text, chat messages, token ids",
    "letters": "no token for 'a', which the environment returned",
    "tuple": r"allowed: Step\(observation, reward, done, info\)",
    "long": "reset returned 17 tokens; data.max_prompt_tokens allows 1 to 16",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_failing_environment_ends_the_run_for_good_and_is_named(player, kind, monkeypatch):
    monkeypatch.setattr("megarl.system.imports._of_user", {__name__})  # as where a recipe names it
    begin = group("train-0-5", {"prompt": kind}, ids("1+1="), 0, lambda turn: turn)
    with pytest.raises(
        EpisodeError, match=rf"sample train-0-5#0 failed[\s\S]*{REASONS[kind]}[\s\S]*env.on_error=mark"
    ) as caught:
        player(Scripted("1"), Faulty)([begin], SAMPLING, [EOS])
    assert caught.value.repeats
    assert caught.value.exit_code == 2, "a mistake of the user, like that of a reward"
    assert str(caught.value).count("  fix: ") == 1


def test_or_it_marks_its_episode_and_nothing_of_that_is_trained_on(player):
    begins = [group(kind, {"prompt": kind}, ids("1+1="), 0, lambda turn: turn) for kind in [*REASONS, "fine"]]
    counted = []
    *bad, good = player(Scripted("1"), Faulty, on_error="mark")(begins, SAMPLING, [EOS], counted.append)
    assert all(t.error and t.ended_by == "error" and not any(t.sampled) and t.token_ids for t in bad)
    assert all(sum(tokens for _, tokens in t.versions) == len(t.token_ids) for t in bad)
    assert (good.error, good.ended_by, good.sampled) == ("", "done", [True, True])
    assert sum(counted) == len(begins)


def test_order_and_company_change_no_episode(player):
    kind, settings = load_environment({"name": f"{Path(__file__).parent / 'guess.py'}:Guess"})
    begins = [start(f"train-0-{i}", seed=i) for i in range(5)]
    together = player(Scripted("4", "5", "6"), kind, settings)(begins, SAMPLING, [EOS])
    backwards = player(Scripted("4", "5", "6"), kind, settings)(begins[::-1], SAMPLING, [EOS])
    assert [t.prompt_ids for t in backwards] == [t.prompt_ids for t in together[::-1]]
    assert (
        together[2].turn_rewards[0]
        == player(Scripted("4"), kind, settings)([begins[2]], SAMPLING, [EOS])[0].turn_rewards[0]
    )


def test_episodes_of_one_turn_are_one_call_of_generate(player):
    from tests.dist import single_process
    from tests.rollout.cases import STOP, build, engine, make_requests, sampled

    single_process()
    embedded, requests = engine(build("qwen3")), make_requests()
    begins = [
        group(
            str(number), {}, request.prompt_ids, 0, *[partial(lambda seed, turn: seed, seed) for seed in request.seeds]
        )
        for number, request in enumerate(requests)
    ]
    played = player(embedded, SingleTurn, tokens=20)(begins, sampled(), STOP)
    drawn = [c for group in embedded.generate(requests, sampled(), STOP) for c in group]
    assert [(t.token_ids, t.logprobs, t.finish_reason) for t in played] == [
        (c.token_ids, c.logprobs, c.finish_reason) for c in drawn
    ]
