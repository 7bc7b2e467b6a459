"""All checks of a recipe that need no process: files exist, sizes divide, settings agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from megarl.artifacts.draft_training import facts_with_draft
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.shared_prefixes import prefix_problem
from megarl.checks.asynchrony import check_async
from megarl.checks.checklist import Check, Checklist, Roles, problems_of
from megarl.checks.correction import check_correction
from megarl.checks.curriculum import check_curriculum
from megarl.checks.descriptors import check_descriptors
from megarl.checks.disk import check_disk
from megarl.checks.environment import check_packages, check_secrets
from megarl.checks.experts import check_experts
from megarl.checks.files import (
    check_chat_template,
    check_data,
    check_end_tokens,
    check_model,
    check_only_in_training,
    check_other_models,
    check_places,
    check_reward,
    check_reward_is_named,
)
from megarl.checks.fp8 import check_fp8
from megarl.checks.gpus import check_machine_gpus
from megarl.checks.graph import build, check_graph
from megarl.checks.images import check_images
from megarl.checks.kept_tokens import check_kept_tokens
from megarl.checks.layout import check_cluster, check_layouts
from megarl.checks.lora import check_lora
from megarl.checks.machine import check_machine
from megarl.checks.models import check_models
from megarl.checks.mtp import check_mtp
from megarl.checks.oversampling import check_oversampling
from megarl.checks.placement import check_placement, extra_models
from megarl.checks.policies import check_policies
from megarl.checks.profile import check_profile
from megarl.checks.replay import check_replay
from megarl.checks.reward_model import check_reward_model
from megarl.checks.routes import check_routes
from megarl.checks.settings import (
    check_batches,
    check_job,
    check_objective,
    check_sampling,
    check_schedules,
    check_watched_metrics,
)
from megarl.checks.step_time import check_time
from megarl.checks.unused import check_unused
from megarl.config.base import raise_problems
from megarl.config.run import RunConfig
from megarl.config.task import check_tasks
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role
from megarl.planning.shards import Sizes
from megarl.rollout.families import family_of
from megarl.system.errors import UserError
from megarl.system.machine import Machine, this_machine


class ConfigWarning(UserWarning):
    """A warning: a setting is legal but probably not intended."""


@dataclass(frozen=True)
class Checked:
    """The result of all checks.

    Attributes:
        items: all checks in order, including failed ones.
        sizes: sizes of each role's model; None if they are unknown here.
        graph: the task graph of a training run; None if it cannot be built.
        placement: the teams of the job; None if they are unknown.
        step_s: estimated seconds of a step; None if no formula covers it.
    """

    items: list[Check]
    sizes: Sizes
    graph: TaskGraph | None
    placement: Placement | None
    step_s: float | None = None


def check_config(
    config: RunConfig,
    *,
    hf: ModelFacts | None = None,
    launcher: str | None = None,
    job: str = "train",
    machine: Machine | None = None,
    starts: bool = False,
    here: bool = True,
    run_dir: Path | None = None,
) -> Checked:
    """Run all checks without downloads. Only the servers' interpreter is started, for its version, and the modules of a
    user's own pipeline and components (estimator, loss, filter) are imported.

    Args:
        hf: sizes of the model; None: read from the local files that the recipe names.
        launcher: also check what this launcher cannot do.
        job: train, sft, eval or generate: only what it uses is checked.
        machine: also check whether the run fits this machine.
        starts: whether the run starts on `machine`; if not, a check of this machine that fails is only a warning.
        here: whether this machine is one of the run's; if not, its hardware does not count.
        run_dir: folder of the run; None: one below `tracking.dir`.
    """
    checks = Checklist()
    facts = check_model(config.model, hf, checks)
    check_cluster(config, checks, launcher)
    built = build(config, checks) if job == "train" else None
    graph, roles = (built, built.roles) if isinstance(built, TaskGraph) else (None, None)
    others = check_other_models(config, roles if job == "train" else extra_models(config, job), facts, checks)
    sizes = {Role.ACTOR: None if facts is None else facts_with_draft(config, facts), Role.ROLLOUT: facts, **others}
    placement = check_placement(config, graph, job, launcher, checks)
    if placement is not None:
        _check_placed(config, placement, sizes, job, checks)
    if job in ("train", "sft"):
        check_only_in_training(facts, checks)
        _check_steps(config, placement, roles, job, checks)
        check_profile(config, placement, machine, checks, launcher=launcher, job=job, starts=starts)
    learns_pairs = job == "train" and config.preference is not None
    if job == "train":
        _check_training(config, built, placement, checks)
        if not learns_pairs:
            _check_learning(config, roles, placement, facts, checks)
    if not learns_pairs:
        check_sampling(config, facts, checks)
        check_reward_model(config, roles, placement, others.get(Role.REWARD_MODEL), job, checks)
    if job != "sft":
        family_of(config).check(config, placement, facts, checks, launcher, here=here)
    check_job(config, job, checks)
    _check_parts(config, job, facts, placement, checks, here=here)
    check_tasks(config, placement, checks, starts=starts and launcher != "ray")
    _check_texts(config, facts, job, roles, checks)
    if machine is not None and launcher != "ray" and (starts or config.cluster.device_memory_gb is None):
        check_disk(config, sizes, roles, job, run_dir, checks)
    check_secrets(config, checks)
    check_packages(config, placement, checks, launcher, job, starts=starts)
    if machine is not None or not here:
        check_machine(config, sizes, placement, machine, checks, launcher=launcher, job=job, starts=starts)
    check_unused(config, graph, placement, checks)  # after the others, so that a key with a problem is reported once
    step_s = check_time(config, graph, placement, sizes, machine, checks, job)
    return Checked(checks.items, sizes, graph, placement, step_s)


def _check_training(
    config: RunConfig, built: TaskGraph | UserError | None, placement: Placement | None, checks: Checklist
) -> None:
    """Check the task graph, further models, how prompts are drawn, and samples that are not generated in the step."""
    graph = built if isinstance(built, TaskGraph) else None
    check_graph(config, built, checks)
    check_models(config, graph, checks.of("models"))
    check_curriculum(config, graph, placement, checks.of("curriculum"))
    check_experts(config, graph, checks.of("experts"))
    check_replay(config, graph, checks.of("replay"))
    check_oversampling(config, graph, placement, checks.of("rollout"))


def _check_learning(
    config: RunConfig,
    roles: Roles,
    placement: Placement | None,
    facts: ModelFacts | None,
    checks: Checklist,
) -> None:
    """Check the objective of training on generated samples."""
    check_objective(config, roles, checks)
    check_correction(config, checks)
    if placement is not None:
        check_async(config, placement, facts, checks)


def _check_parts(
    config: RunConfig,
    job: str,
    facts: ModelFacts | None,
    placement: Placement | None,
    checks: Checklist,
    *,
    here: bool,
) -> None:
    """Check several policies, adapters, draft head, shared prefixes, replay of routes and of kept tokens, images, and
    the folders of the checkpoint and of the run.
    """
    check_policies(config, job, facts, checks.of("policies"))
    check_lora(config, facts, placement, checks)
    check_mtp(config, facts, checks.of("actor"))
    for role in ("actor", "critic", *config.models):
        checks.of(role).from_error(prefix_problem(config, facts, role))
    check_routes(config, facts, checks.of("rollout"))
    check_kept_tokens(config, checks.of("rollout"))
    check_images(config, facts, checks, here=here)
    check_places(config, checks)


def _check_placed(config: RunConfig, placement: Placement, sizes: Sizes, job: str, checks: Checklist) -> None:
    """Check the GPUs per machine, the layouts of the teams' models, and the limit of open files."""
    check_machine_gpus(config, placement, job, checks)
    check_layouts(config, placement, sizes, checks)
    check_descriptors(config, placement, checks)


