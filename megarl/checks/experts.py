"""Checks of `data.experts`: whether a term of the loss learns the responses, and what does not go with them."""

from __future__ import annotations

from megarl.algorithms.needs import loss_fields
from megarl.checks.checklist import Checklist
from megarl.checks.conflicts import Conflict, refuse_conflicts
from megarl.config.data import ExpertsConfig
from megarl.config.run import RunConfig
from megarl.config.task import SECTIONS
from megarl.dag.graph import TaskGraph
from megarl.dag.stage import Role
from megarl.data.fields import EXPERT_MASK

KEY = "data.experts"
_COEF, _GATE = "algorithm.loss.expert_coef", "algorithm.loss.expert_gate"


def check_experts(config: RunConfig, graph: TaskGraph | None, checks: Checklist) -> None:
    """Check that the recipe has expert responses if the loss uses them, and that no setting conflicts with them."""
    loss, experts = config.algorithm.loss, config.data.experts
    reads = EXPERT_MASK in loss_fields(config.algorithm)
    if experts is None:
        for key, used in {
            "algorithm.loss.name": reads,
            _COEF: loss.expert_coef > 0,
            _GATE: loss.expert_gate is not None,
        }.items():
            if used:
                checks.fail(
                    key,
                    "this needs expert responses, but the recipe names none",
                    found=loss.name if key.endswith("name") else getattr(loss, key.rpartition(".")[2]),
                    allowed="with data.experts.files",
                    fix=f"set {KEY}.files=[FILE], or remove this setting",
                )
        return
    if not experts.files:
        checks.fail(f"{KEY}.files", "no file of expert responses is named", found=[], fix="name at least one file")
    _check_use(config, experts, checks, reads=reads)
    refuse_conflicts(_conflicts(config, graph), KEY, f"{KEY}=null", checks)


def _check_use(config: RunConfig, experts: ExpertsConfig, checks: Checklist, *, reads: bool) -> None:
    """Check that a term of the loss trains on expert responses, and has the log-probs that it needs."""
    loss, correction = config.algorithm.loss, config.rollout_correction.resolved()
    weighs = correction.bypass or correction.is_level != "none"
    if reads and not experts.in_group:
        checks.fail(
            f"{KEY}.in_group",
            f"{loss.name} compares expert responses with the policy's own samples of the prompt",
            found=False,
            allowed=True,
            fix=f"set {KEY}.in_group=true",
        )
    elif not reads and experts.in_group and (experts.logp_key is None or not weighs):
        checks.fail(
            f"{KEY}.in_group",
            f"{loss.name} takes the ratio to the policy that sampled a token: for expert responses it needs their "
            "log-probs, and a rollout correction that uses them",
            found=f"logp_key {experts.logp_key}, rollout_correction {config.rollout_correction.preset}",
            allowed="logp_key with rollout_correction of mode bypass or with importance weights; or the loss luffy, "
            "which needs no log-probs; or in_group: false with expert_coef",
            fix=f"set algorithm.loss.name=luffy, or {KEY}.in_group=false {_COEF}=0.1",
        )
    if not experts.in_group and not loss.expert_coef:
        checks.fail(
            _COEF,
            "no term of the loss learns the expert responses",
            found=0,
            allowed="number > 0, or the loss luffy with data.experts.in_group: true",
            fix=f"set {_COEF}=0.1, or algorithm.loss.name=luffy {KEY}.in_group=true",
        )
    if loss.expert_coef and correction.bypass and correction.rejects:
        checks.fail(
            _COEF,
            "with mode bypass and rejection the gradient is divided by the number of trained tokens, which is known "
            "only after the update; the cross-entropy on expert responses has another divisor",
            found=loss.expert_coef,
            allowed="0, or more with mode decoupled or without rejection",
            fix="set rollout_correction.mode=decoupled with loss: ppo, or algorithm.loss.name=luffy "
            f"{KEY}.in_group=true {_COEF}=0",
        )
    if experts.logp_key is not None and (reads or not experts.in_group):
        checks.fail(
            f"{KEY}.logp_key",
            "nothing reads these log-probs: "
            + (f"{loss.name} weighs expert tokens by the policy's own probability" if reads else "in_group is false"),
            found=experts.logp_key,
            allowed="null",
            fix="remove it",
        )
    if loss.expert_gate is not None and (experts.in_group or not loss.expert_coef):
        checks.fail(
            _GATE,
            "the gate chooses between the policy's own samples and the cross-entropy on expert responses",
            found=f"in_group {experts.in_group}, expert_coef {loss.expert_coef:g}",
            allowed="in_group: false and expert_coef > 0",
            fix=f"set {KEY}.in_group=false {_COEF}=1",
        )


def _conflicts(config: RunConfig, graph: TaskGraph | None) -> list[Conflict]:
    """Return the settings that do not go with expert responses, such as episodes, replay of routes or kept tokens,
    resampling, or a critic.
    """
    rollout, resampling, (image_key, column) = config.rollout, config.algorithm.resampling, config.data.shows
    critic = graph is not None and Role.CRITIC in graph.roles
    env = config.env.get("name")
    return [
        Conflict(
            *("env", env, config.has_turns, "'!replace {}'"),
            "episodes are tokens of policy and environment, which a file does not have",
        ),
        Conflict(", ".join(SECTIONS), "a section", not config.task.writes_text, "null", "expert responses are texts"),
        Conflict(
            *(image_key, column, column is not None, "null"),
            "prompts with images or videos are not matched with responses",
        ),
        Conflict(*("rollout.replay_routes", True, rollout.replay_routes, "false"), "expert responses have no routes"),
        Conflict(
            *("rollout.replay_kept_tokens", True, rollout.replay_kept_tokens, "false"),
            "expert responses have no kept tokens",
        ),
        Conflict(
            *("algorithm.resampling.name", resampling.name, resampling.active, "none"),
            "copies would count expert responses as samples",
        ),
        Conflict(
            *("algorithm.pipeline", "with a critic", critic, "grpo"),
            "a critic would learn the values of responses that the policy does not write",
        ),
    ]
