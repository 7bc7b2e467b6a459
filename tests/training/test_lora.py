"""Low-rank adapters in the engine, against float64 formulas on transformers' model, and under every layout."""

import pytest
import torch
import torch.nn.functional as F

from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from tests.dist import run_distributed
from tests.training import cases

LORA = LoraConfig(rank=4, alpha=8)
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0)


def adapted_engine(model: str = "dense", parallel: ParallelConfig | None = None, clip: float = 0, **kwargs):
    """Engine whose adapters are random, B too: a product that is zero would hide mistakes."""
    optim = OPTIM.model_copy(update={"clip_grad": clip})
    engine = cases.make_engine(model, parallel, lora=kwargs.pop("lora", LORA), optim=optim, **kwargs)
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
        lambda name, box: draw_tensor(engine.hf_config, name, shapes[name], 7)[tuple(slice(*s) for s in box)] * 4,
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
            cut = [tuple(slice(*span) for span in box) for box in (piece.source_box, piece.target_box)]
            found[piece.source][cut[0]] = of(parameter)[cut[1]].float()
    return found


def base_model(engine):
    """transformers' float64 model with the base weights of an engine in one process."""
    from transformers import AutoModelForCausalLM

    from megarl.models.lora import adapters_off
    from megarl.models.weights import iter_hf_tensors

    model = AutoModelForCausalLM.from_config(engine.hf_config, attn_implementation="eager").double().eval()
    with adapters_off(engine.chunks):
        weights = dict(iter_hf_tensors(engine.chunks, engine.layout.world))
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    return model.requires_grad_(False)


def oracle(engine, batch, temperature: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the responses, and the gradient of the tests' loss for every adapter tensor, all in float64."""
    model = base_model(engine)
    adapters = {name: t.double().requires_grad_() for name, t in whole_adapters(engine).items()}
    for name in {name.rpartition(".lora_")[0] for name in adapters}:
        linear = model.get_submodule(name)
        a, b = adapters[f"{name}.lora_A.weight"], adapters[f"{name}.lora_B.weight"]
        linear.register_forward_hook(
            lambda _, x, y, a=a, b=b: y + engine.lora.alpha / engine.lora.rank * F.linear(F.linear(x[0], a), b)
        )
    rows, entropies = [], []
    for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        logp = torch.log_softmax(logits, -1)
        rows.append(logp.gather(1, response[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    loss, _ = cases.loss_fn(torch.cat(rows), torch.cat(entropies), batch)
    loss.backward()
    return torch.cat(rows).detach(), {name: tensor.grad for name, tensor in adapters.items()}


@pytest.mark.parametrize("model", ["dense", "tied"])
@pytest.mark.parametrize("recompute", ["none", "full"])
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


@pytest.mark.parametrize(("model", "dtype"), [("dense", torch.float32), ("critic", torch.bfloat16)])
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
    other = cases.make_engine(model, dtype=dtype, lora=LORA, optim=engine.optim)
    checkpoint.load(tmp_path / "checkpoints/step_1", {"actor": other})
    for one in (engine, other):
        cases.train(one, batch)
    for (name, parameter), here in zip(engine.chunks[0].named_parameters(), other.chunks[0].parameters(), strict=True):
        assert torch.equal(parameter, here), name


LAYOUTS = [
    ("dense", {"tp": 2}, {}),
    ("tied", {"tp": 2, "sp": True}, {"micro_batch_tokens": 50, "recompute": "full"}),
    ("tied", {"pp": 2}, {"distributed_optimizer": False}),
    ("moe", {"ep": 2}, {}),
    ("critic", {"pp": 2, "vpp": 2}, {}),
]


def run(name: str, parallel: ParallelConfig, settings: dict) -> dict:
    """Outputs before and after two steps, and the metrics of these, under one layout."""
    from tests.dist import fresh_layout

    layout = fresh_layout(parallel)
    engine = adapted_engine(name, parallel, layout=layout, clip=0.5, engine=EngineConfig(**settings))
    batch = cases.make_batch()
    mine = cases.split_over(batch, layout.dp_rank, layout.dp_size)
    found = {"before": cases.outputs(engine, batch, 0.8)}
    found["steps"] = [cases.train(engine, mine, 0.8).result() for _ in range(2)]
    found["after"] = cases.outputs(engine, batch, 0.8)
    return found | {"engine": engine}


def reference(models: list[str]) -> dict:
    from megarl.models.weights import iter_hf_tensors

    found = {}
    for name in models:
        got = run(name, ParallelConfig(), {"micro_batch_tokens": 10_000})
        engine = got.pop("engine")
        got |= {key: {part: rows.values for part, rows in got[key].items()} for key in ("before", "after")}
        found[name] = got | {"weights": dict(iter_hf_tensors(engine.chunks, engine.layout.world))}
    return found


def compare(layouts: list, want: dict) -> list[dict[str, float]]:
    from megarl.models.weights.fill import weight_readers

    found = []
    for name, sizes, settings in layouts:
        got = run(name, ParallelConfig(**sizes), {"micro_batch_tokens": 60, "logits_chunk_tokens": 16} | settings)
        errors = {
            f"{key} {part}": (rows.values - want[name][key][part]).abs().max().item()
            for key in ("before", "after")
            for part, rows in got[key].items()
        }
        for key in ("loss", "actor/grad_norm", "samples"):
            pairs = zip(got["steps"], want[name]["steps"], strict=True)
            errors[key] = max(abs(a[key] - b[key]) / max(abs(b[key]), 1.0) for a, b in pairs)
        errors["merged"] = max(
            (read(piece.target_box) - want[name]["weights"][piece.source][cut(piece.source_box)]).abs().max().item()
            for shard, read in weight_readers(got["engine"].chunks)
            for piece in shard.pieces
        )
        found.append(errors)
    return found


def cut(box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


@pytest.mark.procs
def test_layouts_equal_the_single_process():
    """As tests/training/test_layouts.py: sums in another order, and Adam's division, some 1e-6."""
    want = run_distributed(reference, 1, 120, sorted({name for name, *_ in LAYOUTS}))[0]
    ranks = run_distributed(compare, 2, 240, LAYOUTS, want)
    for number, case in enumerate(LAYOUTS):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        print(case, {key: f"{value:.1e}" for key, value in worst.items()})
        assert max(worst.values()) < 1e-5, (case, worst)
    for got in want.values():
        losses = [step["loss"] for step in got["steps"]]
        assert losses[0] > losses[1]
