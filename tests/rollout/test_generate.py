"""Text in, text out, and the seeds of samples."""

from __future__ import annotations

import pytest

from megarl.config.model import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError
from megarl.rollout.generate import generate_text
from megarl.rollout.seeds import sample_seed
from tests.rollout.cases import build, engine, sampled


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig(tokenizer="chars:0123456789+="))


@pytest.fixture(scope="module")
def generator(single_process, tokenizer):
    return engine(build("qwen3", hf={"vocab_size": len(tokenizer)}))


def test_rows_hold_n_completions_of_every_prompt(generator, tokenizer):
    rows = generate_text(generator, tokenizer, ["1+2=", "30+4="], sampled(n=3))
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, i) for p in ("1+2=", "30+4=") for i in range(3)]
    for row in rows:
        assert row["finish_reason"] in ("stop", "length")
        assert len(row["response"]) <= row["tokens"] <= 20
        assert row["logprob"] < 0


def test_a_completion_depends_on_prompt_and_seed_only(generator, tokenizer):
    both = generate_text(generator, tokenizer, ["1+2=", "30+4="], sampled(n=2), seed=5)
    alone = generate_text(generator, tokenizer, ["30+4="], sampled(n=2), seed=5)
    other = generate_text(generator, tokenizer, ["30+4="], sampled(n=2), seed=6)
    assert [r["response"] for r in both[2:]] == [r["response"] for r in alone] != [r["response"] for r in other]


def test_an_empty_prompt_is_named(generator, tokenizer):
    with pytest.raises(DataError, match="prompt 1"):
        generate_text(generator, tokenizer, ["1", ""], sampled())


def test_sample_seeds_are_stable_and_distinct():
    assert sample_seed(0, 1, "a", 0) == 7923307643974160087
    seeds = {sample_seed(r, s, u, i) for r in range(3) for s in range(5) for u in ("1", "11", 1) for i in range(20)}
    assert len(seeds) == 3 * 5 * 2 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
