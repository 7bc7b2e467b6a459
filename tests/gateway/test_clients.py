"""Clients that nobody here wrote, and what the engine sampled for them."""

from __future__ import annotations

import json
from pathlib import Path

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


def played(name: str, lines: list[str], tmp_path: Path, engine=None, talk=None, **sampling):
    """The episode of an agent, and what it received."""
    talk, file = talk or Talk("qwen3"), tmp_path / "received"
    engine = engine or Scripted(talk.tokenizer, talk.end, *lines)
    settings = SamplingConfig(**{"max_new_tokens": 200, **sampling})
    ends, rows = [talk.end, *settings.stop_token_ids], [{"prompt": "hello", "file": str(file)}]
    how = {"env": {"history": "exact"}, **LIMITS}
    [episode] = episodes_of(engine, talk.template, talk.tokenizer, ends, (AGENTS, name), rows, settings, **how)
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


def test_what_a_client_receives_is_what_the_embedded_engine_sampled(single_process, tmp_path):
    """Tokens and log-probs bit for bit; those of a training forward pass to rounding, in every sequence."""
    from tests.rollout.cases import build, engine, full_forward

    talk = Talk("qwen3")
    chunks = build("qwen3", hf={"vocab_size": 600, "max_position_embeddings": 1024})
    ends = list(range(100, 600, 3))  # a random model meets one soon
    episode, received = played("talks", [], tmp_path, engine(chunks), talk, stop_token_ids=ends)
    turns = turns_of(episode)
    assert [turns[number] for number in range(4)] == [tuple(entry) for entry in received]
    assert sorted(lane.turn_numbers for lane in episode.all_lanes) == [[0, 1, 2], [0, 1, 3]]
    for lane in episode.all_lanes:
        again = full_forward(chunks[0], lane.prompt_ids, lane.token_ids)
        sampled = torch.tensor(lane.sampled)
        torch.testing.assert_close(again[sampled], torch.tensor(lane.logprobs)[sampled], atol=2e-5, rtol=0)
