"""How long a weight update waits for a server in each of its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.receiver import SglangReceivers
from megarl.sync.receiver import UpdateGroup, UpdateStep
from megarl.system.errors import ServerError
from tests.sync.layouts import config


class Noting(ServerApi):
    """Keeps the deadline of every call."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None, "server 0")
        object.__setattr__(self, "deadlines", {})
        object.__setattr__(self, "payloads", {})

    def call(self, path: str, payload: Any = None, *, deadline_s: float, phase: str, method: str = "POST") -> Any:
        self.deadlines[path] = deadline_s
        self.payloads[path] = payload
        return {"ranks": []}


def test_calls_that_move_no_weights_have_a_short_deadline(tmp_path: Path) -> None:
    api = Noting()
    fleet = Fleet([Server(0, api, "current", 1)], SGLangConfig(health_timeout_s=7.0))
    receiver, step = SglangReceivers(fleet, ServerLayout.of(config("qwen3_moe"))).all[0], UpdateStep("update", 300.0)
    receiver.pause("retract", step)
    receiver.begin(step)
    receiver.set_version("1@run", step)
    receiver.flush("retract", step)
    receiver.resume(step)
    receiver.takes_changes(step)
    assert set(api.deadlines.values()) == {7.0}
    api.deadlines.clear()
    receiver.read_folder(tmp_path, step)
    receiver.join_group(UpdateGroup("a", "127.0.0.1", 1, 2, "gloo"), step)
    receiver.take_broadcast("a", [], step)
    receiver.checksums(step)
    receiver.end(step)
    assert set(api.deadlines.values()) == {300.0}
    receiver.flush("retract", UpdateStep("update", 3.0))
    assert api.deadlines["/flush_cache"] == 3.0


def test_a_draft_model_takes_updates_only_if_it_is_the_policys_own_head() -> None:
    for own, models in ((False, "target"), (True, "all")):
        fleet = Fleet([Server(0, api := Noting(), "current", 1)], SGLangConfig(health_timeout_s=7.0))
        receivers, step = (
            SglangReceivers(fleet, ServerLayout.of(config("glm4_moe")), takes_draft=own),
            UpdateStep("", 9),
        )
        receivers.all[0].begin(step)
        receivers.all[0].take_broadcast("a", [], step)
        assert {payload["selector"] for payload in api.payloads.values()} == {models}


def test_a_server_without_the_loader_maps_no_memory_of_a_gpu() -> None:
    fleet = Fleet([Server(0, api := Noting(), "current", 1)], SGLangConfig())
    receiver, step = SglangReceivers(fleet, ServerLayout.of(config("qwen3_moe"))).all[0], UpdateStep("bucket", 9.0)
    with pytest.raises(ServerError, match=r"answers before its GPU has copied .* set sync\.transport=distributed"):
        receiver.take_shared([{"device": "GPU-1"}], [[]], None, step)
    assert "/update_weights_from_tensor" not in api.payloads
