"""Which files of a folder are read, and how quantised, tied and classifier checkpoints are taken."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megarl.artifacts.checkpoint_files import quantized_block
from megarl.artifacts.facts import model_facts
from megarl.checks.weights import check_weights
from megarl.commands.convert import convert
from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.models.weights import export_weights
from megarl.models.weights.files import CheckpointReader
from megarl.system.errors import ConfigError
from tests.dist import single_process, world
from tests.models.test_logits import logits, sequences
from tests.models.tiny import build_tiny, save_tiny

TENSOR = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, changes):
    file = folder / "model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})


def as_transformers(folder):
    """Our tensor and the one of transformers, from the same folder."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()[TENSOR]
    return CheckpointReader(folder).read(TENSOR), theirs


# -- files -------------------------------------------------------------------------------------------------------------


def test_other_safetensors_of_the_folder_are_not_read(tmp_path):
    save_tiny(tmp_path, "llama")
    other = {name: t + 1 for name, t in load_file(tmp_path / "model.safetensors").items()}
    for name in ("zz_ema.safetensors", "consolidated.safetensors"):
        save_file(other, tmp_path / name)
    ours, theirs = as_transformers(tmp_path)
    assert torch.equal(ours, theirs)
    assert "zz_ema" not in CheckpointReader(tmp_path).describe()


def sharded(folder, name="llama"):
    save_tiny(folder, name).save_pretrained(folder / "parts", max_shard_size="100KB")
    assert len(list((folder / "parts").glob("*.safetensors"))) > 2
    return folder / "parts"


def test_a_single_file_comes_before_an_index(tmp_path):
    parts = sharded(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save_file({n: t + 1 for n, t in whole.items()}, parts / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = as_transformers(parts)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, whole[TENSOR] + 1)


def test_of_two_files_of_an_index_the_later_one_counts(tmp_path):
    parts = sharded(tmp_path)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    first, last = (sorted(set(index["weight_map"].values()))[i] for i in (0, -1))
    for name, value in ((first, 1.0), (last, 2.0)):
        file = parts / name
        save_file(load_file(file) | {TENSOR: torch.full((96, 64), value)}, file, metadata={"format": "pt"})
    index["weight_map"][TENSOR] = first
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    ours, theirs = as_transformers(parts)
    assert torch.equal(ours, theirs)


def test_the_config_may_name_the_file(tmp_path):
    save_tiny(tmp_path, "llama")
    whole = load_file(tmp_path / "model.safetensors")
    save_file({n: t + 1 for n, t in whole.items()}, tmp_path / "best.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, transformers_weights="best.safetensors")
    ours, theirs = as_transformers(tmp_path)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, whole[TENSOR] + 1)


def test_the_files_that_are_read_are_said(tmp_path, capfd):
    parts = sharded(tmp_path)
    build_tiny(parts)
    said = capfd.readouterr().out
    count = len(list(parts.glob("*.safetensors")))
    assert f"tensors in {count} files, model-00001-of-" in said


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"), "neither model.safetensors"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "has an adapter"),
        (lambda f: change_config(f, transformers_weights="no.safetensors"), "is missing"),
        (lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json"), "cannot read the index"),
    ],
    ids=["other-name", "adapter", "named-and-missing", "damaged-index"],
)
def test_folders_without_whole_weights_are_refused_before_a_start(tmp_path, break_it, words):
    save_tiny(tmp_path, "llama")
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_weights(tmp_path, model_facts(ModelConfig(path=str(tmp_path))))
    with pytest.raises(ConfigError, match=words):
        CheckpointReader(tmp_path)


