"""Servers that get only adapters: their arguments, the requests to them, and what they load and drop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.artifacts.facts import facts_from_config
from megarl.config.load import load_config
from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Request
from megarl.rollout.sglang.adapters import adapter_problems, serving_adapters
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.probe import probe_servers
from megarl.rollout.sglang.samples import BadAnswerError, ServedSample
from megarl.sync.receiver import UpdateStep
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from tests.models.tiny import tiny_dict
from tests.rollout.fake_servers import finish, ok, samples_of, servers
from tests.rollout.test_sglang_samples import answer
from tests.sync.receivers import server_receiver

ARGUMENT = "rollout.sglang.extra_args=[--log-level,info]"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def settings(*overrides: str, model: str = "qwen3", cuda: bool = False) -> SGLangConfig:
    facts = facts_from_config(tiny_dict(model), "a test")
    config = load_config("grpo_quickstart", ["model.lora={rank: 4}", ARGUMENT, *overrides])
    return serving_adapters(config.rollout.sglang, config.model.lora, facts, cuda=cuda)


@pytest.mark.parametrize(
    ("made", "modules", "more"),
    [
        (settings(), [*ATTENTION, *MLP], ["--lora-backend", "torch_native"]),
        (settings(cuda=True), [*ATTENTION, *MLP], []),
        (settings(model="qwen3_moe", cuda=True), ATTENTION, []),
        (settings("model.lora.targets=[mlp]", cuda=True), MLP, []),
        (
            settings("rollout.sglang.colocated=true", cuda=True),
            [*ATTENTION, *MLP],
            ["--enable-weights-cpu-backup"],
        ),
    ],
)
def test_servers_are_started_with_the_rank_and_modules_of_the_adapters(made, modules, more) -> None:
    slots = ["--enable-lora", "--max-lora-rank", "4", "--max-loras-per-batch", "3"]
    assert made.extra_args == [*slots, "--lora-target-modules", *modules, *more, "--log-level", "info"]


@pytest.mark.parametrize(("config", "named"), [(settings(), "1@run"), (SGLangConfig(), None)])
def test_every_request_names_the_adapter_of_its_weights(config, named) -> None:
    """Also the one that only prefills a long prompt, and that of a probe."""
    with servers(ok) as (server,):
        samples = samples_of([Request([7] * 300, [1, 2])])
        finish(samples, {0: server.api}, SamplingConfig(max_new_tokens=3), config)
        fleet = Fleet([Server(0, server.api, "current", 1)], config)
        probe_servers(fleet, [0], 100, 10.0, "1@run", WorkerGroup.alone())
        assert len(server.payloads) == 4
        assert {payload.get("lora_path") for payload in server.payloads} == {named}


def test_a_sample_has_the_version_of_its_adapter_though_the_server_has_a_newer_one_by_now() -> None:
    sample = ServedSample(0, [5], 1)
    spans = [("4@run", 0, 1), ("5@run", 1, 2)]  # the server was updated after the first token
    sample.add(answer([7, 9], "stop", spans), SamplingConfig(), [9], "4@run", adapter=True)
    assert sample.completion().versions == [[4, 2]]
    with pytest.raises(BadAnswerError, match="another run"):
        ServedSample(0, [5], 1).add(
            answer([9], "stop", [("4@other", 0, 1)]), SamplingConfig(), [9], "4@run", adapter=True
        )


def test_a_server_that_was_restarted_without_its_adapter_is_lost() -> None:
    with servers(lambda server, payload: "unloaded", ok) as (restarted, other):
        samples = samples_of([Request([7], [1])])
        (lost,) = finish(samples, {0: restarted.api, 1: other.api}, SamplingConfig(max_new_tokens=3), settings())
        assert lost.number == 0
        assert "never been loaded: 1@run" in lost.why
        assert samples[0].finish_reason == "length"


class Loading(ServerApi):
    """A server that has loaded `adapters`; requests use those in `busy`."""

    def __init__(self, *adapters: str, busy: Sequence[str] = (), refusal: str = "", compares: bool = True) -> None:
        super().__init__("http://127.0.0.1:1", None, "server 0")
        object.__setattr__(self, "loaded", dict.fromkeys(adapters, "somewhere"))
        object.__setattr__(self, "busy", busy)
        object.__setattr__(self, "refusal", refusal or "it is already loaded")
        object.__setattr__(self, "compares", compares)

    def call(self, path: str, payload: Any = None, *, deadline_s: float, phase: str, method: str = "POST") -> Any:
        name = payload["lora_name"]
        if path == "/load_lora_adapter":
            assert deadline_s == 9.0
            if name in self.loaded:
                raise ServerError(self.name, self.url, phase, f"HTTP 400: {self.refusal}", status=400)
            self.loaded[name] = payload["lora_path"]
            message = f"compared {name}" if self.compares else ""
            return {"success": True, "error_message": message, "loaded_adapters": dict(self.loaded)}
        assert path == "/unload_lora_adapter"
        if name in self.busy:
            raise ServerError(self.name, self.url, phase, f"no answer within {deadline_s:g} s")
        del self.loaded[name]
        return {"success": True}


def test_an_update_drops_the_adapters_of_older_versions_and_of_earlier_runs() -> None:
    """The version before it stays, for requests that have begun with it, and so do adapters that no run has loaded."""
    api = Loading("a user's", "7@before", "1@run", "2@run")
    server_receiver(api).load_adapter("3@run", Path("/new"), ["2@run"], UpdateStep("update", 9.0))
    assert api.loaded == {"a user's": "somewhere", "2@run": "somewhere", "3@run": "/new"}


def test_an_old_adapter_that_requests_still_use_does_not_fail_an_update(capsys) -> None:
    api = Loading("1@run", "2@run", busy=["1@run"])
    server_receiver(api).load_adapter("3@run", Path("/new"), ["2@run"], UpdateStep("update", 9.0))
    assert set(api.loaded) == {"1@run", "2@run", "3@run"}
    assert "server 0 keeps old adapters until the next update: " in (printed := capsys.readouterr().out)
    assert "no answer within 5 s" in printed


def test_a_server_that_does_not_compare_adapters_has_failed() -> None:
    """One of the user's that was started with an older serve.py."""
    with pytest.raises(ServerError, match=r"without comparing it with the trainer.s; start it with serve\.py"):
        server_receiver(Loading(compares=False)).load_adapter("1@run", Path("/a"), [], UpdateStep("update", 9.0))


