"""Generation: prompts in, samples out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from megarl.dag.stage import Kind, Role, stage
from megarl.data.versions import VERSION_FIELDS
from megarl.errors import MegarlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RolloutRole, ScorerRole

SAMPLE_FIELDS = (
    "response_ids",
    "response_mask",
    "rollout_logp",
    *VERSION_FIELDS,
    "sample_id",
    "response_text",
    "finish_reason",
)
#: What episodes of several turns have in addition, which begin with the environment's first observation.
TURN_FIELDS = ("turn_starts", "turn_ends", "turn_rewards", "ended_by", "env_info", "env_error", "transcript")
_OF_PROMPTS = ("uid", "prompt_text", "answer", "data_source", "row")


def _of_prompts(config: RunConfig) -> list[str]:
    """What an environment is told of a prompt."""
    return list(_OF_PROMPTS) if config.has_turns else []


def _of_turns(config: RunConfig) -> list[str]:
    return [*TURN_FIELDS, "prompt_ids", "prompt_text"] if config.has_turns else []


def generated_fields(config: RunConfig) -> list[str]:
    """What generation gives every sample."""
    return [*SAMPLE_FIELDS, *(TURN_FIELDS if config.has_turns else [])]


class RolloutError(MegarlError):
    """The generation engine returned a sample that cannot be trained on; the message names it."""


@stage(
    reads=["prompt_ids", "uid"],
    needs=_of_prompts,
    writes=SAMPLE_FIELDS,
    gives=_of_turns,
    kind=Kind.MODEL_INFERENCE,
    role=Role.ROLLOUT,
    resamples=True,
)
def rollout(c: StepContext, prompts: Batch, *, rollout: RolloutRole) -> Batch:
    """Draw `rollout.sampling.n` responses for every prompt of this rank."""
    with nullcontext() if rollout.stale is None else rollout.stale.installed():
        samples = generate(c, rollout, prompts, c.config.rollout.sampling)
    _record_lengths(c, samples)
    if rollout.episodes is not None:
        from megarl.runtime.episodes import record_episodes

        record_episodes(c, samples)
    return samples


@stage(
    reads=["prompt_ids", *_OF_PROMPTS],
    writes=["greedy_score"],
    kind=Kind.MODEL_INFERENCE,
    role=Role.ROLLOUT,
)
def greedy_rollout(c: StepContext, samples: Batch, *, rollout: RolloutRole, scorer: ScorerRole) -> Batch:
    """Score of a greedy response to every sample's prompt, the baseline of ReMax."""
    import torch

    from megarl.data.batch import Batch
    from megarl.data.groups import group_places
    from megarl.runtime.stages.reward import collect, submit

    first = samples.select([group[0] for group in group_places(samples["uid"])])
    prompts = Batch({"prompt_ids": first["prompt_ids"]}, {name: first[name] for name in _OF_PROMPTS}, size=len(first))
    greedy = c.config.rollout.sampling.model_copy(update={"n": 1, "temperature": 0.0})
    best = generate(c, rollout, prompts, greedy)
    results = collect(c, scorer, submit(scorer, best), best)
    score = torch.tensor([result["overall"] for result in results], dtype=torch.float32)
    number = {uid: place for place, uid in enumerate(prompts["uid"])}
    samples.set("greedy_score", score[[number[uid] for uid in samples["uid"]]])
    c.metrics.mean("critic/greedy_score/mean", float(score.double().sum()), len(score))
    _record_work(c, best)
    return samples


def generate(c: StepContext, rollout: RolloutRole, prompts: Batch, sampling: SamplingConfig) -> Batch:
    """`sampling.n` samples of each of `prompts`, one prompt after the other.

    Args:
        c: of the step.
        rollout: draws them.
        prompts: B prompts.
        sampling: how tokens are drawn.

    Returns:
        B * n samples: the prompts' fields repeated, and the fields of SAMPLE_FIELDS (with an environment also
        those of TURN_FIELDS, and its first observations as prompts).

    Raises:
        RolloutError: a log-prob is not finite.
        EpisodeError: an environment failed, and `env.on_error` is `fail`.
    """
    with rollout.drawing(c, len(prompts) * sampling.n) as advance:
        if rollout.episodes is None:
            samples = _respond(c, rollout, prompts, sampling, advance)
        else:
            from megarl.runtime.episodes import play

            samples = play(c, rollout, prompts, sampling, advance)
    _refuse_broken_logprobs(samples)
    return samples


def _respond(
    c: StepContext, rollout: RolloutRole, prompts: Batch, sampling: SamplingConfig, advance: Callable[[int], None]
) -> Batch:
    """One response to each prompt, `sampling.n` times."""
    import torch

    from megarl.data.batch import Jagged
    from megarl.data.versions import set_versions
    from megarl.rollout.engine import Request

    requests = [
        Request(ids.tolist(), [c.seeds.sample(uid, i) for i in range(sampling.n)])
        for ids, uid in zip(prompts["prompt_ids"].unbind(), prompts["uid"], strict=True)
    ]
    groups = rollout.engine.generate(requests, sampling, rollout.eos_ids, advance)
    done = [completion for group in groups for completion in group]
    samples = prompts.repeat(sampling.n)
    response_ids = Jagged.from_list([d.token_ids for d in done], dtype=torch.int64)
    samples.set("response_ids", response_ids)
    samples.set("response_mask", response_ids.like(torch.ones_like(response_ids.values, dtype=torch.bool)))
    samples.set("rollout_logp", Jagged.from_list([d.logprobs for d in done], dtype=torch.float32))
    set_versions(samples, [d.versions for d in done])
    samples.set("sample_id", [f"{uid}#{i % sampling.n}" for i, uid in enumerate(samples["uid"])])
    samples.set("response_text", rollout.decode([d.token_ids for d in done]))
    samples.set("finish_reason", [d.finish_reason for d in done])
    return samples


def _refuse_broken_logprobs(samples: Batch) -> None:
    """One NaN would be in every mean over the batch, and from there in the weights."""
    from megarl.data.versions import token_versions

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
        "  fix:     if the weights are not finite, go on from an earlier checkpoint with a lower actor.optim.lr; if "
        "they are, decode in the trainer's dtype: rollout.dtype=model"
    )


def _record_lengths(c: StepContext, samples: Batch) -> None:
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
    _record_work(c, samples)


def _record_work(c: StepContext, samples: Batch) -> None:
    """Count the generation of samples; the prompt of a group is prefilled once."""
    from megarl.data.groups import group_places
    from megarl.data.trajectory import policy_tokens

    groups = group_places(samples["uid"])
    prompts, responses = (samples[name].lengths.tolist() for name in ("prompt_ids", "response_ids"))
    by_group = [[responses[place] for place in group] for group in groups]
    c.metrics.sum("perf/flops", c.flops.generate([prompts[group[0]] for group in groups], by_group))
    c.metrics.sum("perf/generated_tokens", float(policy_tokens(samples, by_turn=c.config.has_turns).sum()))
    c.metrics.sum("perf/total_tokens", float(sum(responses) + sum(prompts)))
