"""Updates on preference pairs: equal to transformers' autograd, and the same for every layout and micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megarl.config.data import DataConfig
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, PreferenceConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.loader import rounds
from megarl.data.preferences import LabelledDataset
from megarl.data.tokenizer import character_tokenizer
from megarl.runtime.roles import ActorRole
from megarl.runtime.stages.kto import example_step, measure_examples
from megarl.runtime.stages.preference import pair_step, score_step, sequences_of
from megarl.system.offload_schedule import OffloadSchedule
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

PAIRS = 5
LAYOUTS = ({"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2})
EVERY = ({}, *LAYOUTS)
SETTINGS = {"beta": 0.5, "label_smoothing": 0.1, "sft_coef": 0.3}
SCORES = {"loss": "bradley_terry", "center_coef": 0.1}
KTO = {"loss": "kto", "beta": 0.05, "desirable_weight": 1.5}  # rewards of 100 nats would leave no gradient


def make_pairs() -> Batch:
    """Pairs whose two samples have one prompt and responses of uneven lengths, some of whose tokens do not count."""
    g = torch.Generator().manual_seed(11)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))  # noqa: E731
    tokens = lambda n: torch.randint(0, cases.VOCAB, (n,), generator=g)  # noqa: E731
    prompts = [tokens(draw(1, 9)) for _ in range(PAIRS)]
    responses = Jagged.from_list([tokens(draw(1, 30)) for _ in range(2 * PAIRS)])
    mask = torch.rand(len(responses.values), generator=g) < 0.8
    mask[responses.offsets[:-1]] = True
    ref = responses.like(-5 - torch.rand(len(mask), generator=g))
    fields = {
        "prompt_ids": Jagged.from_list([prompts[i // 2] for i in range(2 * PAIRS)]),
        "response_ids": responses,
        "response_mask": responses.like(mask),
        "ref_logp": ref,
    }
    return Batch(fields, {"uid": [str(i // 2) for i in range(2 * PAIRS)]})


def make_examples() -> Batch:
    """The responses of the pairs with labels, each with the response before it as the mismatched one."""
    examples = make_pairs()
    order = [2 * PAIRS - 1, *range(2 * PAIRS - 1)]
    examples.set("label", torch.arange(2 * PAIRS) % 3 == 0)
    # A reference that finds mismatched responses unlikelier than the policy does: the baseline is not 0.
    for name, own, shift in (("ids", "response_ids", 0), ("mask", "response_mask", 0), ("ref_logp", "ref_logp", -1)):
        others = examples[own].select(torch.tensor(order))
        examples.set(f"mismatched_{name}", others.like(others.values + shift) if shift else others)
    return examples


def step(engine, pairs: Batch, budget: int, settings: dict = SETTINGS) -> tuple[dict, list[list[int]]]:
    """Metrics of the real step, and the samples of each micro-batch."""
    scores = engine.chunks[0].has_value_head
    engine.config = engine.config.model_copy(update={"micro_batch_tokens": budget})
    c = SimpleNamespace(
        config=SimpleNamespace(
            preference=PreferenceConfig(**(SCORES if scores else settings)), model=SimpleNamespace(dtype="fp32")
        ),
        all_sum=lambda values: engine.layout.dp_group.all_reduce(values.clone()),
        temperature=1.0,
        layout=engine.layout,
        offload=OffloadSchedule(),
        count_pass=lambda *_, **__: None,
    )
    groups: list[list[int]] = []
    update = engine._update

    def seen(batch, parts, losses):
        groups.extend(parts)
        return update(batch, parts, losses)

    engine._update = seen
    take = score_step if scores else example_step if "label" in pairs else pair_step
    made = take(c, pairs, ActorRole(engine, c, offloads=()))
    return made.result(), groups


def _run(layout: dict, budget: int) -> dict:
    """Metrics of a step of DPO, a reward model and KTO, and what the models say then of all samples."""
    parallel = ParallelConfig(**layout)
    made = fresh_layout(parallel)
    policy = cases.make_engine("dense", parallel, layout=made, layers=2)
    scorer = cases.make_engine("critic", parallel, layout=made, layers=2)
    taught = cases.make_engine("dense", parallel, layout=made, layers=2)
    pairs, examples = make_pairs(), make_examples()
    if made.dp_size == 2:
        pairs = pairs.split([2 * PAIRS - 2, 2])[made.dp_rank]
        examples = examples.split([2 * PAIRS - 3, 3])[made.dp_rank]
    metrics, groups = step(policy, pairs.copy(), budget)
    of_scores, more = step(scorer, pairs, budget)
    of_examples, _ = step(taught, examples, budget, KTO)
    metrics |= {f"{name} of scores": value for name, value in of_scores.items()}
    metrics |= {f"{name} of examples": value for name, value in of_examples.items()}
    said = [engine.logprobs(make_pairs())[0].values for engine in (policy, taught)]
    said.append(scorer.values(sequences_of(make_pairs())).values)
    return {"metrics": metrics, "groups": groups, "more": more, "said": torch.cat(said)}


def _all(layouts: tuple[dict, ...]) -> list[dict]:
    if torch.distributed.get_world_size() == 2:
        return [_run(layout, 60) for layout in layouts]
    return [_run({}, budget) for budget in (10_000, 1)]


@pytest.mark.procs
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(EVERY, marks=pytest.mark.campaign("teams"))], ids=len)
def test_a_step_is_the_same_in_every_layout_and_micro_batch(layouts):
    ((want, *parts),) = run_distributed(_all, 1, 300, layouts)
    assert want["metrics"]["preference/kl of examples"] > 0
    two = run_distributed(_all, 2, 300, layouts)
    for number, cell in enumerate([*parts, *two[0], *two[1]]):
        for name, value in want["metrics"].items():
            # A log-ratio is a sum of 30 numbers of size 5: a few units in the last place of 150 are 1e-5.
            assert cell["metrics"][name] == pytest.approx(value, rel=2e-5, abs=2e-5), (number, name)
        # As in test_layouts.py: sums in another order, and Adam's division by |g| + eps.
        assert torch.allclose(cell["said"], want["said"], rtol=1e-4, atol=1e-4), number
        for group in filter(None, [*cell["groups"], *cell["more"]]):
            assert all(a + 1 == b and a % 2 == 0 for a, b in zip(group[::2], group[1::2], strict=True)), group
    assert (len(want["groups"]), len(parts[0]["groups"])) == (1, PAIRS)


def engine_gradient(folder: str, settings: dict = SETTINGS, make: Callable[[], Batch] = make_pairs) -> dict:
    """The gradient of each weight under its name in transformers, with the model beside it."""
    from megarl.models.weights import export_weights, iter_hf_tensors

    layout = fresh_layout(ParallelConfig())
    engine = cases.make_engine("dense", layout=layout, layers=2, engine=EngineConfig(distributed_optimizer=False))
    export_weights(engine.chunks, folder, engine.hf_config, None, world=layout.world, source=None)
    found = {}

    def capture(batch, groups, losses):
        with torch.no_grad():
            for parameter in engine.chunks[0].parameters():
                parameter.copy_(parameter.main_grad)
        found.update(iter_hf_tensors(engine.chunks, layout.world))
        return {"grad_norm": 0.0, "lr": 0.0}

    engine._update = capture
    metrics, _ = step(engine, make(), 60, settings)
    scorer = cases.make_engine("critic", layout=layout, layers=2)
    heads = {"world": layout.world, "source": None, "classifies": True}
    export_weights(scorer.chunks, f"{folder}_scores", scorer.hf_config, None, **heads)
    scores = scorer.values(sequences_of(make_pairs())).values
    gradient = {name: tensor.clone() for name, tensor in found.items()}
    return {"gradient": gradient, "metrics": metrics, "scores": scores}


def sequence_logp(model, prompt, response) -> torch.Tensor:
    """Log-probs of a response's tokens by transformers."""
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def assert_gradients(got: dict, model, tolerance: float) -> None:
    """Compare with those of a model of transformers: the largest difference relative to the largest entry."""
    weights = dict(model.named_parameters())
    assert set(got["gradient"]) == set(weights)
    for name, gradient in got["gradient"].items():
        want = weights[name].grad
        assert (gradient - want).abs().max() < tolerance * want.abs().max(), name


