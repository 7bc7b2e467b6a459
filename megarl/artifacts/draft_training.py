"""Why a run cannot train the draft head of its policy (`actor.mtp`), from the recipe and the model's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import ModelFacts
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_KEY, _OFF = "actor.mtp", "remove actor.mtp, which keeps the draft head as it is"


def draft_problem(config: RunConfig, facts: ModelFacts) -> ConfigError | None:
    """Return the error for a draft head that cannot be trained, or None."""
    obstacle = _of_model(config, facts) or _of_layout(config)
    if config.actor.mtp is None or obstacle is None:
        return None
    problem, value, allowed = obstacle
    return ConfigError(problem, where=_KEY, found=value, allowed=allowed, fix=_OFF)


def _of_model(config: RunConfig, facts: ModelFacts) -> tuple[str, object, str] | None:
    with_heads = sorted(name for name, known in ARCHITECTURES.items() if known.draft is not None)
    if ARCHITECTURES[facts.model_type].draft is None:
        return "models of this kind have no draft head", facts.model_type, ", ".join(with_heads)
    if all(mixer.state_bytes(1, 1) for mixer in facts.mixers):
        return "a draft head has softmax attention, of which this model has no layer", "only gated delta nets", "some"
    if facts.draft_layers > 1:
        return "only draft heads of one layer can be trained", f"{facts.draft_layers} layers", "1 layer"
    if not config.task.writes_text or facts.encoder is not None:
        return "the draft head of a model that reads images cannot be trained", facts.model_type, "model.vision=false"
    if config.trains_reward_model:
        return "a reward model has no draft head", config.algorithm.pipeline, "training of a policy"
    return None


def _of_layout(config: RunConfig) -> tuple[str, object, str] | None:
    model, parallel = config.model, config.actor.parallel
    if model.lora is not None:
        return "adapters freeze all other weights, so a draft head cannot be trained", "model.lora", "model.lora=null"
    if "language_model" in model.freeze:
        return "the draft head is a part of the frozen language_model", model.freeze, "model.freeze=[]"
    if parallel.pp > 1:
        reason = "a draft head needs the embedding and the last hidden states on one pipeline stage"
        return reason, f"actor.parallel.pp={parallel.pp}", "pp=1"
    if parallel.cp > 1:
        reason = "the token after a rank's last one is on another context-parallel rank"
        return reason, f"actor.parallel.cp={parallel.cp}", "cp=1"
    return None
