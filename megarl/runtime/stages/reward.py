"""Scores: submitted when samples exist, collected when something needs them, so that they overlap log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.dag.stage import Kind, Role, stage
from megarl.data.fields import DIGESTS, GRIDS, PATCHES, SOURCE, own_places
from megarl.data.lanes import EPISODE, LANE, branches, leads, spread
from megarl.data.policies import POLICY, compared, places_of
from megarl.runtime.stages.needs import model_fields, part_fields
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.data.messages import PromptColumn
    from megarl.rewards.parts import Rewards, Submitted
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import RewardModelRole, ScorerRole


_COLUMNS = ("uid", "prompt_text", "response_text", "answer", "data_source", "finish_reason", "row")
#: The field with handles of the scores that are being computed; it exists between `reward_submit` and `reward`, in this
#: process only.
PENDING = "pending_reward"


@dataclass(frozen=True)
class Pending:
    """A score that is being computed: the handle of its submission, and the sample's position in the submission."""

    handle: Submitted
    place: int


@stage(
    reads=["response_ids", *_COLUMNS],
    optional=["transcript", "turn_starts", "turn_ends", EPISODE, LANE, POLICY, PATCHES, GRIDS, DIGESTS],
    writes=[PENDING],
    role=Role.REWARD,
)
def reward_submit(c: StepContext, samples: Batch, *, scorer: ScorerRole) -> Batch:
    """Submit the samples to the reward functions, which run only on the first rank of a replica."""
    samples.set(PENDING, submit(scorer, samples))
    return samples


@stage(
    reads=["response_ids", "uid"],
    optional=["turn_ends", "turn_rewards", EPISODE, LANE, POLICY, "env_error", SOURCE],
    consumes=[PENDING],
    writes=["score", "token_rewards"],
    gives=part_fields,
    role=Role.REWARD,
)
def reward(c: StepContext, samples: Batch, *, scorer: ScorerRole) -> Batch:
    """Wait for the scores, on all ranks of a replica; a score becomes the reward of the last token.

    If the environment gives the rewards, each turn's last token gets the turn's reward.
    """
    results = collect(c, scorer, samples[PENDING], samples)
    write_scores(c, samples, results, by_turn=scorer.by_environment)
    return samples


@stage(
    reads=["response_ids", "uid"],
    optional=["turn_rewards", EPISODE, LANE, "env_error"],
    consumes=[PENDING],
    writes=["rule_rewards"],
    role=Role.REWARD,
)
def rule_rewards(c: StepContext, samples: Batch, *, scorer: ScorerRole) -> Batch:
    """Wait for the results of reward functions that are used together with a reward model."""
    samples.set("rule_rewards", collect(c, scorer, samples[PENDING], samples))
    return samples


@stage(
    reads=["prompt_ids", "response_ids", "sample_id"],
    needs=model_fields,
    writes=["model_score"],
    kind=Kind.MODEL_INFERENCE,
    role=Role.REWARD_MODEL,
)
def model_score(c: StepContext, samples: Batch, *, reward_model: RewardModelRole) -> Batch:
    """Score the samples with the reward model."""
    samples.set("model_score", reward_model.scores(samples))
    return samples


@stage(
    reads=["response_ids", "uid", "rule_rewards", "model_score"],
    optional=[EPISODE, LANE, POLICY, "env_error", SOURCE],
    writes=["score", "token_rewards"],
    gives=part_fields,
    role=Role.ADVANTAGE,
)
def total_reward(c: StepContext, samples: Batch) -> Batch:
    """Add the reward model's scores to the other rewards; the sum becomes the reward of the last response token."""
    from megarl.rewards.parts import with_model_scores

    results = with_model_scores(c.config.reward, samples["rule_rewards"], samples["model_score"].tolist())
    write_scores(c, samples, results, by_turn=False)
    return samples


