"""From prompts to groups of trajectories, and from these to the samples of a batch; the environment of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import env_section
from megarl.data.render import chat_of
from megarl.data.rows import Row
from megarl.data.trajectory import Trajectory, add_fields
from megarl.data.turns import Turns
from megarl.envs.host import Host
from megarl.envs.registry import check_longest, load_environment
from megarl.rollout.answers import EpisodeLimits, EpisodeRules
from megarl.rollout.groups import Group, Groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole
    from megarl.training.parallel import Layout


@dataclass(frozen=True)
class Episodes:
    """The environment of a run on one rank.

    Attributes:
        scores: it gives the rewards; else the recipe's reward function does.
        replayable: an episode may be played again from its recorded turns.
        tools: JSON schemas that prompts announce.
        host: plays the environments; only on the first rank of a replica.
    """

    scores: bool
    replayable: bool
    tools: list[dict[str, Any]]
    turns: Turns
    host: Host | None

    def close(self) -> None:
        """End what the environments use."""
        if self.host is not None:
            self.host.close()


def build_episodes(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int], layout: Layout
) -> Episodes | None:
    """Make the environments that the section `env` asks for; None for one prompt and one response.

    Args:
        eos_ids: tokens that end a turn, in addition to `rollout.sampling.stop_token_ids`.

    Raises:
        ConfigError: the environment cannot be found or loaded, or does not take its keys.
    """
    if not config.has_turns:
        return None
    kind, settings = load_environment(config.env)
    answer_s = config.cluster.timeout_s / 2
    check_longest(settings.longest_s, answer_s)
    # One rank of all loads the tools: they may be programs to start, and all prompts must announce the same.
    tools = layout.world.broadcast_json(kind.tools(settings) if layout.world.rank == 0 else None)
    data = config.data
    render = None
    written = chat_of(data, tokenizer, tools)
    if written is not None:
        render = lambda messages: written.observed(messages, Row({}, "messages of the environment", 0))  # noqa: E731
    turns = Turns(tokenizer, render, [*eos_ids, *config.rollout.sampling.stop_token_ids])
    host = Host(kind, settings, answer_s) if layout.is_lead else None
    return Episodes(kind.scores, kind.replayable, tools, turns, host)


def open_groups(c: StepContext, rollout: RolloutRole, sampling: SamplingConfig, slots: int) -> Groups:
    """Make the producer of this run's samples, up to `slots` at a time."""
    config, episodes, rules = c.config, rollout.episodes, None
    if episodes is not None:
        limits, prompt_tokens = config.rollout.limits, config.data.max_prompt_tokens
        rules = EpisodeRules(
            episodes.host,
            episodes.turns,
            lambda ids: (rollout.decode(ids), rollout.tokenizer.batch_decode(ids)),
            c.layout.mp_group.broadcast_json,
            EpisodeLimits(limits.turns, prompt_tokens, limits.response_tokens(sampling), limits.seconds),
            env_section(config.env)[1],
            episodes.replayable,
        )
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    return Groups(rollout.engine, sampling, rollout.eos_ids, slots, longest, rules)


def groups_of_prompts(c: StepContext, prompts: Batch, n: int, numbers: Iterable[int]) -> Iterator[Group]:
    """Groups of `n` samples of `prompts`, under these numbers."""
    columns = ("prompt_text", "answer", "data_source", "row")
    told = zip(*(prompts[name] for name in columns), strict=True) if c.config.has_turns else repeat(None)
    for number, ids, uid, about in zip(numbers, prompts["prompt_ids"].unbind(), prompts["uid"], told, strict=False):
        seeds = [partial(c.seeds.sample, uid, sample) for sample in range(n)]
        if about is None:
            yield Group(number, ids.tolist(), seeds, uid)
            continue
        text, answer, source, row = about
        of_row = {**row, "prompt": text, "answer": answer, "data_source": source}
        yield Group(number, ids.tolist(), seeds, uid, of_row, c.seeds.env(uid))


def samples_of(rollout: RolloutRole, prompts: Batch, groups: Sequence[Sequence[Trajectory]]) -> Batch:
    """Return the samples of `prompts`, equally many for each, with the fields of samples, and of turns of episodes.

    Raises:
        RolloutError: a log-prob is not finite.
    """
    n = len(groups[0]) if groups else 1
    trajectories = [trajectory for group in groups for trajectory in group]
    samples = prompts.repeat(n)
    if rollout.episodes is not None and trajectories:
        samples.set("prompt_text", _prompt_texts(rollout.tokenizer, samples, trajectories))
    add_fields(samples, trajectories, by_turn=rollout.episodes is not None)
    samples.set("sample_id", [f"{uid}#{i % n}" for i, uid in enumerate(samples["uid"])])
    samples.set("response_text", rollout.decode([t.last_turn for t in trajectories]))
    if rollout.episodes is not None:
        samples.set("transcript", rollout.decode([t.token_ids for t in trajectories]))
    return samples


def _prompt_texts(tokenizer: PreTrainedTokenizerBase, samples: Batch, trajectories: list[Trajectory]) -> list[str]:
    """Return the prompts of the data as they were, and first observations of environments as text."""
    given = [ids.tolist() for ids in samples["prompt_ids"].unbind()]
    return [
        text if t.prompt_ids == ids else tokenizer.decode(t.prompt_ids)
        for text, ids, t in zip(samples["prompt_text"], given, trajectories, strict=True)
    ]


def record_episodes(c: StepContext, samples: Batch) -> None:
    """Metrics `env/...` of episodes. Those whose environment failed are only counted."""
    m, good = c.metrics, [place for place, error in enumerate(samples["env_error"]) if not error]
    m.sum("env/errors", len(samples) - len(good))
    if not good:
        return
    turns = samples["turn_ends"].lengths[good]
    m.mean("env/turns/mean", float(turns.sum()), len(good))
    m.max("env/turns/max", float(turns.max()))
    lengths = samples["response_ids"].lengths[good]
    m.mean("env/tokens/mean", float(lengths.sum()), len(good))
    m.max("env/tokens/max", float(lengths.max()))
    ends = [(samples["ended_by"][place], samples["finish_reason"][place]) for place in good]
    m.mean("env/cut", sum(by != "done" or reason != "stop" for by, reason in ends), len(good))
    infos = [samples["env_info"][place] for place in good]
    for name in sorted({name for info in infos for name in info}):
        m.mean(f"env/{name}", sum(info.get(name, 0.0) for info in infos), len(good))
