"""Logits, gradients and export under real processes, many layouts per process group."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.dist import fresh_parallel, run_distributed, world
from tests.models import varlen
from tests.models.tiny import build_tiny, save_tiny, two_layers

LENGTHS = [21, 7, 30, 1, 12]
FORWARD_2 = {"tp2": {"tp": 2}, "tp2+sp": {"tp": 2, "sp": True}, "cp2": {"cp": 2}}
EXPORT_2 = {**FORWARD_2, "pp2": {"pp": 2}, "dp2": {}}
VPP_2 = {"pp2+vpp2": {"pp": 2, "vpp": 2}}  # needs four layers
#: Layouts of two processes by model: one is written under all, of the others what they have of their own is split.
SPLIT_2 = {
    "tied": {**EXPORT_2, **VPP_2},
    "untied": {"pp2": {"pp": 2}},
    "latent": {"tp2": {"tp": 2}, "pp2": {"pp": 2}},
    "fused": {"tp2": {"tp": 2}},
    "qwen3_moe": {"ep2": {"ep": 2}, "tp2": {"tp": 2}},
    "mixtral": {"ep2": {"ep": 2}},
    "glm4_moe": {"tp2": {"tp": 2}},
    "qwen3_next": {"ep2": {"ep": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}},
}
LAYOUTS_4 = {"tp2xpp2": {"tp": 2, "pp": 2}, "tp2xcp2+sp": {"tp": 2, "cp": 2, "sp": True}}
KERNEL = "cp2, with a variable-length kernel"
MOE_4 = {
    "pp2xep2": {"pp": 2, "ep": 2},
    "tp2xep2": {"tp": 2, "ep": 2, "etp": 1},
    "tp2xep2etp2": {"tp": 2, "ep": 2, "etp": 2},
}


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 131, (n,), generator=generator) for n in LENGTHS]


def fresh(layout: dict) -> None:
    fresh_parallel(**{key: value for key, value in layout.items() if key != "sp"})


def forward(folder: str, layout: dict) -> dict:
    """Full logits by index into the unpadded stream, and the gradient of one weight summed over the replica."""
    fresh(layout)
    (model,) = build_tiny(folder, **layout)
    return passed(model, layout)


def passed(model, layout: dict) -> dict:
    """The result of `forward` for a model of the layout that is set up now."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    from megarl.models.packing import pack_stream

    cp = layout.get("cp", 1)
    stream = pack_stream(
        LENGTHS,
        cp_size=cp,
        cp_rank=mpu.get_context_parallel_rank(),
        multiple=layout.get("tp", 1) if model.config.sequence_parallel else 1,
    )
    hidden = model(stream.input_ids(torch.cat(sequences())), stream.position_ids, None, packed_seq_params=stream.params)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    local = model.logits(hidden[:, 0])
    real = stream.index >= 0
    (local[real] * probe(stream.index[real], model.vocab_range)).sum().backward()
    mlp = model.decoder.layers[0].mlp
    sparse = hasattr(mlp, "router")
    grad = (mlp.router.weight if sparse else mlp.linear_fc2.weight).grad.clone()
    whole = torch.zeros(sum(LENGTHS), 131)
    start, end = model.vocab_range
    whole[stream.index[real], start:end] = local[real].detach()
    if layout.get("tp", 1) * cp > 1:
        dist.all_reduce(whole, group=mpu.get_tensor_and_context_parallel_group())
    if cp > 1:
        dist.all_reduce(grad, group=mpu.get_context_parallel_group())
    elif model.config.sequence_parallel and sparse:
        dist.all_reduce(grad, group=mpu.get_tensor_model_parallel_group())
    return {"logits": whole, "grad": grad}


def probe(rows: torch.Tensor, vocab: tuple[int, int]) -> torch.Tensor:
    """Fixed output gradient, the same for a (token, vocabulary) entry in every layout."""
    whole = torch.randn(sum(LENGTHS), 131, generator=torch.Generator().manual_seed(2))
    return whole[rows, vocab[0] : vocab[1]]


def forward_cases(folders: list[str], layouts: dict) -> list[dict]:
    from megarl.models.layers.attention import training as attention

    found: list[dict] = [{} for _ in folders]
    for name, layout in layouts.items():
        without = attention.varlen_kernel
        attention.varlen_kernel = (lambda q: varlen.kernel) if name == KERNEL else without
        for folder, results in zip(folders, found, strict=True):
            results[name] = forward(folder, layout)
        attention.varlen_kernel = without
    return found


