"""Generation: prompts in, samples out."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import DATA_IMAGES, EXPERT, EXPERT_MASK, GRIDS, IMAGES, SOURCE
from megarl.data.lanes import EPISODE, LANE, SHARE, UNSAMPLED, leads
from megarl.data.policies import POLICY
from megarl.data.versions import VERSION_FIELDS, token_versions
from megarl.runtime.stages.needs import call_fields, echo_fields, expert_fields, needed_fields, replayed_fields
from megarl.system.errors import MegarlError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.data.jagged import Jagged
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole, ScorerRole
    from megarl.system.metrics import Metrics

SAMPLE_FIELDS = (
    "response_ids",
    "response_mask",
    "rollout_logp",
    *VERSION_FIELDS,
    "sample_id",
    "response_text",
    "finish_reason",
)
#: Fields that only episodes have.
TURN_FIELDS = (
    *("turn_starts", "turn_ends", "turn_rewards", "ended_by", "env_info", "env_error", "env_output", "transcript"),
)
#: The data row's prompt, kept because an episode's prompt includes the environment's first observation, which may
#: replace it; its images are in DATA_IMAGES.
DATA_PROMPT = ("data_prompt_ids", "data_prompt_text")
_OF_ROWS = ("uid", "answer", "data_source", "row")
_OF_PROMPTS = ("prompt_text", *_OF_ROWS)


def _of_prompts(config: RunConfig) -> list[str]:
    """List the fields of prompts that generation reads in addition to tokens."""
    if not config.task.writes_text:
        return config.task.prompt_fields(config)
    return [*call_fields(config), *(_OF_PROMPTS if config.has_turns else [])]


def _of_episodes(config: RunConfig) -> list[str]:
    """List the fields that generation writes in addition to SAMPLE_FIELDS."""
    if not config.task.writes_text:
        return config.task.sample_fields(config)
    replayed = replayed_fields(config)
    if not config.has_turns:
        return [*replayed, *expert_fields(config)]
    return [
        *replayed,
        *TURN_FIELDS,
        *_lanes(config),
        *echo_fields(config),
        *_data_prompt(config),
        "prompt_ids",
        "prompt_text",
        *call_fields(config),
    ]


def _lanes(config: RunConfig) -> tuple[str, ...]:
    """List the fields that rows have if an episode may have several rows (lanes)."""
    if not config.has_lanes:
        return ()
    optional = ((POLICY, config.policies), (SHARE, config.has_shares))
    return (EPISODE, LANE, UNSAMPLED, *(name for name, written in optional if written))


def _data_prompt(config: RunConfig) -> list[str]:
    """List the fields that keep the original prompt for a greedy episode; empty without greedy episodes."""
    if not config.has_turns or "greedy_score" not in needed_fields(config):
        return []
    return [*DATA_PROMPT, *(DATA_IMAGES if config.data.image_key is not None else ())]


def _of_greedy(config: RunConfig) -> list[str]:
    """List the fields that greedy generation reads: prompts, and with an environment the samples' mask."""
    if config.has_turns:
        return [*_data_prompt(config), "response_mask"]
    return ["prompt_ids", "prompt_text", *call_fields(config)]


def generated_fields(config: RunConfig) -> list[str]:
    """List the fields that generation writes for every sample."""
    if not config.task.writes_text:
        return [*SAMPLE_FIELDS, *_of_episodes(config)]
    turns = (*TURN_FIELDS, *_lanes(config), *echo_fields(config)) if config.has_turns else ()
    return [*SAMPLE_FIELDS, *replayed_fields(config), *turns, *_data_prompt(config), *expert_fields(config)]


class RolloutError(MegarlError):
    """The generation engine returned a sample that cannot be trained on; the message names it."""

    repeats = True


@stage(
    reads=["prompt_ids", "uid"],
    needs=_of_prompts,
    optional=[EPISODE, LANE, POLICY],
    writes=SAMPLE_FIELDS,
    gives=_of_episodes,
    kind=Kind.MODEL_INFERENCE,
    role=Role.ROLLOUT,
    resamples=True,
)
def rollout(c: StepContext, prompts: Batch, *, rollout: RolloutRole) -> Batch:
    """Generate `rollout.sampling.n` responses for every prompt of this rank."""
    if rollout.oversampling is not None:
        samples = rollout.oversampling.generate(c, rollout, prompts)
    else:
        with nullcontext() if rollout.stale is None else rollout.stale.installed():
            samples = generate(c, rollout, prompts, c.config.rollout.sampling, scored=True)
        samples = with_data_prompts(c.config, samples, prompts)
    record_samples(c, samples)
    if rollout.player is not None:
        rollout.player.record(c, samples)
    return with_experts(c, rollout, samples)


