"""Checks of routing replay."""

from __future__ import annotations

from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig

_KEY = "rollout.replay_routes"
_CHUNK = "--chunked-prefill-size"


def check_routes(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that expert routes can be replayed (`rollout.replay_routes`): the model has experts, and the engine records
    the route of every token."""
    if not config.rollout.replay_routes:
        return
    obstacle: tuple[str, object, str] | None = None
    if facts is not None and not facts.is_moe:
        obstacle = "this model has no experts, so there are no routes", facts.model_type, "a mixture of experts"
    elif not config.task.writes_text:
        obstacle = "the policy of this task has no routes", "true", "a text model"
    engine = config.actor.engine
    if engine.fp8 != "none" and "moe" in engine.recomputed:
        obstacle = "FP8 mixtures that recompute themselves cannot replay routes", "actor.engine.recompute: moe", "full"
    servers = config.rollout.servers
    if servers is not None and servers.speculative is not None:
        obstacle = "routes of speculative decoding are not supported", servers.speculative.algorithm, "no draft model"
    if servers is not None and servers.argument(_CHUNK) == "-1":
        reason = "SGLang's record of routes is too small for prompts that are not read in chunks"
        obstacle = reason, f"{_CHUNK}=-1", f"{_CHUNK} above 0"
    if obstacle is not None:
        problem, value, allowed = obstacle
        checks.fail(_KEY, problem, found=value, allowed=allowed, fix=f"set {_KEY}=false")
