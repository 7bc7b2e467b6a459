"""The seeds of samples."""

from __future__ import annotations

from megarl.rollout.seeds import sample_seed


def test_sample_seeds_are_stable_and_distinct():
    assert sample_seed(0, 1, "a", 0) == 7923307643974160087
    seeds = {sample_seed(r, s, u, i) for r in range(3) for s in range(5) for u in ("1", "11", 1) for i in range(20)}
    assert len(seeds) == 3 * 5 * 2 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