def write_scores(c: StepContext, samples: Batch, results: list[dict[str, Any]], *, by_turn: bool) -> None:
    """Write `score`, `token_rewards` and `reward_parts` from reward results, and record their metrics."""
    from megarl.evaluation.metrics import correctness
    from megarl.rewards.runner import reward_metrics

    set_scores(samples, results, by_turn=by_turn)
    parts = list(c.config.algorithm.advantage.parts)
    if parts:
        samples.set("reward_parts", part_table(results, parts))
    places = own_places(samples)
    if others := len(samples) - len(places):
        scores = samples["score"].double()
        c.metrics.mean("experts/score/mean", float(scores.sum() - scores[places].sum()), others)
        samples, results = samples.select(places), [results[place] for place in places]
    places = leads(samples)
    samples, results = samples.select(places), [results[place] for place in places]
    c.metrics.merge(reward_metrics(results))
    record_scores(c, samples)
    failed = samples["env_error"] if "env_error" in samples else [""] * len(samples)
    played = [place for place, error in enumerate(failed) if not error]
    if POLICY not in samples:
        record_groups(c, samples.select(played), [correctness(results[place]) for place in played])
        return
    played_samples = samples.select(played)
    for policy, rows in places_of(played_samples).items():
        part = played_samples.select(rows)
        record_scores(c, part, f"{policy}/")
        part.set("uid", compared(part, c.config.policies[policy].compare))
        record_groups(c, part, [correctness(results[played[place]]) for place in rows], f"{policy}/")


def submit(scorer: ScorerRole, samples: Batch) -> list[Pending | None]:
    """Submit samples for scoring; return one handle per sample on the rank with the reward functions, None elsewhere.

    Nothing is submitted if the environment gives the rewards.
    """
    if scorer.runner is None or scorer.by_environment:
        return [None] * len(samples)
    led = samples.select(leads(samples)) if branches(samples) else samples
    inputs = reward_inputs(led, scorer.prompts, scorer.whole_texts)
    handle = scorer.runner.submit(inputs, _images(scorer.runner, led))
    return spread([Pending(handle, place) for place in range(len(led))], samples)


def _images(runner: Rewards, samples: Batch) -> list[list[str]] | None:
    """Return each sample's images, encoded for reward functions; None without images, or if no function uses them."""
    if not runner.uses_images or PATCHES not in samples:
        return None
    from megarl.data.image_set import image_sets, pixels_of
    from megarl.rewards.images import encoded

    return encoded([[] if images is None else pixels_of(images) for images in image_sets(samples)])


def collect(c: StepContext, scorer: ScorerRole, pending: list[Pending | None], samples: Batch) -> list[dict[str, Any]]:
    """Wait for the results of `submit` for `samples`, and return them on every rank of the replica.

    If the environment gives the rewards, a result contains the sum of an episode's rewards. An episode whose
    environment failed gets a result that is marked as an error.
    """
    from megarl.rewards.scoring import ERROR_KEY

    if scorer.by_environment:
        rewards = samples["turn_rewards"].unbind()
        results = spread([{"overall": float(rewards[place].double().sum())} for place in leads(samples)], samples)
    else:
        results = c.layout.mp_group.broadcast_json(_results(scorer.runner, pending))
    if "env_error" not in samples:
        return results
    failed = {"overall": 0.0, ERROR_KEY: 1.0}
    return [failed if error else result for result, error in zip(results, samples["env_error"], strict=True)]


def is_scored(samples: Batch) -> bool:
    """Return whether all results of `submit` for `samples` are ready; call it on the rank with the reward functions."""
    if PENDING not in samples:
        return True
    return all(score is None or score.handle.done() for score in samples[PENDING])


def _results(runner: Rewards | None, pending: list[Pending | None]) -> list[dict[str, Any]] | None:
    """Wait for the results of this rank's reward functions; None on a rank without them."""
    if runner is None:
        return None
    scores = [score for score in pending if score is not None]
    results = {handle: runner.result(handle) for handle in dict.fromkeys(score.handle for score in scores)}
    return [results[score.handle][score.place] for score in scores]


def reward_inputs(
    samples: Batch, prompts: PromptColumn, whole_texts: Callable[[list[list[int]]], list[str]] | None = None
) -> list[dict[str, Any]]:
    """Return one dict per sample, the input of reward functions.

    It has the sample's own entries, the row's columns whose names do not clash with them, and all columns under `row`.
    `ground_truth` equals `answer`, unless the row has such a column. `messages` is None if the prompt is a text.
    Samples of several policies have the name of theirs under `policy`.

    Args:
        whole_texts: decodes `response` and `transcript` with special tokens; None: they are without.
    """
    from megarl.data.trajectory import policy_tokens

    lengths = policy_tokens(samples, by_turn="turn_starts" in samples).tolist()
    if whole_texts is not None:
        samples = samples.with_values(_texts_of_tokens(samples, whole_texts))
    given = [name for name in ("transcript", POLICY) if name in samples]
    more = [{name: samples[name][place] for name in given} for place in range(len(samples))]
    return [
        {
            "ground_truth": answer,
            **row,
            "uid": uid,
            "prompt": prompt,
            "response": response,
            "answer": answer,
            "data_source": source,
            "finish_reason": reason,
            "response_length": length,
            "messages": prompts.messages(row),
            "row": row,
            **others,
        }
        for uid, prompt, response, answer, source, reason, row, length, others in zip(
            *(samples[name] for name in _COLUMNS), lengths, more, strict=True
        )
    ]


