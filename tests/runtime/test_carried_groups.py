"""Groups in flight in a checkpoint that a run with another batch continues."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.run import RunConfig
from megarl.data.partials import partials_to_json
from megarl.data.trajectory import Trajectory
from megarl.runtime.oversampling import Oversampling
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError

SAVED = {"parts": 1, "groups": 4, "temperature": 1.0, "carries": True}


def load(folder: Path, size: int, begun: list[int], *, step: int = 5, **rollout: Any) -> Oversampling:
    """Continue after `step` of 9 with batches of `size`; group k of the checkpoint began in step `begun[k]`."""
    partials = {number: [Trajectory([1, 2])] for number in range(len(begun))}
    content = {"begun": dict(enumerate(begun)), "partials": partials_to_json(partials)}
    (folder / "carried_0.json").write_text(json.dumps(content))
    config = RunConfig.model_validate(
        {"name": "x", "trainer": {"steps": 9}, "rollout": {"oversample": 1.5, "carry_steps": 1, **rollout}}
    )
    layout = SimpleNamespace(dp_group=WorkerGroup.alone(), dp_rank=0, dp_size=1, rank=0, is_lead=True)
    context: Any = SimpleNamespace(config=config, layout=layout, step=step, temperature=1.0)
    loader: Any = SimpleNamespace(batch_size=size, in_flight=[0], needed=None)
    oversampling = Oversampling(loader)
    oversampling.load(context, folder, SAVED)
    return oversampling


@pytest.mark.parametrize(
    ("size", "begun", "rollout", "least"),
    [
        (4, [5, 5, 5, 5], {}, None),
        (3, [5, 5, 5, 5], {}, 4),  # all four are due, and one of them would be two steps old
        (2, [4, 4, 5, 5], {"carry_steps": 2}, None),  # two are due now, the others in the next step
        (2, [4, 4, 4, 5], {"carry_steps": 2}, 3),
        (1, [5, 5, 5, 5], {"carry_steps": 3}, 2),  # of those left after a step more than one could be due at once
        (1, [5, 5, 5, 5], {"carry_steps": 0}, None),  # they begin again
        (1, [5, 5, 5, 5], {"round_prompts": 1}, 4),
    ],
)
def test_a_smaller_batch_continues_groups_only_if_none_gets_too_old(tmp_path, size, begun, rollout, least):
    if least is None:
        assert load(tmp_path, size, begun, **rollout).in_flight == len(begun)
        return
    key = "rollout.round_prompts" if "round_prompts" in rollout else "data.batch_size"
    with pytest.raises(ConfigError, match=f"(?s){key}: the checkpoint has 4 prompt groups.*allowed: {least} or more"):
        load(tmp_path, size, begun, **rollout)


def test_a_run_without_a_step_left_is_not_refused(tmp_path):
    assert load(tmp_path, 1, [9, 9, 9, 9], step=9).in_flight == 4
