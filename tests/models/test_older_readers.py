"""Exports are one and the same model for transformers 4 and 5, and for what reads their config.json by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.model import ModelConfig
from megarl.data.tokenizer import character_tokenizer
from megarl.models.convert import convert
from megarl.models.hf import load_hf_config
from megarl.models.weights import export_weights
from megarl.models.weights.metadata import older_rope_keys, write_metadata
from megarl.system.compat.sglang import STAND_INS
from tests.dist import single_process, world
from tests.models import older_reader, vlm_tiny
from tests.models.tiny import ARCHITECTURES, build_tiny, save_tiny
from tests.rollout.servers import need_interpreter

ALPHABET = "0123456789+="
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-ratio": {**YARN, "factor": None},
    "yarn-all": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
}
# Keys that the classes of the two versions treat by different code.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"head_dim": None}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "tie_word_embeddings": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
]
ENVIRONMENT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl" / "transformers-4.57.6"


def written(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("rope", ROPES)
def test_older_keys_stand_beside_the_newer_ones_and_mean_the_same(tmp_path: Path, rope: str) -> None:
    config = transformers.AutoConfig.for_model("qwen3", rope_parameters=dict(ROPES[rope]), max_position_embeddings=128)

    write_metadata(tmp_path, config, None, torch.bfloat16)

    raw = written(tmp_path)
    assert raw["rope_theta"] == ROPES[rope]["rope_theta"]
    assert (raw["rope_scaling"] is None) == (rope == "default")
    assert raw["torch_dtype"] == raw["dtype"] == "bfloat16"
    again = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert again == {**config.rope_parameters, **({"factor": 4.0} if rope == "yarn-ratio" else {})}
    # A reader of only one form gets the same numbers.
    for left_out in (["rope_parameters"], ["rope_scaling", "rope_theta"]):
        part = {key: value for key, value in raw.items() if key not in left_out}
        single = transformers.AutoConfig.for_model(**part).rope_parameters
        assert older_rope_keys(single, 128) == older_rope_keys(again, 128)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_number_of_experts_has_both_of_its_names(tmp_path: Path, model_type: str) -> None:
    write_metadata(tmp_path, transformers.AutoConfig.for_model(model_type, num_experts=6), None, torch.float32)
    assert written(tmp_path)["num_experts"] == written(tmp_path)["num_local_experts"] == 6
    assert transformers.AutoConfig.from_pretrained(tmp_path).num_experts == 6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("kind", vlm_tiny.OLDER_KINDS)
def test_the_decoder_of_a_vision_language_model_has_the_older_keys(
    tmp_path: Path, kind: str, rope: str, tied: bool
) -> None:
    raw = vlm_tiny.config_of(kind)
    sections = {key: value for key, value in raw["text_config"]["rope_parameters"].items() if key.startswith("mrope_")}
    raw["text_config"]["rope_parameters"] = {**sections, **ROPES[rope]}
    raw["tie_word_embeddings"] = tied
    if tied and "mlp_only_layers" in raw["text_config"]:  # experts have their keys although no layer has any
        raw["text_config"]["mlp_only_layers"] = [0, 1, 2, 3]

    write_metadata(tmp_path, load_hf_config(ModelConfig(hf_config=raw)), None, torch.bfloat16)

    whole, text = written(tmp_path), written(tmp_path)["text_config"]
    assert text["rope_scaling"] == {key: value for key, value in text["rope_parameters"].items() if key != "rope_theta"}
    assert text["rope_scaling"].items() >= {**sections, "rope_type": rope}.items()
    assert text["rope_theta"] == ROPES[rope]["rope_theta"]
    assert text["tie_word_embeddings"] is whole["tie_word_embeddings"] is tied
    assert whole["torch_dtype"] == whole["dtype"] == "bfloat16"
    if kind == "qwen3_vl_moe":
        assert text["num_experts"] == text["num_local_experts"] == 4
    # A reader of only one form gets the same numbers.
    again = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    for left_out in (["rope_parameters", "num_local_experts"], ["rope_scaling", "rope_theta", "num_experts"]):
        part = {**whole, "text_config": {key: value for key, value in text.items() if key not in left_out}}
        single = transformers.AutoConfig.for_model(**part).text_config
        assert single.rope_parameters == again.rope_parameters == text["rope_parameters"]
        assert getattr(single, "num_experts", None) == getattr(again, "num_experts", None)


def test_files_of_the_source_are_kept_as_they_are(tmp_path: Path) -> None:
    save_tiny(tmp_path / "in", "qwen3")
    source = tmp_path / "in"
    character_tokenizer(ALPHABET).save_pretrained(source)
    ours = written(source, "tokenizer_config.json") | {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ x }}"}
    (source / "tokenizer_config.json").write_text(json.dumps(ours))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5],   "temperature": 0.6}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    kept = [file for file in source.rglob("*") if file.is_file() and file.name not in ("config.json",)]
    single_process()
    chunks = build_tiny(source)

    convert(source, tmp_path / "converted")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, tokenizer, world=world(), source=source)

    for folder in ("converted", "out"):
        for file in kept:
            same = (tmp_path / folder / file.relative_to(source)).read_bytes() == file.read_bytes()
            assert same or file.suffix == ".safetensors", file


def test_a_generation_config_is_not_made_up_for_a_source_without_one(tmp_path: Path) -> None:
    save_tiny(tmp_path / "in", "qwen3")
    (tmp_path / "in" / "generation_config.json").unlink()
    convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_a_tokenizer_of_no_folder_has_a_class_that_both_versions_know(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    write_metadata(tmp_path, transformers.AutoConfig.for_model("qwen3"), tokenizer, torch.float32)
    found = written(tmp_path, "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in found
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("1<|turn|>2") == tokenizer.encode("1<|turn|>2")
    assert again.all_special_ids == tokenizer.all_special_ids


@pytest.mark.parametrize(("more", "expected"), [(["<|turn|>", "<|unused|>"], "<|unused|>"), (["<|turn|>"], None)])
def test_a_reward_model_pads_with_a_token_that_its_texts_do_not_end_with(
    tmp_path: Path, more: list[str], expected: str | None
) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.bos_token, tokenizer.pad_token = None, tokenizer.eos_token
    tokenizer.unk_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": more})
    tokenizer.chat_template = "{{ messages[0].content }}<|turn|>"
    config = transformers.AutoConfig.for_model("qwen3", eos_token_id=2, pad_token_id=2)
    with contextlib.nullcontext() if expected else pytest.warns(UserWarning, match="for padding"):
        write_metadata(tmp_path, config, tokenizer, torch.float32, value_head=True, classifies=True)
    padding = written(tmp_path)["pad_token_id"]
    assert padding == (expected and tokenizer.convert_tokens_to_ids(expected))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.pad_token == (expected or tokenizer.eos_token)


# -- the real programs -------------------------------------------------------------------------------------------------


def exports(folder: Path) -> list[Path]:
    """Exports of each architecture and kind of RoPE, odd configurations, vision-language models, and critics."""
    single_process()
    models = [
        (f"{model_type}-{rope}", model_type, {"rope_parameters": dict(parameters), **_head(model_type)})
        for model_type in ARCHITECTURES
        for rope, parameters in ROPES.items()
    ]
    models += [(f"{model_type}-{number}", model_type, changes) for number, (model_type, changes) in enumerate(OTHERS)]
    for name, model_type, changes in models:
        save_tiny(folder / "in" / name, model_type, **changes)
    kinds = {f"{kind}-{tied}": (kind, tied) for kind in vlm_tiny.OLDER_KINDS for tied in (False, True)}
    for name, (kind, tied) in kinds.items():
        vlm_tiny.save(folder / "in" / name, kind, {"tie_word_embeddings": tied}, tie_word_embeddings=tied)
    made = [folder / name for name in (*(name for name, _, _ in models), *kinds)]
    for target in made:
        source = folder / "in" / target.name
        character_tokenizer(ALPHABET).save_pretrained(source)
        (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
        chunks, tokenizer = build_tiny(source), transformers.AutoTokenizer.from_pretrained(source)
        export_weights(chunks, target, chunks[0].hf_config, tokenizer, world=world(), source=source)
    for bias in (False, True):
        policy = transformers.AutoConfig.from_pretrained(folder / "in" / "llama-llama3")
        policy.num_labels, policy.token_classification_bias = 1, bias
        classifier = transformers.AutoModelForTokenClassification.from_config(policy).eval()
        if bias:
            torch.nn.init.constant_(classifier.score.bias, 0.75)
        made.append(folder / f"critic-{bias}")
        classifier.save_pretrained(folder / "in" / made[-1].name)
        critic = build_tiny(folder / "in" / made[-1].name, value_head=True)
        export_weights(critic, made[-1], critic[0].hf_config, character_tokenizer(ALPHABET), world=world())
    return made


def _head(model_type: str) -> dict[str, Any]:
    return {"head_dim": 16} if model_type == "mixtral" else {}  # whose class works out none for yarn


def has_class_in_transformers_4(model_type: str) -> bool:
    """Whether version 4 has the model; without its environment, which a reader skips, it is not known."""
    names = {folder.name for folder in ENVIRONMENT.glob("lib/python*/site-packages/transformers/models/*")}
    return not names or model_type.removesuffix("_text") in names


def read_by_transformers_4(folders: list[Path]) -> dict[str, float]:
    """The largest difference of log-probs between both versions for each folder; all else that they read is equal."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        pytest.skip("make older-env makes the interpreter")
    paths = [str(folder) for folder in folders]
    said = subprocess.run([python, older_reader.__file__, *paths], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    theirs = json.loads(said.stdout.splitlines()[-1])
    assert theirs["transformers"].startswith("4.")
    differences = {}
    for folder in paths:
        ours, found = older_reader.read(folder), theirs["folders"][folder]
        worst = (torch.tensor(ours.pop("log_probs")) - torch.tensor(found.pop("log_probs"))).abs().max().item()
        assert found == ours, folder
        differences[folder] = worst
    return differences


@pytest.mark.campaign("exports")
def test_transformers_4_reads_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differences = read_by_transformers_4(exports(tmp_path))
    with capsys.disabled():
        lines = [f"{Path(folder).name:24} {worst:.1e}" for folder, worst in differences.items()]
        print("\nlargest difference of log-probs between transformers 4 and 5:", *lines, sep="\n")
    assert max(differences.values()) < 1e-5


_SGLANG = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers.common import get_rope_config
found = {}
for folder in sys.argv[2:]:
    config = ModelConfig(folder)
    found[folder] = [get_rope_config(config.hf_config), str(config.dtype), sorted(config.hf_eos_token_id)]
print(json.dumps(found))
"""


@pytest.mark.campaign("exports")
def test_sglang_reads_the_same_configuration(tmp_path: Path) -> None:
    python = need_interpreter()
    for model_type in ARCHITECTURES:
        for rope, parameters in ROPES.items():
            kept = {"rope_parameters": dict(parameters), "max_position_embeddings": 128, "head_dim": 16}
            config = transformers.AutoConfig.for_model(model_type, eos_token_id=[2, 5], **kept)
            (tmp_path / f"{model_type}-{rope}").mkdir()
            write_metadata(tmp_path / f"{model_type}-{rope}", config, None, torch.bfloat16)
    paths, folders = json.dumps([str(path) for path in STAND_INS]), sorted(map(str, tmp_path.iterdir()))
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [python, "-W", "ignore", "-c", _SGLANG, paths, *folders]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    for folder, (rope, dtype, ends) in json.loads(said.stdout.splitlines()[-1]).items():
        expected = transformers.AutoConfig.from_pretrained(folder).rope_parameters
        theta, scaling = rope
        assert (theta, dtype, ends) == (expected["rope_theta"], "torch.bfloat16", [2, 5]), folder
        assert {key: value for key, value in scaling.items() if key != "type"} == expected, folder
