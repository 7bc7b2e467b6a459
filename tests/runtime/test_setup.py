"""What a worker refuses before it makes a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.errors import ConfigError
from megarl.runtime import setup
from megarl.runtime.team import OwnTeam


class Accepted(Exception):
    """Models would be made now."""


@pytest.mark.parametrize(
    ("hf_config", "order", "engine", "refused"),
    [
        (Qwen3MoeConfig, "as_ready", "embedded", True),
        (Qwen3Config, "as_ready", "embedded", False),
        (Qwen3MoeConfig, "in_order", "embedded", False),
        (Qwen3MoeConfig, "as_ready", "sglang", False),
    ],
)
def test_experts_of_a_model_that_came_from_the_hub_are_not_drawn_as_they_get_ready(
    monkeypatch, hf_config, order, engine, refused
):
    """The checks before the start do not know such a model."""

    def accepted(*arguments: object) -> None:
        raise Accepted

    monkeypatch.setattr(setup, "init_processes", lambda config, run_dir, parallel: SimpleNamespace(rank=0))
    monkeypatch.setattr(setup, "load_tokenizer", lambda model: "")
    monkeypatch.setattr(setup, "load_hf_config", lambda model: hf_config())
    monkeypatch.setattr(setup, "check_vocabulary", accepted)
    config = RunConfig.model_validate(
        {"name": "x", "async": {"max_staleness": 2, "order": order}, "rollout": {"engine": engine}}
    )
    plans = [
        TeamPlan(role.value, (role,), 1, first, config.actor.parallel, ())
        for first, role in enumerate((Role.ACTOR, Role.ROLLOUT))
    ]
    team = OwnTeam(plans[0], Placement(tuple(plans)))
    with pytest.raises(ConfigError if refused else Accepted) as caught:
        setup.build_rank_state(config, Path(), team)
    if refused:
        assert caught.value.where == "async.order"