def with_data_prompts(config: RunConfig, samples: Batch, prompts: Batch) -> Batch:
    """Return the samples with the prompts of the data as fields of their own, if greedy episodes (a baseline) need
    them; `prompts`: the prompts of the samples, before an environment may have replaced them."""
    names = _data_prompt(config)
    if not names:
        return samples
    place = {uid: number for number, uid in enumerate(prompts["uid"])}
    repeated = prompts.select([place[uid] for uid in samples["uid"]])
    return samples.with_values({name: repeated[name.removeprefix("data_")] for name in names})


def with_experts(c: StepContext, rollout: RolloutRole, samples: Batch) -> Batch:
    """Return the samples of whole groups with the expert responses that join them; without experts the samples."""
    if rollout.experts is None:
        return samples
    joined = rollout.experts.added_to(samples, c.seeds)
    groups = len(set(samples["uid"]))
    with_some = len({uid for uid, source in zip(joined["uid"], joined[SOURCE], strict=True) if source == EXPERT})
    c.metrics.mean("experts/groups", with_some, max(1, groups))
    c.metrics.sum("experts/samples", len(joined) - len(samples))
    tokens = int(joined[EXPERT_MASK].values.sum())
    c.metrics.mean("experts/response_length/mean", tokens, max(1, len(joined) - len(samples)))
    return joined


@stage(
    reads=_OF_ROWS,
    needs=_of_greedy,
    optional=[EPISODE, LANE, POLICY],
    writes=["greedy_score"],
    gives=lambda config: ["response_mask"] if config.has_turns else [],
    kind=Kind.MODEL_INFERENCE,
    role=Role.ROLLOUT,
)
def greedy_rollout(c: StepContext, samples: Batch, *, rollout: RolloutRole, scorer: ScorerRole) -> Batch:
    """Generate and score a greedy response to every prompt, the baseline of ReMax.

    With an environment the response is a greedy episode from the original prompt, with the samples' environment seed.
    If the environment fails in this episode, the prompt has no baseline and all of its samples are masked out.
    """
    import torch

    from megarl.data.groups import group_places
    from megarl.runtime.stages.reward import collect, submit

    by_turn = c.config.has_turns
    first = samples.select([group[0] for group in group_places(samples["uid"])])
    images = () if c.config.data.image_key is None else IMAGES
    prompts = _given_prompts(first, "data_" if by_turn else "", images)
    greedy = c.config.rollout.sampling.model_copy(update={"n": 1, "temperature": 0.0})
    best = generate(c, rollout, prompts, greedy)
    best = best.select(leads(best))
    results = collect(c, scorer, submit(scorer, best), best)
    score = torch.tensor([result["overall"] for result in results], dtype=torch.float32)
    number = {uid: place for place, uid in enumerate(prompts["uid"])}
    of_sample = torch.tensor([number[uid] for uid in samples["uid"]], dtype=torch.int64)
    samples.set("greedy_score", score[of_sample])
    if by_turn:
        good = torch.tensor([not error for error in best["env_error"]], dtype=torch.bool)
        mask = samples["response_mask"]
        samples.set("response_mask", mask.like(mask.values & torch.repeat_interleave(good[of_sample], mask.lengths)))
        c.metrics.sum("env/greedy_errors", int((~good).sum()))
        score = score[good]
    if len(score):
        c.metrics.mean("critic/greedy_score/mean", float(score.double().sum()), len(score))
    _record_work(c, best)
    return samples


def _given_prompts(samples: Batch, prefix: str, images: Sequence[str]) -> Batch:
    """Return the original prompts of samples from fields that begin with `prefix`; `images`: names of image fields."""
    from megarl.data.batch import Batch

    columns = {"prompt_text": samples[f"{prefix}prompt_text"], **{name: samples[name] for name in _OF_ROWS}}
    fields = {name: samples[f"{prefix}{name}"] for name in ("prompt_ids", *images)}
    return Batch(fields, columns, size=len(samples))


def generate(
    c: StepContext, rollout: RolloutRole, prompts: Batch, sampling: SamplingConfig, *, scored: bool = False
) -> Batch:
    """Generate `sampling.n` samples of each of `prompts`, in the order of the prompts.

    Args:
        prompts: B prompts.
        scored: whether the samples are trained on: several policies have their own sampling then, and a `TaskPlayer`
            adds the score and the fields that training needs to the episodes it plays.

    Returns:
        B * n samples: the prompts' fields repeated, and the fields of SAMPLE_FIELDS (with an environment also
        those of TURN_FIELDS, and its first observations as prompts). More samples where an episode has several
        sequences.

    Raises:
        RolloutError: a log-prob is not finite.
        EpisodeError: an environment failed, and `env.on_error` is `fail`.
    """
    with rollout.generating(c, len(prompts) * sampling.n) as advance:
        if rollout.player is not None:
            samples = rollout.player.generate(c, rollout, prompts, sampling, advance, scored=scored)
        else:
            from megarl.runtime.samples import groups_of_prompts, open_groups, samples_of

            slots = len(prompts) * sampling.n
            with closing(open_groups(c, rollout, sampling, slots, training=scored)) as groups:
                for group in groups_of_prompts(c, prompts, sampling.n, range(len(prompts))):
                    groups.add(group)
                samples = samples_of(rollout, prompts, groups.finish(advance), sampling, list(c.config.policies))
    refuse_broken_logprobs(samples)
    return samples