def export_cases(folders: list[str], out: str, layouts: dict) -> None:
    from megarl.models.weights import export_weights

    for name, layout in layouts.items():
        for folder in folders:
            fresh(layout)
            chunks = build_tiny(folder, **layout)
            export_weights(
                chunks, Path(out) / name / Path(folder).name, chunks[0].hf_config, max_shard_gb=1e-4, world=world()
            )


def random_cases(out: str, layouts: dict) -> None:
    from megarl.config.model import ModelConfig, ParallelConfig
    from megarl.config.training import EngineConfig
    from megarl.models.build import build_policy
    from megarl.models.config import load_hf_config, transformer_config
    from megarl.models.weights import export_weights, init_random
    from tests.models.tiny import tiny_dict

    hf = load_hf_config(ModelConfig(hf_config=tiny_dict("qwen3")))
    for name, layout in layouts.items():
        fresh(layout)
        config = transformer_config(hf, ParallelConfig(**layout), dtype=torch.float32, engine=EngineConfig())
        chunks = build_policy(hf, config)
        init_random(chunks, hf, 11)
        export_weights(chunks, Path(out) / name, hf, world=world())


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_exports_equal(sources: list[Path], out: Path, layouts: dict) -> None:
    for name in layouts:
        for source in sources:
            expected, written = load_folder(source), load_folder(out / name / source.name)
            assert written.keys() == expected.keys(), name
            assert all(torch.equal(written[key], expected[key]) for key in expected), name


