"""What a rank holds, and when it lets go of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.run import RunConfig
from megarl.runtime.rank_state import RankState, TeamContext
from megarl.runtime.roles import RolloutRole, ScorerRole


def closing(name: str, closed: list[str]) -> SimpleNamespace:
    return SimpleNamespace(close=lambda: closed.append(name))


def test_what_only_a_cold_start_draws_with_ends_with_it():
    closed: list[str] = []
    scorer = ScorerRole(closing("runner", closed))
    rollout = RolloutRole(SimpleNamespace(), SimpleNamespace(), [2], closing("episodes", closed))
    held = {"rollout": rollout, "scorer": scorer}
    team, link = TeamContext.of_all(RunConfig(name="run")), closing("link", closed)
    c = RankState(team, SimpleNamespace(), Path(), SimpleNamespace(), held, None, SimpleNamespace(), link=link)
    assert c.rollout is rollout
    c.end_generation()
    assert sorted(closed) == ["episodes", "runner"]
    assert (c.roles, c.val_data) == ({}, None)
    with pytest.raises(AssertionError, match="team 'all' has no rollout"):
        c.rollout  # noqa: B018
    c.close()
    assert sorted(closed) == ["episodes", "link", "runner"], "each once"