@pytest.mark.parametrize("size", [1, 3, None])
def test_held_out_numbers_of_kto_are_those_of_all_examples_at_once(tmp_path, size):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}", "label": n % 3 > 0} for n in range(7)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DataConfig(train_files=[str(file)], val_files=[str(file)])
    settings = PreferenceConfig(loss="kto")
    data = LabelledDataset(config, settings, character_tokenizer("0123456789+="))

    def score(samples: Batch, times: float) -> Jagged:
        prompts = torch.tensor([int(prompt[0]) for prompt in samples["prompt_ids"].unbind()])
        ids = samples["response_ids"]
        return ids.like(times * (ids.values * prompts.repeat_interleave(ids.lengths)).float().sin().abs())

    config = SimpleNamespace(preference=settings, model=SimpleNamespace(dtype="fp32"))
    c = SimpleNamespace(config=config, all_sum=lambda values: values)
    actor, reference = (SimpleNamespace(score=partial(score, times=times)) for times in (1.5, 1.0))
    numbers, whole = (
        measure_examples(c, rounds(data, count), actor, reference).result() for count in (size, len(data))
    )
    assert numbers == pytest.approx(whole, rel=1e-6)
    assert numbers["preference/kl"] > 0


@pytest.mark.procs
def test_gradients_of_kto_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    (got,) = run_distributed(engine_gradient, 1, 300, str(tmp_path / "hf"), KTO, make_examples)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    examples = make_examples()
    ratios = {}
    for kind in ("response", "mismatched"):
        names = ("prompt_ids", f"{kind}_ids", f"{kind}_mask", "ref_logp" if kind == "response" else f"{kind}_ref_logp")
        rows = zip(*(examples[name].unbind() for name in names), strict=True)
        ratios[kind] = torch.stack(
            [((sequence_logp(model, prompt, ids) - ref.double()) * mask).sum() for prompt, ids, mask, ref in rows]
        )
    z = ratios["mismatched"].mean().clamp(min=0).item()
    gains = torch.where(examples["label"], ratios["response"] - z, z - ratios["response"])
    loss = (torch.where(examples["label"], 1.5, 1.0) * (1 - (0.05 * gains).sigmoid())).mean()
    loss.backward()
    assert got["metrics"]["preference/kl"] == pytest.approx(z, rel=1e-5)
    assert got["metrics"]["preference/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_gradients(got, model, 2e-5)  # float32 against float64, as below


@pytest.mark.procs
def test_gradients_and_scores_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    (got,) = run_distributed(engine_gradient, 1, 300, str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    pairs, ratios, chosen = make_pairs(), [], []
    columns = ("prompt_ids", "response_ids", "response_mask", "ref_logp")
    for prompt, response, mask, ref in zip(*(pairs[name].unbind() for name in columns), strict=True):
        logp = sequence_logp(model, prompt, response)
        ratios.append(((logp - ref.double()) * mask).sum())
        chosen += [logp[mask]] * (len(ratios) % 2)
    loss = torch.zeros((), dtype=torch.float64)
    for better, worse in zip(ratios[::2], ratios[1::2], strict=True):
        margin = 0.5 * (better - worse)
        loss = loss - (0.9 * margin.sigmoid().log() + 0.1 * (-margin).sigmoid().log()) / PAIRS
    assert got["metrics"]["preference/loss"] == pytest.approx(loss.item(), rel=1e-5)
    (loss - 0.3 * torch.cat(chosen).mean()).backward()
    # float32 against float64: a few units in the last place of sums of thousands of products.
    assert_gradients(got, model, 2e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf_scores")
    assert classifier.config.num_labels == 1
    for prompt, response, score in zip(*(pairs[name].unbind() for name in columns[:2]), got["scores"], strict=True):
        (expected,) = classifier(torch.cat([prompt, response])[None]).logits[0].tolist()
        assert score == pytest.approx(expected, rel=1e-5, abs=1e-6)