@pytest.fixture
def dense(tmp_path) -> list[Path]:
    save_tiny(tmp_path / "untied", "qwen2", num_hidden_layers=2)
    save_tiny(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    save_tiny(tmp_path / "latent", "deepseek_v3", num_hidden_layers=2)
    save_tiny(tmp_path / "fused", "phi3", num_hidden_layers=2)
    return [tmp_path / name for name in ("untied", "tied", "latent", "fused")]


@pytest.fixture
def moe(tmp_path) -> list[Path]:
    save_tiny(tmp_path / "qwen3_moe", "qwen3_moe", num_hidden_layers=2)
    save_tiny(tmp_path / "mixtral", "mixtral", tie_word_embeddings=True, num_hidden_layers=2)
    save_tiny(tmp_path / "glm4_moe", "glm4_moe", num_hidden_layers=2, first_k_dense_replace=0)
    save_tiny(tmp_path / "qwen3_next", "qwen3_next", num_hidden_layers=2, full_attention_interval=2)
    return [tmp_path / name for name in ("qwen3_moe", "mixtral", "glm4_moe", "qwen3_next")]


@pytest.mark.procs
def test_export_is_bit_exact_on_two_processes(dense, moe, tmp_path):
    out = tmp_path / "out"
    run_distributed(_two, 2, 240, [str(f) for f in (*dense, *moe)], str(out))
    for folder in (*dense, *moe):
        assert_exports_equal([folder], out, SPLIT_2[folder.name])


def _two(folders: list[str], out: str) -> None:
    for folder in folders:
        export_cases([folder], out, SPLIT_2[Path(folder).name])


@pytest.mark.procs
@pytest.mark.parametrize("models", [slice(2, 3), pytest.param(slice(0, 4), marks=pytest.mark.campaign("teams"))])
def test_export_is_bit_exact_on_four_processes(dense, moe, tmp_path, models):
    dense, moe, out = dense[models], moe[models], tmp_path / "out"
    run_distributed(_four, 4, 300, [str(f) for f in dense], [str(f) for f in moe], str(out))
    assert_exports_equal(dense, out, LAYOUTS_4)
    assert_exports_equal(moe, out, MOE_4)


def _four(dense_folders: list[str], moe_folders: list[str], out: str) -> None:
    export_cases(dense_folders, out, LAYOUTS_4)
    export_cases(moe_folders, out, MOE_4)


@pytest.mark.procs
def test_logits_and_gradients_do_not_depend_on_the_layout(dense, moe, tmp_path):
    folders = {"latent": dense[2], "shared": moe[2]}
    # Windows, and norms over the heads of all ranks; biases after sums over ranks, and tied embeddings.
    for name in ("olmo3", "granite"):
        folders[name] = tmp_path / name
        save_tiny(folders[name], name, tie_word_embeddings=name == "granite", **two_layers(name))
    layouts = {**FORWARD_2, KERNEL: {"cp": 2}}
    results = run_distributed(forward_cases, 2, 240, [str(f) for f in folders.values()], {**layouts, "one": {}})
    for number in range(len(folders)):
        cases = [rank[number] for rank in results]
        one = cases[0]["one"]
        for name, layout in layouts.items():
            torch.testing.assert_close(cases[0][name]["logits"], one["logits"], atol=5e-6, rtol=0)
            grads = [case[name]["grad"] for case in cases]
            whole = torch.cat(grads, dim=1) if "tp" in layout and grads[0].shape != one["grad"].shape else grads[0]
            torch.testing.assert_close(whole, one["grad"], atol=2e-4, rtol=1e-4)


@pytest.mark.procs
def test_random_model_is_the_same_in_every_layout(tmp_path):
    layouts = {**EXPORT_2, **VPP_2}
    run_distributed(random_cases, 2, 120, str(tmp_path), layouts)
    first = load_folder(tmp_path / "tp2")
    for name in layouts:
        other = load_folder(tmp_path / name)
        assert all(torch.equal(first[key], other[key]) for key in first), name


STATES_4 = {"cp4": {"cp": 4}, "tp2xcp2": {"tp": 2, "cp": 2}, "tp2xcp2+sp": {"tp": 2, "cp": 2, "sp": True}}
AGAIN = "cp2 and recomputation"


@pytest.mark.procs
@pytest.mark.parametrize(
    ("processes", "layouts"),
    [(2, FORWARD_2), pytest.param(4, {**STATES_4, AGAIN: {"cp": 2}}, marks=pytest.mark.campaign("teams"))],
)
def test_states_do_not_depend_on_the_layout(tmp_path, processes, layouts):
    """Gated delta nets, whose heads tensor and context parallelism divide."""
    heads = {"linear_num_key_heads": processes, "linear_num_value_heads": 2 * processes}
    save_tiny(tmp_path / "model", "qwen3_5_text", tie_word_embeddings=False, **two_layers("qwen3_5_text"), **heads)
    results = run_distributed(_states, processes, 240, str(tmp_path / "model"), str(tmp_path / "out"), layouts)
    one = results[0]["one"]
    for name in layouts:
        torch.testing.assert_close(results[0][name]["logits"], one["logits"], atol=2e-5, rtol=0)
        for parameter, grad in one["grads"].items():
            torch.testing.assert_close(
                results[0][name]["grads"][parameter],
                grad,
                atol=2e-3,
                rtol=1e-2,
                msg=lambda text, at=name: f"{at}: {text}",
            )
    assert_exports_equal([tmp_path / "model"], tmp_path / "out", {**layouts, "pp2": {}})


def _states(folder: str, out: str, layouts: dict) -> dict:
    export_cases([folder], out, {**layouts, "pp2": {"pp": 2}})
    cases = {**layouts, "one": {}}
    return {name: _with_all_gradients(folder, layout, again=name == AGAIN) for name, layout in cases.items()}


def _with_all_gradients(folder: str, layout: dict, *, again: bool) -> dict:
    """The logits of `forward`, and every gradient under the names of the checkpoint."""
    from megatron.core import parallel_state as mpu

    from megarl.models.weight_table import as_index
    from megarl.models.weights.fill import local_shards

    fresh(layout)
    (model,) = build_tiny(folder, **layout)
    for layer in model.decoder.layers:
        layer.self_attention._recompute = again
    logits = passed(model, layout)["logits"]
    ways = layout.get("tp", 1)
    grads: dict[str, torch.Tensor] = {}
    shapes = model.weight_table.shapes()
    for shard, parameter in local_shards([model]):
        grad = parameter.grad
        of_heads = "q_layernorm" in shard.param or "k_layernorm" in shard.param
        if ways > 1 and (of_heads or getattr(parameter, "sequence_parallel", False)):  # as Megatron sums them
            dist.all_reduce(grad, group=mpu.get_tensor_model_parallel_group())
        for piece in shard.pieces:
            whole = grads.setdefault(piece.source, torch.zeros(shapes[piece.source]))
            whole[as_index(piece.source_region)] = grad[as_index(piece.target_region)]
    if layout.get("cp", 1) > 1:
        for grad in grads.values():
            dist.all_reduce(grad, group=mpu.get_context_parallel_group())
    if ways > 1:
        for name, grad in grads.items():
            filled, group = (grad != 0).float(), mpu.get_tensor_model_parallel_group()
            dist.all_reduce(grad, group=group)
            dist.all_reduce(filled, group=group)
            grads[name] = grad / filled.clamp(min=1)
    return {"logits": logits, "grads": grads}