def _texts_of_tokens(samples: Batch, whole_texts: Callable[[list[list[int]]], list[str]]) -> dict[str, list[str]]:
    """Return texts by name: of each response or, if samples have turns, of its last turn and its whole episode."""
    ids = [tokens.tolist() for tokens in samples["response_ids"].unbind()]
    if "turn_starts" not in samples:
        return {"response_text": whole_texts(ids)}
    bounds = zip(samples["turn_starts"].unbind(), samples["turn_ends"].unbind(), strict=True)
    turns = [
        tokens[int(starts[-1]) : int(ends[-1])] if len(ends) else []
        for tokens, (starts, ends) in zip(ids, bounds, strict=True)
    ]
    return {"response_text": whole_texts(turns), "transcript": whole_texts(ids)}


def set_scores(samples: Batch, results: list[dict[str, Any]], *, by_turn: bool = False) -> None:
    """Write `score` [B] and `token_rewards` (jagged like the responses) from reward results.

    The score becomes the reward of the last token. With `by_turn`, each turn's reward goes to the turn's last token.
    """
    import torch

    responses = samples["response_ids"]
    score = torch.tensor([r["overall"] for r in results], dtype=torch.float32)
    token_rewards = torch.zeros(responses.values.shape[0], dtype=torch.float32)
    if by_turn:
        ends, rewards = samples["turn_ends"], samples["turn_rewards"].values
        starts = torch.repeat_interleave(responses.offsets[:-1], ends.lengths)
        token_rewards[starts + ends.values - 1] = rewards
    else:
        token_rewards[responses.offsets[1:] - 1] = score  # no response is empty, so each has a last token
    samples.set("score", score)
    samples.set("token_rewards", responses.like(token_rewards))


def part_table(results: list[dict[str, Any]], parts: list[str]) -> Tensor:
    """Return the K named parts of the rewards, float32 [B, K]; for a failed sample every part equals its score.

    Raises:
        ConfigError: a result lacks one of the parts.
    """
    import torch

    from megarl.rewards.scoring import ERROR_KEY

    for result in results:
        missing = [] if ERROR_KEY in result else [name for name in parts if name not in result]
        if missing:
            raise ConfigError(
                f"the reward function returned no {', '.join(map(repr, missing))}",
                where="algorithm.advantage.parts",
                found=sorted(result),
                fix="name only parts that the reward function returns for every sample",
            )
    rows = [[result.get(name, result["overall"]) for name in parts] for result in results]
    return torch.tensor(rows, dtype=torch.float32).view(len(results), len(parts))


def record_scores(c: StepContext, samples: Batch, prefix: str = "") -> None:
    """Record mean, maximum and minimum of the samples' scores; the metrics' names begin with `prefix`."""
    score = samples["score"]
    if len(score) == 0:
        return
    c.metrics.mean(f"{prefix}critic/score/mean", float(score.double().sum()), len(score))
    c.metrics.max(f"{prefix}critic/score/max", float(score.max()))
    c.metrics.min(f"{prefix}critic/score/min", float(score.min()))


def record_groups(c: StepContext, samples: Batch, correct: Sequence[float], prefix: str = "") -> None:
    """Record the spread of scores in groups of two or more samples, and the shares of groups without a signal.

    Args:
        samples: whole groups, with `uid` and `score`.
        correct: how correct each sample is, usually 0 or 1.
        prefix: beginning of the metrics' names.
    """
    from statistics import stdev

    from megarl.data.groups import by_group
    from megarl.evaluation.metrics import CORRECT_ABOVE

    uid = samples["uid"]
    scores = [group for group in by_group(uid, samples["score"].tolist()) if len(group) > 1]
    right = [group for group in by_group(uid, [value > CORRECT_ABOVE for value in correct]) if len(group) > 1]
    if not scores:
        return
    c.metrics.mean(f"{prefix}critic/score/group_std", sum(map(stdev, scores)), len(scores))
    shares = {
        "zero_std": [min(group) == max(group) for group in scores],
        "all_correct": [all(group) for group in right],
        "none_correct": [not any(group) for group in right],
    }
    for name, of_groups in shares.items():
        c.metrics.mean(f"{prefix}critic/groups/{name}", sum(of_groups), len(of_groups))
