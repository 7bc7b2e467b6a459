"""What a worker refuses before it makes a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.runtime import setup
from megarl.runtime.rank_state import TeamContext
from megarl.system.errors import ConfigError


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
    team = TeamContext(plans[0], Placement(tuple(plans)))
    with pytest.raises(ConfigError if refused else Accepted) as caught:
        setup.build_rank_state(config, Path(), team)
    if refused:
        assert caught.value.where == "async.order"


def test_a_critic_sees_the_images_that_the_policy_sees(monkeypatch):
    """Its engine gets the same layout of sequences; with that of text it would read image tokens as words."""
    from megarl.models.config import load_hf_config
    from megarl.runtime.role_models import make_critic
    from megarl.system.offload_schedule import OffloadSchedule
    from megarl.training.vlm_sequences import ImageLayout

    class Built(Exception):
        pass

    def build(*arguments, sequences, freeze, **settings):
        raise Built(sequences, freeze)

    monkeypatch.setattr("megarl.runtime.setup.MegatronEngine", build)
    config = load_config("grpo_shapes_quickstart", ["model.freeze=[tower]"])
    c = SimpleNamespace(config=config, hf_config=load_hf_config(config.model), offload=OffloadSchedule(), layout=None)
    with pytest.raises(Built) as found:
        make_critic(c, None, None)
    sequences, freeze = found.value.args
    assert isinstance(sequences, ImageLayout)
    assert freeze == ["tower"]
