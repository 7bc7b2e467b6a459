"""Held-out evaluation: every replica generates for its share of the prompts; only scores are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.data.fields import PATCHES
from megarl.data.image_set import image_sets, pixels_of
from megarl.data.lanes import branches, leads
from megarl.data.loader import rounds
from megarl.data.policies import POLICY
from megarl.evaluation.metrics import Scored, from_reward, validation_metrics
from megarl.rewards.parts import with_model_scores
from megarl.rewards.scoring import ERROR_KEY
from megarl.runtime.recorder import VALIDATE, Recorder
from megarl.runtime.roles import RewardModelRole
from megarl.runtime.stages.kto import measure_examples
from megarl.runtime.stages.preference import measure_pairs, settings_of
from megarl.runtime.stages.reward import collect, submit
from megarl.runtime.stages.rollout import generate
from megarl.system.errors import MegarlError, count, shortened
from megarl.system.metrics import Metrics
from megarl.system.tracing import phase
from megarl.tracking.sample_images import write_images

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.data.preferences import LabelledDataset, PairDataset
    from megarl.runtime.rank_state import RankState


@dataclass(frozen=True)
class Validation:
    """This rank's part of an evaluation: metrics that merge over ranks, and some generations for the report.

    `unplayed`: the error of the first episode that could not be played; empty: all were played.
    """

    metrics: Metrics
    rows: list[dict[str, Any]]
    unplayed: str = ""


def validate(c: RankState, films_of: int | None = None) -> Validation | None:
    """Generate responses to the held-out prompts and score them; None: the recipe has no held-out prompts.

    Args:
        films_of: the training step for which episodes that a `TaskPlayer` plays are filmed; None: no films.
    """
    if c.val_data is None:
        return None
    scored: list[Scored] = []
    rows: list[dict[str, Any]] = []
    failed, failed_episodes, why = 0.0, 0, ""
    settings = c.config.validation
    with phase(VALIDATE):
        for prompts in rounds(c.val_data, c.config.data.val_batch_size, c.layout.dp_rank, c.layout.dp_size):
            samples = generate(c.context, c.rollout, prompts, c.config.validation_sampling)
            samples = samples.select(leads(samples)) if branches(samples) else samples
            results = _scored(c, samples)
            player, nothing = c.rollout.player, [""] * len(samples)
            errors = samples["env_error"] if c.config.has_episodes else nothing
            failed_episodes += sum(map(bool, errors))
            failed += sum(result.get(ERROR_KEY, 0.0) for result in results)
            unplayed = nothing if player is None else samples["env_error"]
            parts = nothing if player is None else samples["set"]
            why = why or next(filter(None, errors), "")
            sources = samples[POLICY] if POLICY in samples else samples["data_source"]
            columns = (samples["uid"], results, samples["response_text"], sources, parts)
            for sample, error in zip(zip(*columns, strict=True), unplayed, strict=True):
                if not error:  # an episode whose simulator failed does not count against the policy
                    scored.append(from_reward(*sample, select_by=settings.select_by))
            wanted = settings.log_samples - len(rows)
            if films_of is not None and player is not None:
                rows += player.report_rows(c.run_dir, films_of, samples, wanted) if c.layout.rank == 0 else []
            elif wanted > 0:
                rows += _report_rows(c, samples, results, wanted)
    metrics = validation_metrics(scored)
    if c.config.reward.on_error != "raise":
        metrics.sum("val/reward_errors", failed)
    if c.config.has_episodes:
        metrics.sum("val/env_errors", failed_episodes)
    if why and c.rollout.player is None and c.layout.rank == 0:
        number = count(failed_episodes, "held-out episode")
        print(f"WARNING: the environment failed in {number}, counted as wrong: {shortened(why)}", flush=True)
    return Validation(metrics, rows, why)


def _scored(c: RankState, samples: Batch) -> list[dict[str, Any]]:
    """Return the samples' reward results, including the reward model's score if this team holds it."""
    results = collect(c.context, c.scorer, submit(c.scorer, samples), samples)
    model = c.held.get("reward_model")
    if not isinstance(model, RewardModelRole):
        return results
    return with_model_scores(c.config.reward, results, model.scores(samples).tolist())


def _report_rows(c: RankState, samples: Batch, results: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the first `count` samples as rows of the report; rank 0 also writes their images to files."""
    shown = samples.select(list(range(min(count, len(samples)))))
    text = "transcript" if "transcript" in shown else "response_text"
    columns = (shown["prompt_text"], shown[text], shown["answer"], results[: len(shown)])
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "response": response, "answer": answer, "score": result["overall"]}
        for prompt, response, answer, result in zip(*columns, strict=True)
    ]
    if "env_output" in shown and any(shown["env_output"]):
        for row, output in zip(rows, shown["env_output"], strict=True):
            row["output"] = output
    if PATCHES in shown and c.layout.rank == 0:
        for row, images in zip(rows, image_sets(shown), strict=True):
            if images is not None:
                row["images"] = write_images(c.run_dir, pixels_of(images))
    return rows


