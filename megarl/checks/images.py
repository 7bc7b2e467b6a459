"""Checks of recipes whose prompts have images, and of vision-language models."""

from __future__ import annotations

from megarl.architectures.vision_language import DECODERS
from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.images import image_problems
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement

_NAME = "images"


def check_images(config: RunConfig, placement: Placement | None, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the model of a recipe with images sees them, and that engine and layout can."""
    key, encoder = config.data.image_key, None if facts is None else facts.encoder
    if key is None and encoder is None:
        return
    if facts is not None and encoder is None:
        checks.fail(
            _NAME,
            "data.image_key",
            "the model sees no images",
            found=f"{key!r} for a {facts.model_type}",
            allowed=f"a vision-language model: {', '.join(DECODERS)}",
            fix="choose such a model, or set data.image_key to null",
        )
        return
    layouts = [config.actor.parallel] if placement is None else [team.parallel for team in placement.teams]
    problems = image_problems(config, layouts)
    for problem in problems:
        checks.from_error(_NAME, problem)
    if facts is not None and encoder is not None and _deep_layers_fit(config, facts, checks) and not problems:
        checks.ok(_NAME, f"{encoder.model_type}, {facts.visual_parameters:,} parameters of its encoder")


def _deep_layers_fit(config: RunConfig, facts: ModelFacts, checks: Checklist) -> bool:
    """Check that the layers that get features of the encoder's blocks are all in the first pipeline chunk."""
    assert facts.encoder is not None, "the model sees images"
    parallel, deep = config.actor.parallel, len(facts.encoder.deepstack)
    layers = facts.layers // (parallel.pp * (parallel.vpp or 1))
    if layers >= deep:
        return True
    checks.fail(
        _NAME,
        "actor.parallel.pp",
        "the first pipeline stage has fewer layers than get features of the vision encoder",
        found=f"{layers} layers",
        allowed=f"at least {deep} layers in the first stage",
        fix="take fewer stages",
    )
    return False