def _check_steps(config: RunConfig, placement: Placement | None, roles: Roles, job: str, checks: Checklist) -> None:
    """Check the sizes of training steps, their learning rates, FP8 scales, and the watched metrics."""
    check_batches(config, placement, checks)
    for section in sorted(config.uncounted):
        epochs = getattr(config, section).epochs
        checks.of("steps").skip(f"{section}.epochs={epochs:g}: steps are known when the run starts")
    check_schedules(config, roles, checks)
    check_fp8(config, roles, checks.of("fp8"))
    check_watched_metrics(config, job, checks)


def _check_texts(config: RunConfig, facts: ModelFacts | None, job: str, roles: Roles, checks: Checklist) -> None:
    """Check prompts in files and the reward function of a policy that writes text."""
    if not config.task.writes_text:
        return
    check_chat_template(config, checks)
    check_end_tokens(config, facts, checks)
    check_data(config, job, checks)
    if job != "generate" and not (job == "train" and config.preference is not None):
        check_reward(config, checks)
        check_reward_is_named(config, job, roles, checks)
        checks.of("deadlines").check_deadline("reward.timeout_s", config.reward.timeout_s, "the rewards do", config)


def validate(
    config: RunConfig,
    *,
    launcher: str | None = None,
    job: str = "train",
    run_dir: Path | None = None,
) -> Checked:
    """Raise a ConfigError with all failed checks, or issue a ConfigWarning per doubtful key; return the result."""
    checked = check_config(config, launcher=launcher, job=job, machine=this_machine(), starts=True, run_dir=run_dir)
    raise_problems(problems_of(checked.items))
    for check in checked.items:
        if check.status == "warn":
            warnings.warn(str(check.problem()), ConfigWarning, stacklevel=2)
    return checked
