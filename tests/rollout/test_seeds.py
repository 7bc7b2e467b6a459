"""The seeds of samples, and of what losses draw."""

from __future__ import annotations

from megarl.rollout.seeds import Seeds


def test_seeds_are_stable_and_distinct():
    seeds = {
        Seeds(run).sample(uid, sample, turn)
        for run in range(3)
        for uid in ("train-0-1", "train-0-11", "train-1-1")
        for sample in range(20)
        for turn in range(4)
    }
    seeds |= {Seeds(run).tokens(update, f"train-0-1#{i}") for run in range(3) for update in range(5) for i in range(20)}
    assert len(seeds) == 3 * 3 * 20 * 4 + 3 * 5 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version():
    assert Seeds(0).sample("train-0-1", 0) == 2552730278034871850
    assert Seeds(0).sample("train-0-1", 0, turn=0) == 2552730278034871850
