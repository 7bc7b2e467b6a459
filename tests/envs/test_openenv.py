"""Episodes of environments that servers of the real package openenv hold."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from pydantic import ValidationError

from megarl.config.rollout import SamplingConfig
from megarl.envs.openenv import OpenEnvSettings
from megarl.rollout.groups import EpisodeError
from tests.gateway.playing import Scripted, episodes_of
from tests.gateway.talking import Talk
from tests.own_packages import interpreter

pytestmark = [pytest.mark.campaign("connectors"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["openenv-core==0.3.0", "openenv==0.10.0"])
def url(request):
    """A server with room for two episodes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([interpreter(request.param), str(server), str(port), "2"])
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert process.poll() is None
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def played(url, lines, rows, on_error="fail", **env):
    talk = Talk("qwen3")
    engine = Scripted(talk.tokenizer, talk.end, *lines)
    settings = {"name": "openenv", "url": url, **env}
    room = {"prompt_tokens": 900, "tokens": 900}
    sampling = SamplingConfig(max_new_tokens=60)
    return talk, episodes_of(
        engine, talk.template, talk.tokenizer, [talk.end], [], rows, sampling, on_error, settings, **room
    )


def test_an_episode_is_played_with_json(url):
    lines = ["<action>[1]</action>", '<action>{"number": "x"}</action>', *['<action>{"number": 2}</action>'] * 2]
    talk, [episode] = played(url, lines, [{"prompt": "1", "seed": 4}], observation="text", invalid_reward=-1.0)
    prompt = talk.tokenizer.decode(episode.prompt_ids)
    assert "up to 4" in prompt
    assert '"number"' in prompt  # the schema of the action
    assert episode.turn_rewards == [-1.0, -1.0, 0.0, 1.0]
    assert (episode.ended_by, episode.info["invalid"]) == ("done", 2.0)
    assert "This is not a valid action." in talk.tokenizer.decode(episode.token_ids)


def test_a_field_and_further_arguments_of_reset(url):
    rows = [{"prompt": "1", "reset": {"goal": 6}}]
    talk, [episode] = played(url, ["3", "3"], rows, tag=None, field="number", instructions="", reset={"goal": 5})
    assert '{"text": "up to 6", "total": 0}' in talk.tokenizer.decode(episode.prompt_ids)
    assert '{"text": "3", "total": 3}' in talk.tokenizer.decode(episode.token_ids)
    assert episode.turn_rewards == [0.0, 1.0]


@pytest.mark.parametrize("running", [1, 2, 4])
def test_more_episodes_than_the_server_has_room_for_wait(url, running):
    rows = [{"prompt": str(seed), "seed": 3} for seed in range(6)]
    _, episodes = played(url, ["3"], rows, tag=None, field="number", max_running=running)
    assert [episode.turn_rewards for episode in episodes] == [[1.0]] * 6


def test_failures_are_named(url):
    rows = [{"prompt": "1", "seed": 4}]
    with pytest.raises(EpisodeError, match="bad luck"):
        played(url, ["13"], rows, tag=None, field="number")
    with pytest.raises(EpisodeError, match=r"has no field 'txt' \(env.observation\); it has .*text, total"):
        played(url, ["13"], rows, tag=None, field="number", observation="txt")
    with pytest.raises(EpisodeError, match="cannot be reached"):
        played("http://127.0.0.1:9", ["13"], rows)
    with pytest.raises(ValidationError, match="must begin with http"):
        OpenEnvSettings(url="localhost:8000")
