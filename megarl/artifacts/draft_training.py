"""Why a run cannot train the draft head of its policy (`actor.mtp`), from the recipe and the model's sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import ModelFacts
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_KEY, _OFF = "actor.mtp", "remove actor.mtp"
_KEPT = f"{_OFF}; the run then keeps the draft head as it is"


def facts_with_draft(config: RunConfig, facts: ModelFacts) -> ModelFacts:
    """Return the actor's sizes `facts`, with its draft head if the recipe trains the head and the model allows it."""
    if config.actor.mtp is None or draft_problem(config, facts) is not None:
        return facts
    return replace(facts, trains_draft=True)


def draft_problem(config: RunConfig, facts: ModelFacts) -> ConfigError | None:
    """Return the error for a draft head that cannot be trained, or None."""
    if config.actor.mtp is None:
        return None
    obstacle = _of_model(config, facts) or _of_settings(config)
    if obstacle is None:
        return None
    problem, value, allowed, fix = obstacle
    return ConfigError(problem, where=_KEY, found=value, allowed=allowed, fix=fix)


def _of_model(config: RunConfig, facts: ModelFacts) -> tuple[str, object, str, str] | None:
    kind = facts.model_type
    if not config.task.writes_text:
        return "only the draft head of a model that writes text can be trained", kind, "a language model", _OFF
    if ARCHITECTURES[kind].draft is None:
        with_heads = sorted(name for name, known in ARCHITECTURES.items() if known.draft is not None)
        return "models of this kind have no draft head", kind, ", ".join(with_heads), _OFF
    if all(mixer.state_bytes(1, 1) for mixer in facts.mixers):
        problem = "a draft head has softmax attention, of which this model has no layer"
        return problem, "layers without softmax attention only", "at least one layer of softmax attention", _KEPT
    if facts.draft_layers > 1:
        problem = "only draft heads of one layer can be trained"
        return problem, f"{facts.draft_layers} layers", "1 layer", _KEPT
    if facts.encoder is not None:
        problem = "the draft head of a model that reads images cannot be trained"
        return problem, kind, "a model without its vision encoder", f"set model.vision=false, or {_OFF}"
    if config.trains_reward_model:
        return (
            "a reward model has no draft head",
            config.algorithm.pipeline_name,
            "a pipeline that trains a policy",
            _OFF,
        )
    return None


def _of_settings(config: RunConfig) -> tuple[str, object, str, str] | None:
    model = config.model
    if model.lora is not None:
        problem = "adapters freeze all other weights, so a draft head cannot be trained"
        return problem, "model.lora", "model.lora=null", f"set model.lora=null, or {_OFF}"
    if "language_model" in model.freeze:
        problem = "the draft head is a part of the frozen language_model"
        allowed = "model.freeze without language_model"
        return problem, f"model.freeze={model.freeze}", allowed, f"remove language_model from model.freeze, or {_OFF}"
    return None
