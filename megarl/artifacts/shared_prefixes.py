"""Why an engine cannot share the prefixes of its samples (`actor.engine.share_prefixes`), from recipe and model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.artifacts.facts import ModelFacts
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.model import ParallelConfig
    from megarl.config.run import RunConfig


class _Obstacle(NamedTuple):
    problem: str
    value: object
    allowed: str


def prefix_problem(config: RunConfig, facts: ModelFacts | None, role: str) -> ConfigError | None:
    """Return the error for an engine that is to share prefixes and cannot, or None.

    Args:
        facts: those of the policy, whose architecture a critic has; None: not known.
        role: `actor` or `critic`.
    """
    settings = config.training_of(role)
    if not settings.engine.share_prefixes:
        return None
    key = f"{config.section_of(role)}.engine.share_prefixes"
    obstacle = _of_settings(config, role)
    if obstacle is None and facts is not None:
        obstacle = _of_model(facts, config.parallel_of(role))
    if obstacle is None:
        return None
    problem, value, allowed = obstacle
    return ConfigError(problem, where=key, found=value, allowed=allowed, fix=f"set {key}=false")


def shares_prefixes(config: RunConfig, facts: ModelFacts, role: str) -> bool:
    """Return whether the model of a role shares the prefixes of samples. Models that are not trained use the actor's
    setting, and share nothing where they cannot."""
    settings = config.training_of(role)
    can = config.task.writes_text and _of_model(facts, config.parallel_of(role)) is None
    return settings.engine.share_prefixes and can


def _of_settings(config: RunConfig, role: str) -> _Obstacle | None:
    settings, lora = config.training_of(role), config.model.lora
    engine, section = settings.engine, config.section_of(role)
    if not config.task.writes_text:
        return _Obstacle(
            "prefixes are shared by samples of text only", "a task without text", "a task that writes text"
        )
    if lora is not None and lora.dropout:
        problem = "dropout draws another mask for each sample, so samples have no common prefix"
        return _Obstacle(problem, f"model.lora.dropout={lora.dropout:g}", "model.lora.dropout=0")
    if engine.layers == "te" or engine.fp8 != "none":
        problem = "Transformer Engine's attention cannot share prefixes"
        value = f"{section}.engine.layers=te" if engine.fp8 == "none" else f"{section}.engine.fp8={engine.fp8}"
        return _Obstacle(problem, value, "layers auto or local, without fp8")
    if role == "actor" and config.actor.mtp is not None:
        problem = "a draft head predicts the token after the next one, and a shared prefix has several next tokens"
        return _Obstacle(problem, "actor.mtp", "actor.mtp=null")
    return None


def _of_model(facts: ModelFacts, parallel: ParallelConfig) -> _Obstacle | None:
    if facts.encoder is not None:
        return _Obstacle("prefixes with images cannot be shared", facts.model_type, "a model that reads text")
    if any(mixer.state_bytes(1, 1) for mixer in facts.mixers):
        problem = "layers with a recurrent state cannot share prefixes"
        return _Obstacle(problem, facts.model_type, "a model with softmax attention in all layers")
    if parallel.cp > 1:
        return _Obstacle("context parallelism cuts samples, which then share no prefixes", f"cp={parallel.cp}", "cp=1")
    return None
