"""The `te` form of layers, computed by the double of Transformer Engine, against the `local` form.

Both forms compute the same in float32 up to the order of sums: a few units in the last place of log-probs of size 1 to
10, and of a gradient norm.
"""

from pathlib import Path

import pytest
import torch

from megarl.artifacts.facts import facts_from_config
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models import layer_forms
from megarl.models.config import load_hf_config, transformer_config
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.wiring import LLAMA
from megarl.system.errors import ConfigError
from megarl.training import optimizer
from tests.dist import fresh_layout, run_distributed, run_with_te
from tests.models.tiny import ARCHITECTURES, LOCAL_ONLY, save_tiny, tiny_dict
from tests.rollout import cases as rollout_cases
from tests.training import cases, test_layouts

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def engine_settings(layers: str, **more) -> EngineConfig:
    return EngineConfig(layers=layers, micro_batch_tokens=100, logits_chunk_tokens=32, **more)


def of_architecture(folder: str, layers: str) -> dict:
    """Log-probs, metrics of a step, and the weights after it, of the model in `folder`."""
    from megarl.config.model import ModelConfig
    from megarl.config.training import OptimConfig
    from megarl.models.hf import load_hf_config
    from megarl.models.weights import iter_hf_tensors, load_weights
    from megarl.training.engine import MegatronEngine

    layout = fresh_layout(ParallelConfig())
    engine = MegatronEngine(
        load_hf_config(ModelConfig(path=folder)),
        ParallelConfig(),
        engine_settings(layers),
        OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1),
        dtype=torch.float32,
        layout=layout,
        total_steps=3,
        weights=lambda chunks: load_weights(chunks, folder),
    )
    batch = cases.make_batch(4, longest=24)
    start = dict(iter_hf_tensors(engine.chunks, layout.world))
    logp, _ = engine.logprobs(batch)
    drawn = rollout_cases.engine(engine.chunks).generate(rollout_cases.make_requests(), rollout_cases.sampled(), [2])
    steps = [cases.train(engine, batch).result() for _ in range(2)]
    return {
        "form": type(engine.chunks[0].decoder.layers[0].self_attention.linear_qkv).__name__,
        "start": start,
        "logp": logp.values,
        "generated": rollout_cases.tokens(drawn),
        "norms": [step["actor/grad_norm"] for step in steps],
        "end": dict(iter_hf_tensors(engine.chunks, layout.world)),
    }


# whose layers Transformer Engine's cannot compute, and phi3 by longrope's factor of a part of each head
@pytest.mark.parametrize("name", LOCAL_ONLY)
def test_models_that_need_local_layers_are_refused_by_name(name):
    hf = load_hf_config(ModelConfig(hf_config=tiny_dict(name)))
    with pytest.raises(ConfigError, match="cannot use Transformer Engine layers"):
        transformer_config(hf, ParallelConfig(), dtype=torch.bfloat16, engine=EngineConfig(layers="te"))


def only_local(model_type: str) -> bool:
    facts = facts_from_config(tiny_dict(model_type), model_type)
    plain = all(isinstance(mixer, Attention) and not mixer.unusual for mixer in facts.mixers)
    return not plain or facts.wiring != LLAMA or model_type == "phi3"  # scales rotary positions of a part of a head


def test_the_descriptions_of_layers_say_which_models_need_local_layers():
    assert [name for name in ARCHITECTURES if only_local(name)] == list(LOCAL_ONLY)


def both_forms(folders: list[str]) -> list[dict]:
    return [{layers: of_architecture(folder, layers) for layers in ("local", "te")} for folder in folders]


# Norms of queries and keys, biases, shared experts; others have the same parts with other numbers.
SOON = ("glm4_moe", "llama", "qwen2", "qwen3")
CHANGES = {"llama": {"rope_parameters": YARN}}  # whose scale of cosines is not 1


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOON, id="soon"),
        pytest.param(
            [name for name in ARCHITECTURES if name not in (*SOON, *LOCAL_ONLY)],
            id="later",
            marks=pytest.mark.campaign("families"),
        ),
    ],
)
def test_an_architecture_reads_trains_and_exports_as_the_local_form(tmp_path, names):
    models = {name: CHANGES.get(name, {}) for name in names}
    for name, changes in models.items():
        save_tiny(tmp_path / name, name, num_hidden_layers=2, **changes)
    (results,) = run_with_te(both_forms, 1, 240, [str(tmp_path / name) for name in models])
    for name, found in zip(models, results, strict=True):
        local, te = found["local"], found["te"]
        assert (local["form"], te["form"]) == ("ColumnParallelLinear", "TELayerNormColumnParallelLinear")
        assert te["start"].keys() == local["start"].keys() == te["end"].keys()
        assert all(torch.equal(value, local["start"][key]) for key, value in te["start"].items()), name
        assert (te["logp"] - local["logp"]).abs().max() < 1e-5, name
        assert te["generated"] == local["generated"]
        assert te["norms"] == pytest.approx(local["norms"], rel=1e-5), name
        moved = max((local["end"][key] - local["start"][key]).abs().max() for key in local["end"])
        assert moved > 1e-3
        worst = max((te["end"][key] - local["end"][key]).abs().max() for key in local["end"])
        assert worst < 1e-5, (name, worst)