def refuse_broken_logprobs(samples: Batch) -> None:
    """Reject samples with a log-prob that is not finite, which would turn losses and then weights into NaN.

    Raises:
        RolloutError: a log-prob is not finite.
    """
    logp = samples["rollout_logp"]
    broken = (~logp.values.isfinite()).nonzero().flatten()
    if not len(broken):
        return
    place = int(broken[0])
    sample = int((logp.offsets <= place).sum()) - 1
    raise RolloutError(
        f"sample {samples['sample_id'][sample]}: the generation engine's log-prob of response token "
        f"{place - int(logp.offsets[sample])} (id {int(samples['response_ids'].values[place])}) is "
        f"{float(logp.values[place])}\n"
        f"  found:   {len(broken)} of {len(logp.values)} log-probs of this rank are not finite; weight version "
        f"{int(token_versions(samples).values[place])}\n"
        "  allowed: finite numbers\n"
        "  fix:     if the weights are not finite, resume from an earlier checkpoint with a lower actor.optim.lr; if "
        "they are, decode in the trainer's dtype: rollout.dtype=model"
    )


def record_samples(c: StepContext, samples: Batch) -> None:
    """Record metrics of prompt and response lengths, images, FLOPs of generation, and episodes."""
    from megarl.data.trajectory import policy_tokens

    lengths, prompt_lengths = policy_tokens(samples, by_turn=c.config.has_turns), samples["prompt_ids"].lengths
    count = len(samples)
    if count == 0:
        return
    m = c.metrics
    m.mean("response_length/mean", float(lengths.sum()), count)
    m.max("response_length/max", float(lengths.max()))
    m.min("response_length/min", float(lengths.min()))
    m.mean("response_length/clip_ratio", sum(reason == "length" for reason in samples["finish_reason"]), count)
    m.mean("prompt_length/mean", float(prompt_lengths.sum()), count)
    m.max("prompt_length/max", float(prompt_lengths.max()))
    if c.config.data.image_key is not None:
        _record_images(m, samples[GRIDS])
    if c.config.task.writes_text:
        record_unknown(c, samples)
    _record_work(c, samples)
    if c.config.has_turns:
        from megarl.runtime.samples import record_episodes

        record_episodes(c, samples)


def record_unknown(c: StepContext, samples: Batch) -> None:
    """Record the share of generated tokens that are padding of the model's vocabulary, unknown to the tokenizer."""
    if c.tokens is None or c.tokens >= c.hf_config.vocab_size:
        return
    generated = samples["response_ids"].values[samples["response_mask"].values.bool()]
    c.metrics.mean("rollout/unknown_tokens", float((generated >= c.tokens).sum()), len(generated))


def _record_images(m: Metrics, grids: Jagged) -> None:
    """Record the number of images per sample, and of tokens per image."""
    images = len(grids.values)
    m.mean("images/per_sample", images, len(grids))
    if images:
        tokens = grids.values[:, 1] * grids.values[:, 2]
        m.mean("images/tokens/mean", float(tokens.sum()), images)
        m.max("images/tokens/max", float(tokens.max()))


def _record_work(c: StepContext, samples: Batch) -> None:
    """Record FLOPs and tokens of generating samples; the prompt of a group is prefilled once."""
    if not c.config.task.writes_text:
        c.count_pass(samples)
        c.metrics.sum("perf/generated_tokens", float(samples["response_mask"].values.sum()))
        c.metrics.sum("perf/total_tokens", float(sum(map(sum, c.sequences.sample_columns(samples)))))
        return
    from megarl.data.groups import group_places
    from megarl.data.trajectory import policy_tokens

    groups = group_places(samples["uid"])
    prompts, responses = (samples[name].lengths.tolist() for name in ("prompt_ids", "response_ids"))
    by_group = [[responses[place] for place in group] for group in groups]
    decoder = c.flops.generate([prompts[group[0]] for group in groups], by_group)
    c.metrics.sum("perf/flops", decoder + c.vision_flops(samples))
    c.metrics.sum("perf/generated_tokens", float(policy_tokens(samples, by_turn=c.config.has_turns).sum()))
    c.metrics.sum("perf/total_tokens", float(sum(responses) + sum(prompts)))
