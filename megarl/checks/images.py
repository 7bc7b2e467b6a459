"""Checks of recipes whose prompts have images, and of vision-language models."""

from __future__ import annotations

from megarl.architectures.decoders import DECODERS
from megarl.architectures.vision_language import ImageSettings, VideoSettings, VisionEncoder
from megarl.artifacts.facts import ModelFacts, local_folder
from megarl.artifacts.vla_folder import read_preprocessor, read_video_preprocessor
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.rollout.families import family_of
from megarl.system.errors import ConfigError

_NAME = "images"


def check_images(config: RunConfig, facts: ModelFacts | None, checks: Checklist, *, here: bool = True) -> None:
    """Check that the model of a recipe with images can see them, and that engine and layout support it.

    Args:
        here: whether this machine is one of the run's, so that its interpreter of servers must read images.
    """
    checks = checks.of(_NAME)
    key, encoder = config.data.image_key, None if facts is None else facts.encoder
    if config.data.video_key is not None and config.has_lanes:
        checks.fail(
            "data.video_key",
            "requests of agents have no videos, so the policy would see none",
            found=config.data.video_key,
            allowed=f"null with env.name={config.env['name']}",
            fix="set data.video_key to null; agents may send frames as images",
        )
    if config.data.video_key is not None and config.data.video_key == key:
        checks.fail(
            "data.video_key",
            "one column cannot hold both images and videos",
            found=key,
            allowed="another column than data.image_key's",
            fix="set it to another column; for prompts without images set data.image_key to a name that no column has",
        )
    if (problem := _vision_problem(config, facts)) is not None:
        checks.from_error(problem)
        return
    if key is None and encoder is None:
        return
    if facts is not None and encoder is not None:
        _check_numbers(config, encoder, facts.vocab, checks)
    before = len(checks.items)
    if encoder is not None:
        family_of(config).check_images(config, encoder, checks, here=here)
    fits = len(checks.items) == before
    if facts is not None and encoder is not None and _deep_layers_fit(config, facts, checks) and fits:
        checks.ok(f"{encoder.model_type}, {facts.visual_parameters:,} parameters of its encoder")


def _vision_problem(config: RunConfig, facts: ModelFacts | None) -> ConfigError | None:
    """Return the error if the model cannot read the images or videos of the recipe, or has no encoder for
    `model.vision`; None if they fit."""
    (key, column), vision = config.data.shows, config.model.vision
    nouns = "videos" if key == "data.video_key" else "images"
    models = f"a vision-language model: {', '.join(DECODERS)}"
    if column is not None and vision is False:
        return ConfigError(
            f"the model cannot see the {nouns} of {key} without its vision encoder",
            where="model.vision",
            found=False,
            allowed="true, or null",
            fix=f"set model.vision to null, or {key} to null",
        )
    if facts is None:
        return None
    if column is not None and facts.encoder is None:
        return ConfigError(
            f"this model cannot see {nouns}",
            where=key,
            found=f"{column!r} for a {facts.model_type}",
            allowed=models,
            fix=f"choose such a model, or set {key} to null",
        )
    if vision and facts.encoder is None and facts.vision is None:
        return ConfigError(
            "this model has no vision encoder",
            where="model.vision",
            found=f"true for a {facts.model_type}",
            allowed=models,
            fix="choose such a model, or set model.vision to null",
        )
    if vision is False and facts.vision is not None:
        return ConfigError(
            "this policy is always read with its vision towers",
            where="model.vision",
            found=False,
            allowed="true, or null",
            fix="set model.vision to null",
        )
    return None


def _check_numbers(config: RunConfig, encoder: VisionEncoder, vocab: int, checks: Checklist) -> None:
    """Check that the special tokens of images are in the vocabulary, and the minimum and maximum pixels of an image."""
    tokens = [*encoder.image_tokens, *([] if config.data.video_key is None else [encoder.video_token])]
    beyond = [token for token in tokens if not 0 <= token < vocab]
    if beyond:
        checks.fail(
            "model: image_token_id",
            "this special token of images is not in the vocabulary",
            found=beyond,
            allowed=f"0 to {vocab - 1}",
            fix="correct vision_start_token_id, image_token_id, video_token_id and vision_end_token_id of config.json",
        )
    with checks.recorded():
        folder = None if config.model.path is None else local_folder(config.model.path)
        processor = read_preprocessor(folder) if folder is not None else None
        ImageSettings.from_config(encoder, processor).limited(config.data.min_pixels, config.data.max_pixels)
        if config.data.video_key is not None:
            videos = None if folder is None else read_video_preprocessor(folder)
            VideoSettings.of(encoder, videos, config.data.video_min_pixels, config.data.video_max_pixels)


def _deep_layers_fit(config: RunConfig, facts: ModelFacts, checks: Checklist) -> bool:
    """Check that all decoder layers that receive features of encoder blocks are in the first pipeline chunk."""
    assert facts.encoder is not None, "the model sees images"
    parallel, deep = config.actor.parallel, len(facts.encoder.deepstack)
    layers = parallel.chunk_layers(facts.layers)[0]
    if layers >= deep:
        return True
    ends = parallel.first_stage_layers is not None
    checks.fail(
        f"actor.parallel.{'first_stage_layers' if ends else 'pp'}",
        "the first pipeline stage has fewer layers than those that get features of the vision encoder",
        found=f"{layers} layers",
        allowed=f"at least {deep} layers in the first stage",
        fix=f"set it to {deep} or more" if ends else f"set actor.parallel.first_stage_layers={deep}, or a smaller pp",
    )
    return False
