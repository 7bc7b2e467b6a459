"""Low-rank adapters in the engine, against float64 formulas on transformers' model, and under every layout."""

import pytest
import torch

from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from tests.dist import run_distributed
from tests.training import cases

LORA = LoraConfig(rank=4, alpha=8)
EXPERTS = LoraConfig(rank=4, alpha=8, targets=["attention", "experts"])
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0)


def _lora(model: str) -> LoraConfig:
    return EXPERTS if "moe" in model or model == "sinks" else LORA


def adapted_engine(model: str = "dense", parallel: ParallelConfig | None = None, clip: float = 0, **kwargs):
    """Engine whose adapters are random, B too: a product that is zero would hide mistakes."""
    optim = OPTIM.model_copy(update={"clip_grad": clip})
    engine = cases.make_engine(model, parallel, lora=_lora(model), optim=optim, **kwargs)
    spread_up(engine)
    return engine


def spread_up(engine) -> None:
    """Draw B, each whole tensor by its name, so that layouts agree."""
    from megarl.models.lora import local_adapters
    from megarl.models.weights.adapters import adapter_tensors
    from megarl.models.weights.fill import draw_tensor, fill

    shapes = adapter_tensors(engine.hf_config, engine.lora)
    up = [(shard, p) for shard, p in local_adapters(engine.chunks, engine.lora) if shard.param.endswith(".b")]
    fill(
        up,
        lambda name, region: draw_tensor(engine.hf_config, name, shapes[name], 7)[tuple(slice(*s) for s in region)] * 4,
    )


def whole_adapters(engine) -> dict[str, torch.Tensor]:
    """All adapter tensors of an engine in one process, by PEFT's names."""
    return _whole(engine, lambda parameter: parameter.detach())


def whole_gradients(engine) -> dict[str, torch.Tensor]:
    """Their gradients, of the last step."""
    return _whole(engine, lambda parameter: parameter.main_grad)


def _whole(engine, of) -> dict[str, torch.Tensor]:
    from megarl.models.lora import local_adapters
    from megarl.models.weights.adapters import adapter_tensors

    found = {name: torch.zeros(shape) for name, shape in adapter_tensors(engine.hf_config, engine.lora).items()}
    for shard, parameter in local_adapters(engine.chunks, engine.lora):
        for piece in shard.pieces:
            cut = [tuple(slice(*span) for span in region) for region in (piece.source_region, piece.target_region)]
            found[piece.source][cut[0]] = of(parameter)[cut[1]].float()
    return found


def base_weights(engine) -> dict[str, torch.Tensor]:
    """The base weights of an engine in one process, in float64."""
    from megarl.models.lora import adapters_off
    from megarl.models.weights import iter_hf_tensors

    with adapters_off(engine.chunks):
        return {name: tensor.double() for name, tensor in iter_hf_tensors(engine.chunks, engine.layout.world)}


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as transformers' modules hold them: those of all experts of a layer in two tensors."""
    found = {name: tensor for name, tensor in weights.items() if not name.partition(".experts.")[2][:1].isdigit()}
    for block in sorted({name.partition(".experts.")[0] for name in weights.keys() - found.keys()}):
        named = {
            kind: [
                weights[f"{block}.experts.{number}.{kind}_proj.weight"]
                for number in range(cases.MODELS["moe"]["num_experts"])
            ]
            for kind in ("gate", "up", "down")
        }
        found[f"{block}.experts.down_proj"] = torch.stack(named["down"])
        found[f"{block}.experts.gate_up_proj"] = torch.cat([torch.stack(named["gate"]), torch.stack(named["up"])], 1)
    return found


