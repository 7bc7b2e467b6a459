"""Servers that hold block-wise FP8 weights: their model's configuration, and the shapes that SGLang can split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.architectures import ARCHITECTURES
from megarl.artifacts.facts import ModelFacts
from megarl.sync.plan import FP8_BLOCK, goes_as_fp8


def write_block_fp8(folder: Path, facts: ModelFacts) -> None:
    """Say in the config.json of `folder` that weights are FP8 with a scale per block, as `sync.fp8` sends them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": quantization_config(facts)}, indent=2) + "\n")


def quantization_config(facts: ModelFacts) -> dict[str, Any]:
    """Return the `quantization_config` of transformers and SGLang; modules whose matrices are sent whole are named."""
    whole = {"lm_head"}
    for rule in ARCHITECTURES[facts.model_type].tensors:
        for source in rule.sources:
            if len(source.shape) == 2 and "{i}" in source.name and not goes_as_fp8(source.name):
                module = source.name.removesuffix(".weight")
                whole |= {module.format(i=layer) for layer in range(facts.layers)}
    if facts.encoder is not None:
        whole |= {"visual", "model.visual"}  # SGLang's name, and that of published files
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(whole),
    }


def unsplittable(facts: ModelFacts, tp_size: int, ep_size: int) -> list[str]:
    """Return the widths that are no whole number of blocks on every rank of a server, in words."""
    sizes = facts.dimensions
    heads = max(facts.kv_heads // tp_size, 1) * facts.head_dim  # heads that are fewer than ranks are on several
    widths = {"queries": sizes["query"] // tp_size, "keys and values": heads}
    if sizes["ffn"]:
        widths["feed-forward part"] = sizes["ffn"] // tp_size
    if facts.is_moe:
        widths["experts"] = sizes["expert_ffn"] * ep_size // tp_size
    return [f"{name} {width}" for name, width in widths.items() if width % FP8_BLOCK]
