"""Policy calls through the engine: what a call says depends neither on the others nor on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.architectures.vision import VisionShape
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.robots.data.pictures import DINO_SIGLIP
from megarl.robots.models.vla.calls import PolicyFamily
from megarl.robots.models.vla.config import read_policy_config
from megarl.robots.models.vla.sequences import VLALayout, calls_of
from megarl.system.metrics import Metrics
from tests.dist import layout_for, run_distributed, single_process
from tests.robots.models.vla.small import CONFIG, Oracle, save_small

pytestmark = pytest.mark.procs

COLUMNS = (64, 320)  # of 330: 101 of them on the first of two ranks
DIM, CHUNK, CAMERAS = 2, 3, ("front", "wrist")
SLOTS, CALLS = DIM * CHUNK, [3, 1, 2, 4, 2]
TEMPERATURE = 0.7


def vla_layout_of(folder: Path, **settings: Any) -> VLALayout:
    family = PolicyFamily(parallel=settings.pop("parallel", True))
    shape = VisionShape.from_config(CONFIG, 32, "small")
    return VLALayout(shape, family, DINO_SIGLIP, CAMERAS, DIM, CHUNK, COLUMNS, **settings)


def episodes() -> Batch:
    """Five episodes; the last call of each is executed in part."""
    rng = torch.Generator().manual_seed(0)
    calls = torch.tensor(CALLS)
    total = int(calls.sum())
    draw = lambda *shape: torch.randint(0, 256, shape, generator=rng).byte()  # noqa: E731
    tokens = [torch.randint(*COLUMNS, (n * SLOTS,), generator=rng) for n in CALLS]
    weights = [torch.randn(n * SLOTS, generator=rng) / (total * SLOTS) for n in CALLS]
    for one in weights:
        one[-DIM:] = 0.0
    ends = [[SLOTS * (k + 1) for k in range(n)] for n in CALLS]
    return Batch(
        {
            "prompt_ids": Jagged.from_list([torch.arange(4 + n % 3) * 5 + n for n in range(5)]),
            "response_ids": Jagged.from_list(tokens),
            "loss_weights": Jagged.from_list(weights),
            "turn_ends": Jagged.from_list(ends, dtype=torch.int64),
            "turn_starts": Jagged.from_list([[end - SLOTS for end in some] for some in ends], dtype=torch.int64),
            **{f"frames/{name}": Jagged.from_lengths(draw(total, 8, 8, 3), calls) for name in CAMERAS},
            "states": Jagged.from_lengths(torch.randn(total, 5, generator=rng), calls),
            "success": torch.tensor([True, False, True, False, False]),
        },
        {"sample_id": [f"s{n}" for n in range(5)], "task": list("ababa")},
    )


def engine_of(folder: Path, budget: int = 120, split: dict[str, int] | None = None, **settings: Any) -> Any:
    from megarl.models.weights import load_weights
    from megarl.training.engine import MegatronEngine

    layout = ParallelConfig(**(split or {}))
    return MegatronEngine(
        read_policy_config(folder),
        layout,
        EngineConfig(micro_batch_tokens=budget, logits_chunk_tokens=16),
        settings.pop("optim", OptimConfig(lr=1e-2, eps=1e-3)),
        dtype=torch.float32,
        layout=layout_for(layout),
        total_steps=10,
        weights=lambda chunks: load_weights(chunks, folder),
        freeze=settings.pop("freeze", ()),
        sequences=vla_layout_of(folder, **settings),
    )


def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
    metrics = Metrics()
    value = -(micro["loss_weights"].values.to(logp.device) * logp).sum()
    metrics.sum("loss", value.item())
    return value, metrics


def test_a_batch_of_calls_has_the_tokens_of_its_episodes_in_their_order() -> None:
    samples = episodes()
    calls = calls_of(samples)
    assert len(calls) == sum(CALLS)
    for name in ("response_ids", "loss_weights"):
        assert torch.equal(calls[name].values, samples[name].values)
        assert calls[name].lengths.tolist() == [SLOTS] * sum(CALLS)
    assert calls["frames/front"].shape == (sum(CALLS), 8, 8, 3)
    assert calls["sample_id"] == [f"s{n}" for n, count in enumerate(CALLS) for _ in range(count)]
    assert calls["prompt_ids"].unbind()[3].tolist() == samples["prompt_ids"].unbind()[1].tolist()
    assert calls["success"].tolist() == [n in (0, 2) for n, count in enumerate(CALLS) for _ in range(count)]
    assert len(calls_of(samples.select([]))) == 0


@pytest.mark.parametrize("settings", [{}, {"block_only": True}, {"parallel": False}], ids=["all", "block", "causal"])
def test_log_probs_are_those_of_the_published_maths(tmp_path, settings) -> None:
    single_process()
    tensors = save_small(tmp_path)
    samples = episodes()
    calls = calls_of(samples)
    logp, entropy = engine_of(tmp_path, **settings).logprobs(calls, TEMPERATURE)
    for number, found in enumerate(logp.unbind()):
        row = calls.select([number])
        wanted = torch.log_softmax(_oracle(tensors, row, **settings) / TEMPERATURE, -1)
        ids = row["response_ids"].values - COLUMNS[0]
        torch.testing.assert_close(found.double(), wanted.gather(1, ids[:, None])[:, 0], atol=2e-5, rtol=0)
        spread = -(wanted.exp() * wanted).sum(-1)
        torch.testing.assert_close(entropy.unbind()[number].double(), spread, atol=2e-5, rtol=0)


def _oracle(tensors: dict[str, Tensor], row: Batch, *, block_only: bool = False, parallel: bool = True) -> Tensor:
    """Logits [K * D, columns] of one call."""
    oracle = Oracle(tensors)
    pixels = DINO_SIGLIP(torch.stack([row[f"frames/{name}"] for name in CAMERAS], 1))[0]
    prompt = row["prompt_ids"].values
    rows = oracle.embeddings(prompt, pixels, row["states"][0], SLOTS, 2 if parallel else None)
    first = len(rows) - SLOTS - parallel
    if not parallel:
        rows[first:] = oracle.t["language_model.model.embed_tokens.weight"][row["response_ids"].values]
    place = torch.arange(len(rows))
    seen = place[None] <= place[:, None]
    if parallel:
        seen |= place[:, None] >= (first if block_only else 0)
    hidden = oracle.hidden(rows, seen)[first - 1 : first - 1 + SLOTS]
    return (hidden @ oracle.t["language_model.lm_head.weight"].T)[:, slice(*COLUMNS)]


def _after_a_step(folder: str, budget: int, split: dict[str, int]) -> dict[str, Any]:
    """Log-probs before it, what it measured, and how far every parameter was moved, by tensor."""
    from megarl.models.weights.fill import local_shards

    engine = engine_of(Path(folder), budget, split)
    place = engine.layout
    samples = episodes()
    if place.dp_size > 1:  # the second rank has fewer micro-batches: it fills up
        samples = samples.split([4, 1])[place.dp_rank]
    logp, _ = engine.logprobs(samples, TEMPERATURE)
    assert logp.lengths.tolist() == samples["response_ids"].lengths.tolist()
    metrics = engine.train_step(samples, loss, TEMPERATURE).result()
    pieces = [
        (piece.source, piece.source_region, parameter.detach()[tuple(slice(*span) for span in piece.target_region)])
        for shard, parameter in local_shards(engine.chunks)
        for piece in shard.pieces
    ]
    return {"logp": {place.dp_rank: logp.values}, "metrics": metrics, "pieces": pieces}


def test_splitting_episodes_leaves_a_step_alone_and_so_does_the_layout(tmp_path) -> None:
    single_process()
    save_small(tmp_path)
    whole = _after_a_step(str(tmp_path), 100_000, {})
    expected = {(name, str(region)): value for name, region, value in whole["pieces"]}
    runs = [[_after_a_step(str(tmp_path), 60, {})]]
    runs += [run_distributed(_after_a_step, 2, 240.0, str(tmp_path), 60, one) for one in ({"tp": 2}, {"pp": 2}, {})]
    for ranks in runs:
        logp = torch.cat([found for _, found in sorted({k: v for r in ranks for k, v in r["logp"].items()}.items())])
        # fp32 sums in another order
        torch.testing.assert_close(logp, whole["logp"][0], atol=1e-5, rtol=0)
        for found in ranks:
            assert found["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], abs=1e-6)
            assert found["metrics"]["actor/grad_norm"] == pytest.approx(whole["metrics"]["actor/grad_norm"], rel=1e-5)
            for name, region, value in found["pieces"]:
                same = expected.get((name, str(region)))
                if same is not None:
                    torch.testing.assert_close(value, same, atol=2e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("method", "change", "text"),
    [
        (
            "pack",
            lambda ids: ids.index_fill(0, torch.tensor([8]), 5),
            "call 1: token 2 is 5, not a token of 64 to 319",
        ),
        ("lengths", lambda ids: ids[:-1], "call 11 has 5 tokens; allowed: 6, for 3 actions of 2 numbers"),
    ],
)
def test_tokens_that_are_no_actions_are_refused(tmp_path, method, change, text) -> None:
    calls = calls_of(episodes())
    ids = change(calls["response_ids"].values)
    lengths = calls["response_ids"].lengths
    lengths[-1] -= len(calls["response_ids"].values) - len(ids)
    calls.set("response_ids", Jagged.from_lengths(ids, lengths))
    refuse = getattr(vla_layout_of(tmp_path), method)
    with pytest.raises(ValueError, match=text):
        refuse(calls)


def _drawn(folder: str, split: dict[str, int]) -> dict[str, Any]:
    engine = engine_of(Path(folder), 90, split)
    calls = calls_of(episodes())
    tokens, logp = engine.sample(calls, torch.arange(len(calls)) * 97, TEMPERATURE)
    return {"tokens": tokens.values, "logp": logp.values}


def test_what_is_drawn_has_its_log_prob_and_depends_on_its_own_seed_only(tmp_path) -> None:
    single_process()
    save_small(tmp_path)
    engine, calls = engine_of(tmp_path), calls_of(episodes())
    seeds = torch.arange(len(calls)) * 97
    tokens, logp = engine.sample(calls, seeds, TEMPERATURE)
    assert int(tokens.values.min()) >= COLUMNS[0]
    assert int(tokens.values.max()) < COLUMNS[1]
    calls.set("response_ids", tokens)
    torch.testing.assert_close(engine.logprobs(calls, TEMPERATURE)[0].values, logp.values, atol=1e-6, rtol=0)
    places = [7, 2, 9]
    again, _ = engine.sample(calls.select(places), seeds[places], TEMPERATURE)
    assert again.values.tolist() == tokens.select(places).values.tolist()
    other, _ = engine.sample(calls, seeds + 1, TEMPERATURE)
    assert other.values.tolist() != tokens.values.tolist()
    best, _ = engine.sample(calls, seeds, 0.0)
    assert best.values.tolist() == engine.sample(calls, seeds + 1, 0.0)[0].values.tolist()
    for split in ({"tp": 2}, {"pp": 2}):
        for found in run_distributed(_drawn, 2, 240.0, str(tmp_path), split):
            assert found["tokens"].tolist() == tokens.values.tolist()
            torch.testing.assert_close(found["logp"], logp.values, atol=1e-5, rtol=0)


def test_tokens_are_drawn_as_often_as_they_are_likely(tmp_path) -> None:
    """The first token of one call, 4,000 times, over the five likeliest."""
    single_process()
    save_small(tmp_path)
    engine = engine_of(tmp_path, 100_000)
    calls = calls_of(episodes()).select([0] * 500)
    counts = torch.zeros(COLUMNS[1] - COLUMNS[0])
    for part in range(8):
        tokens, _ = engine.sample(calls, torch.arange(500) + 500 * part, TEMPERATURE)
        counts += torch.bincount(tokens.values.view(-1, SLOTS)[:, 0] - COLUMNS[0], minlength=len(counts))
    for token in counts.topk(5).indices.tolist():
        ids = calls.select([0])["response_ids"].values.clone()
        ids[0] = token + COLUMNS[0]
        one = calls.select([0])
        one.set("response_ids", Jagged.from_lengths(ids, [SLOTS]))
        chance = float(engine.logprobs(one, TEMPERATURE)[0].values[0].exp())
        spread = (4000 * chance * (1 - chance)) ** 0.5
        assert abs(float(counts[token]) - 4000 * chance) < 4.5 * spread
