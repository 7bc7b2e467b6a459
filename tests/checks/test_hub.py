"""The hub: what is missing is said in seconds, and why; a filled cache is used without waiting for it."""

from __future__ import annotations

import http.server
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from megarl import cli
from megarl.artifacts.facts import hub_cache_folder, hub_paths
from megarl.checks.before_start import with_steps
from megarl.checks.hub import check_hub, sources
from megarl.checks.recipe import ConfigWarning
from megarl.config.base import ConfigErrors
from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.data import hub
from megarl.data.hub import HubSource, advice
from megarl.system.errors import ConfigError
from megarl.system.processes import free_port

MODEL = ["model.path=org/model", "model.hf_config=null", "model.tokenizer=null"]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        *hub._SWITCHES,
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_DATASETS_CACHE",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # put back at the end, whatever is set in between
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


def recipe(*overrides: str) -> RunConfig:
    return load_config("grpo_quickstart", [*MODEL, *overrides])


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that has one model, org/model."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/models/org/model" else 401)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")


def test_what_a_job_takes_from_the_hub() -> None:
    config = recipe("data.val_files=[org/set@test, org/set:part@train]", "reward.name=exact_match")
    assert sources(config, "eval") == [
        HubSource("model.path", "models", "org/model"),
        HubSource("data.val_files", "datasets", "org/set"),
    ]
    judge = HubSource("reward_model.path", "models", "org/judge")
    judged = recipe("reward=!replace {name: reward_model}", "reward_model.path=org/judge")
    assert [job for job in ("train", "sft", "eval", "generate") if judge in sources(judged, job)] == ["train", "eval"]
    assert judge not in sources(recipe("reward_model.path=org/judge"), "eval")


@pytest.mark.parametrize("switch", hub._SWITCHES)
def test_offline_without_a_cache_is_said_at_once_and_nobody_is_asked(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "1")
    monkeypatch.setattr(hub, "ask", lambda asked: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=rf"{switch} is set, and the (model|data set) is not in the local cache"):
        check_hub(recipe(), "train", ask=True)
    with pytest.raises(ConfigError, match=f"unset {switch}"):
        check_hub(recipe(), "train", ask=False)


def test_a_hub_that_cannot_be_reached_is_named_with_what_is_missing(no_network: None) -> None:
    with pytest.raises(ConfigErrors, match="refused") as caught:
        check_hub(recipe("data.val_files=[org/set@test]"), "train", ask=True)
    assert "model.path: the model is not in the local cache, and the hub at http://127.0.0.1" in str(caught.value)
    assert "data.val_files: the data set is not in the local cache" in str(caught.value)
    assert "check the network" in str(caught.value)


def test_epochs_of_a_hub_model_do_not_wait_for_a_hub_that_cannot_be_reached(no_network: None) -> None:
    for epochs in ("trainer.epochs=1", "sft.epochs=1"):
        with pytest.raises(ConfigErrors, match=r"the (model|data set) is not in the local cache, and the hub"):
            with_steps(recipe("data.val_files=[org/set@test]", epochs), "train")


def test_a_name_server_that_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ASK_S", 0.2)
    answer, waited = threading.Event(), []

    def silent(*args: object, **kwargs: object) -> None:
        waited.append(answer.wait(60))
        raise OSError("no such host")

    monkeypatch.setattr("urllib.request.urlopen", silent)
    config = recipe()
    with pytest.raises(ConfigError, match=r"no answer within 0\.2 s"):
        check_hub(config, "train", ask=True)
    assert waited == [], "it waited for the name server"
    answer.set()


def test_what_the_hub_has_passes_and_a_wrong_name_does_not(endpoint: None) -> None:
    check_hub(recipe(), "train", ask=True)
    with pytest.raises(ConfigError, match=r"has no such public repository(.|\n)*check the name") as caught:
        check_hub(recipe("model.path=org/modle"), "train", ask=True)
    assert "network" not in str(caught.value)


def test_with_a_token_what_may_be_private_is_left_to_the_hubs_own_packages(
    endpoint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    check_hub(recipe("model.path=org/private"), "train", ask=True)


def test_a_filled_cache_needs_no_hub_and_workers_do_not_wait_for_it(no_cache: Path, no_network: None) -> None:
    (no_cache / "hub" / "models--org--model" / "snapshots" / "1").mkdir(parents=True)
    check_hub(recipe(), "train", ask=False)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    with pytest.warns(ConfigWarning, match="org/model come from the cache"):
        check_hub(recipe(), "train", ask=True)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_advice_of_a_worker_is_by_what_stands_in_the_way(
    endpoint: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert advice("models", "org/model", "look inside") == "look inside"
    assert "check the name" in advice("models", "org/modle", "look inside")
    assert advice("models", str(tmp_path), "look inside") == "look inside"
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "check the network" in advice("datasets", "org/set@test", "look inside")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "unset HF_HUB_OFFLINE" in advice("datasets", "org/set@test", "look inside")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/$PLACE", "XDG_CACHE_HOME": "/x"},
        {"HUGGINGFACE_HUB_CACHE": "~/older"},
        {"HF_HUB_CACHE": "$PLACE/hub", "HUGGINGFACE_HUB_CACHE": "/older"},
        {"HF_TOKEN_PATH": "~/$PLACE/token"},
    ],
)
def test_the_places_are_those_of_the_hubs_own_package(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PLACE": "place", "HOME": "/nobody", **variables}.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("huggingface_hub.constants_now", constants.__file__)
    assert spec is not None
    assert spec.loader is not None
    now = importlib.util.module_from_spec(spec)  # a copy: the module itself has read its variables
    spec.loader.exec_module(now)
    assert hub_paths() == tuple(map(Path, (now.HF_HOME, now.HF_HUB_CACHE, now.HF_TOKEN_PATH)))


def test_a_model_in_the_cache_of_xdg_is_found_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "caches" / "huggingface" / "hub" / "models--org--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert hub_cache_folder("org/model") == snapshot
    assert HubSource("model.path", "models", "org/model").cached


def test_a_dry_run_of_epochs_asks_no_hub_and_gives_no_number_of_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "ask", lambda asked: pytest.fail("asked the hub"))
    model = ["model.path=Qwen/Qwen3-0.6B", "model.hf_config=null", "model.tokenizer=null"]
    epochs = ["trainer.epochs=2", "sft.epochs=3", "actor.optim.warmup_steps=5000"]
    assert cli.main(["train", "grpo_quickstart", *model, *epochs, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "[skip] steps: trainer.epochs=2: steps are known when the run starts" in text
    assert "[skip] steps: sft.epochs=3: " in text
    assert "== Steps ==\n2 epochs in batches of" in text
    assert re.search(r"] time: .*\n", text)
    assert not re.search(r"\d steps", text.partition("== Steps")[2])
    gpus = ["cluster.device_memory_gb=80", "cluster.nproc=1"]
    assert cli.main(["launch", "grpo_quickstart", *model, *epochs, *gpus, "--slurm", "--dry-run"]) == 0
    text = capsys.readouterr().err
    assert "[skip] steps: trainer.epochs=2: steps are known when the run starts" in text
    assert not re.search(r"\d steps", text)


def test_a_dry_run_counts_epochs_of_a_model_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("grpo_quickstart", ["trainer.epochs=2", "sft.steps=0"])
    assert with_steps(config, dry=True) == with_steps(config)
    assert capsys.readouterr().out.count("trainer.steps=") == 2
    assert os.environ["HF_HUB_OFFLINE"] == "0"