@pytest.mark.parametrize("refusal", ["it is already loaded", "LoRA adapter '3@run' has an incomplete unload."])
def test_an_adapter_that_an_update_had_loaded_before_it_failed_is_loaded_again(refusal) -> None:
    api = Loading("3@run", refusal=refusal)
    server_receiver(api).load_adapter("3@run", Path("/new"), [], UpdateStep("update", 9.0))
    assert api.loaded == {"3@run": "/new"}


READY = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": [*ATTENTION, *MLP],
    "max_loras_per_batch": 8,
    "custom_weight_loader": ["megarl_loader.load"],
}


@pytest.mark.parametrize(
    ("other", "lacks"),
    [
        ({}, []),
        ({"lora_target_modules": ["all"]}, []),
        ({"enable_lora": False}, ["--enable-lora"]),
        ({"max_lora_rank": 2}, ["--max-lora-rank 4"]),
        (
            {"lora_target_modules": MLP},
            ["--lora-target-modules down_proj gate_proj k_proj "],
        ),
        ({"max_loras_per_batch": 2}, ["--max-loras-per-batch 3"]),
        ({"custom_weight_loader": None}, ["--custom-weight-loader "]),
    ],
)
def test_a_running_server_is_examined_for_the_adapters_of_the_run(other, lacks) -> None:
    found = [option for _, option in adapter_problems(READY | other, settings())]
    assert len(found) == len(lacks)
    assert all(option.startswith(start) for option, start in zip(found, lacks, strict=True))
    assert list(adapter_problems({}, SGLangConfig())) == []
