"""Builds prompt groups for the rollout engine and samples from the trajectories that it returns, for text tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import torch

from megarl.config.rollout import SamplingConfig, env_section
from megarl.data.batch import Batch, Jagged
from megarl.data.fields import GRIDS, PATCHES
from megarl.data.image_set import STILLS, image_sets, pil_images
from megarl.data.lanes import EPISODE, LANE, SHARE, UNSAMPLED, leads
from megarl.data.policies import POLICY, parts_of, places_of, whole_episode
from megarl.data.trajectory import Trajectory, token_shares, trajectory_values
from megarl.rollout.answers import EpisodeLimits, EpisodeRules
from megarl.rollout.groups import Group, GroupGenerator
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import MegarlError, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole
    from megarl.system.metrics import Metrics


# -- text ------------------------------------------------------------------------------------------------------------


def open_groups(
    c: StepContext, rollout: RolloutRole, sampling: SamplingConfig, slots: int, *, training: bool
) -> GroupGenerator:
    """Open the generator of prompt groups, with up to `slots` samples in flight.

    Args:
        training: whether the samples are trained on, so that several policies have their own sampling.
    """
    config, episodes, rules = c.config, rollout.episodes, None
    strings = StopStrings.of(sampling, rollout.tokenizer)
    if episodes is not None:
        limits, prompt_tokens, images = config.rollout.limits, config.data.max_prompt_tokens, episodes.images
        rules = EpisodeRules(
            episodes.host,
            episodes.turns,
            lambda ids: (_turn_texts(rollout, sampling, ids), rollout.tokenizer.batch_decode(ids)),
            c.layout.mp_group.broadcast_json,
            EpisodeLimits(
                limits.turns,
                prompt_tokens,
                limits.response_tokens(sampling),
                limits.seconds,
                None if images is None else images.limit,
                None if images is None else images.token,
            ),
            env_section(config.env)[1],
            episodes.replayable,
            images,
            episodes.bodies,
            lambda strings: StopStrings(strings, rollout.tokenizer),
            episodes.may_drop_turns,
            episodes.has_simultaneous_turns,
        )
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    engine = (training and rollout.training_engine) or rollout.engine
    return GroupGenerator(engine, sampling, rollout.eos_ids, slots, longest, rules, strings)


def groups_of_prompts(c: StepContext, prompts: Batch, n: int, numbers: Iterable[int]) -> Iterator[Group]:
    """Yield a prompt group of `n` samples for each of `prompts`, numbered by `numbers`."""
    columns = ("prompt_text", "answer", "data_source", "row")
    contexts = zip(*(prompts[name] for name in columns), strict=True) if c.config.has_turns else repeat(None)
    sets = repeat(None, len(prompts)) if c.config.data.image_key is None else image_sets(prompts)
    given = zip(prompts["prompt_ids"].unbind(), prompts["uid"], sets, strict=True)
    for number, (ids, uid, images), context in zip(numbers, given, contexts, strict=False):
        seeds = [partial(c.seeds.sample, uid, sample) for sample in range(n)]
        if context is None:
            yield Group(number, ids.tolist(), seeds, uid, images=images)
            continue
        text, answer, source, row = context
        prompt = row["prompt"] if c.config.has_lanes else text
        of_row = {**row, "prompt": prompt, "answer": answer, "data_source": source}
        if c.config.data.image_key is not None:
            of_row["images"] = [] if images is None else pil_images(images)
        yield Group(number, ids.tolist(), seeds, uid, of_row, c.seeds.env(uid), images)


def samples_of(
    rollout: RolloutRole,
    prompts: Batch,
    groups: Sequence[Sequence[Trajectory]],
    sampling: SamplingConfig,
    policies: Sequence[str] = (),
) -> Batch:
    """Build samples with all their fields from `groups`, the n trajectories of each of B prompts: B * n, and more where
    an episode has several sequences.

    Args:
        policies: names of the run's policies; empty: the run has only one.
    """
    parts = [
        (place, part)
        for place, (uid, group) in enumerate(zip(prompts["uid"], groups, strict=True))
        for k, episode in enumerate(group)
        for part in parts_of(episode, f"{uid}#{k}", policies)
    ]
    rows = [(place, part, lane, row) for place, part in parts for lane, row in enumerate(part.rows)]
    trajectories = [row for *_, row in rows]
    samples, by_turn = prompts.select([place for place, *_ in rows]), rollout.episodes is not None
    width = samples[PATCHES].values.shape[1] if by_turn and PATCHES in samples.names() else None
    bodies = rollout.episodes is not None and rollout.episodes.bodies
    clips = width is not None and samples[GRIDS].values.shape[1] > STILLS
    forms: dict[str, Any] = {"patch_values": width, "clips": clips, "bodies": bodies, "routes": rollout.routes}
    forms["kept"] = rollout.keeps_tokens and sampling.is_bounded
    values = trajectory_values(trajectories, by_turn=by_turn, **forms) | {
        "sample_id": [part.name + f".{lane}" * (lane > 0) for _, part, lane, _ in rows],
        "response_text": _turn_texts(rollout, sampling, [t.last_turn for t in trajectories]),
    }
    if rollout.episodes is not None and rollout.episodes.has_lanes:
        values[EPISODE] = [part.name for _, part, *_ in rows]
        values[LANE] = torch.tensor([lane for _, _, lane, _ in rows], dtype=torch.int64)
        values[UNSAMPLED] = torch.tensor([not any(t.sampled) and not t.error for t in trajectories], dtype=torch.bool)
        if rollout.episodes.has_shares:
            values[SHARE] = token_shares(trajectories, cast(Jagged, values["response_ids"]))
    if policies:
        values[POLICY] = [part.policy for _, part, *_ in rows]
    if by_turn:
        values["transcript"] = rollout.decode([t.token_ids for t in trajectories])
        if trajectories:
            values["prompt_text"] = _prompt_texts(rollout.tokenizer, samples, trajectories)
    return samples.with_values(values)


def _turn_texts(rollout: RolloutRole, sampling: SamplingConfig, turns: Sequence[list[int]]) -> list[str]:
    """Return the texts of turns, each cut before its stop string."""
    strings = StopStrings.of(sampling, rollout.tokenizer)
    texts = rollout.decode(turns)
    return texts if strings is None else [strings.before(text) for text in texts]


def _prompt_texts(tokenizer: PreTrainedTokenizerBase, samples: Batch, trajectories: list[Trajectory]) -> list[str]:
    """Return the prompt texts of samples; a prompt replaced by an environment's first observation is decoded again."""
    given = [ids.tolist() for ids in samples["prompt_ids"].unbind()]
    return [
        text if t.prompt_ids == ids else tokenizer.decode(t.prompt_ids)
        for text, ids, t in zip(samples["prompt_text"], given, trajectories, strict=True)
    ]