LAYOUTS = [
    ("tied", {"tp": 2, "sp": True}, {"recompute": "selective"}),
    ("dense", {"cp": 2}, {"recompute": "full"}),
    ("moe", {"tp": 2, "sp": True}, {}),
]
MORE = [("tied", {"pp": 2}, {"distributed_optimizer": False}), ("moe", {"ep": 2}, {"overlap_grad_reduce": True})]


@pytest.mark.procs
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.campaign("teams"))], ids=len)
def test_every_layout_equals_a_plain_process(layouts):
    (reference,) = run_distributed(test_layouts._reference, 1, 120, layouts)
    layouts = [(name, sizes, {**settings, "layers": "te"}) for name, sizes, settings in layouts]
    ranks = run_with_te(test_layouts._all_cases, 2, 420, layouts, reference)
    for number, case in enumerate(layouts):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        print(case, {key: f"{value:.1e}" for key, value in worst.items()})
        assert max(worst.values()) < 1e-5, (case, worst)


def checkpoints(root: str) -> dict:
    """Metrics of the step after a checkpoint of each form: undisturbed, and read by both forms."""
    from megarl.training import checkpoint

    found = {}
    for saver in ("local", "te"):
        engine = cases.make_engine("moe", engine=engine_settings(saver), layers=2)
        cases.train(engine, cases.make_batch(6))
        folder = checkpoint.save(Path(root) / saver, 1, {"actor": engine}, {})
        on = {"undisturbed": cases.train(engine, cases.make_batch(6, seed=1)).result()}
        for reader in ("local", "te"):
            other = cases.make_engine("moe", engine=engine_settings(reader), layers=2, seed=77)
            checkpoint.load(folder, {"actor": other})
            on[reader] = cases.train(other, cases.make_batch(6, seed=1)).result()
        found[saver] = on
    return found


def test_a_checkpoint_of_one_form_goes_on_in_the_other(tmp_path):
    (found,) = run_with_te(checkpoints, 1, 240, str(tmp_path))
    for saver, on in found.items():
        for reader in ("local", "te"):
            for key in ("loss", "actor/grad_norm"):  # without the moments these differ by more than 1e-3
                assert on[reader][key] == pytest.approx(on["undisturbed"][key], rel=5e-6, abs=5e-6), (saver, reader)
            assert saver != reader or on[reader] == on["undisturbed"]


def unlisted_arguments() -> dict[str, list[str]]:
    """Note from now on what the double's layers are passed beyond `CALLS`, by which other versions are judged."""
    import transformer_engine.pytorch as te

    from megarl.system.compat.transformer_engine import CALLS

    found: dict[str, list[str]] = {}
    for (module, name), (count, keywords) in CALLS.items():
        owner, _, method = name.partition(".")
        if module or not hasattr(te, owner):
            continue
        real = getattr(getattr(te, owner), method or "__init__")

        def noting(self, *given, _name=name, _count=count, _keywords=keywords, _real=real, **named):
            taken = _count - ("." in _name)
            if len(given) > taken or not named.keys() <= set(_keywords):
                found[_name] = [str(len(given)), *sorted(named.keys() - set(_keywords))]
            return _real(self, *given, **named)

        setattr(getattr(te, owner), method or "__init__", noting)
    return found