# -- quantised checkpoints ---------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def quantize(weight, block, scale_dtype):
    """fp8 codes and one scale per block; the largest code of a block is near the largest fp8 number, 448."""
    rows, columns = (torch.arange(n) // size for n, size in zip(weight.shape, block, strict=True))
    scales = torch.empty(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
    scales = scales.to(scale_dtype)
    codes = (weight / scales.float()[rows][:, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * scales.float()[rows][:, columns]


def save_fp8(folder, name, block, scale_dtype=torch.float32, **changes):
    """A checkpoint in block-wise fp8 under `folder`/fp8, and the same numbers unquantised under `folder`/plain."""
    save_tiny(folder / "plain", name, **changes)
    shutil.copytree(folder / "plain", folder / "fp8")
    plain, codes = load_file(folder / "plain" / "model.safetensors"), {}
    for key, tensor in list(plain.items()):
        if "proj" in key and key.endswith("weight"):
            codes[key], codes[f"{key}_scale_inv"], plain[key] = quantize(tensor, block, scale_dtype)
        else:
            codes[key] = tensor
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    change_config(folder / "fp8", quantization_config={**FP8, "weight_block_size": list(block)})


@pytest.mark.parametrize(
    ("name", "block", "scale_dtype"),
    [
        ("qwen3", (32, 16), torch.bfloat16),  # as Qwen publishes: scales in bf16
        ("llama", (40, 48), torch.float32),  # no size is a multiple: the last blocks are cut off
        ("qwen3_moe", (128, 128), torch.float32),  # all weights smaller than a block
    ],
)
def test_fp8_blocks_are_the_numbers_that_they_stand_for(tmp_path, name, block, scale_dtype):
    save_fp8(tmp_path, name, block, scale_dtype)
    model_facts(ModelConfig(path=str(tmp_path / "fp8")))
    (ours,), (theirs,) = build_tiny(tmp_path / "fp8"), build_tiny(tmp_path / "plain")
    with torch.no_grad():
        for a, b in zip(logits(ours, sequences()), logits(theirs, sequences()), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_fp8_blocks_equal_those_of_transformers_and_any_part_can_be_read(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    save_fp8(tmp_path, "llama", (32, 16))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    theirs = Fp8Dequantize(None)._dequantize_one(stored[TENSOR], stored[f"{TENSOR}_scale_inv"], torch.float32)
    reader = CheckpointReader(tmp_path / "fp8")
    assert torch.equal(reader.read(TENSOR), theirs)
    assert torch.equal(reader.read(TENSOR, ((30, 71), (5, 50))), theirs[30:71, 5:50])


def test_what_comes_of_a_quantised_model_says_nothing_of_it(tmp_path):
    save_fp8(tmp_path, "llama", (32, 32))
    convert(tmp_path / "fp8", tmp_path / "converted")
    chunks = build_tiny(tmp_path / "fp8")
    export_weights(chunks, tmp_path / "exported", chunks[0].hf_config, world=world())
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for folder in ("converted", "exported"):
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == plain.keys()
        assert all(torch.equal(written[key], plain[key]) for key in plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},  # one scale per tensor
        {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
        {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ],
)
def test_other_quantisations_are_refused_before_a_start(tmp_path, settings):
    save_tiny(tmp_path, "llama")
    change_config(tmp_path, quantization_config=settings)
    for refuse in (
        lambda: model_facts(ModelConfig(path=str(tmp_path))),
        lambda: load_hf_config(ModelConfig(path=str(tmp_path))),
        lambda: convert(tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="quantised in a way that is not supported"):
            refuse()
    assert not (tmp_path / "out").exists()
    assert quantized_block({"quantization_config": None}, "here") is None


def save_mxfp4(folder):
    """A checkpoint with experts in mxfp4 under `folder`/mxfp4, with small and large exponents."""
    save_tiny(folder / "plain", "gpt_oss", intermediate_size=64)
    shutil.copytree(folder / "plain", folder / "mxfp4")
    tensors, random = load_file(folder / "plain" / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, width // 32, 16), generator=random)
        scales = torch.randint(121, 128, blocks.shape[:3], generator=random)
        scales[0, 0, :2] = torch.tensor([0, 253])
        tensors |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}
    save_file(tensors, folder / "mxfp4" / "model.safetensors", metadata={"format": "pt"})
    change_config(
        folder / "mxfp4", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return tensors


def test_experts_in_mxfp4_are_those_of_transformers_and_are_exported_unquantised(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, reader = save_mxfp4(tmp_path), CheckpointReader(tmp_path / "mxfp4")
    assert "experts dequantised from mxfp4" in reader.describe()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert reader.read(name).dtype == torch.bfloat16
    assert torch.equal(reader.read(name), theirs)
    assert torch.equal(reader.read(name, ((1, 3), (30, 41), (5, 90))), theirs[1:3, 30:41, 5:90])
    check_weights(tmp_path / "mxfp4", model_facts(ModelConfig(path=str(tmp_path / "mxfp4"))))
    convert(tmp_path / "mxfp4", tmp_path / "converted", dtype="bf16")
    chunks = build_tiny(tmp_path / "mxfp4", torch.bfloat16)
    export_weights(chunks, tmp_path / "exported", chunks[0].hf_config, world=world())
    for folder in ("converted", "exported"):
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
        read, wanted = load_as_transformers(tmp_path / folder), CheckpointReader(tmp_path / "mxfp4")
        assert all(torch.equal(tensor, wanted.read(key).bfloat16()) for key, tensor in read.items())


def load_as_transformers(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {key: tensor.bfloat16() for key, tensor in model.state_dict().items()}


def test_blocks_without_scales_are_refused(tmp_path):
    save_mxfp4(tmp_path)
    file = tmp_path / "mxfp4" / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(file).items() if "1.mlp.experts.down_proj_scales" not in name}
    save_file(left, file, metadata={"format": "pt"})
    facts = model_facts(ModelConfig(path=str(tmp_path / "mxfp4")))
    for read in (CheckpointReader, lambda folder: check_weights(folder, facts)):
        with pytest.raises(
            ConfigError, match=r"experts.down_proj' is quantised in an unknown format[\s\S]*scales None"
        ):
            read(tmp_path / "mxfp4")


def test_codes_without_a_word_about_them_are_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    change_weights(tmp_path, {TENSOR: torch.ones(96, 64, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"up_proj.weight' is quantised.*"):
        build_tiny(tmp_path)


def test_scales_that_do_not_fit_the_blocks_are_refused(tmp_path):
    save_fp8(tmp_path, "llama", (32, 32))
    change_config(tmp_path / "fp8", quantization_config={**FP8, "weight_block_size": [64, 64]})
    with pytest.raises(ConfigError, match="one scale per block"):
        build_tiny(tmp_path / "fp8")


# -- tied embeddings and value heads -----------------------------------------------------------------------------------


def test_a_head_that_differs_from_tied_embeddings_is_kept_as_transformers_keeps_it(tmp_path):
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    change_weights(tmp_path, {"lm_head.weight": torch.randn(131, 64, generator=torch.Generator().manual_seed(0)) / 8})
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embeddings"):
        (model,) = build_tiny(tmp_path)
    seq = sequences()[0]
    with torch.no_grad():
        torch.testing.assert_close(logits(model, [seq])[0], reference(input_ids=seq[None]).logits[0], atol=5e-6, rtol=0)
    export_weights([model], tmp_path / "out", model.hf_config, world=world())
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


def test_tied_embeddings_stored_twice_or_as_the_head_stay_tied(tmp_path):
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    change_weights(tmp_path, {"lm_head.weight": embeddings.clone()})
    (model,) = build_tiny(tmp_path)
    assert model.share_embeddings_and_output_weights
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (model,) = build_tiny(tmp_path)
    assert torch.equal(model.embedding.word_embeddings.weight, embeddings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    assert torch.equal(theirs, embeddings)


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_classifier_keeps_the_bias_of_its_score(tmp_path, tied):
    policy = save_tiny(tmp_path / "policy", "qwen3", tie_word_embeddings=tied)
    policy.config.num_labels = 1
    torch.manual_seed(5)
    classifier = transformers.AutoModelForTokenClassification.from_config(policy.config).eval()
    torch.nn.init.constant_(classifier.score.bias, 0.75)
    classifier.save_pretrained(tmp_path / "critic")
    (critic,) = build_tiny(tmp_path / "critic", value_head=True)
    assert critic.output_layer.bias.item() == 0.75
    export_weights([critic], tmp_path / "exported", critic.hf_config, world=world())
    convert(tmp_path / "critic", tmp_path / "converted")
    for folder in ("exported", "converted"):
        again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / folder)
        assert torch.equal(again.score.bias, classifier.score.bias)
        assert torch.equal(again.score.weight, classifier.score.weight)


def test_a_critic_from_a_policy_has_no_bias_and_transformers_adds_none(tmp_path):
    save_tiny(tmp_path / "policy", "qwen3")
    (critic,) = build_tiny(tmp_path / "policy", value_head=True)
    export_weights([critic], tmp_path / "out", critic.hf_config, world=world())
    assert transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out").score.bias is None
    assert not critic.value_weight.any()
