"""Adapters in PEFT's form: against the formula, against PEFT itself where it is installed, and back again."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.errors import ConfigError
from tests.dist import single_process, world
from tests.models.tiny import save_tiny

LORA = LoraConfig(rank=4, alpha=6)
EXPERTS = LORA.model_copy(update={"targets": ["attention", "experts"]})
MODELS = {"qwen2": LORA, "qwen3": LORA, "mixtral": EXPERTS, "qwen3_moe": EXPERTS}  # biases; norms of heads; experts


@pytest.fixture(autouse=True)
def layout():
    """The layout of a single process."""
    return single_process()


def adapted(folder, lora: LoraConfig = LORA, dtype: torch.dtype = torch.float32):
    """The model in `folder` with adapters of size 1."""
    from megarl.models.build import build_policy
    from megarl.models.config import load_hf_config, transformer_config
    from megarl.models.lora import init_adapters
    from megarl.models.weights import load_weights

    hf = load_hf_config(ModelConfig(path=str(folder)))
    config = transformer_config(hf, ParallelConfig(), dtype=dtype, engine=EngineConfig(), lora=lora)
    chunks = build_policy(hf, config)
    init_adapters(chunks, lora, 0)
    load_weights(chunks, folder)
    if lora.path is None:
        for name, parameter in chunks[0].named_parameters():
            if name.endswith("adapter.b"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return chunks


@pytest.fixture(params=MODELS)
def exported(request, tmp_path, layout):
    """Folders: the base model, the adapter, and both merged by the export of the whole model; what the adapter is."""
    from megarl.models.weights import export_weights
    from megarl.models.weights.peft import export_adapter

    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    lora = MODELS[request.param]
    save_tiny(base, request.param, num_hidden_layers=2)
    chunks = adapted(base, lora)
    export_adapter(chunks, adapter, lora, base=str(base), world=world())
    export_weights(chunks, merged, chunks[0].hf_config, world=world())
    return base, adapter, merged, lora


def logits(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_a_merged_weight_is_the_sum_and_loads_in_again(exported, tmp_path):
    from megarl.models.convert import convert
    from megarl.models.weights.files import CheckpointReader

    base, adapter, merged, lora = exported
    tensors = load_file(adapter / "adapter_model.safetensors")
    before, after = CheckpointReader(base), CheckpointReader(merged)
    changed = set()
    for name in before.names():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        want = before.read(name).double()
        if f"{stem}A.weight" in tensors:
            want += 6 / 4 * tensors[f"{stem}B.weight"].double() @ tensors[f"{stem}A.weight"].double()
            changed.add(stem)
        torch.testing.assert_close(after.read(name).double(), want, rtol=1e-6, atol=1e-6)
    assert len(changed) * 2 == len(tensors)
    again = adapted(base, lora.model_copy(update={"path": str(adapter)}))
    for name, parameter in adapted(base, lora)[0].named_parameters():
        assert torch.equal(dict(again[0].named_parameters())[name], parameter), name
    convert(adapter, tmp_path / "converted")
    assert (tmp_path / "converted/model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_servers_are_sent_merged_weights(exported):
    from megarl.models.weights.files import CheckpointReader
    from megarl.sync.source import Pieces

    base, _, merged, lora = exported
    sent, want = Pieces(adapted(base, lora)), CheckpointReader(merged)
    assert {name for name, _ in sent} == set(want.names())
    for (name, region), tensor in sent.items():
        assert torch.equal(tensor, want.read(name, region)), name


def test_peft_computes_what_the_merged_model_does(exported):
    peft = pytest.importorskip("peft", reason="PEFT is not installed: the formula is tested above")
    base, adapter, merged, _ = exported
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(logits(base), adapter)(ids).logits
        torch.testing.assert_close(found, logits(merged)(ids).logits, rtol=1e-5, atol=1e-4)
        assert (found - logits(base)(ids).logits).abs().max() > 1


@pytest.mark.parametrize(("base", "written"), [("base", "{here}/base"), ("org/base", "org/base"), (None, None)])
def test_a_base_in_a_folder_is_named_by_its_absolute_path(tmp_path, monkeypatch, base, written):
    from megarl.models.weights.peft import export_adapter

    save_tiny(tmp_path / "base", "qwen3")
    monkeypatch.chdir(tmp_path)
    export_adapter(adapted(tmp_path / "base"), tmp_path / "adapter", LORA, base=base, world=world())
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == (written and written.format(here=tmp_path))


def test_a_base_that_is_not_there_is_to_be_corrected_in_the_adapter(tmp_path):
    from megarl.models.convert import convert
    from megarl.models.weights.peft import export_adapter

    save_tiny(tmp_path / "base", "qwen3")
    export_adapter(adapted(tmp_path / "base"), tmp_path / "adapter", LORA, base="runs/sft/hf", world=world())
    file = tmp_path / "adapter/adapter_config.json"
    with pytest.raises(ConfigError) as error:
        convert(tmp_path / "adapter", tmp_path / "converted")
    assert error.value.where == f"{file}: base_model_name_or_path"
    assert error.value.found == "runs/sft/hf"
    assert "the base model of this adapter" in error.value.what
    assert f"write the absolute path of its folder as base_model_name_or_path in {file}" in str(error.value.fix)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"rank": 8}, ["model.lora.rank", "set model.lora.rank=4"]),
        ({}, {"alpha": 4.0}, ["model.lora.alpha", "6"]),
        ({}, {"targets": ["attention"]}, ["mlp.down_proj.lora_A.weight is no target here"]),
        ({"use_rslora": True}, {}, ["use_rslora", "does more than"]),
        ({"r": 4, "rank_pattern": {"q_proj": 2}}, {}, ["rank_pattern"]),
    ],
)
def test_another_adapter_is_refused(tmp_path, changes, settings, said):
    from megarl.models.weights.peft import export_adapter

    save_tiny(tmp_path / "base", "qwen3")
    export_adapter(adapted(tmp_path / "base"), tmp_path / "adapter", LORA, base=None, world=world())
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError) as error:
        adapted(tmp_path / "base", LORA.model_copy(update={"path": str(tmp_path / "adapter"), **settings}))
    for words in said:
        assert words in str(error.value)
