"""How a worker tells of its keeper, without Ray's processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl import phase
from megarl.store.client import StoreClient
from megarl.store.core import StoreError


@pytest.fixture(autouse=True)
def _no_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "_on_change", [])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ray.exceptions.ActorDiedError(), "the keeper of the samples of store 'x' on this machine is gone: The actor"),
        (ray.exceptions.GetTimeoutError(), "timed out waiting for what it has: the keeper of the samples of store 'x'"),
    ],
)
def test_a_keeper_that_died_or_hangs_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    keeper = SimpleNamespace(held=SimpleNamespace(remote=lambda team, rank: None))
    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(StoreError) as caught:
        StoreClient(SimpleNamespace(), "x", "draw", 1, 4.0, keeper=keeper)
    assert str(caught.value).startswith("team 'draw' rank 1 in phase ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("x", "Ray knows no store 'x': "), ("x-keeper-10.0.0.7", "Ray knows no keeper of the samples of store 'x' on")],
)
def test_whom_ray_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, said: str) -> None:
    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        if name == missing:
            raise ValueError("no such actor")
        return SimpleNamespace()

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    with pytest.raises(StoreError, match=f"team 'draw' rank 1: {said}"):
        StoreClient.connect("x", "draw", 1, 4.0, kept=True)