def all_failed(step: int, errors: Sequence[str]) -> str:
    """Return the warning that a step trains on no sample, because the environment failed in all episodes.

    >>> all_failed(3, ["KeyError: 'door'", "KeyError: 'door'"])
    "WARNING: step 3: the environment failed in all 2 episodes, which are left out: KeyError: 'door'"
    """
    episodes = "the only episode, which is" if len(errors) == 1 else f"all {len(errors)} episodes, which are"
    return f"WARNING: step {step}: the environment failed in {episodes} left out: {shortened(errors[0])}"


def refuse_failed_step(step: int, numbers: Mapping[str, float]) -> None:
    """Raise MegarlError if the environment failed in all episodes of a step, given the metrics of all ranks.

    >>> refuse_failed_step(1, {"env/errors": 3.0, "env/turns/mean": 1.5})
    """
    errors = numbers.get("env/errors", 0)
    if errors and "env/turns/mean" not in numbers:
        raise MegarlError(
            f"the environment failed in all {errors:.0f} episodes of step {step}, so nothing can be learnt from them\n"
            "  fix:     correct the environment; the warning of this step above, and in log.txt, names the error"
        )


def record_episodes(c: StepContext, samples: Batch) -> None:
    """Record the metrics `env/...` of episodes; an episode whose environment failed counts only in `env/errors`."""
    m, count = c.metrics, len(samples)
    samples = samples.select(leads(samples))
    # The parts of an episode, one for each policy, have the same error and numbers, which count once.
    names = [whole_episode(name) for name in samples[EPISODE]] if POLICY in samples else range(len(samples))
    first = {name: place for place, name in reversed([*enumerate(names)])}
    if LANE in samples and first:
        m.mean("env/samples", count, len(first))
    good = [place for place, error in enumerate(samples["env_error"]) if not error]
    episodes = [place for place in good if first[names[place]] == place]
    m.sum("env/errors", len(first) - len(episodes))
    if not good:
        if len(samples):
            print(all_failed(c.step, samples["env_error"]), flush=True)
        return
    _record_lengths(m, samples.select(good))
    infos = [samples["env_info"][place] for place in episodes]
    for name in sorted({name for info in infos for name in info}):
        m.mean(f"env/{name}", sum(info.get(name, 0.0) for info in infos), len(episodes))


def _record_lengths(m: Metrics, samples: Batch) -> None:
    """Record turns, tokens and cut ends of episodes, of several policies those of each policy's parts."""
    turns, lengths = samples["turn_ends"].lengths, samples["response_ids"].lengths
    ends = zip(samples["ended_by"], samples["finish_reason"], strict=True)
    cut = [by != "done" or reason != "stop" for by, reason in ends]
    of_policies = places_of(samples) if POLICY in samples else {}
    for policy, places in {"": [*range(len(samples))], **of_policies}.items():
        prefix = f"{policy}/env" if policy else "env"
        m.mean(f"{prefix}/turns/mean", float(turns[places].sum()), len(places))
        m.max(f"{prefix}/turns/max", float(turns[places].max()))
        m.mean(f"{prefix}/tokens/mean", float(lengths[places].sum()), len(places))
        m.max(f"{prefix}/tokens/max", float(lengths[places].max()))
        m.mean(f"{prefix}/cut", sum(cut[place] for place in places), len(places))
