"""Whole runs on a pretended GPU: what is on it while each piece of work is done. A wrong order shows nowhere else."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.dist import run_pretending
from tests.runtime.harness import PPO, write_recipe

OFFLOAD = ["actor.engine.offload=true", "critic.engine.offload=true"]
SMALL = ["cluster.nproc=1", "trainer.steps=2", "data.batch_size=2", "sft.steps=0"]
VALIDATION = ["validation.before_train=false", "validation.every=1"]
TWICE = ["actor.mini_batch_size=1"]  # two updates of the actor a step, so that old log-probs are computed


def parts_of(engine: Any) -> str:
    """Which storages of an engine have memory on the device: p(arameters), o(ptimizer state), g(radients)."""
    from megarl.training.offload import _optimizer_tensors

    parameters = [p for chunk in engine.wrapped for p in chunk.parameters()]
    groups = {"p": parameters, "o": [], "g": []}
    if engine.optimizer is not None:
        weights = {p.untyped_storage().data_ptr() for p in parameters}
        state = [t for t in _optimizer_tensors(engine.optimizer) if t.is_cuda and t.numel() > 1]
        groups["o"] = [t for t in state if t.untyped_storage().data_ptr() not in weights]
        groups["g"] = [buffer.grad_data for chunk in engine.wrapped for buffer in chunk.buffers]
    found = ""
    for name, tensors in groups.items():
        there = {t.untyped_storage().nbytes() > 0 for t in tensors}
        assert len(there) < 2, f"half of {name} is on the device"
        found += name if there == {True} else ""
    return found


def watched_run(recipe: str, run_dir: str, overrides: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Train; each piece of work, and what was on the device when it began."""
    from megarl.config.load import load_config
    from megarl.recipes import entry
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.embedded.model import DecoderStage
    from megarl.training import checkpoint
    from megarl.training.engine import MegatronEngine
    from tests.pretend_cuda import Pretend

    seen: list[tuple[str, dict[str, str]]] = []
    engines: dict[str, Any] = {}
    caches: list[Any] = []

    def watch(owner: Any, method: str, name: Any) -> Any:
        original = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            state = {role: parts_of(engine) for role, engine in engines.items()}
            seen.append((name(args), state | {"cache": "c" * sum(cache() is not None for cache in caches)}))
            return original(*args, **kwargs)

        return mock.patch.object(owner, method, watched)

    def built(owner: Any, keep: Any) -> Any:
        original = owner.__init__

        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            keep(self)

        return mock.patch.object(owner, "__init__", build)

    os.chdir(Path(recipe).parent)
    Path(run_dir).mkdir()
    with (
        Pretend(),
        mock.patch("megarl.runtime.setup.dist_backend", return_value="gloo"),
        built(MegatronEngine, lambda engine: engines.update({engine.name: engine})),
        built(DecoderStage, lambda stage: caches.append(weakref.ref(stage))),
        watch(MegatronEngine, "logprobs", lambda args: f"score {args[0].name}"),
        watch(MegatronEngine, "values", lambda args: f"score {args[0].name}"),
        watch(MegatronEngine, "_step", lambda args: f"update {args[0].name}"),
        watch(EmbeddedEngine, "generate", lambda args: "generate"),
        watch(checkpoint, "begin", lambda args: "checkpoint"),
        watch(checkpoint, "load", lambda args: "resume"),
    ):
        entry.train(load_config(Path(recipe), overrides), Path(run_dir))
    assert caches, "no cache was ever built: that none is left says nothing"
    return seen


def expected(work: str, role: str, has_state: bool) -> str:
    """What of a model is on the device; it has optimizer state from its first update or checkpoint on."""
    state = "o" if has_state else ""
    if work == f"update {role}":
        return f"p{state}g"
    if work in ("checkpoint", "resume"):
        return f"p{state}" if role in ("actor", "critic") else ""
    return "p" if role == "actor" or work == f"score {role}" else ""


@pytest.mark.procs
def test_only_what_works_is_on_the_device(tmp_path):
    works = ["score actor", "score reference", "score critic", *["update actor"] * 2, "update critic"]
    settings = [*PPO, *TWICE, *OFFLOAD, *SMALL, *VALIDATION]
    recipe = str(write_recipe(tmp_path))
    (seen,) = run_pretending(watched_run, 1, 240, recipe, str(tmp_path / "run"), settings)
    # While a critic warms up, in the first step, the actor rests.
    first = [work for work in works if work != "update actor"]
    steps = [["generate", *step, "generate", "checkpoint"] for step in (first, works)]  # samples, and a validation
    assert [work for work, _ in seen] == [*steps[0], *steps[1]]
    assert [(work, state["cache"]) for work, state in seen if state["cache"]] == []
    has_state: set[str] = set()
    wrong = []
    for work, state in seen:
        there = {role: parts for role, parts in state.items() if role != "cache"}
        right = {role: expected(work, role, role in has_state) for role in there}
        wrong += [] if there == right else [f"{work}: {there}, not {right}"]
        has_state |= {"actor", "critic"} if work == "checkpoint" else {work.removeprefix("update ")}
    assert wrong == []
