"""The weight plan: pure data, checked for coverage in every layout and against mbridge."""

import itertools

import pytest
import torch

from megarl.artifacts.facts import facts_from_config
from megarl.checks.weights import expected_tensors
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.models.hf import check_trainable, load_hf_config, num_experts
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.system.errors import ConfigError
from tests.models.tiny import ARCHITECTURES, save_tiny, tiny_dict


def config(name: str, **changes):
    return load_hf_config(ModelConfig(hf_config=tiny_dict(name, **changes)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_checked_before_a_run_is_what_is_loaded(name, tied):
    raw = tiny_dict(name, tie_word_embeddings=tied)
    for value_head in (False, True):
        loaded = WeightTable.of(config(name, tie_word_embeddings=tied), value_head=value_head).shapes()
        loaded.pop("score.weight", None)
        found = {}
        for forms in expected_tensors(facts_from_config(raw, "here"), value_head=value_head):
            found |= next((form for form in forms if form.keys() <= loaded.keys()), forms[0])
        assert found == loaded


def coordinates(tp: int, pp: int, vpp: int, ep: int, etp: int, *ends: int):
    for t, p, e, x in itertools.product(range(tp), range(pp), range(ep), range(etp)):
        yield Coordinate(tp, t, pp, p, vpp, ep, e, etp, x, *ends)


LAYOUTS = [
    (1, 1, 1, 1, 1),
    (1, 3, 1, 1, 1),
    (1, 2, 1, 1, 1, 1),
    (1, 2, 1, 1, 1, 0, 1),
    (2, 1, 1, 1, 2),
    (1, 2, 1, 1, 1),
    (1, 2, 2, 2, 1),
    (2, 2, 2, 2, 2),
    (2, 1, 1, 4, 1),
]


def placed() -> list:
    """Every architecture in a third of the layouts and every layout with a third of the architectures, in turn with a
    head of its own and with a tied one; all of them in the campaign."""
    cases, campaign = [], pytest.mark.campaign("families")
    for (first, name), (second, layout), tied in itertools.product(
        enumerate(ARCHITECTURES), enumerate(LAYOUTS), (False, True)
    ):
        turn, rest = divmod(first + second, 3)
        marks = () if rest == 0 and turn % 2 == tied else campaign
        cases.append(
            pytest.param(name, layout, tied, marks=marks, id=f"{name}-{layout}-{'tied' if tied else 'untied'}")
        )
    return cases


@pytest.mark.parametrize(("name", "layout", "tied"), placed())
def test_every_element_of_every_tensor_is_placed(name, layout, tied):
    hf = config(name, tie_word_embeddings=tied)
    seen = {key: torch.zeros(shape, dtype=torch.int32) for key, shape in WeightTable.of(hf).shapes().items()}
    for at in coordinates(*layout):
        for shard in WeightTable.of(hf).shards(at):
            local = torch.zeros(shard.shape, dtype=torch.int32)
            for piece in shard.pieces:
                seen[piece.source][tuple(slice(*span) for span in piece.source_region)] += 1
                local[tuple(slice(*span) for span in piece.target_region)] += 1
            assert local.max() <= 1
            if "word_embeddings" not in shard.param and "output_layer" not in shard.param:
                assert local.min() == 1
    assert all(count.min() >= 1 for count in seen.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_and_shapes_are_those_of_transformers(name, tmp_path):
    from safetensors import safe_open

    save_tiny(tmp_path, name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    assert WeightTable.of(config(name)).shapes() == saved


def _in_bridge_form(param: str, hf) -> list[str]:
    """The parameters that one of ours is in mbridge's tables, which expect Transformer Engine's names: one for each
    expert."""
    param = param.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if num_experts(hf) is None:
        return [param.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")]
    return [f"{param}{expert}" for expert in range(num_experts(hf))] if ".experts." in param else [param]


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4_moe"])
def test_mbridge_makes_the_same_parameters(name):
    import mbridge  # noqa: F401 (registers its models)
    from mbridge.core.bridge import _MODEL_REGISTRY

    hf = config(name)
    bridge = object.__new__(_MODEL_REGISTRY[name])  # its constructor wants Transformer Engine
    bridge.hf_config, bridge.dtype, bridge.make_vocab_size_divisible_by = hf, None, None
    tensors = {key: torch.randn(shape) for key, shape in WeightTable.of(hf).shapes().items()}
    for shard in WeightTable.of(hf).shards(Coordinate()):
        ours = torch.empty(shard.shape)
        for piece in shard.pieces:
            region, place = ([slice(*span) for span in b] for b in (piece.source_region, piece.target_region))
            ours[tuple(place)] = tensors[piece.source][tuple(region)]
        names, found = _in_bridge_form(shard.param, hf), list(dict.fromkeys(piece.source for piece in shard.pieces))
        sources = [bridge._weight_name_mapping_mcore_to_hf(param) for param in names]
        assert [source for each in sources for source in each] == found
        for param, each, block in zip(names, sources, ours.chunk(len(names)), strict=True):
            theirs = bridge._weight_to_mcore_format(param, [tensors[source] for source in each])
            assert torch.equal(block, theirs), param


@pytest.mark.parametrize("text", ["{", '{"model_type": "no_such_type"}'])
def test_a_broken_config_is_an_error_at_its_key(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"teacher\.path: the model's configuration cannot be loaded"):
        load_hf_config(ModelConfig(path=str(tmp_path)), "teacher.path")


def test_workers_refuse_what_transformers_does_in_training_only(monkeypatch, tmp_path):
    """A dry run knows it of models on this machine only; of a hub model the workers see the config first."""
    from megarl.runtime import setup

    monkeypatch.setattr(setup, "init_processes", lambda *_: None)
    hf_config = tiny_dict("mixtral", vocab_size=16, router_jitter_noise=0.1)
    recipe = RunConfig(name="tiny", model=ModelConfig(hf_config=hf_config, tokenizer="chars:0123456789+="))
    with pytest.raises(ConfigError, match="router_jitter_noise: transformers applies this key in training"):
        setup.build_rank_state(recipe, tmp_path)
    check_trainable(config("qwen3_moe", router_jitter_noise=0.1), "model.path")  # this class does not read it
