"""Clients that nobody here wrote, and what the engine sampled for them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.rollout import SamplingConfig
from tests.gateway.playing import Scripted, episodes_of
from tests.gateway.talking import Talk

AGENTS = Path(__file__).with_name("sdk_agents.py")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LIMITS = {"prompt_tokens": 300, "tokens": 300, "turns": 12}


def turns_of(episode) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs of every turn, by number."""
    return {
        number: (lane.token_ids[start:end], lane.logprobs[start:end])
        for lane in episode.all_lanes
        for number, start, end in zip(lane.turn_numbers, lane.turn_starts, lane.turn_ends, strict=True)
    }


def played(name: str | list[str], lines: list[str], tmp_path: Path, engine=None, talk=None, **sampling):
    """The episode of an agent, and what it received."""
    talk, file = talk or Talk("qwen3"), tmp_path / "received"
    engine = engine or Scripted(talk.tokenizer, talk.end, *lines)
    settings = SamplingConfig(**{"max_new_tokens": 200, **sampling})
    ends, rows = [talk.end, *settings.stop_token_ids], [{"prompt": "hello", "file": str(file)}]
    how = {"env": {"history": "exact"}, **LIMITS}
    agent = name if isinstance(name, list) else (AGENTS, name)
    [episode] = episodes_of(engine, talk.template, talk.tokenizer, ends, agent, rows, settings, **how)
    return episode, json.loads(file.read_text())


def test_the_package_of_openai_plays_an_episode(tmp_path):
    lines = [CALL, "yes it is", "no", "kind", "the answer is", "add"]
    episode, received = played("by_openai", lines, tmp_path)
    turns = turns_of(episode)
    assert len(received) == len(turns) == 6
    for number, (tokens, logprobs) in turns.items():
        assert received[number][0] == tokens
        assert received[number][1] in (None, logprobs)
    assert [lane.turn_numbers for lane in episode.all_lanes] == [[5], [0, 1, 3, 4], [0, 1, 2]]
    assert {name: n for name, n in episode.info.items() if n} == {
        "calls": 6,
        "branches/sibling": 1,
        "branches/plain": 1,
        "overflows": 1,
    }


@pytest.mark.parametrize(("agent", "thoughts"), [("by_anthropic", "<think>\nso\n</think>\n\n"), ("by_responses", "")])
def test_other_apis_play_an_episode(agent, thoughts, tmp_path):
    episode, received = played(agent, [thoughts + CALL, "yes it is", "the answer is no"], tmp_path)
    turns = turns_of(episode)
    assert received == [len(turns[number][0]) for number in range(3)]
    assert [lane.turn_numbers for lane in episode.all_lanes] == [[0, 1, 2]]


