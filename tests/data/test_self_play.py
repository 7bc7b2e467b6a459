"""Self-play on sums: a held-out sum is never trained on, whoever proposes it."""

import pytest

from megarl.recipes import self_play

SETTINGS = {"low": 10, "high": 19, "held_out": 20}


@pytest.mark.parametrize(
    ("proposal", "rewards", "info"),
    [
        ("12+19", {"proposer": 0.2 + 0.8 * 0.5, "solver": [1, 0, 1, 1]}, {"valid": 1, "carry": 1, "solved": 0.75}),
        ("12+13", {"proposer": 0.0}, {"valid": 0}),  # held out
        ("13+19", {"proposer": 0.0}, {"valid": 0}),  # another number than the prompt's
        ("12+9", {"proposer": 0.0}, {"valid": 0}),
        ("12+19+1", {"proposer": 0.0}, {"valid": 0}),
    ],
)
def test_a_proposal_is_worth_more_the_closer_the_solver_is_to_half(monkeypatch, proposal, rewards, info):
    replies = {"proposer": [proposal], "solver": ["31", "30", "31", "31"]}
    monkeypatch.setattr(self_play, "_complete", lambda policy, prompt, samples=1: replies[policy][:samples])
    row = {"prompt": ".12", "answer": "", "attempts": 4, "held_out": ["13"]}
    assert self_play.play({"row": row}) == {"rewards": rewards, "info": info}


def test_held_out_sums_are_neither_demonstrated_nor_trained_on():
    held_out = {row["prompt"].removesuffix("=") for row in self_play.make_rows("val", **SETTINGS)}
    refused = {f"{row['prompt'][1:]}+{second}" for row in self_play.make_rows(**SETTINGS) for second in row["held_out"]}
    assert refused == held_out
    given = {row["prompt"] for row in self_play.make_rows(proposed=False, **SETTINGS)}
    demonstrated = {row["prompt"] for row in self_play.make_demonstrations(**SETTINGS) if row["prompt"][0] != "."}
    assert not {f"{sum_}=" for sum_ in held_out} & (given | demonstrated)
