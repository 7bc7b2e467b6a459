"""Updates on preference pairs: equal to transformers' autograd, and the same for every layout and micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, PreferenceConfig
from megarl.data.batch import Batch, Jagged
from megarl.offload_schedule import OffloadSchedule
from megarl.runtime.roles import ActorRole
from megarl.runtime.stages.preference import pair_step, score_step, sequences_of
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

PAIRS = 5
LAYOUTS = ({}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2})
SETTINGS = {"beta": 0.5, "label_smoothing": 0.1, "sft_coef": 0.3}
SCORES = {"loss": "bradley_terry", "center_coef": 0.1}


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


def step(engine, pairs: Batch, budget: int, settings: dict = SETTINGS) -> tuple[dict, list[list[int]]]:
    """Metrics of the real step, and the samples of each micro-batch."""
    scores = engine.chunks[0].has_value_head
    engine.config = engine.config.model_copy(update={"micro_batch_tokens": budget})
    c = SimpleNamespace(
        config=SimpleNamespace(preference=PreferenceConfig(**(SCORES if scores else settings))),
        all_sum=lambda values: engine.layout.dp_group.all_reduce(values.clone()),
        temperature=1.0,
        layout=engine.layout,
        offload=OffloadSchedule(),
    )
    groups: list[list[int]] = []
    update = engine._update

    def seen(batch, parts, losses):
        groups.extend(parts)
        return update(batch, parts, losses)

    engine._update = seen
    made = (score_step if scores else pair_step)(c, pairs, ActorRole(engine, c, offloads=False))
    return made.result(), groups


def _run(layout: dict, budget: int) -> dict:
    """Metrics of a policy's step and of a reward model's, and what both say then of all samples."""
    parallel = ParallelConfig(**layout)
    made = fresh_layout(parallel)
    policy = cases.make_engine("dense", parallel, layout=made, layers=2)
    scorer = cases.make_engine("critic", parallel, layout=made, layers=2)
    pairs = make_pairs()
    if made.dp_size == 2:
        pairs = pairs.split([2 * PAIRS - 2, 2])[made.dp_rank]
    metrics, groups = step(policy, pairs.copy(), budget)
    of_scores, more = step(scorer, pairs, budget)
    metrics |= {f"{name} of scores": value for name, value in of_scores.items()}
    said = policy.logprobs(make_pairs())[0].values, scorer.values(sequences_of(make_pairs())).values
    return {"metrics": metrics, "groups": groups, "more": more, "said": torch.cat(said)}


def _all() -> list[dict]:
    if torch.distributed.get_world_size() == 2:
        return [_run(layout, 60) for layout in LAYOUTS]
    return [_run({}, budget) for budget in (10_000, 60, 1)]


@pytest.mark.procs
def test_a_step_is_the_same_in_every_layout_and_micro_batch():
    ((want, *parts),) = run_distributed(_all, 1, 300)
    two = run_distributed(_all, 2, 300)
    for number, cell in enumerate([*parts, *two[0], *two[1]]):
        for name, value in want["metrics"].items():
            # A log-ratio is a sum of 30 numbers of size 5: a few units in the last place of 150 are 1e-5.
            assert cell["metrics"][name] == pytest.approx(value, rel=2e-5, abs=2e-5), (number, name)
        # As in test_layouts.py: sums in another order, and Adam's division by |g| + eps.
        assert torch.allclose(cell["said"], want["said"], rtol=1e-4, atol=1e-4), number
        for group in filter(None, [*cell["groups"], *cell["more"]]):
            assert all(a + 1 == b and a % 2 == 0 for a, b in zip(group[::2], group[1::2], strict=True)), group
    assert (len(want["groups"]), len(parts[1]["groups"])) == (1, PAIRS)


def engine_gradient(folder: str, settings: dict = SETTINGS) -> dict:
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
        return 0.0, 0.0

    engine._update = capture
    metrics, _ = step(engine, make_pairs(), 60, settings)
    scorer = cases.make_engine("critic", layout=layout, layers=2)
    heads = {"world": layout.world, "source": None, "classifies": True}
    export_weights(scorer.chunks, f"{folder}_scores", scorer.hf_config, None, **heads)
    scores = scorer.values(sequences_of(make_pairs())).values
    gradient = {name: tensor.clone() for name, tensor in found.items()}
    return {"gradient": gradient, "metrics": metrics, "scores": scores}


@pytest.mark.procs
def test_gradients_and_scores_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    (got,) = run_distributed(engine_gradient, 1, 300, str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    pairs, ratios, chosen = make_pairs(), [], []
    columns = ("prompt_ids", "response_ids", "response_mask", "ref_logp")
    for prompt, response, mask, ref in zip(*(pairs[name].unbind() for name in columns), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        ratios.append(((logp - ref.double()) * mask).sum())
        chosen += [logp[mask]] * (len(ratios) % 2)
    loss = torch.zeros((), dtype=torch.float64)
    for better, worse in zip(ratios[::2], ratios[1::2], strict=True):
        margin = 0.5 * (better - worse)
        loss = loss - (0.9 * margin.sigmoid().log() + 0.1 * (-margin).sigmoid().log()) / PAIRS
    assert got["metrics"]["preference/loss"] == pytest.approx(loss.item(), rel=1e-5)
    (loss - 0.3 * torch.cat(chosen).mean()).backward()
    weights = dict(model.named_parameters())
    assert set(got["gradient"]) == set(weights)
    for name, gradient in got["gradient"].items():
        want = weights[name].grad
        # float32 against float64: a few units in the last place of sums of thousands of products.
        assert (gradient - want).abs().max() < 2e-5 * want.abs().max(), name
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf_scores")
    assert classifier.config.num_labels == 1
    for prompt, response, score in zip(*(pairs[name].unbind() for name in columns[:2]), got["scores"], strict=True):
        (expected,) = classifier(torch.cat([prompt, response])[None]).logits[0].tolist()
        assert score == pytest.approx(expected, rel=1e-5, abs=1e-6)
