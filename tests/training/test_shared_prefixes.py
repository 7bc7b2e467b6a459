"""An engine that computes shared prefixes once against one that computes every sample."""

from dataclasses import replace

import pytest
import torch

from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.routes import RouteForm
from megarl.models.hf import route_form
from megarl.training import microbatch, sequence_layout
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

BUDGET = 2000


def make_batch(seed: int = 0) -> Batch:
    """Three groups of a common system prompt, some answers that begin alike, a repeated sample, and a stranger."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(0, cases.VOCAB, (count,), generator=rng)  # noqa: E731
    system, prompts, responses = draw(18), [], []
    for length in (5, 20, 30):
        prompt, start = torch.cat([system, draw(length)]), draw(17)
        for number in range(4):
            prompts.append(prompt)
            rest = draw(int(torch.randint(1, 12, (), generator=rng)))
            responses.append(torch.cat([start, rest]) if number < 2 else rest)
    prompts += [prompts[-1], draw(3)]
    responses += [responses[-1], draw(4)]
    total = sum(map(len, responses))
    weights = [torch.randn(len(response), generator=rng) / total for response in responses]
    fields = {"prompt_ids": prompts, "response_ids": responses, "loss_weights": weights}
    names = [f"s{number}" for number in range(len(prompts))]
    return Batch({key: Jagged.from_list(rows) for key, rows in fields.items()}, {"sample_id": names})


def engine(model: str, *, share: bool, **more):
    settings = EngineConfig(micro_batch_tokens=BUDGET, logits_chunk_tokens=16, share_prefixes=share)
    return cases.make_engine(model, engine=settings, **more)


def _step_in_float64(share: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients of a step without an optimizer, which Megatron has for narrower numbers only."""
    made = engine("dense", share=share, frozen=True, dtype=torch.float64)
    batch = make_batch()
    groups = made._plan(batch)
    (micro,), _ = made._build(batch, groups)
    chunk = made.chunks[0].requires_grad_(True)
    hidden = chunk(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
    outputs = made._outputs(made._log_probs(0.8), hidden, chunk, micro)
    loss, _ = cases.loss_fn(*outputs, batch.select(list(micro.samples)))
    loss.backward()
    return outputs[0].detach(), {name: parameter.grad for name, parameter in chunk.named_parameters()}


def _error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients, relative to their norm."""
    difference = torch.stack([(got[name] - want[name]).norm() for name in want]).norm()
    return (difference / torch.stack([value.norm() for value in want.values()]).norm()).item()


def test_float64_gradients_are_those_of_whole_samples(alone):
    logp, gradients = _step_in_float64(share=True)
    want_logp, want = _step_in_float64(share=False)
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-12)
    assert _error(gradients, want) < 1e-12


def _index_positions(packed):
    return replace(packed, positions=torch.arange(len(packed.tokens))[None])


def _rolled(packed):
    """A token is predicted by the column before its own, as in a batch of whole samples."""
    return replace(packed, sources=torch.cat([packed.sources[1:] - 1, packed.sources[-1:]]))


@pytest.mark.parametrize("mutant", [_index_positions, _rolled])
def test_mutants_are_found(alone, mutant, monkeypatch):
    want_logp, _ = _step_in_float64(share=False)
    share = sequence_layout.share_prefixes
    monkeypatch.setattr(sequence_layout, "share_prefixes", lambda packed: mutant(share(packed)))
    assert (_step_in_float64(share=True)[0] - want_logp).abs().max() > 0.1


def _train(model: str, *, share: bool, batch: Batch, **more) -> dict:
    """Log-probs before a step, and its metrics and gradients."""
    made = engine(model, share=share, optim=OptimConfig(lr=1e-3, clip_grad=1e9), **more)
    before = {key: rows.values for key, rows in cases.outputs(made, batch).items()}
    metrics = cases.train(made, batch).result()
    named = [pair for chunk in made.wrapped for pair in chunk.named_parameters() if pair[1].requires_grad]
    # experts' biases follow their numbers of tokens
    biases = {name: b.tolist() for chunk in made.chunks for name, b in chunk.named_buffers() if "expert_bias" in name}
    return {
        "before": before,
        "biases": biases,
        "metrics": metrics,
        "gradients": {name: p.main_grad.clone() for name, p in named},
    }


def with_routes(batch: Batch) -> Batch:
    """Samples whose routes follow from their tokens, but for the last four tokens of one prompt in one sample."""
    form = route_form(cases.hf_config("moe"))
    table = torch.rand(cases.VOCAB, form.layers, form.experts, generator=torch.Generator().manual_seed(4))
    table = table.argsort(-1)[..., : form.chosen].flatten(1).to(form.dtype)
    pairs = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    rows = [table[torch.cat([prompt, response[:-1]])] for prompt, response in pairs]
    length = len(batch["prompt_ids"].unbind()[5])
    rows[5][length - 4 : length] = rows[5][length - 4 : length].roll(1, 1)
    return batch.with_values({"routes": Jagged.from_list(rows)})


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("dense", None),
        ("moe", None),
        ("latent", None),
        ("sinks", None),
        ("critic", None),
        ("shared", None),
        ("dense", 4),
    ],
)
def test_a_step_equals_that_of_whole_samples(alone, model, lora):
    batch = with_routes(make_batch()) if model == "moe" else make_batch()
    more = {} if lora is None else {"lora": LoraConfig(rank=lora)}
    got, want = (_train(model, share=share, batch=batch, **more) for share in (True, False))
    for key, values in want["before"].items():
        torch.testing.assert_close(got["before"][key], values, rtol=0, atol=3e-6)
    assert got["metrics"]["loss"] == pytest.approx(want["metrics"]["loss"], abs=1e-6)
    # Of 667 tokens. Where routes fork, three samples share four tokens, which are too few, and two no longer share 17.
    saved = 452 - (3 * 4 + 17 if model == "moe" else 0)
    assert got["metrics"]["actor/shared_tokens"] == pytest.approx(saved / 667)
    assert got["biases"] == want["biases"]
    # float32: sums in another order, of a few units in the last place each
    assert _error(got["gradients"], want["gradients"]) < 1e-6


@pytest.mark.parametrize(
    ("budget", "unit", "sizes"), [(100, 1, [4] * 3), (60, 1, [2] * 6), (45, 1, [1] * 12), (60, 2, [2] * 6)]
)
def test_samples_of_a_prompt_are_in_one_micro_batch_if_they_fit(alone, budget, unit, sizes):
    """Of three prompts of 40 tokens each sample has nine columns of its own, and 40 more if it is by itself."""
    numbers = [number // unit % 3 for number in range(12)]
    prompts = [torch.full((40,), number) for number in numbers]
    rows = {"prompt_ids": prompts, "response_ids": [torch.arange(50 + row, 60 + row) for row in range(12)]}
    batch = Batch({key: Jagged.from_list(values) for key, values in rows.items()})
    layout = sequence_layout.TextLayout(share=True)
    groups = microbatch.plan(batch, budget, alone, torch.device("cpu"), layout, unit=unit)
    assert sorted(map(len, groups), reverse=True) == sizes
    assert sorted(row for group in groups for row in group) == list(range(12))
    assert all(len({numbers[row] for row in group}) == 1 for group in groups)
    assert all(sum(layout.pack(batch.select(group)).lengths) == 40 + 9 * len(group) for group in groups)


@pytest.mark.parametrize(
    ("lengths", "starts", "columns"),
    [([1, *[40] * 7], range(8), 512 + 7 * 39), ([20] * 4, [0, 0, 1, 2], 512 + 3 * 19)],
    ids=["one_token", "equal_answers"],
)
def test_a_prompt_is_shared_if_the_tree_has_as_many_nodes_as_samples(lengths, starts, columns):
    """An answer of one token has no column of its own; nor has an answer that equals another one."""
    answers = [torch.arange(100 * start, 100 * start + length) for start, length in zip(starts, lengths, strict=True)]
    prompts = [torch.arange(512)] * len(answers)
    batch = Batch({"prompt_ids": Jagged.from_list(prompts), "response_ids": Jagged.from_list(answers)})
    packed = sequence_layout.TextLayout(share=True).pack(batch)
    assert len(packed.lengths) == len(answers)
    assert sum(packed.lengths) == len(packed.tokens) == columns


def test_prompts_with_other_routes_are_not_planned_as_one(alone):
    """Six samples of a prompt of 40 tokens, two of which have routes of their own for one token of it."""
    form = RouteForm((True, True), 2, 8)
    rows = [form.empty(49).index_fill(0, torch.tensor([20]), number) for number in (0, 1, 0, 2, 0, 0)]
    fields = {
        "prompt_ids": [torch.arange(40)] * 6,
        "response_ids": [torch.arange(50 + row, 60 + row) for row in range(6)],
        "routes": rows,
    }
    batch = Batch({key: Jagged.from_list(values) for key, values in fields.items()})
    layout = sequence_layout.TextLayout(share=True, routes=form)
    assert [list(each) for each in layout.prompts(batch)] == [[0], [1], [0], [2], [0], [0]]
    groups = microbatch.plan(batch, 100, alone, torch.device("cpu"), layout)
    assert sorted(row for group in groups for row in group) == list(range(6))
    assert max(sum(layout.pack(batch.select(group)).lengths) for group in groups) <= 100
    assert [sorted(group) for group in groups if 0 in group] == [[0, 2, 4, 5]]
    packed = layout.pack(batch.select([0, 1]))
    assert sum(packed.lengths) == 20 + 2 * 29  # twenty tokens before the one with other routes
    assert torch.equal(packed.routes[1][packed.prefixes.columns()[1]], rows[1])


TWO = [
    ("dense", {"tp": 2, "sp": True}, {}),
    ("moe", {"pp": 2}, {}),
    ("dense", {}, {"micro_batch_tokens": 150}),
]
MORE_OF_TWO = [
    ("dense", {"tp": 2}, {"recompute": "full"}),
    ("moe", {"tp": 2, "sp": True, "ep": 2}, {}),
    ("tied", {"pp": 2, "vpp": 2}, {"micro_batch_tokens": 150}),
    ("sinks", {"tp": 2, "sp": True}, {"recompute": "selective"}),
    ("latent", {"pp": 2}, {"recompute": "selective"}),
    ("critic", {"tp": 2, "sp": True}, {}),
    ("moe", {}, {"recompute": ["moe", "norm"]}),
    ("shared", {"tp": 2, "sp": True, "ep": 2}, {"recompute": ["moe"]}),
    ("shared", {"pp": 2}, {"recompute": ["moe"], "micro_batch_tokens": 150}),
]
LAYERS = {
    "tied": 4,
    **dict.fromkeys(("dense", "moe", "shared", "sinks", "latent", "critic"), 2),
}  # tied: two parts of two stages
MORE_OF_FOUR = [("moe", {"tp": 2, "pp": 2, "sp": True}, {}), ("dense", {"tp": 2, "sp": True}, {})]


def _layout_run(name: str, sizes: dict, settings: dict) -> dict:
    """This rank's outputs, and metrics of two steps, which depend on the parameters of the first."""
    layout = fresh_layout(ParallelConfig(**sizes))
    defaults = {"micro_batch_tokens": BUDGET, "logits_chunk_tokens": 16}
    made = cases.make_engine(
        name,
        layout.parallel,
        layout=layout,
        engine=EngineConfig(**{**defaults, **settings}),
        layers=LAYERS[name],
    )
    whole = with_routes(make_batch()) if name == "moe" else make_batch()
    batch = whole.split([9, len(whole) - 9])[layout.dp_rank] if layout.dp_size > 1 else whole
    outputs = {key: rows.values for key, rows in cases.outputs(made, batch).items()}
    steps = [cases.train(made, batch).result() for _ in range(2)]
    return {"outputs": outputs, "steps": steps, "part": layout.dp_rank if layout.dp_size > 1 else None}


def _layout_runs(layouts: list) -> list[dict]:
    return [_layout_run(name, sizes, {**settings, "share_prefixes": True}) for name, sizes, settings in layouts]


def _whole_samples(names: list[str]) -> dict[str, dict]:
    return {name: _layout_run(name, {}, {}) for name in names}


@pytest.mark.procs
@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (2, TWO),
        pytest.param(2, MORE_OF_TWO, marks=pytest.mark.campaign("teams")),
        pytest.param(4, MORE_OF_FOUR, marks=pytest.mark.campaign("teams")),
    ],
)
def test_layouts_equal_whole_samples_in_a_single_process(processes, layouts):
    (want,) = run_distributed(_whole_samples, 1, 120, sorted({name for name, _, _ in layouts}))
    ranks = run_distributed(_layout_runs, processes, 420, layouts)
    first = int(make_batch()["response_ids"].offsets[9])  # tokens of the first replica
    for number, (name, *layout) in enumerate(layouts):
        for rank in ranks:
            got = rank[number]
            for key, values in want[name]["outputs"].items():
                part = {None: values, 0: values[:first], 1: values[first:]}[got["part"]]
                torch.testing.assert_close(got["outputs"][key], part, rtol=0, atol=5e-6, msg=f"{name} {layout} {key}")
            for step, other in zip(got["steps"], want[name]["steps"], strict=True):
                for key in ("loss", "actor/grad_norm"):
                    assert step[key] == pytest.approx(other[key], rel=5e-6, abs=2e-6), (name, layout, key)
                assert step["actor/shared_tokens"] > 0.4, (name, layout)
