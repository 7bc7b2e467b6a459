"""Real SGLang servers for tests, on a tiny model.

They take 17 s to start, nine of its eleven CPU-seconds for imports; under `forked_servers` (tests/rollout/forked.py),
which imports once, it takes 3 s and one CPU-second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.model import LoraConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.adapters import serving_adapters
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.fleet import Fleet
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.sync.protocol import version_tag
from megarl.system.comm import WorkerGroup
from megarl.system.compat.sglang import find_python
from megarl.system.errors import ConfigError
from tests.rollout.forked import forked_servers

VOCAB = 128
KEY_NAME = "MEGARL_TEST_SERVER_KEY"


def need_interpreter() -> Path:
    """The servers' interpreter; the test is skipped, with the command that makes one, when there is none."""
    try:
        return find_python(None, cuda=False)
    except ConfigError as error:
        pytest.skip(f"no SGLang here, run `make sglang-env`: {error.what}")


def start(folder: Path, model: Path, **config: Any) -> Fleet:
    """Servers of `model` that answer; close them in the end."""
    need_interpreter()
    settings = SGLangConfig(**{"max_total_tokens": 8192, **config})
    return open_fleet(settings, WorkerPlace(), folder, model, "float32", cuda=False, world=WorkerGroup.alone())


@contextlib.contextmanager
def running_server(recipe: Path) -> Iterator[tuple[str, ...]]:
    """Overrides of `recipe` that name a server that runs already, with random weights; it also loads adapters."""
    import torch

    from megarl.models.hf import facts_of, load_hf_config
    from megarl.models.weights.metadata import write_metadata

    need_interpreter()
    model = recipe.parent / "model"
    model.mkdir()
    write_metadata(model, load_hf_config(load_config(str(recipe), []).model), None, torch.float32)
    facts = facts_of(load_hf_config(load_config(str(recipe), []).model))
    settings = serving_adapters(SGLangConfig(max_total_tokens=4096), LoraConfig(rank=4), facts, cuda=False)
    place = WorkerPlace()
    more: dict[str, Any] = {"cuda": False, "random_weights": True, "world": WorkerGroup.alone()}
    with (
        forked_servers(),
        open_fleet(settings, place, recipe.parent, model, "float32", **more) as fleet,
        pytest.MonkeyPatch.context() as patch,
    ):
        api = fleet.servers[0].api
        patch.setenv(KEY_NAME, api.api_key or "")
        yield (f"rollout.sglang.urls=[{api.url}]", f"rollout.sglang.api_key_env={KEY_NAME}")


RUN = "test"


def label(fleet: Fleet, version: int) -> None:
    """Stand-in for a synchronisation: every server that answers calls the weights it has `version`."""
    for server in fleet.servers:
        if server.state not in ("catching_up", "current") or server.version == version:
            continue
        payload = {"new_version": version_tag(version, RUN), "abort_all_requests": False}
        server.api.call("/update_weight_version", payload, deadline_s=60, phase="label")
        fleet.acknowledge(server, version)


def engine(fleet: Fleet, version: int = 0, run: str = RUN, **config: Any) -> SglangEngine:
    """An engine over `fleet` whose `catch_up` is `label`."""
    settings = SGLangConfig(**{"servers": len(fleet.servers), **config})
    made = SglangEngine(settings, fleet, Replica(), lambda: None, run)
    made.weight_version = version
    made._catch_up = lambda: label(fleet, version)
    return made
