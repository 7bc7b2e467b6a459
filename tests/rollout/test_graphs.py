"""Buckets of captured decode steps, and on a GPU that replaying them changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.embedded.graphs import cache_length, length_bucket, row_bucket, slots_below
from tests.rollout.cases import STOP, build, engine, logprobs, make_requests, sampled, tokens


@given(st.integers(1, 300), st.integers(0, 300))
def test_a_row_bucket_holds_the_rows_and_fits_the_slots(rows, spare):
    assert rows <= row_bucket(rows, rows + spare) <= rows + spare


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_length_bucket_holds_the_positions_and_fits_the_cache(needed, spare):
    assert needed <= length_bucket(needed, needed + spare) <= needed + spare


@given(st.integers(1, 40_000))
def test_a_cache_holds_its_sequences_and_little_more(longest):
    assert longest <= cache_length(longest) < longest + max(64, longest / 4)


@given(st.integers(1, 600))
def test_fewer_slots_than_wanted_are_a_row_bucket(fit):
    slots = slots_below(fit)
    assert fit / 2 <= slots <= fit
    assert row_bucket(slots, 10**6) == slots


def test_buckets_are_few():
    assert len({row_bucket(rows, 256) for rows in range(1, 257)}) <= 20
    assert len({length_bucket(needed, 8192) for needed in range(1, 8193)}) <= 8
    assert len({cache_length(longest) for longest in range(4097, 8193)}) <= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("single_process")
def test_captured_steps_generate_what_plain_ones_do():
    chunks, requests = build("qwen3"), make_requests(n=5)
    plain = engine(chunks, cuda_graphs=False, max_running=8).generate(requests, sampled(), STOP)
    captured = engine(chunks, cuda_graphs=True, max_running=8).generate(requests, sampled(), STOP)
    assert tokens(captured) == tokens(plain)
    torch.testing.assert_close(logprobs(captured), logprobs(plain), rtol=0, atol=1e-4)