def evaluate(c: RankState, recorder: Recorder, step: int, *, films: bool = False) -> float | None:
    """Run the held-out evaluation and record its metrics and samples; return the accuracy over all ranks.

    The accuracy is None without held-out prompts. Collective over the team. In preference training the accuracy is the
    share of held-out pairs that are ranked correctly; a cold start before it evaluates nothing.
    """
    if c.val_pairs is not None:
        measures = settings_of(c.context).scores or "reference" in c.models
        return _evaluate_pairs(c, c.val_pairs) if measures else None
    result = validate(c, step if films else None)
    if result is None:
        return None
    recorder.samples(step, result.rows)
    return _record_metrics(c, result)


def _evaluate_pairs(c: RankState, data: PairDataset | LabelledDataset) -> float:
    """Add the metrics of the held-out pairs to the step's metrics; return the share of correctly ranked pairs over all
    ranks.
    """
    measured = Metrics()
    parts = rounds(data, c.config.data.val_batch_size, c.layout.dp_rank, c.layout.dp_size)
    with phase(VALIDATE):
        if settings_of(c.context).labelled:
            measured = measure_examples(c.context, parts, c.actor, c.reference)
        else:
            reference = c.reference if "reference" in c.models else None
            for pairs in parts:
                measured.merge(measure_pairs(c.context, pairs, c.actor, reference))
    metrics = Metrics()
    for name in list(measured):
        _, total, pairs_measured = measured.pop(name)
        metrics.mean(f"val/{name}", total, pairs_measured)
        if name == "rewards/accuracies":
            metrics.mean("val/acc", total, pairs_measured)
    c.context.metrics.merge(metrics)
    return c.layout.dp_group.reduce_metrics(metrics).result()["val/acc"]


def _record_metrics(c: RankState, result: Validation) -> float:
    """Add the evaluation's metrics to the step's metrics; return the accuracy over all ranks."""
    numbers = c.layout.dp_group.reduce_metrics(result.metrics).result()
    if "val/acc" not in numbers:
        failed, name = numbers["val/env_errors"], c.config.task.place(c.config)
        raise MegarlError(
            f"none of {failed:.0f} held-out episodes could be played in {name}: {result.unplayed}\n"
            f"  fix:     fix this error of {name}"
        )
    c.context.metrics.merge(result.metrics)
    return numbers["val/acc"]


def validates(config: RunConfig, step: int, *, early: bool = False) -> bool:
    """Return whether to validate after `step` (1 or more): after every `validation.every`-th and the last step.

    `early`: whether `trainer.early_stop` makes this step the last one.
    """
    last = early or step == config.trainer.steps
    return bool(config.data.held_out) and (last or due(step, config.validation.every))


def may_be_last(config: RunConfig, step: int) -> bool:
    """Return whether a training metric may end the run at `step`, which then needs a validation that is not due."""
    stop = config.trainer.early_stop
    by_training = stop is not None and not stop.metric.startswith("val/")
    return by_training and bool(config.data.held_out) and not validates(config, step)


def due(step: int, every: int) -> bool:
    """Return whether `step` is a multiple of `every`; False if `every` is 0."""
    return every > 0 and step % every == 0
