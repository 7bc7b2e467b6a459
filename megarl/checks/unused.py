"""Finds keys that the user wrote and that nothing in the recipe reads.

`OWNERS` lists for parts of a recipe when something reads them. A key counts as written if it is in the user's own
recipe file or among the overrides. Keys set by a parent recipe, and values equal to the default, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.checks.checklist import Checklist
from megarl.config.load import differences
from megarl.config.run import RunConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.placement import Placement
from megarl.dag.stage import Role

#: Maximum number of keys in one message.
_SHOWN = 5


@dataclass(frozen=True)
class _Job:
    """The recipe, the task graph and the teams of a job."""

    config: RunConfig
    graph: TaskGraph
    placement: Placement | None

    def has(self, role: Role) -> bool:
        """Return whether the graph has a node of this role."""
        return role in self.graph.roles

    @property
    def uses_servers(self) -> bool:
        """Whether generation runs on servers."""
        return self.config.rollout.servers is not None

    @property
    def several_teams(self) -> bool:
        """Whether separate teams generate and train; also true if the teams are unknown."""
        return self.placement is None or len(self.placement.teams) > 1


@dataclass(frozen=True)
class Owner:
    """A part of a run, such as the critic, and the section that only this part reads; without it the keys are unused.

    Attributes:
        prefix: dotted key of the section.
        reads: returns whether a job has this part.
        lacks: why the keys are unused in a job without this part, as text for the warning.
        fix: recipe change that adds this part.
        but: keys below `prefix` that something else reads, or that switch this part on.
        only: the keys below `prefix` that this part reads; empty: all except `but`.
    """

    prefix: str
    reads: Callable[[_Job], bool]
    lacks: str
    fix: str
    but: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


OWNERS = (
    Owner("critic", lambda j: j.has(Role.CRITIC), "the pipeline trains no critic", "set algorithm.pipeline=ppo"),
    Owner(
        "reference",
        lambda j: j.has(Role.REFERENCE),
        "nothing compares the policy with a reference",
        "set algorithm.kl.use=loss",
    ),
    Owner(
        "teacher",
        lambda j: j.has(Role.TEACHER),
        "no teacher is used",
        "set algorithm.distillation.coef",
        ("path", "models"),
    ),
    Owner(
        "reward_model",
        lambda j: j.has(Role.REWARD_MODEL),
        "no reward model scores samples",
        "set reward.name=reward_model",
        ("path",),
    ),
    Owner(
        "algorithm.kl",
        lambda j: j.config.algorithm.kl.use != "none",
        "KL is off",
        "set algorithm.kl.use=loss",
        ("use",),
    ),
    Owner(
        "algorithm.distillation",
        lambda j: bool(j.config.algorithm.distillation.coef),
        "distillation is off",
        "set algorithm.distillation.coef",
        ("coef", "task_loss"),
    ),
    Owner(
        "algorithm.dynamic_sampling",
        lambda j: j.config.algorithm.dynamic_sampling.enabled,
        "dynamic sampling is off",
        "set algorithm.dynamic_sampling.enabled=true, and algorithm.pipeline=dapo",
        ("enabled",),
    ),
    Owner(
        "algorithm.overlong",
        lambda j: j.config.algorithm.overlong.buffer_tokens is not None,
        "no penalty for long responses is on",
        "set algorithm.overlong.buffer_tokens",
        ("buffer_tokens",),
    ),
    Owner(
        "rollout.sglang",
        lambda j: j.uses_servers,
        "the engine is another one",
        "set rollout.engine=sglang",
    ),
    Owner(
        "sync",
        lambda j: j.several_teams or j.uses_servers,
        "generation uses the trainer's own weights",
        "set rollout.engine=sglang, or give generation a team of its own",
    ),
    Owner(
        "validation.sampling",
        lambda j: bool(j.config.data.held_out),
        "there are no held-out prompts",
        "set data.val_files or data.val_split",
    ),
    Owner(
        "sft.optim",
        # with sft.epochs a submitted job computes the steps itself
        lambda j: j.config.sft.steps > 0 or j.config.sft.epochs is not None,
        "no supervised steps come first",
        "set sft.steps",
    ),
    Owner(
        "data",
        lambda j: j.config.data.image_key is not None,
        "prompts have no images",
        "set data.image_key",
        only=("image_dir", "min_pixels", "max_pixels", "limit_images"),
    ),
    Owner(
        "data",
        lambda j: bool(j.config.data.image_key or j.config.data.video_key),
        "prompts have no images or videos, which threads would read",
        "set data.image_key",
        only=("loader_workers",),
    ),
    Owner(
        "data",
        lambda j: j.config.data.video_key is not None,
        "prompts have no videos",
        "set data.video_key",
        only=("video_fps", "max_frames", "video_min_pixels", "video_max_pixels"),
    ),
    Owner(
        "tracking",
        lambda j: j.config.tracking.mlflow,
        "MLflow is off",
        "set tracking.mlflow=true",
        only=("mlflow_uri",),
    ),
    Owner(
        "tracking",
        lambda j: j.config.tracking.mlflow or bool(j.config.tracking.loggers),
        "no tracker is on",
        "set tracking.mlflow=true, or tracking.loggers",
        only=("project",),
    ),
)


def check_unused(config: RunConfig, graph: TaskGraph | None, placement: Placement | None, checks: Checklist) -> None:
    """Warn of keys that the user set to a value other than the default, but that nothing reads."""
    if graph is None or not config.written:
        return
    checks, job = checks.of("unused keys"), _Job(config, graph, placement)
    changed = _leaves(differences(RunConfig(name="").model_dump(), config.model_dump()), "")
    for owner in OWNERS:
        keys = [key for key in changed if _belongs(key, owner) and key in config.written]
        if not keys or owner.reads(job) or any(check.key in keys for check in checks.items):
            continue
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        checks.warn(
            keys[0],
            f"nothing reads {', '.join(keys[:_SHOWN])}{more}: {owner.lacks}",
            found=changed[keys[0]],
            fix=f"{owner.fix}, or remove {'it' if len(keys) == 1 else 'them'}",
        )


def _belongs(key: str, owner: Owner) -> bool:
    inside = key.removeprefix(f"{owner.prefix}.")
    name = inside.partition(".")[0]
    return inside != key and name not in owner.but and (not owner.only or name in owner.only)


def _leaves(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of a nested mapping by dotted key."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        nested = isinstance(value, dict) and value
        leaves |= _leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return leaves
