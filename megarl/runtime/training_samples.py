"""Groups of training samples for the report, with scores and advantages of samples and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.data.groups import group_places

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.runtime.rank_state import RankState

_MOST_SAMPLES = 16  # maximum number of samples shown per group
_MOST_TOKENS = 512  # maximum number of tokens shown per response
_NEEDED = ("uid", "prompt_ids", "response_ids", "response_mask", "advantages")


def shows_groups(config: RunConfig, step: int, *, early: bool = False) -> bool:
    """Return whether the report shows groups of `step`: of the first, every `validation.every`-th and the last step.

    `early`: whether `trainer.early_stop` makes this step the last one.
    """
    every = config.validation.every
    due = early or step in (1, config.trainer.steps) or (every > 0 and step % every == 0)
    return due and config.tracking.training_groups > 0


def group_rows(c: RankState, samples: Batch) -> list[dict[str, Any]]:
    """Return the samples of the first groups of a step, as lines of training_samples.jsonl.

    A line has the `group`, `prompt`, `answer`, `score`, `finish_reason`, an agent's `output`, the response's number of
    `tokens` and the mean `advantage` of those that are trained on. `pieces` are the texts of the first tokens;
    `advantages`, `ratios` (pi_old / pi_rollout, before an update) and `ages` (steps between the weights that generated
    a token and those that are trained) are values per token, None for a token that is not trained on. Fields the
    samples lack are omitted.

    Args:
        samples: this replica's samples after the step.
    """
    if not c.config.task.writes_text or not all(name in samples for name in _NEEDED):
        return []
    groups = group_places(samples["uid"])[: c.config.tracking.training_groups]
    places = [place for group in groups for place in group[:_MOST_SAMPLES]]
    shown = samples.select(places)
    return [_row(c, shown, number) for number in range(len(shown))]


def _row(c: RankState, shown: Batch, number: int) -> dict[str, Any]:
    ids, mask = (shown[name].unbind()[number].tolist() for name in ("response_ids", "response_mask"))
    advantages = shown["advantages"].unbind()[number].tolist()
    trained = [value for value, counts in zip(advantages, mask, strict=True) if counts]
    prompt = shown["prompt_text"][number] if "prompt_text" in shown else None
    row: dict[str, Any] = {
        "group": shown["uid"][number],
        "prompt": c.tokenizer.decode(shown["prompt_ids"].unbind()[number].tolist()) if prompt is None else prompt,
        "tokens": len(ids),
        "advantage": _short(sum(trained) / len(trained)) if trained else None,
    }
    if "score" in shown or "token_rewards" in shown:
        score = shown["score"][number] if "score" in shown else shown["token_rewards"].unbind()[number].sum()
        row["score"] = _short(float(score))
    row |= {name: shown[name][number] for name in ("answer", "finish_reason") if name in shown}
    if "env_output" in shown and shown["env_output"][number]:
        row["output"] = shown["env_output"][number]
    row["pieces"] = c.tokenizer.batch_decode([[token] for token in ids[:_MOST_TOKENS]])

    def of_tokens(values: list[float]) -> list[float | None]:
        pairs = zip(values[:_MOST_TOKENS], mask[:_MOST_TOKENS], strict=True)
        return [_short(value) if counts else None for value, counts in pairs]

    row["advantages"] = of_tokens(advantages)
    if "old_logp" in shown and "rollout_logp" in shown:
        gap = shown["old_logp"].unbind()[number].double() - shown["rollout_logp"].unbind()[number].double()
        row["ratios"] = of_tokens(gap.exp().tolist())
    if "weight_versions" in shown and "version_tokens" in shown:
        runs = zip(
            *(shown[name].unbind()[number].tolist() for name in ("weight_versions", "version_tokens")), strict=True
        )
        row["ages"] = of_tokens([c.context.step - 1 - version for version, tokens in runs for _ in range(tokens)])
    return row


def _short(value: float) -> float:
    return float(f"{value:.3g}")
