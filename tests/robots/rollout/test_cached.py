"""Action tokens that are predicted one after another, with a key/value cache: equal to passes over whole calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged
from megarl.robots.models.vla.sequences import calls_of
from tests.dist import run_distributed, single_process
from tests.robots.models.vla.small import save_small
from tests.robots.models.vla.test_sequences import SLOTS, TEMPERATURE, engine_of, episodes

pytestmark = pytest.mark.procs


def by_whole_passes(engine: Any, calls: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
    """Sample without a cache: pass number k over all columns makes token number k final."""
    rows = calls.copy()
    for _ in range(SLOTS + 1):
        tokens, logp = engine.sample(rows, seeds, temperature)
        rows.set("response_ids", tokens)
    return tokens, logp


def sampled(folder: str, split: dict[str, int], temperature: float, budget: int = 120) -> dict[str, Any]:
    """Sample the calls of `episodes` with and without the cache, from other tokens in place of theirs."""
    from megarl.robots.rollout.cached import CachedSampling

    engine = engine_of(Path(folder), budget, split, parallel=False)
    calls = calls_of(episodes())
    seeds = torch.arange(len(calls)) * 97
    whole = by_whole_passes(engine, calls, seeds, temperature)
    cached = CachedSampling(engine, engine.sequences)(calls, seeds, temperature)
    return {"whole": [part.values for part in whole], "cached": [part.values for part in cached]}


def check_equal(found: dict[str, Any]) -> None:
    tokens, logp = found["cached"]
    assert tokens.tolist() == found["whole"][0].tolist()
    # fp32 sums in another order: the attention of one column beside that of all
    torch.testing.assert_close(logp, found["whole"][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [TEMPERATURE, 0.0])
def test_tokens_and_log_probs_are_those_of_passes_over_whole_calls(temperature, tmp_path) -> None:
    single_process()
    save_small(tmp_path)
    found = sampled(str(tmp_path), {}, temperature)
    check_equal(found)
    tokens = found["cached"][0].view(-1, SLOTS)
    assert len(set(map(tuple, tokens.tolist()))) == len(tokens), "calls differ by what they see"


@pytest.mark.parametrize(
    "split", [pytest.param({"tp": 2}, marks=pytest.mark.campaign("teams")), {"pp": 2}], ids=["tp", "pp"]
)
def test_every_layout_samples_the_same_tokens(split, tmp_path) -> None:
    save_small(tmp_path)
    ranks = run_distributed(sampled, 2, 240.0, str(tmp_path), split, TEMPERATURE)
    for found in ranks:
        check_equal(found)
        assert found["cached"][0].tolist() == ranks[0]["cached"][0].tolist()


def test_every_column_is_computed_once(tmp_path, monkeypatch) -> None:
    from megarl.robots.rollout.cached import CachedSampling
    from megarl.rollout.embedded.model import DecoderStage

    single_process()
    save_small(tmp_path)
    engine, calls = engine_of(tmp_path, 10_000, parallel=False), calls_of(episodes())
    columns: list[int] = []
    forward = DecoderStage.forward
    monkeypatch.setattr(
        DecoderStage,
        "forward",
        lambda stage, tokens, *a, **k: columns.append(len(tokens)) or forward(stage, tokens, *a, **k),
    )
    CachedSampling(engine, engine.sequences)(calls, torch.arange(len(calls)), TEMPERATURE)
    whole = int(engine.sequences.lengths(calls).sum())
    # the last action token of a call is not an input of the model
    assert columns == [whole - (SLOTS + 1) * len(calls), *[len(calls)] * SLOTS]
    assert sum(columns) == whole - len(calls)
