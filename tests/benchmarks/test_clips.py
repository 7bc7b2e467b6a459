"""The benchmark of clips plays, records and compares both ways."""

from __future__ import annotations

import pytest

from megarl.benchmarks import clips

pytestmark = pytest.mark.procs


def test_both_kinds_of_clips_are_compared_with_their_controls(capsys) -> None:
    clips.main(["tasks=[reach_red]", "max_steps=10", "--trials", "2", "--steps", "1", "--noise", "0.3", "4"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("1 steps of 4 episodes")
    kinds = [line.partition(":")[0] for line in lines if "reach_red" in line]
    assert [kind.partition(",")[0] for kind in kinds] == ["steps", "steps", "calls", "calls"]
    assert [kind.endswith("shuffled") for kind in kinds] == [False, True, False, True]
