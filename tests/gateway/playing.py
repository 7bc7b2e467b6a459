"""Episodes of agents with any engine, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.policies import AgentPolicyConfig
from megarl.config.rollout import SamplingConfig
from megarl.data.image_prompts import ImagePrompts
from megarl.data.rows import Row
from megarl.data.templates import ChatTemplate
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host
from megarl.envs.protocol import Services
from megarl.envs.registry import load_environment
from megarl.rollout.answers import EpisodeLimits
from megarl.rollout.batched import BatchedGeneration
from megarl.rollout.engine import Completion, FinishReason, Request
from megarl.rollout.stop_strings import StopStrings
from tests.envs.playing import group, play, rules_of


class Scripted:
    """Answers each call with the next of its lines, and the last one for ever."""

    weight_version = 7

    def __init__(self, tokenizer: Any, end: int, *lines: str) -> None:
        self.tokenizer, self.end, self.lines, self.asked = tokenizer, end, list(lines), list[Request]()
        self.turns = 0

    def generate(self, requests, sampling, eos_ids, advance=None):
        self.asked += requests
        return [self._turns(request) for request in requests]

    def _turns(self, request: Request) -> list[Completion]:
        """Answer the calls of a round in the order of their seeds, which is that of their arrival."""
        turns = {seed: self._turn(request.room) for seed in sorted(request.seeds)}
        return [turns[seed] for seed in request.seeds]

    def _turn(self, room: int) -> Completion:
        line = self.lines[min(len(self.lines) - 1, self.turns)]
        self.turns += 1
        tokens = [*self.tokenizer(line, add_special_tokens=False)["input_ids"], self.end][:room]
        return Completion(tokens, [-0.5 - k for k in range(len(tokens))], _reason(tokens, self.end), [[7, len(tokens)]])

    def open(self, sampling, eos_ids, sequences, longest):
        return BatchedGeneration(self.generate, lambda busy: busy, sampling, eos_ids)


def _reason(tokens: list[int], end: int) -> FinishReason:
    return "stop" if tokens[-1] == end else "length"


def episodes_of(
    engine: Any,
    template: ChatTemplate,
    tokenizer: Any,
    ends: list[int],
    agent: tuple[Path, str] | list[str],
    rows: list[dict[str, Any]],
    sampling: SamplingConfig,
    on_error: str = "fail",
    env: dict[str, Any] | None = None,
    policies: dict[str, AgentPolicyConfig] | None = None,
    images: ImagePrompts | None = None,
    **limits: Any,
) -> list[Trajectory]:
    """Play an episode of `agent`, a file and a function in it or a command, for each of `rows`.

    Args:
        agent: empty: `env` is an environment by its name.
    """
    program = (
        {} if not agent else {"command": agent} if isinstance(agent, list) else {"function": "{}:{}".format(*agent)}
    )
    kind, settings = load_environment({"name": "agent", **program, **(env or {})})
    most = {"prompt_tokens": 12, "tokens": 40, "turns": 8, "seconds": None, **limits}
    turns = Turns(tokenizer, lambda messages: template.write(messages, Row({}, "here", 0)), ends)
    window = most["prompt_tokens"], most["tokens"], most["turns"]
    host = Host(kind, settings, None, images, Services(template, turns, tokenizer, *window, policies or {}, images))
    try:
        rules = replace(
            rules_of(host, on_error),
            turns=turns,
            texts=lambda ids: (tokenizer.batch_decode(ids, skip_special_tokens=True), tokenizer.batch_decode(ids)),
            stops=lambda strings: StopStrings(strings, tokenizer),
            limits=EpisodeLimits(**most),
            may_drop_turns=kind.may_drop_turns,
            has_simultaneous_turns=kind.has_simultaneous_turns,
        )
        groups = [group(f"train-0-{n}", row, [1], n, lambda k, n=n: 100 * n + k) for n, row in enumerate(rows)]
        return play(engine, rules, groups, sampling, [ends[0]])
    finally:
        host.close()