def oracle(engine, batch, temperature: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the responses, and the gradient of the tests' loss for every adapter tensor, all in float64."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(engine.hf_config, **plain).double().eval()
    adapters = {name: t.double().requires_grad_() for name, t in whole_adapters(engine).items()}
    weights = base_weights(engine)
    for name in {name.rpartition(".lora_")[0] for name in adapters}:
        added = adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        added = engine.lora.alpha / engine.lora.rank * added
        block, _, expert = name.partition(".experts.")
        number, _, projection = expert.partition(".")
        if (stack := f"{block}.experts.{projection}") in weights:
            weights[stack] = weights[stack].clone()
            weights[stack][int(number)] += added.t()
        else:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + added
    merged = fused(weights)
    rows, entropies = [], []
    for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = torch.func.functional_call(model, merged, (ids,)).logits[0, len(prompt) - 1 : -1] / temperature
        logp = torch.log_softmax(logits, -1)
        rows.append(logp.gather(1, response[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    loss, _ = cases.loss_fn(torch.cat(rows), torch.cat(entropies), batch)
    loss.backward()
    return torch.cat(rows).detach(), {name: tensor.grad for name, tensor in adapters.items()}


@pytest.mark.parametrize(
    ("model", "recompute"),
    [("sinks", "full"), ("tied", "full"), ("moe", "full"), ("latent", "none")],
)
def test_log_probs_and_gradients_are_those_of_the_formula(alone, model, recompute):
    """float32 against float64: sums of at most 96 products of values of size 1, some 1e-6 relative."""
    engine = adapted_engine(model, engine=EngineConfig(micro_batch_tokens=64, recompute=recompute))
    batch = cases.make_batch()
    want, gradients = oracle(engine, batch, 0.7)
    logp, _ = engine.logprobs(batch, 0.7)
    torch.testing.assert_close(logp.values.double(), want, rtol=1e-5, atol=1e-5)
    engine.train_step(batch, cases.loss_fn, 0.7)
    found = whole_gradients(engine)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


def test_a_fresh_adapter_changes_nothing_and_only_adapters_are_trained(alone):
    engine, plain = cases.make_engine(lora=LORA, optim=OPTIM), cases.make_engine(frozen=True)
    batch = cases.make_batch()
    assert torch.equal(engine.logprobs(batch)[0].values, plain.logprobs(batch)[0].values)
    before = {name: p.detach().clone() for name, p in engine.chunks[0].named_parameters()}
    engine.train_step(batch, cases.loss_fn)
    engine.train_step(batch, cases.loss_fn)  # B is zero at first, so that A moves in the second step only
    moved = {name for name, p in engine.chunks[0].named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".adapter." in name}
    held = sum(buffer.grad_data.numel() for buffer in engine.wrapped[0].buffers)
    trained = sum(p.numel() for name, p in engine.chunks[0].named_parameters() if ".adapter." in name)
    assert trained <= held < 1.1 * trained  # gradients of adapters, and some padding


def test_adapters_off_is_the_base_model(alone):
    from megarl.models.lora import adapters_off

    engine, plain = adapted_engine(), cases.make_engine(frozen=True)
    batch = cases.make_batch()
    with adapters_off(engine.chunks):
        off = engine.logprobs(batch)[0].values
    assert torch.equal(off, plain.logprobs(batch)[0].values)
    assert (engine.logprobs(batch)[0].values - off).abs().max() > 0.1


@pytest.mark.parametrize(("model", "dtype"), [("moe", torch.float32), ("critic", torch.bfloat16)])
def test_a_checkpoint_has_what_is_trained_and_brings_all_of_it_back(alone, model, dtype, tmp_path):
    from safetensors import safe_open

    from megarl.training import checkpoint

    batch = cases.make_batch()
    engine = adapted_engine(model, dtype=dtype)
    cases.train(engine, batch)
    checkpoint.save(tmp_path / "checkpoints", 1, {"actor": engine}, {})
    with safe_open(tmp_path / "checkpoints/step_1/rank_0.safetensors", framework="pt") as file:
        names = {name.partition("@")[0] for name in file.keys()}  # noqa: SIM118
    parts = (
        "",
        "optimizer.exp_avg.",
        "optimizer.exp_avg_sq.",
        *(["optimizer.param."] if dtype != torch.float32 else []),
    )
    heads = ["output_layer.weight"] if model == "critic" else []
    assert names == {f"{part}actor.{name}" for part in parts for name in (*whole_adapters(engine), *heads)}
    other = cases.make_engine(model, dtype=dtype, lora=engine.lora, optim=engine.optim)
    checkpoint.load(tmp_path / "checkpoints/step_1", {"actor": other})
    for one in (engine, other):
        cases.train(one, batch)
    for (name, parameter), here in zip(engine.chunks[0].named_parameters(), other.chunks[0].parameters(), strict=True):
        assert torch.equal(parameter, here), name


LAYOUTS = [
    ("tied", {"tp": 2, "sp": True}, {"micro_batch_tokens": 50, "recompute": "full"}),
    ("dense", {"cp": 2}, {}),
    ("sinks", {"tp": 2, "sp": True}, {"recompute": "full"}),
    ("moe", {"tp": 2, "sp": True, "ep": 2}, {"distributed_optimizer": False}),
    ("critic", {"pp": 2, "vpp": 2}, {}),
]
# Each of these changes one thing of a layout above, or leaves one out.
MORE = [
    ("tied", {"pp": 2}, {"distributed_optimizer": False}),
    ("latent", {"tp": 2, "sp": True}, {}),
    ("dense", {"tp": 2}, {}),
    ("latent", {"tp": 2}, {}),
    ("latent", {"cp": 2}, {}),
    ("moe", {"ep": 2}, {}),
    ("moe", {"pp": 2}, {"distributed_optimizer": False}),
    ("moe", {"tp": 2, "sp": True, "etp": 1}, {}),
]


def run(name: str, sizes: dict, settings: dict, layers: int) -> dict:
    """Outputs before and after two steps, and the metrics of these, under one layout."""
    from tests.dist import fresh_layout

    parallel = ParallelConfig(**sizes)
    layout = fresh_layout(parallel)
    engine = adapted_engine(name, parallel, layout=layout, clip=0.5, engine=EngineConfig(**settings), layers=layers)
    batch = cases.make_batch(5, longest=16)
    mine = cases.split_over(batch, layout.dp_rank, layout.dp_size)
    found = {"before": cases.outputs(engine, batch, 0.8)}
    found["steps"] = [cases.train(engine, mine, 0.8).result() for _ in range(2)]
    found["after"] = cases.outputs(engine, batch, 0.8)
    return found | {"engine": engine}


def reference(layouts: list) -> dict:
    from megarl.models.weights import iter_hf_tensors

    found = {}
    for kind, (name, layers) in cases.kinds(layouts).items():
        got = run(name, {}, {"micro_batch_tokens": 10_000}, layers)
        engine = got.pop("engine")
        got |= {key: {part: rows.values for part, rows in got[key].items()} for key in ("before", "after")}
        found[kind] = got | {"weights": dict(iter_hf_tensors(engine.chunks, engine.layout.world))}
    return found


def compare(layouts: list, want: dict) -> list[dict[str, float]]:
    from megarl.models.weights.fill import weight_readers

    found = []
    for name, sizes, settings in layouts:
        layers = cases.layers_for(name, sizes)
        single = want[cases.kind(name, layers)]
        got = run(name, sizes, {"micro_batch_tokens": 40, "logits_chunk_tokens": 16} | settings, layers)
        errors = {
            f"{key} {part}": off(rows.values, single[key][part])
            for key in ("before", "after")
            for part, rows in got[key].items()
        }
        for key in ("loss", "actor/grad_norm", "samples"):
            pairs = zip(got["steps"], single["steps"], strict=True)
            errors[key] = max(abs(a[key] - b[key]) / max(abs(b[key]), 1.0) for a, b in pairs)
        errors["merged"] = max(
            (read(piece.target_region) - single["weights"][piece.source][cut(piece.source_region)]).abs().max().item()
            for shard, read in weight_readers(got["engine"].chunks)
            for piece in shard.pieces
        )
        found.append(errors)
    return found


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to what is above 1: log-probs reach -20."""
    return ((found - want).abs() / want.abs().clamp(min=1)).max().item()


def cut(region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


@pytest.mark.procs
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.campaign("lora"))])
def test_layouts_equal_the_single_process(layouts):
    """As tests/training/test_layouts.py: sums in another order, and Adam's division, some 1e-6."""
    want = run_distributed(reference, 1, 120, layouts)[0]
    ranks = run_distributed(compare, 2, 240, layouts, want)
    for number, case in enumerate(layouts):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        print(case, {key: f"{value:.1e}" for key, value in worst.items()})
        assert max(worst.values()) < 1e-5, (case, worst)
    for got in want.values():
        losses = [step["loss"] for step in got["steps"]]
        assert losses[0] > losses[1]


SAVED: list[dict] = [{"tp": 2, "sp": True}]
GOES_ON: list[dict] = [{"tp": 2, "sp": True}, {}, {"pp": 2}, {"ep": 2}]
"""The second one has tp=1 on both ranks, which are replicas."""


def goes_on(folder: str) -> list[list[dict[str, float]]]:
    """Metrics of the steps after a checkpoint of every layout, under every layout."""
    return [_goes_on(f"{folder}/{number}", sizes) for number, sizes in enumerate(SAVED)]


def _goes_on(folder: str, sizes: dict) -> list[dict[str, float]]:
    from pathlib import Path

    from megarl.training import checkpoint
    from tests.dist import fresh_layout

    model, parallel = "moe", ParallelConfig(**sizes)
    layout = fresh_layout(parallel)
    engine = adapted_engine(model, parallel, layout=layout, clip=0.5, layers=2)
    cases.train(engine, cases.split_over(cases.make_batch(5, longest=16), layout.dp_rank, layout.dp_size), 0.8)
    saved = checkpoint.save(Path(folder), 1, {"actor": engine}, {})
    found = []
    for sizes in GOES_ON:
        parallel = ParallelConfig(**sizes)
        layout = fresh_layout(parallel)
        other = cases.make_engine(model, parallel, layout=layout, layers=2, lora=engine.lora, optim=engine.optim)
        checkpoint.load(saved, {"actor": other})
        mine = cases.split_over(cases.make_batch(5, seed=1, longest=16), layout.dp_rank, layout.dp_size)
        found.append([cases.train(other, mine, 0.8).result() for _ in range(2)])
    return [{f"{key} {n}": step[key] for n, step in enumerate(steps) for key in KEYS} for steps in found]


KEYS = ("loss", "actor/grad_norm")


@pytest.mark.procs
def test_a_checkpoint_goes_on_under_every_layout(tmp_path):
    """Also its moments: the loss after the second step is off by 1e-3 without them."""
    for rank in run_distributed(goes_on, 2, 240, str(tmp_path)):
        for saved, found in zip(SAVED, rank, strict=True):
            for sizes, steps in zip(GOES_ON, found, strict=True):
                assert steps == pytest.approx(found[0], rel=1e-5, abs=1e-5), (saved, sizes)
