"""What is on a device when servers start there, come back, or samples are drawn: the order of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megarl.config.load import load_config
from megarl.data.batch import Batch, Jagged
from megarl.rollout.engine import Completion
from megarl.rollout.sglang import links, start
from megarl.rollout.sglang.engine import SglangEngine
from megarl.runtime import generation
from megarl.runtime.context import Seeds, no_progress
from megarl.runtime.roles import RolloutRole
from megarl.runtime.stages.rollout import generate
from megarl.sync import updater
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import PARTS, OffloadSchedule
from tests.runtime.harness import RECIPE


@pytest.fixture
def controller(tmp_path, monkeypatch) -> Any:
    """A rank with colocated servers that writes down what it is asked for, in `calls`."""
    calls: list[str] = []

    def told(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(" ".join([name, *map(str, args), *map(str, kwargs.items())]))

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    settings = ["rollout.engine=sglang", "rollout.sglang.colocated=true", "actor.engine.offload=true"]
    actor = SimpleNamespace(parts=frozenset(PARTS), held=frozenset(PARTS))

    def hold(*parts: str) -> None:
        if actor.held != set(parts):
            calls.append(" ".join(["actor", *sorted(parts)]))
            actor.held = frozenset(parts)

    actor.hold, offload = hold, OffloadSchedule()
    offload.add("actor", actor, offloads=PARTS)
    limits = SimpleNamespace(health_timeout_s=60.0)
    fleet = SimpleNamespace(refresh=told("refresh"), wait_started=told("wait"), servers=[], replaced=0, config=limits)
    engine = Mock(SglangEngine, weight_version=0)
    engine.pop_drafts.return_value = 0, 0
    c = SimpleNamespace(
        calls=calls,
        team=SimpleNamespace(holds=lambda role: True),
        tokenizer=None,
        config=load_config(tmp_path / "recipe.yaml", settings),
        layout=SimpleNamespace(rank=1, world=WorkerGroup.alone(), dp_rank=0, dp_size=1, mp_group=WorkerGroup.alone()),
        run_dir=tmp_path,
        actor=actor,
        offload=offload,
        servers=SimpleNamespace(hold=told("servers")),
        fleet=fleet,
        hf_config=SimpleNamespace(vocab_size=20, model_type="qwen3"),
        rollout=RolloutRole(engine, SimpleNamespace(batch_decode=decode), [2]),
        seeds=Seeds(0),
        progress=no_progress,
        metrics=Metrics(),
    )
    c.context = c
    push = lambda version: calls.append("push") or SimpleNamespace(updated=[], failed={}, to_probe=[])  # noqa: E731
    c.sync = SimpleNamespace(run="a run", transport_name="none", push=push)
    with monkeypatch.context() as patched:
        patched.setattr(links, "start_servers", lambda host: fleet)
        patched.setattr(links, "send_weights_to", lambda host, fleet: c.sync)
        c.link = links.OwnServers(c)
    c.link.engine = engine
    return c


def decode(rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
    return ["x"] * len(rows)


OFFLOAD = "actor parameters"


def test_gradients_and_optimizer_are_away_before_servers_start(controller, monkeypatch) -> None:
    class StartedError(Exception):
        """The servers start now."""

    def starts(*args: Any, **kwargs: Any) -> None:
        raise StartedError

    monkeypatch.setattr(start, "open_fleet", starts)
    monkeypatch.setattr(start, "_write_model_config", lambda c: c.run_dir)
    with pytest.raises(StartedError):
        generation.open_rollout(controller)
    assert controller.calls == [OFFLOAD]


def test_a_server_that_comes_back_starts_while_gradients_and_optimizer_are_away(controller) -> None:
    controller.fleet.servers = [SimpleNamespace(state="starting")]
    controller.offload.add_servers(controller.servers)
    generation.publish(controller, 3)
    assert controller.calls == [OFFLOAD, "servers", "refresh", "wait", "servers weights", "push"]


def test_servers_that_are_there_are_not_waited_for(controller) -> None:
    controller.fleet.servers = [SimpleNamespace(state="current")]
    generation.publish(controller, 3)
    assert "wait" not in controller.calls


@pytest.mark.parametrize("overrides", [{"colocated": False}, {"colocated": False, "urls": ["http://127.0.0.1:1"]}])
def test_servers_elsewhere_move_nothing_of_the_trainer(controller, monkeypatch, overrides) -> None:
    """After a checkpoint the optimizer is there, and the next update needs it: it stays meanwhile."""

    class StartedError(Exception):
        """The servers start now."""

    def starts(*args: Any, **kwargs: Any) -> None:
        raise StartedError

    sglang = controller.config.rollout.sglang.model_copy(update=overrides)
    rollout = controller.config.rollout.model_copy(update={"sglang": sglang})
    controller.config = controller.config.model_copy(update={"rollout": rollout})
    monkeypatch.setattr(start, "open_fleet", starts)
    monkeypatch.setattr(start, "_write_model_config", lambda c: c.run_dir)
    with pytest.raises(StartedError):
        generation.open_rollout(controller)
    generation.publish(controller, 3)
    assert controller.calls == ["refresh", "push"]


def test_a_probe_of_idle_servers_waits_no_longer_than_other_calls_that_move_no_weights(controller, monkeypatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(links, "probe_servers", lambda *args: limits.append(args[3]) or [])
    controller.sync.push = lambda version: updater.SyncReport(version, "tensor", updated=[0], to_probe=[0])
    generation.publish(controller, 3)
    assert limits == [60.0]


def test_any_generation_has_the_servers_cache(controller) -> None:
    """Validation generates samples through the same function as training, and needs the same memory."""

    def answer(requests: Any, *args: Any) -> list[list[Completion]]:
        controller.calls.append("generate")
        return [[Completion([3], [-1.0], "stop", [[0, 1]])] for _ in requests]

    controller.rollout.engine.generate = answer
    prompts = Batch({"prompt_ids": Jagged.from_list([[4, 5]]), "uid": ["a"]})
    controller.offload.add_servers(controller.servers)
    generation.publish(controller, 0)
    with controller.offload.phase("update", "actor"):
        pass
    generation.publish(controller, 1)
    controller.calls.clear()
    generate(controller, controller.rollout, prompts, controller.config.validation_sampling)
    assert controller.calls == ["actor", "servers kv_cache weights", "generate"]


def test_the_embedded_engine_draws_while_gradients_and_optimizer_are_away(controller) -> None:
    controller.rollout.engine.generate = lambda requests, *args: (
        controller.calls.append("generate") or [[Completion([3], [-1.0], "stop", [[0, 1]])] for _ in requests]
    )
    prompts = Batch({"prompt_ids": Jagged.from_list([[4, 5]]), "uid": ["a"]})
    generate(controller, controller.rollout, prompts, controller.config.validation_sampling)
    assert controller.calls == [OFFLOAD, "generate"]
