"""Episodes on the only rank of a replica, as a synchronous step plays them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.data.tokenizer import character_tokenizer
from megarl.data.trajectory import Trajectory
from megarl.data.turns import Turns
from megarl.envs.host import Host
from megarl.rollout.answers import EpisodeLimits, EpisodeRules
from megarl.rollout.groups import Group, GroupGenerator

EOS = 2
TOKENIZER = character_tokenizer("0123456789+-=")


def texts(rows: list[list[int]]) -> tuple[list[str], list[str]]:
    return TOKENIZER.batch_decode(rows, skip_special_tokens=True), TOKENIZER.batch_decode(rows)


def rules_of(
    host: Host, on_error: str = "fail", *, end: int = EOS, replayable: bool = False, **limits: Any
) -> EpisodeRules:
    known = {"turns": 8, "prompt_tokens": 16, "tokens": 40, "seconds": None, **limits}
    share = lambda value: json.loads(json.dumps(value))  # noqa: E731
    turns = Turns(TOKENIZER, None, [end])
    return EpisodeRules(host, turns, texts, share, EpisodeLimits(**known), on_error, replayable)


def group(uid: str, row: dict[str, Any], prompt: list[int], seed: int, *turn_seeds: Callable[[int], int]) -> Group:
    """One whose number is that of nothing yet: `play` counts them."""
    return Group(0, prompt, turn_seeds, uid, row, seed)


def play(
    engine: Any,
    rules: EpisodeRules,
    groups: Sequence[Group],
    sampling: SamplingConfig,
    eos: Sequence[int],
    advance: Callable[[int], None] = lambda count: None,
) -> list[Trajectory]:
    """All samples of `groups`, in their order."""
    slots, longest = sum(len(one.seeds) for one in groups), rules.limits.prompt_tokens + rules.limits.tokens
    with closing(GroupGenerator(engine, sampling, eos, slots, longest, rules)) as made:
        for number, one in enumerate(groups):
            made.add(Group(number, one.prompt_ids, one.seeds, one.uid, one.row, one.env_seed))
        return [trajectory for samples in made.finish(advance) for trajectory in samples]
