"""Episodes of the real package verifiers, which runs in an interpreter of its own without megarl."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.gateway import verifiers
from megarl.gateway.verifiers import rows
from megarl.rollout.groups import EpisodeError
from megarl.system.errors import ConfigError
from tests.gateway.playing import Scripted, episodes_of
from tests.gateway.talking import Talk
from tests.own_packages import interpreter

TASKSETS = Path(__file__).with_name("tasksets")
TASKSET = {"id": "digits-taskset", "first": 3}
CONFIG = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    return interpreter("verifiers==0.4.0")


def played(python, lines, tasks, **env):
    talk = Talk("qwen3")
    settings = {"name": "verifiers", "python": python, "taskset": TASKSET, "config": CONFIG, **env}
    engine, sampling = Scripted(talk.tokenizer, talk.end, *lines), SamplingConfig(max_new_tokens=20)
    room = {"prompt_tokens": 300, "tokens": 300}
    return episodes_of(engine, talk.template, talk.tokenizer, [talk.end], [], tasks, sampling, env=settings, **room)


@pytest.mark.campaign("connectors")
@pytest.mark.timeout(600)
def test_the_package_plays_episodes_whose_tokens_and_rewards_are_those_of_the_run(python, tmp_path):
    tasks = rows(TASKSET, python=python, config=CONFIG, select={"limit": 2})
    assert [row["prompt"] for row in tasks] == ["name 3", "name 4"]
    assert [row["prompt"] for row in rows(TASKSET, "val", python, CONFIG, {"limit": 2}, {"first": 8})] == [
        "name 8",
        "name 9",
    ]
    episodes = played(python, ["1", "1", "3"], tasks)
    assert sorted(sum(episode.turn_rewards) for episode in episodes) == [0.0, 1.0]
    for episode in episodes:
        [lane] = episode.all_lanes
        assert lane.turn_numbers == [0, 1]
        assert episode.info["verifiers/turns"] == 2


@pytest.mark.campaign("connectors")
@pytest.mark.timeout(600)
def test_failures_are_named_and_an_episode_that_a_limit_ends_counts_as_0(python):
    [task] = rows(TASKSET, python=python, config=CONFIG, select={"limit": 1})
    with pytest.raises(EpisodeError, match="the row has no column `verifiers`"):
        played(python, ["3"], [{"prompt": "name 3"}])
    with pytest.raises(ConfigError, match=r"verifiers cannot list the tasks: (?s:.*)no-such"):
        rows("no-such", python=python)
    [episode] = played(python, ["1", "3"], [task], max_calls=1)
    assert sum(episode.turn_rewards) == 0.0
    assert episode.info["refused_calls"] >= 1


def test_an_interpreter_without_the_package_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"kwargs.python: this interpreter has no package (?s:.*)pip install"):
        rows("digits-taskset")
    with pytest.raises(ConfigError, match=r"kwargs.python: the interpreter does not start"):
        rows("digits-taskset", python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"kwargs.python: the interpreter does not start: exit code 1"):
        rows("digits-taskset", python="/bin/false")


@pytest.mark.parametrize(
    ("env", "key"),
    [
        ({"credit": "no_module:fn"}, "env.credit"),
        ({"sandbox": ["no-such-sandbox", "{command}", "{shared}"]}, "env.sandbox"),
        ({"taskset": {}}, "env.taskset"),
    ],
)
def test_what_is_checked_of_every_agent_is_checked_before_the_start(env, key, monkeypatch):
    monkeypatch.setattr(verifiers, "_check_package", lambda python: None)
    with pytest.raises(ConfigError, match=key):
        verifiers.Verifiers.check(verifiers.VerifiersSettings(**{"taskset": "digits-taskset", **env}))


def test_a_taskset_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers, "_ROWS_S", 0.2)
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = -c ] || exec sleep 60\n')
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"verifiers cannot list the tasks: it did not end within 0.2 s"):
        rows("digits-taskset", python=str(tmp_path / "python"))
