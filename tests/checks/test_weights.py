"""Weight files are looked at before a run: whole, and with the tensors that the configuration implies."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.artifacts.checkpoint_files import INDEX
from megarl.artifacts.facts import facts_from_config
from megarl.checks.weights import check_weights, expected_tensors, read_header
from megarl.system.errors import ConfigError

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 6}


def raw_config(model_type: str, **more: object) -> dict:
    experts = {"mixtral": {"num_local_experts": 3}, "qwen3_moe": {"num_experts": 3, **MOE}}.get(model_type, {})
    return {"model_type": model_type, **SMALL, **experts, **more}


def facts_of(model_type: str, **more: object):
    return facts_from_config(raw_config(model_type, **more), "here")


def write(file: Path, shapes: dict[str, tuple[int, ...]], cut: int = 0, dtypes: dict[str, str] | None = None) -> None:
    """A safetensors file of zeros, without its last `cut` bytes. `dtypes`: of tensors that are not F32."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "F32")
        size = {"F32": 4, "F16": 2}.get(dtype, 1) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(offset)
    file.write_bytes(content[: len(content) - cut])


def test_a_whole_model_passes(tmp_path: Path) -> None:
    facts = facts_of("qwen3")
    shapes = {name: shape for forms in expected_tensors(facts) for name, shape in forms[0].items()}
    write(tmp_path / "model.safetensors", shapes)
    assert check_weights(tmp_path, facts) == f"{len(shapes)} tensors in model.safetensors"
    assert read_header(tmp_path / "model.safetensors") == {name: ("F32", shape) for name, shape in shapes.items()}


def test_layers_of_a_mixture_may_be_dense_and_are_those_of_config_json(tmp_path: Path) -> None:
    facts, other = facts_of("qwen3_moe", mlp_only_layers=[0]), facts_of("qwen3_moe", mlp_only_layers=[1])
    shapes = {name: shape for forms in expected_tensors(facts) for name, shape in forms[0].items()}
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate.weight"} <= shapes.keys()
    write(tmp_path / "model.safetensors", shapes)
    check_weights(tmp_path, facts)
    with pytest.raises(ConfigError, match=r"layers are mixtures of experts by config.json, and dense in the files"):
        check_weights(tmp_path, other)
    sparse = facts_of("qwen3_moe")
    write(tmp_path / "model.safetensors", {n: s for forms in expected_tensors(sparse) for n, s in forms[0].items()})
    with pytest.raises(ConfigError, match=r"layers are dense by config.json, and mixtures[\s\S]*layers 0"):
        check_weights(tmp_path, facts)


@pytest.mark.parametrize(
    ("extra", "critic", "refused"),
    [
        ("model.layers.2.mlp.up_proj.weight", False, True),
        ("model.layers.0.self_attn.q_proj.bias", False, True),
        ("score.weight", False, True),
        ("score.weight", True, False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, False),
    ],
)
def test_tensors_that_nothing_reads_are_refused(tmp_path: Path, extra: str, critic: bool, refused: bool) -> None:
    facts = facts_of("qwen3")
    shapes = {name: shape for forms in expected_tensors(facts) for name, shape in forms[0].items()}
    write(tmp_path / "model.safetensors", shapes | {extra: (1, 8)})
    if not refused:
        check_weights(tmp_path, facts, value_head=critic)
        return
    with pytest.raises(ConfigError, match="1 tensor that the model") as caught:
        check_weights(tmp_path, facts, value_head=critic)
    assert extra in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("none", ["neither model.safetensors nor", "save_pretrained"]),
        ("cut", ["model-2.safetensors", "cut inside its tensors", "bytes"]),
        ("short", ["model-2.safetensors", "or it is incomplete"]),
        ("text", ["model-2.safetensors", "this is not a safetensors file"]),
        ("lost", ["model-2.safetensors", "is missing", f"listed in {INDEX}"]),
        ("tensor", ["'model.norm.weight' is missing"]),
        ("shape", ["model-2.safetensors", "'model.norm.weight' has a different shape", "(9,)", "(8,)"]),
        ("index", [INDEX, "cannot read the index"]),
    ],
)
def test_damage_is_located(tmp_path: Path, damage: str, words: list[str]) -> None:
    facts = facts_of("qwen3")
    shapes = {name: shape for forms in expected_tensors(facts) for name, shape in forms[0].items()}
    if damage == "tensor":
        del shapes["model.norm.weight"]
    if damage == "shape":
        shapes["model.norm.weight"] = (9,)
    names = sorted(shapes)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, held in parts.items():
        write(tmp_path / file, {n: shapes[n] for n in held}, cut=5 if damage == "cut" and "2" in file else 0)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (tmp_path / INDEX).write_text("{" if damage == "index" else json.dumps({"weight_map": weight_map}))
    second = tmp_path / "model-2.safetensors"
    if damage == "short":
        second.write_bytes(second.read_bytes()[:20])
    if damage == "text":
        second.write_text("version https://git-lfs.github.com/spec/v1\n")
    if damage == "lost":
        second.unlink()
    if damage == "none":
        for file in tmp_path.iterdir():
            file.unlink()
    with pytest.raises(ConfigError) as caught:
        check_weights(tmp_path, facts)
    for word in words:
        assert word in str(caught.value)


def test_a_header_that_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    import safetensors

    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:  # a sparse file: only its first 8 bytes are written
        opened.write((100_000_001).to_bytes(8, "little"))
        opened.truncate(8 + 100_000_001)
    with pytest.raises(safetensors.SafetensorError, match=r"(?i)header.*large"):
        safetensors.safe_open(file, "np")
    with pytest.raises(ConfigError, match="no header of the length"):
        read_header(file)


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 4]}
CODED = "model.layers.0.mlp.up_proj.weight"  # 12 x 8


@pytest.mark.parametrize(
    ("dtype", "scales", "said", "words"),
    [
        ("F8_E4M3", (2, 2), FP8, None),
        ("F16", None, None, None),
        ("F8_E4M3", (2, 2), None, ["'model.layers.0.mlp.up_proj.weight' is quantised", "F8_E4M3, scales in F32"]),
        ("F8_E4M3", None, FP8, ["is quantised", "no model.layers.0.mlp.up_proj.weight_scale_inv"]),
        ("F8_E4M3", (2, 1), FP8, ["up_proj.weight_scale_inv' does not have one scale per block", "(2, 2)"]),
        ("I8", (2, 2), FP8, ["is quantised", "I8, scales"]),
    ],
)
def test_codes_need_their_scales_and_a_word_about_them(tmp_path: Path, dtype, scales, said, words) -> None:
    facts = facts_of("qwen3")
    shapes = {name: shape for forms in expected_tensors(facts) for name, shape in forms[0].items()}
    if scales is not None:
        shapes[f"{CODED}_scale_inv"] = scales
    write(tmp_path / "model.safetensors", shapes, dtypes={CODED: dtype})
    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen3", quantization_config=said)))
    if words is None:
        check_weights(tmp_path, facts)
        return
    with pytest.raises(ConfigError) as caught:
        check_weights(tmp_path, facts)
    for word in words:
        assert word in str(caught.value)
