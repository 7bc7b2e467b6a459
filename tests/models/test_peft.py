"""Adapters in PEFT's form: against the formula, against PEFT itself where it is installed, and back again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.system.errors import ConfigError
from tests.dist import single_process, world
from tests.models.tiny import save_tiny

LORA = LoraConfig(rank=4, alpha=6)
EXPERTS = LORA.model_copy(update={"targets": ["attention", "experts"]})
DENSE = {"mlp_only_layers": [1]}
ALL = LORA.model_copy(update={"targets": ["attention", "mlp", "experts"]})
# biases; norms of heads; experts; all experts in one tensor; dense layers of a mixture, without and with adapters on
# its experts
MODELS = {
    "qwen2": ("qwen2", LORA, {}),
    "qwen3": ("qwen3", LORA, {}),
    "latent": ("deepseek_v3", LORA, {"q_lora_rank": None}),
    "mixtral": ("mixtral", EXPERTS, {}),
    "gpt_oss": ("gpt_oss", EXPERTS, {}),
    "dense": ("qwen3_moe", LORA, DENSE),
    "mixed": ("qwen3_moe", ALL, DENSE),
}


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
    model_type, lora, changes = MODELS[request.param]
    save_tiny(base, model_type, num_hidden_layers=2, **changes)
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
        if want.dim() == 3:
            block, _, projection = name.rpartition(".")
            stem = f"base_model.model.{block}{'.base_layer' if projection == 'gate_up_proj' else ''}.lora_"
        if f"{stem}A.weight" in tensors:
            down, up = (tensors[f"{stem}{part}.weight"].double() for part in "AB")
            if want.dim() == 3:
                down, up = down.unflatten(0, (len(want), 4)), up.unflatten(1, (4, len(want)))
                want += 6 / 4 * torch.einsum("ore,eri->eio", up, down)
            else:
                want += 6 / 4 * up @ down
            changed.add(stem)
        torch.testing.assert_close(after.read(name).double(), want, rtol=1e-6, atol=1e-6)
    assert len(changed) * 2 == len(tensors)
    again = adapted(base, lora.model_copy(update={"path": str(adapter)}))
    for name, parameter in adapted(base, lora)[0].named_parameters():
        assert torch.equal(dict(again[0].named_parameters())[name], parameter), name
    convert(adapter, tmp_path / "converted")
    # Some processors add the four products of a rank in another order for stacked experts than for a single one.
    converted = load_file(tmp_path / "converted/model.safetensors")
    torch.testing.assert_close(converted, load_file(merged / "model.safetensors"), rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize("experts", [False, True])
def test_dense_layers_of_a_mixture_are_parameters_for_peft_which_takes_their_names_for_the_experts(experts):
    from megarl.models.weights.peft import peft_config

    names = ["model.layers.0.self_attn.q_proj", *(f"model.layers.1.mlp.{part}_proj" for part in ("up", "down"))]
    names += [f"model.layers.0.mlp.experts.0.{part}_proj" for part in ("up", "down")] if experts else []
    tensors = [name + part for name in names for part in (".lora_A.weight", ".lora_B.weight")]
    lora = LORA.model_copy(update={"dropout": 0.1})
    of_mixture = peft_config(lora, tensors, None, mixture=True)
    assert of_mixture["target_parameters"] == ["layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight"]
    assert of_mixture["target_modules"] == (["down_proj", "q_proj", "up_proj"] if experts else ["q_proj"])
    assert of_mixture["lora_dropout"] == 0
    dense = peft_config(lora, tensors, None, mixture=False)
    assert dense["target_parameters"] is None
    assert dense["target_modules"] == ["down_proj", "q_proj", "up_proj"]
    assert dense["lora_dropout"] == 0.1


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
    assert "this adapter's base model" in error.value.what
    assert f"write the absolute path of its folder as base_model_name_or_path in {file}" in str(error.value.fix)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({}, {"rank": 8}, ["model.lora.rank", "set model.lora.rank=4"]),
        ({}, {"alpha": 4.0}, ["model.lora.alpha", "6"]),
        ({}, {"targets": ["attention"]}, ["mlp.down_proj.lora_A.weight is not targeted here"]),
        ({"use_rslora": True}, {}, ["use_rslora", "does not just add"]),
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


SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.self_attn.q_proj.weight": (32, 16),
    "norm.weight": (16,),
}
Q = "base_model.model.model.layers.0.self_attn.q_proj."


def stored(folder, settings=None, tensors=None):
    """A plain adapter of rank 4 on q_proj, with some settings and tensors (shapes by name) that differ."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    shapes = {Q + "lora_A.weight": (4, 16), Q + "lora_B.weight": (32, 4)} | (tensors or {})
    (folder / "adapter_config.json").write_text(json.dumps(plain | (settings or {})))
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items() if shape}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("init_lora_weights", start) for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")],
        ("lora_bias", True),
        ("alora_invocation_tokens", [1, 2]),
        ("kasa_config", {"beta": 1e-4}),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 2]]),
        ("use_qalora", True),
        ("target_parameters", ["mlp.experts.gate_up_proj_bias"]),
        ("of_next_year", "x"),
        ("r", None),
        ("lora_alpha", 0),
    ],
)
def test_settings_beyond_the_formula_are_refused_by_name(tmp_path, key, value):
    from megarl.models.weights.peft import AdapterReader

    with pytest.raises(ConfigError) as error:
        AdapterReader(stored(tmp_path, {key: value}), "model.lora.path")
    assert error.value.where == f"{tmp_path / 'adapter_config.json'}: {key}"
    assert error.value.found == value


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_what_peft_writes_into_every_plain_adapter_is_read(tmp_path, start):
    from megarl.models.weights.peft import AdapterReader

    empty = dict.fromkeys(["alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "revision"])
    settings = {
        "init_lora_weights": start,
        "lora_bias": False,
        "use_qalora": False,
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        "loftq_config": {},
        "rank_pattern": {},
        "peft_version": "0.21.2",
        "exclude_modules": ["k_proj"],
        "runtime_config": {"ephemeral_gpu_offload": False},
        "task_type": "CAUSAL_LM",
    }
    reader = AdapterReader(stored(tmp_path, empty | settings), "model.lora.path")
    reader.check_base(SHAPES)
    merged = reader.merged("model.layers.0.self_attn.q_proj.weight", torch.zeros(32, 16))
    assert torch.equal(merged, torch.full((32, 16), 8.0))  # 8 / 4 times a sum over 4 ranks


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({Q + "lora_B.bias": (32,)}, "q_proj.lora_B.bias"),
        ({Q + "lora_magnitude_vector": (32,)}, "q_proj.lora_magnitude_vector"),
        ({Q + "base_layer.weight": (32, 16)}, "q_proj.base_layer.weight"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 64)},
            "model.embed_tokens.lora_embedding_A",
        ),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 16)}, "model.embed_tokens.lora_A.weight"),
        ({"base_model.model.norm.lora_A.weight": (4, 16)}, "norm.lora_A.weight"),
        ({Q.replace("q_proj", "k_proj") + "lora_A.weight": (4, 16)}, "k_proj.lora_A.weight"),
        ({Q + "lora_A.weight": (4, 8)}, "q_proj.lora_A.weight"),
        ({Q + "lora_B.weight": (32, 8)}, "q_proj.lora_B.weight"),
        ({Q + "lora_B.weight": ()}, "q_proj.lora_A.weight"),
    ],
)
def test_a_tensor_that_is_not_added_to_a_weight_is_refused_by_name(tmp_path, tensors, name):
    from megarl.models.weights.peft import AdapterReader

    reader = AdapterReader(stored(tmp_path, tensors=tensors), "megarl convert")
    with pytest.raises(ConfigError) as error:
        reader.check_base(SHAPES)
    assert str(error.value.found).endswith(name)
    assert error.value.fix is not None


def test_the_revision_of_a_base_on_the_hub_is_the_adapters(tmp_path, monkeypatch):
    from megarl.models.convert import convert

    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        raise FileNotFoundError

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    stored(tmp_path, {"base_model_name_or_path": "org/base", "revision": "v2"})
    with pytest.raises(ConfigError, match="cannot find this adapter's base model"):
        convert(tmp_path, tmp_path / "converted")
    assert (asked["name"], asked["revision"]) == ("org/base", "v2")
