"""Block-wise FP8 weights of servers: the `quantization_config`, and the shapes that SGLang can split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.artifacts.facts import ModelFacts
from megarl.sync.plan import FP8_BLOCK, is_sent_as_fp8


def write_block_fp8(folder: Path, facts: ModelFacts) -> None:
    """Add the `quantization_config` of the FP8 weights that `sync.fp8` sends to the config.json of `folder`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": quantization_config(facts)}, indent=2) + "\n")


def quantization_config(facts: ModelFacts) -> dict[str, Any]:
    """Return the Hugging Face `quantization_config`; it lists the modules whose matrices stay unquantized."""
    unquantized = {"lm_head"}
    for rule in facts.rules:
        for source in rule.sources:
            if len(source.shape) == 2 and "{i}" in source.name and not is_sent_as_fp8(source.name):
                module = source.name.removesuffix(".weight")
                unquantized |= {module.format(i=layer) for layer in range(facts.layers)}
    if facts.encoder is not None:
        unquantized |= {"visual", "model.visual"}  # names of the vision encoder in SGLang and in published files
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(unquantized),
    }


def unsplittable(facts: ModelFacts, tp_size: int, ep_size: int, attention_dp: int = 1) -> list[str]:
    """Return "NAME WIDTH" of each layer width per server rank that is not a multiple of the FP8 block size."""
    attention_tp = max(1, tp_size // attention_dp)  # ranks that share the attention heads
    sizes = facts.dimensions
    heads = max(facts.kv_heads // attention_tp, 1) * facts.head_dim  # with more ranks than heads, ranks share a head
    widths = {"queries": sizes["query"] // attention_tp, "keys and values": heads}
    if sizes["ffn"]:
        widths["feed-forward part"] = sizes["ffn"] // tp_size
    if facts.is_moe:
        widths["experts"] = sizes["expert_ffn"] * ep_size // tp_size
    return [f"{name} {width}" for name, width in widths.items() if width % FP8_BLOCK]
