"""Checks of recipes whose prompts have images, and of vision-language models."""

from __future__ import annotations

from megarl.architectures.vision_language import DECODERS
from megarl.artifacts.facts import ModelFacts
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement

_NAME = "images"


def check_images(config: RunConfig, placement: Placement | None, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the model of a recipe with images sees them, and that engine and layout can."""
    key = config.data.image_key
    if facts is None or (key is None and facts.encoder is None):
        return
    if facts.encoder is None:
        checks.fail(
            _NAME,
            "data.image_key",
            "the model sees no images",
            found=f"{key!r} for a {facts.model_type}",
            allowed=f"a vision-language model: {', '.join(DECODERS)}",
            fix="choose such a model, or set data.image_key to null",
        )
        return
    if config.rollout.engine != "embedded":
        checks.fail(
            _NAME,
            "rollout.engine",
            "servers are not given images",
            found=config.rollout.engine,
            allowed="embedded",
            fix="set rollout.engine to embedded",
        )
    if config.has_turns:
        checks.fail(
            _NAME,
            "env",
            "episodes of an environment have no images",
            found=config.env["name"],
            allowed="no environment",
            fix="remove the section env, or take a model of text",
        )
    for team in () if placement is None else placement.teams:
        if team.parallel.cp > 1:
            checks.fail(
                _NAME,
                "actor.parallel.cp",
                "images are not split over context-parallel ranks",
                found=team.parallel.cp,
                allowed="1",
                fix="use tp or pp for long sequences",
            )
            break
    _check_deep_layers(config, facts, checks)
    if not any(check.status == "fail" and check.name == _NAME for check in checks.items):
        checks.ok(_NAME, f"{facts.encoder.model_type}, {facts.encoder.parameters:,} parameters of its encoder")


def _check_deep_layers(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that the layers that get features of the encoder's blocks are all in the first pipeline chunk."""
    assert facts.encoder is not None, "the model sees images"
    parallel, deep = config.actor.parallel, len(facts.encoder.deepstack)
    layers = facts.layers // (parallel.pp * (parallel.vpp or 1))
    if layers < deep:
        checks.fail(
            _NAME,
            "actor.parallel.pp",
            "the first pipeline stage has fewer layers than get features of the vision encoder",
            found=f"{layers} layers",
            allowed=f"at least {deep} layers in the first stage",
            fix="take fewer stages",
        )
