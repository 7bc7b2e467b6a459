"""Checks of `rollout.engine: sglang`."""

from __future__ import annotations

import sys

import pytest

ON = ("rollout.engine=sglang", f"rollout.sglang.python={sys.executable}")


def test_the_embedded_engine_needs_no_server(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert failures() == []


def test_a_complete_setting_passes(failures) -> None:
    assert failures(*ON) == []


def test_a_missing_interpreter_is_told_with_the_command_that_makes_one(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (check,) = failures("rollout.engine=sglang")
    assert check.key == "rollout.sglang.python"
    assert str(tmp_path) in check.message
    assert "make sglang-env" in check.fix


def test_servers_that_run_already_need_no_interpreter(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert failures("rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:30000]") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.sglang.python=/no/such/python"], "rollout.sglang.python"),
        (["rollout.sglang.tp_size=4", "rollout.sglang.ep_size=3"], "rollout.sglang.ep_size"),
        (["cluster.nproc=2", "cluster.nnodes=2", "rollout.sglang.servers=3"], "rollout.sglang.servers"),
        (["rollout.sglang.tp_size=2", "rollout.sglang.gpus=[0]"], "rollout.sglang.gpus"),
        (["rollout.sglang.context_length=20"], "rollout.sglang.context_length"),
        (["cluster.nproc=2", "cluster.timeout_s=200", "reward.timeout_s=10"], "rollout.sglang.start_timeout_s"),
        (["rollout.sampling.min_new_tokens=2"], "rollout.sampling.min_new_tokens"),
        (["validation.sampling.min_new_tokens=2"], "validation.sampling.min_new_tokens"),
        (["rollout.stale_steps=1"], "rollout.stale_steps"),
        (["rollout.sglang.host=0.0.0.0"], "rollout.sglang.host"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key(failures, overrides, key) -> None:
    assert key in [check.key for check in failures(*ON, *overrides)]