def in_fp8() -> dict:
    """Log-probs, gradient norms and recipes in use of every kind of FP8, over two tensor-parallel ranks."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    cases.MODELS["wide"] = {**cases.MODELS["dense"], "hidden_size": 128, "intermediate_size": 128}
    cases.MODELS["mixture"] = {**cases.MODELS["moe"], "hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    found = {"unlisted": unlisted_arguments()}
    for model, kind, recompute in (
        ("wide", "none", "none"),
        ("wide", "blockwise", "none"),
        ("wide", "delayed", "full"),
        ("mixture", "none", "none"),
        ("mixture", "mxfp8", "none"),
    ):
        FP8GlobalStateManager.used.clear()
        parallel = ParallelConfig(tp=2, sp=True)
        settings = engine_settings("te", fp8=kind, recompute=recompute)
        engine = cases.make_engine(model, parallel, layout=fresh_layout(parallel), engine=settings, layers=2)
        batch = cases.make_batch(6)
        logp = engine.logprobs(batch)[0].values
        norm = cases.train(engine, batch).result()["actor/grad_norm"]
        found[f"{model} {kind}"] = {"logp": logp, "norm": norm, "used": sorted(FP8GlobalStateManager.used)}
    return found


@pytest.mark.procs
def test_fp8_rounds_the_products_of_layers_and_pads_streams():
    found, _ = run_with_te(in_fp8, 2)
    assert found.pop("unlisted") == {}
    plain = {name.partition(" ")[0]: found.pop(name) for name in ("wide none", "mixture none")}
    assert all(exact["used"] == [] for exact in plain.values())
    for name, got in found.items():
        model, _, kind = name.partition(" ")
        assert got["used"] == [kind]
        # e4m3 has 3 bits after the point: each factor of each product is off by 2% on average, log-probs of -5 by 0.1.
        assert 1e-3 < (got["logp"] - plain[model]["logp"]).abs().mean() < 0.5
        assert got["norm"] == pytest.approx(plain[model]["norm"], rel=0.2)


def form_of(monkeypatch, version: str | None, cuda: bool, dtype=torch.bfloat16, misfits=(), **settings) -> str:
    monkeypatch.setattr(layer_forms, "te_version", lambda: version)
    monkeypatch.setattr(layer_forms.device, "has_cuda", lambda: cuda)
    monkeypatch.setattr(layer_forms, "import_te", lambda: None)
    monkeypatch.setattr(layer_forms, "other_arguments", lambda: misfits)
    special = settings.pop("special", None)
    return layer_forms.layer_form(EngineConfig(**settings), dtype, "critic.engine", special)


def test_auto_is_te_for_bf16_on_a_gpu_with_a_version_that_fits(monkeypatch):
    assert form_of(monkeypatch, "2.11.0", True) == "te"
    assert form_of(monkeypatch, "3.0.0", True) == "te"
    assert form_of(monkeypatch, "2.11.0+c188b533", True, layers="te") == "te"
    assert form_of(monkeypatch, "2.11.0", True, dtype=torch.float32) == "local"
    assert form_of(monkeypatch, "2.11.0", False) == "local"
    misfits = ["Linear has no parameter x"]
    with pytest.warns(
        UserWarning, match=r"2\.20\.2 rejects arguments .*: Linear has no parameter x: using local layers"
    ):
        assert form_of(monkeypatch, "2.20.2", True, misfits=misfits) == "local"
    with pytest.raises(ConfigError, match=r"critic\.engine\.layers: .*Linear has no parameter x"):
        form_of(monkeypatch, "2.20.2", True, misfits=misfits, layers="te")
    assert form_of(monkeypatch, None, True) == "local"
    assert form_of(monkeypatch, "2.11.0", True, special="a model with adapters") == "local"
    assert form_of(monkeypatch, "2.11.0", True, layers="local") == "local"


@pytest.mark.parametrize(
    ("version", "cuda", "settings", "says"),
    [
        (None, True, {"layers": "te"}, r"critic\.engine\.layers: Transformer Engine is not installed"),
        (
            "2.11.0",
            True,
            {"layers": "te", "special": "a model with adapters"},
            r"critic\.engine\.layers: .*adapters cannot use",
        ),
        (None, True, {"fp8": "delayed"}, r"critic\.engine\.fp8: Transformer Engine is not installed"),
        ("2.11.0", False, {"layers": "te"}, r"critic\.engine\.layers: .*needs a CUDA device"),
        ("2.11.0", False, {"fp8": "blockwise"}, r"critic\.engine\.fp8: .*needs a CUDA device"),
        ("2.11.0", True, {"layers": "te", "dtype": torch.float32}, r"critic\.engine\.layers: .*no kernel for float32"),
    ],
)
def test_what_cannot_be_is_an_error_at_its_key(monkeypatch, version, cuda, settings, says):
    with pytest.raises(ConfigError, match=says):
        form_of(monkeypatch, version, cuda, **settings)


def test_a_build_that_does_not_import_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(layer_forms, "te_version", lambda: "2.11.0")  # it is not there
    with pytest.raises(ConfigError, match=r"layers: Transformer Engine 2\.11\.0 does not import: No module"):
        layer_forms.layer_form(EngineConfig(layers="te"), torch.bfloat16)


def fp8_refusals() -> list[str]:
    from transformer_engine import pytorch

    from megarl.system.compat.transformer_engine import other_arguments

    fits, real = other_arguments(), pytorch.RMSNorm
    pytorch.RMSNorm = lambda hidden_size, normalized_shape, eps: None
    found = [*fits, *other_arguments()]
    pytorch.RMSNorm = real
    del pytorch.optimizers.FusedAdam
    found += other_arguments()
    for model, sizes, settings, can in (
        ("dense", {}, {"layers": "local", "fp8": "delayed"}, True),
        ("moe", {"tp": 2, "etp": 2}, {"fp8": "mxfp8"}, True),
        ("dense", {"tp": 2, "sp": True}, {"fp8": "blockwise"}, True),
        ("moe", {"tp": 2}, {"fp8": "blockwise"}, True),
        ("dense", {"tp": 2}, {"fp8": "blockwise"}, True),  # without sequence parallelism no rank gathers
        ("dense", {}, {"fp8": "delayed"}, False),
    ):
        pytorch.is_fp8_available = lambda return_reason, can=can: (can, "" if can else "compute capability 8.0")
        engine = EngineConfig(**{"layers": "te", **settings})
        try:
            layer_forms.refuse_fp8(cases.hf_config(model), ParallelConfig(**sizes), engine, "actor.engine")
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append("actor.engine.fp8: fits")
    return found


def test_fp8_that_cannot_be_is_an_error_at_its_key():
    (found,) = run_with_te(fp8_refusals, 1)
    (misfit, missing), found = found[:2], found[2:]
    assert misfit == "RMSNorm has no parameter sequence_parallel, zero_centered_gamma, params_dtype, device"
    assert missing.startswith("transformer_engine.pytorch.optimizers has no FusedAdam")
    wanted = [
        "local layers do not support FP8",
        "multiples of 32",
        "for the hidden size a multiple of 128",
        "for the hidden size a multiple of 128",
        "fits",
        "lacks this FP8 format: compute capability",
    ]
    assert len(found) == len(wanted)
    for says, part in zip(found, wanted, strict=True):
        assert says.startswith("actor.engine.fp8: ")
        assert part in says


def short_moment(root: str) -> dict:
    """Metrics of two steps with the first moment in each dtype, the second one also after a checkpoint of the other."""
    from megarl.training import checkpoint

    found = {}
    for dtype in ("fp32", "bf16"):
        made = [
            cases.make_engine("tied", dtype=torch.bfloat16, engine=engine_settings("te", exp_avg_dtype=kind), seed=3)
            for kind in (dtype, "bf16" if dtype == "fp32" else "fp32")
        ]
        first = cases.train(made[0], cases.make_batch(6)).result()
        folder = checkpoint.save(Path(root) / dtype, 1, {"actor": made[0]}, {})
        checkpoint.load(folder, {"actor": made[1]})
        second = [cases.train(engine, cases.make_batch(6, seed=1)).result() for engine in made]
        (part,) = optimizer.parts(made[0].optimizer)
        state = next(iter(part.optimizer.state.values()))
        found[dtype] = {
            "steps": [[step[key] for key in ("loss", "actor/grad_norm")] for step in (first, *second)],
            "dtypes": {key: str(value.dtype) for key, value in state.items()},
        }
    return found


def test_the_first_moment_may_be_in_bf16(tmp_path):
    (found,) = run_with_te(short_moment, 1, 240, str(tmp_path))
    assert found["fp32"]["dtypes"] == {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32"}
    short = {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.float32", "master_param": "torch.float32"}
    assert found["bf16"]["dtypes"] == short
    # The moment of the first step is off by 2**-9: by that share of lr = 1e-2 weights move differently before the next.
    for row, other in zip(found["fp32"]["steps"], found["bf16"]["steps"], strict=True):
        assert row == pytest.approx(other, rel=2e-2, abs=2e-2)
    assert found["bf16"]["steps"][0] != found["bf16"]["steps"][1]


@pytest.mark.parametrize(
    ("dtype", "settings", "missing"),
    [
        (torch.float32, {}, "a model in bf16 and Transformer Engine"),
        (torch.bfloat16, {"distributed_optimizer": False}, "distributed_optimizer and Transformer Engine"),
    ],
)
def test_a_moment_in_bf16_that_cannot_be_is_an_error_at_its_key(monkeypatch, dtype, settings, missing):
    monkeypatch.setattr(optimizer, "te_problem", lambda: "it is not installed")
    with pytest.raises(ConfigError, match=rf"actor\.engine\.exp_avg_dtype: .* needs {missing}"):
        optimizer.refuse_short_moment(
            EngineConfig(exp_avg_dtype="bf16", **settings), dtype, "actor.engine.exp_avg_dtype"
        )
