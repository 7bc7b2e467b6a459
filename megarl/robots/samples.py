"""Plays episodes from start states, and turns them into samples and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.batch import Batch, Jagged
from megarl.robots.rollout.episode import Episode, episode_values
from megarl.robots.rollout.play import EpisodeStart, PlayCounts

if TYPE_CHECKING:
    from megarl.robots.setup import Robots
    from megarl.robots.simulators.protocol import Recording
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole


def play_robots(
    c: StepContext,
    robots: Robots,
    rollout: RolloutRole,
    prompts: Batch,
    sampling: SamplingConfig,
    advance: Callable[[int], None],
    record: Recording | None = None,
) -> Batch:
    """Play `sampling.n` episodes for each of B prompts; return B * `sampling.n` samples with EPISODE_FIELDS.

    Args:
        advance: is called with the number of newly finished episodes.
        record: which clips the simulators record; None: no clips.
    """
    assert robots.player is not None, "`take_policy` comes first"
    assert robots.policy is not None, "with the player"
    robots.policy.temperature = sampling.temperature
    starts = [
        EpisodeStart(f"{uid}#{i}", row["task"], row["trial"], ids.tolist(), partial(c.seeds.sample, uid, i))
        for ids, uid, row in zip(prompts["prompt_ids"].unbind(), prompts["uid"], prompts["row"], strict=True)
        for i in range(sampling.n)
    ]
    episodes, counts = robots.player.play(starts, advance, record)
    robots.counts = counts
    values, samples = episode_values(episodes, rollout.engine.weight_version), prompts.repeat(sampling.n)
    ends, texts = values["turn_ends"], zip(episodes, samples["prompt_text"], strict=True)
    rewards = ends.values.new_zeros(len(ends.values)).float()
    rewards[ends.offsets[1:] - 1] = values["success"].float()
    values |= {
        "prompt_ids": Jagged.from_list([episode.prompt_ids for episode in episodes], dtype=torch.int64),
        "prompt_text": [episode.instruction or text for episode, text in texts],
        "sample_id": [start.sample_id for start in starts],
        "response_text": [_told(episode.success, episode.finish_step, episode.failure) for episode in episodes],
        "finish_reason": [_end(episode) for episode in episodes],
        "turn_rewards": Jagged(rewards, ends.offsets),
    }
    return samples.with_values(values)


def _end(episode: Episode) -> str:
    if episode.failure:
        return "abort"
    cut = episode.finish_step >= episode.spec.max_steps and not episode.success
    return "length" if cut else "stop"


def _told(success: bool, steps: int, failure: str) -> str:
    if failure:
        return f"not played: {failure}"
    return f"{'success' if success else 'no success'} after {steps} environment steps"


def record_robots(c: StepContext, samples: Batch, counts: PlayCounts) -> None:
    """Record the metrics `env/...` of samples from `play_robots`; failed simulators only count as errors."""
    m = c.metrics
    m.sum("env/errors", sum(counts.failures.values()))
    for kind, number in counts.failures.items():
        m.sum(f"env/errors/{kind}", number)
    m.sum("env/steps/total", counts.steps)
    m.sum("env/calls/total", counts.calls)
    m.max("timing_s/act", counts.act_s)
    m.max("timing_s/wait_for_simulators", counts.wait_s)
    m.mean("perf/wait_for_simulators", counts.wait_s, max(counts.wait_s + counts.act_s, 1e-9))
    played = samples.select([place for place, error in enumerate(samples["env_error"]) if not error])
    count = len(played)
    if not count:
        return
    m.mean("env/success", float(played["success"].sum()), count)
    m.mean("env/steps/mean", float(played["finish_step"].sum()), count)
    m.mean("env/calls/mean", float(played["turn_ends"].lengths.sum()), count)
    m.max("env/calls/max", float(played["turn_ends"].lengths.max()))
