"""Addresses of servers that run already are tried before the start."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.rollout import RolloutConfig
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.families import family_of
from megarl.rollout.sglang import start
from megarl.system.errors import ConfigError, ServerError


def config(*urls: str) -> RunConfig:
    return RunConfig(name="r", rollout=RolloutConfig(engine="sglang", sglang=SGLangConfig(urls=list(urls))))


def test_an_address_that_refuses_connections_is_said_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert family_of(config()).silent_servers(config(f"http://127.0.0.1:{port}")) is None
    found = family_of(config()).silent_servers(config(f"http://127.0.0.1:{port}/path"))
    assert found is not None
    assert f"http://127.0.0.1:{port}/path (Connection refused)" in found
    assert family_of(RunConfig(name="r")).silent_servers(RunConfig(name="r")) is None


def test_an_address_without_a_server_is_the_users_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fleet(servers: SGLangConfig, *args: object, **kwargs: object) -> None:
        raise ServerError("server 0", "http://127.0.0.1:9", "start", "connection refused")

    monkeypatch.setattr(start, "open_fleet", open_fleet)
    monkeypatch.setattr(start, "_write_model_config", lambda host: None)
    monkeypatch.setattr(start, "with_plain_experts", lambda servers, facts: servers)
    monkeypatch.setattr(start, "facts_of", lambda hf: None)
    layout = SimpleNamespace(rank=0, world=None)

    def host(*urls: str) -> Any:
        return SimpleNamespace(config=config(*urls), layout=layout, run_dir=Path("runs"), hf_config=None)

    with pytest.raises(ConfigError, match=r"rollout.sglang.urls(?s:.*)refused(?s:.*)correct the addresses"):
        start.start_servers(host("http://127.0.0.1:9"))
    with pytest.raises(ServerError):
        start.start_servers(host())
