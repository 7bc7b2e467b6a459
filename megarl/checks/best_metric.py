"""Check that a validation of this recipe writes `trainer.best_metric`."""

from __future__ import annotations

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.errors import close_matches
from megarl.evaluation.metrics import metric_names
from megarl.recipes.build import PIPELINES


def check_best_metric(config: RunConfig, job: str, checks: Checklist) -> None:
    """Check the metric's name against the held-out metrics, which are known except for the prompts' data sources.

    A pipeline of a user may write metrics of its own.
    """
    name = config.trainer.best_metric
    if name is None or not config.data.val_files or (job == "train" and config.algorithm.pipeline not in PIPELINES):
        return
    measures = metric_names(config.validation_sampling.n)
    errors = {"env_errors": config.has_episodes, "reward_errors": config.reward.on_error != "raise"}
    known = [f"val/{measure}" for measure in (*measures, *(error for error, counts in errors.items() if counts))]
    kind, _, measure = name.rpartition("/")
    if name in known or (kind.startswith("val/") and measure in measures) or (kind and kind.split("/")[0] != "val"):
        return
    near = close_matches(measure, measures)
    meant = f"{kind or 'val'}/{near[0]}" if near else ""
    checks.fail(
        "best metric",
        "trainer.best_metric",
        "no validation of this recipe has this metric, so no checkpoint would be the best",
        found=name,
        allowed=f"{', '.join(known)}; the same of one data source, val/SOURCE/acc; another metric of a step",
        fix=f"did you mean {meant}?" if meant else "name one of these, or null to keep no best checkpoint",
    )
