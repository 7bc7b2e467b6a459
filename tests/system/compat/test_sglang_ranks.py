"""An update of weights that fails on only one rank of a server has failed: the hooks of serve.py on two processes.

SGLang is a stand-in here: a registry that keeps hooks, and a context with the ranks' process group.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.dist import run_distributed

UPDATES = {"WeightUpdater.update_weights_from_tensor": "pair"} | {
    f"SchedulerWeightUpdaterManager.update_weights_from_{way}": "answer" for way in ("disk", "distributed")
}
FAILS_ON = [None, 1, 0, None]  # the rank on which an update fails, one update after the other


def stand_in(name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content)


def update_all(raises: bool) -> dict[str, list[list[Any]]]:
    """What this rank answers to every kind of update, for each of FAILS_ON."""
    import torch.distributed as dist

    from tests.system.compat.test_sglang import FOLDER, load

    hooks: dict[str, Any] = {}
    registry = SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target: hook}),
        apply_hooks=lambda: None,
        _hooks=hooks,
        _patched=hooks.keys(),
    )
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    parallel = SimpleNamespace(tp_size=2, tp_group=group)
    stand_in("sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=SimpleNamespace(AROUND=None))
    stand_in("sglang.srt.managers", mm_schedule=SimpleNamespace(embedding_cache=None))
    stand_in("sglang.srt.runtime_context", get_parallel=lambda: parallel)
    load(FOLDER / "serve.py")

    def update(kind: str, fails_on: int | None) -> Any:
        success = dist.get_rank() != fails_on
        if kind == "answer":
            return SimpleNamespace(success=success, message="fine" if success else "broken")
        if not success and raises:
            raise RuntimeError("broken")
        return success, "fine" if success else "broken"

    found: dict[str, list[list[Any]]] = {}
    for name, kind in UPDATES.items():
        (hook,) = (hook for target, hook in hooks.items() if target.endswith(f".{name}"))
        answers = [hook(update, kind, rank) for rank in FAILS_ON]
        found[name] = [list(a) if isinstance(a, tuple) else [a.success, a.message] for a in answers]
    return found


@pytest.mark.procs
@pytest.mark.parametrize("raises", [False, True])
def test_a_failure_on_one_rank_is_the_servers(raises: bool) -> None:
    elsewhere, here = "another rank of this server failed; see its log", "RuntimeError: broken" if raises else "broken"
    for rank, found in enumerate(run_distributed(update_all, 2, 120, raises)):
        for name, kind in UPDATES.items():
            broken = [False, here if kind == "pair" else "broken"]
            failed = [[False, elsewhere], broken] if rank == 0 else [broken, [False, elsewhere]]
            assert found[name] == [[True, "fine"], *failed, [True, "fine"]], name