def agent_for_node(tmp_path: Path) -> list[str]:
    """Return the command of the agent with the package of OpenAI for node, which is installed at the first call."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl" / "node-openai"
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "node_modules" / "openai").is_dir():
        done = subprocess.run(["npm", "install", "--no-audit", "openai@6"], cwd=cache, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install the package openai: {done.stderr[-500:]}")
    (tmp_path / "node_modules").symlink_to(cache / "node_modules")
    return ["node", str(shutil.copy(AGENTS.with_name("agent.mjs"), tmp_path))]


@pytest.mark.campaign("agents")
@pytest.mark.timeout(300)
def test_the_package_of_openai_for_node_plays_an_episode(tmp_path):
    episode, received = played(agent_for_node(tmp_path), [CALL, "yes it is", "no", "kind"], tmp_path)
    turns = turns_of(episode)
    assert [turns[number] for number in range(4)] == [tuple(entry) for entry in received]
    assert [lane.turn_numbers for lane in episode.all_lanes] == [[0, 1, 3], [0, 1, 2]]
    assert episode.info["branches/sibling"] == 1


def teach(folder: Path, episode) -> None:
    """Save a tiny model that was taught the turns of an episode."""
    from tests.models.tiny import tiny_hf

    model = tiny_hf("qwen3", vocab_size=352, max_position_embeddings=1024, num_hidden_layers=2, pad_token_id=None)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = [
        (torch.tensor([*lane.prompt_ids, *lane.token_ids]), [False] * len(lane.prompt_ids) + lane.sampled)
        for lane in episode.all_lanes
    ]
    for _ in range(400):
        losses = []
        for ids, sampled in rows:
            logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            losses.append(-logps[torch.tensor(sampled[1:])].mean())
        if max(loss.item() for loss in losses) < 2e-3:
            break
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    model.eval().save_pretrained(folder)


@contextlib.contextmanager
def embedded_engine(chunks, folder: Path, heard: list[Any], patch: pytest.MonkeyPatch):
    """The embedded engine; `heard` is extended by the tokens and log-probs of every turn."""
    from megarl.rollout.batched import BatchedGeneration
    from megarl.rollout.embedded.turns import TurnSession
    from tests.rollout.cases import engine

    def recorded(wait):
        def waiting(self, enough=None):
            done = wait(self, enough)
            heard.extend((turn.token_ids, turn.logprobs) for turn in done.values())
            return done

        return waiting

    for kind in (TurnSession, BatchedGeneration):
        patch.setattr(kind, "wait", recorded(kind.wait))
    yield engine(chunks)


@contextlib.contextmanager
def served_engine(chunks, folder: Path, heard: list[Any], patch: pytest.MonkeyPatch):
    """A real SGLang server; `heard` is extended by what it answers."""
    from megarl.config.sglang import SGLangConfig
    from megarl.models.hf import encoder_of
    from megarl.rollout.sglang.client import Dispatch
    from megarl.rollout.sglang.images import keeping_sizes
    from tests.rollout import servers
    from tests.rollout.forked import forked_servers

    post = Dispatch._post

    async def posting(self, server, payload):
        body = await post(self, server, payload)
        logprobs = [entry[0] for entry in body["meta_info"]["output_token_logprobs"]]
        heard.append((body["output_ids"], logprobs))
        return body

    patch.setattr(Dispatch, "_post", posting)
    arguments = keeping_sizes(SGLangConfig(), encoder_of(chunks[0].hf_config)).extra_args
    with forked_servers(), servers.start(folder.parent, folder, extra_args=arguments) as fleet:
        yield servers.engine(fleet)


@pytest.mark.campaign("agents")  # the suite has it with images
def test_what_a_client_receives_is_what_the_embedded_engine_sampled(single_process, tmp_path, monkeypatch):
    """Tokens and log-probs bit for bit; those of a training forward pass to rounding, in every sequence."""
    from tests.rollout.cases import build

    talk, heard = Talk("qwen3"), list[Any]()
    chunks = build("qwen3", hf={"vocab_size": 600, "max_position_embeddings": 1024})
    ends = list(range(100, 600, 3))  # a random model meets one soon
    with embedded_engine(chunks, tmp_path, heard, monkeypatch) as engine:
        episode, received = played("talks", [], tmp_path, engine, talk, stop_token_ids=ends)
    turns = turns_of(episode)
    assert [turns[number] for number in range(4)] == [tuple(entry) for entry in received] == heard
    assert sorted(lane.turn_numbers for lane in episode.all_lanes) == [[0, 1, 2], [0, 1, 3]]
    check_logprobs(chunks[0], episode)


def check_logprobs(chunk, episode) -> None:
    """Those of a training forward pass are equal to rounding, in every sequence of the episode."""
    from tests.rollout.cases import full_forward

    assert min(min(lane.logprobs) for lane in episode.all_lanes) < -0.5  # not all tokens are certain
    for lane in episode.all_lanes:
        again = full_forward(chunk, lane.prompt_ids, lane.token_ids)
        sampled = torch.tensor(lane.sampled)
        # float32 on both sides, other kernels
        torch.testing.assert_close(again[sampled], torch.tensor(lane.logprobs)[sampled], atol=2e-5, rtol=0)


ENGINES = [
    pytest.param(embedded_engine, id="embedded"),
    pytest.param(
        served_engine,
        id="sglang",
        marks=[pytest.mark.campaign("agents"), pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(300)],
    ),
]


@pytest.mark.parametrize("open_engine", ENGINES)
def test_the_generation_of_a_client_that_leaves_is_aborted(single_process, open_engine, tmp_path, monkeypatch):
    from tests.models.tiny import build_tiny, save_tiny

    monkeypatch.setattr("megarl.gateway.session._ABANDONED_S", 0.1)
    talk, room = Talk("qwen3"), 3000
    save_tiny(tmp_path / "model", "qwen3", vocab_size=352, max_position_embeddings=4096, num_hidden_layers=1)
    chunks, rows = build_tiny(tmp_path / "model"), [{"prompt": "hello"}]
    sampling, agent = SamplingConfig(max_new_tokens=room, ignore_eos=True), (AGENTS.with_name("agents.py"), "leaves")
    limits = {"prompt_tokens": 300, "tokens": room}
    with open_engine(chunks, tmp_path / "model", [], monkeypatch) as engine:
        [episode] = episodes_of(engine, talk.template, talk.tokenizer, [talk.end], agent, rows, sampling, **limits)
    turns = turns_of(episode)
    assert len(turns[0][0]) < room
    assert len(turns[1][0]) == 2
    assert (episode.ended_by, episode.info["undelivered"], episode.info["timeouts"]) == ("done", 1, 0)
    assert sum(map(sum, (lane.sampled for lane in episode.all_lanes))) == 2  # only the reply that arrived is trained on


@pytest.mark.campaign("agents")
@pytest.mark.parametrize("open_engine", ENGINES)
@pytest.mark.timeout(300)
def test_tool_episodes_of_both_packages_are_recorded_as_sampled(single_process, open_engine, tmp_path, monkeypatch):
    """A model that was taught a call of a tool plays with the packages of OpenAI and Anthropic."""
    from tests.models.tiny import build_tiny

    talk, heard = Talk("qwen3"), list[Any]()
    told, _ = played("adds_by_openai", [CALL, "yes it is", "no", "kind"], tmp_path)
    teach(tmp_path / "model", told.up_to(1))
    [chunk] = build_tiny(tmp_path / "model")
    with open_engine([chunk], tmp_path / "model", heard, monkeypatch) as engine:
        for name in ("adds_by_openai", "adds_by_anthropic"):
            episode, received = played(name, [], tmp_path, engine, talk, max_new_tokens=80)
            turns = [turns_of(episode)[number] for number in range(4)]
            assert sorted(lane.turn_numbers for lane in episode.all_lanes) == [[0, 1, 2], [0, 1, 3]]
            assert turns == heard
            if name == "adds_by_openai":
                assert turns == [tuple(entry) for entry in received]
            else:
                texts = [talk.tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in turns]
                assert received == [[len(turns[0][0]), "add"], *([len(turns[n][0]), texts[n]] for n in (1, 2, 3))]
            check_logprobs(chunk, episode)
            heard.clear()


@pytest.mark.campaign("agents")
@pytest.mark.parametrize("open_engine", ENGINES)
@pytest.mark.timeout(300)
def test_a_tool_episode_of_the_package_for_node_is_recorded_as_sampled(
    single_process, open_engine, tmp_path, monkeypatch
):
    """The last two turns are the attempts of one request, which are generated side by side and end in any order."""
    from tests.models.tiny import build_tiny

    agent, talk, heard = agent_for_node(tmp_path), Talk("qwen3"), list[Any]()
    told, _ = played(agent, [CALL, "yes it is", "no", "kind"], tmp_path, talk=talk)
    teach(tmp_path / "model", told.up_to(1))
    [chunk] = build_tiny(tmp_path / "model")
    with open_engine([chunk], tmp_path / "model", heard, monkeypatch) as engine:
        episode, received = played(agent, [], tmp_path, engine, talk, max_new_tokens=80)
    turns = [turns_of(episode)[number] for number in range(4)]
    assert sorted(lane.turn_numbers for lane in episode.all_lanes) == [[0, 1, 2], [0, 1, 3]]
    assert turns == [tuple(entry) for entry in received] == [*heard[:2], *turns[2:]]
    assert sorted(heard[2:]) == sorted(turns[2:])
    check_logprobs(chunk, episode)
