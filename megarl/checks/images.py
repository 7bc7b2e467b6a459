"""Checks of recipes whose prompts have images, and of vision-language models."""

from __future__ import annotations

import math

from megarl.architectures.vision_language import DECODERS, ImageSettings, VisionEncoder
from megarl.artifacts.facts import ModelFacts, local_folder
from megarl.artifacts.layout import divisors, image_problems
from megarl.artifacts.vla_folder import read_preprocessor
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.dag.placement import Placement
from megarl.system.compat.cuda import version_in
from megarl.system.compat.sglang import find_python, install_fix
from megarl.system.errors import ConfigError

_NAME = "images"
#: Length of a Qwen2.5-VL patch that SGLang 0.5.23 takes for pixels; other lengths it takes for features.
_PATCH_VALUES = 1176
#: Number of encoder blocks of Qwen3-VL's mixture whose features SGLang 0.5.23 adds to layers.
_MIXTURE_BLOCKS = 3


def check_images(config: RunConfig, placement: Placement | None, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the model of a recipe with images can see them, and that engine and layout support it."""
    checks = checks.of(_NAME)
    key, encoder = config.data.image_key, None if facts is None else facts.encoder
    if key is None and encoder is None:
        return
    if facts is not None and encoder is None:
        checks.fail(
            "data.image_key",
            "this model cannot see images",
            found=f"{key!r} for a {facts.model_type}",
            allowed=f"a vision-language model: {', '.join(DECODERS)}",
            fix="choose such a model, or set data.image_key to null",
        )
        return
    if facts is not None and encoder is not None:
        _check_numbers(config, encoder, facts.vocab, checks)
    layouts = [config.actor.parallel] if placement is None else [team.parallel for team in placement.teams]
    before = len(checks.items)
    for problem in image_problems(layouts):
        checks.from_error(problem)
    if encoder is not None and config.rollout.engine == "sglang":
        _check_servers(config.rollout.sglang, encoder, checks)
        if config.async_.partial:
            checks.fail(
                "async.partial",
                "in an interrupted sample a server would take the image token for another image",
                found=True,
                allowed="false if SGLang servers get images",
                fix="set async.partial=false, or rollout.engine=embedded",
            )
        # otherwise the interpreter is on another machine
        if not config.rollout.sglang.urls and config.cluster.device_memory_gb is None:
            _check_interpreter(config.rollout.sglang, checks)
    fits = len(checks.items) == before
    if facts is not None and encoder is not None and _deep_layers_fit(config, facts, checks) and fits:
        checks.ok(f"{encoder.model_type}, {facts.visual_parameters:,} parameters of its encoder")


def _check_numbers(config: RunConfig, encoder: VisionEncoder, vocab: int, checks: Checklist) -> None:
    """Check the special tokens of images and the limits of their pixels."""
    beyond = [token for token in encoder.image_tokens if not 0 <= token < vocab]
    if beyond:
        checks.fail(
            "model: image_token_id",
            "this special token of images is not in the vocabulary",
            found=beyond,
            allowed=f"0 to {vocab - 1}",
            fix="correct vision_start_token_id, image_token_id and vision_end_token_id of config.json",
        )
    with checks.recorded():
        folder = None if config.model.path is None else local_folder(config.model.path)
        processor = read_preprocessor(folder) if folder is not None else None
        ImageSettings.from_config(encoder, processor).limited(config.data.min_pixels, config.data.max_pixels)


def _check_servers(servers: SGLangConfig, encoder: VisionEncoder, checks: Checklist) -> None:
    """Check that SGLang servers support this vision encoder."""
    tp = servers.tp_size
    if encoder.model_type == "qwen2_5_vl" and encoder.patch_values != _PATCH_VALUES:
        checks.fail(
            "model: vision_config.patch_size",
            "a server takes patches of this size for finished features",
            found=encoder.patch,
            allowed=f"14, {_PATCH_VALUES} numbers of a patch, as published models of Qwen2.5-VL have it",
            fix="use such a model, or rollout.engine=embedded",
        )
    if encoder.model_type == "qwen3_vl_moe" and len(encoder.deepstack) != _MIXTURE_BLOCKS:
        checks.fail(
            "model: vision_config.deepstack_visual_indexes",
            "servers support features of another number of blocks only",
            found=list(encoder.deepstack),
            allowed=f"{_MIXTURE_BLOCKS} blocks, as published models of Qwen3-VL have them",
            fix="use such a model, or rollout.engine=embedded",
        )
    if encoder.heads % tp or encoder.ffn % tp:
        checks.fail(
            "rollout.sglang.tp_size",
            "the ranks of a server must be able to divide the heads and the MLP of the vision encoder",
            found=tp,
            allowed=divisors(math.gcd(encoder.heads, encoder.ffn)),
            fix="change tp_size",
        )


def _check_interpreter(servers: SGLangConfig, checks: Checklist) -> None:
    """Check that the servers' interpreter can read images; other checks report a missing interpreter."""
    try:
        python = find_python(servers.python, cuda=None)
    except ConfigError:
        return
    if version_in(python, "torchvision") is None:
        checks.fail(
            "rollout.sglang.python",
            "the servers' interpreter lacks torchvision, which reads images there",
            found=str(python),
            fix=install_fix(),
        )


def _deep_layers_fit(config: RunConfig, facts: ModelFacts, checks: Checklist) -> bool:
    """Check that all layers which get features of encoder blocks are in the first pipeline chunk."""
    assert facts.encoder is not None, "the model sees images"
    parallel, deep = config.actor.parallel, len(facts.encoder.deepstack)
    layers = facts.layers // (parallel.pp * (parallel.vpp or 1))
    if layers >= deep:
        return True
    checks.fail(
        "actor.parallel.pp",
        "the first pipeline stage has fewer layers than those that get features of the vision encoder",
        found=f"{layers} layers",
        allowed=f"at least {deep} layers in the first stage",
        fix="use fewer pipeline stages",
    )
    return False
