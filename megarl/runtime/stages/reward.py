"""Scores: submitted when samples exist, collected when something needs them, so that they overlap log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.dag.stage import stage

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.runtime.controller import Controller


@stage(reads=["response_text", "prompt_text", "answer", "finish_reason"], writes=[])
def reward_submit(c: Controller, samples: Batch) -> Batch:
    """Hand the samples to the reward function; only the first rank of a replica runs it."""
    c.pending_reward = c.reward.submit(reward_inputs(samples)) if c.reward is not None else None
    return samples


@stage(reads=["response_ids"], writes=["score", "token_rewards"])
def reward(c: Controller, samples: Batch) -> Batch:
    """Wait for the scores and give them to all ranks of the replica; the score sits on the last response token."""
    from megarl.rewards.runner import reward_metrics

    results = collect(c)
    set_scores(samples, results)
    c.metrics.merge(reward_metrics(results))
    _record_scores(c, samples)
    return samples


def collect(c: Controller) -> list[dict[str, Any]]:
    """Results of `c.pending_reward` on every rank of the replica."""
    from megarl.comm import broadcast_json

    results = c.reward.result(c.pending_reward) if c.reward is not None else None
    c.pending_reward = None
    return broadcast_json(results, c.layout.lead_rank, c.layout.mp_group)


def reward_inputs(samples: Batch) -> list[dict[str, Any]]:
    """One dict per sample, as reward functions get them."""
    lengths = samples["response_ids"].lengths.tolist()
    columns = ("uid", "prompt_text", "response_text", "answer", "data_source", "finish_reason", "row")
    return [
        {
            **row,
            "uid": uid,
            "prompt": prompt,
            "response": response,
            "answer": answer,
            "data_source": source,
            "finish_reason": reason,
            "response_length": length,
        }
        for uid, prompt, response, answer, source, reason, row, length in zip(
            *(samples[name] for name in columns), lengths, strict=True
        )
    ]


def set_scores(samples: Batch, results: list[dict[str, Any]]) -> None:
    """Write `score` [B] and `token_rewards` (jagged like the responses) from reward results."""
    import torch

    responses = samples["response_ids"]
    score = torch.tensor([r["overall"] for r in results], dtype=torch.float32)
    token_rewards = torch.zeros(responses.values.shape[0], dtype=torch.float32)
    token_rewards[responses.offsets[1:] - 1] = score  # no response is empty: it holds at least its end token
    samples.set("score", score)
    samples.set("token_rewards", responses.like(token_rewards))


def _record_scores(c: Controller, samples: Batch) -> None:
    score = samples["score"]
    if len(score) == 0:
        return
    c.metrics.mean("critic/score/mean", float(score.double().sum()), len(score))
    c.metrics.max("critic/score/max", float(score.max()))
    c.metrics.min("critic/score/min", float(score.min()))
