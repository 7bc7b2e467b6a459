"""Every entry of the Megatron compatibility layer matches the installed version and is still needed."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version

from megarl.system.compat import megatron as compat

ROOT = Path(importlib.util.find_spec("megatron").submodule_search_locations[0])


@cache
def sources() -> dict[str, str]:
    """Dotted module name -> original source, for every module of megatron.core."""
    found = {}
    for path in (ROOT / "core").rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


VERSION = importlib.metadata.version("megatron-core")


def test_installed_version_is_a_tested_one():
    # A new version is welcome: run the suite, look at each entry again, then change this line.
    assert VERSION in ("0.16.1", "0.19.2")


@pytest.mark.parametrize("entry", compat.REWRITES, ids=lambda e: e.name)
def test_rewrite_matches_the_installed_source(entry):
    before = entry.fixed_in is None or Version(VERSION) < Version(entry.fixed_in)
    if not (before and Version(VERSION) >= Version(entry.since)):
        assert not any(entry.sub(source)[1] for module, source in sources().items() if entry.applies(module))
        return
    for glob in entry.modules:
        hits = 0
        for module, source in sources().items():
            if not compat.fnmatch.fnmatchcase(module, glob):
                continue
            for earlier in compat.REWRITES[: compat.REWRITES.index(entry)]:
                if earlier.applies(module):
                    source, _ = earlier.sub(source)
            hits += entry.sub(source)[1]
        assert hits, f"{entry.name} matches nothing in {glob}: drop it or fix its pattern ({entry.reason})"


@pytest.mark.parametrize("entry", compat.PATCHES, ids=lambda e: e.name)
def test_patch_is_still_needed(entry):
    assert entry.needed(sources()[entry.module]), f"{entry.name} is no longer needed: {entry.reason}"


def test_names_are_unique():
    names = [e.name for e in (*compat.REWRITES, *compat.PATCHES)]
    assert len(names) == len(set(names))


def test_with_cuda_only_the_bug_fixes_are_left():
    kept = {e.name for e in compat.rewrites_for("megatron.core.optimizer.distrib_optimizer", cuda=True)}
    assert kept == {"adam-step-copy", "adam-step-shared"}
    source = sources()["megatron.core.tensor_parallel.layers"]
    assert compat.rewrite("megatron.core.tensor_parallel.layers", source, cuda=True) == source


def test_every_rewritten_module_still_compiles():
    for module, source in sources().items():
        compile(compat.rewrite(module, source, cuda=False), module, "exec")


def test_no_cuda_call_is_left_in_the_modules_training_uses():
    used = ("pipeline_parallel.schedules", "pipeline_parallel.p2p_communication", "tensor_parallel.layers", "utils")
    for name in used:
        module = f"megatron.core.{name}"
        text = compat.rewrite(module, sources()[module], cuda=False)
        code = [line for line in text.splitlines() if not line.lstrip().startswith(("#", "import", "from"))]
        assert not [line for line in code if "torch.cuda." in line and "'torch.cuda" not in line]


def test_install_changes_megatron_and_nothing_else():
    script = (
        "import sys, torch\n"
        "before = torch.cuda.current_device\n"
        "from megarl.system.compat import megatron\n"
        "assert 'megatron.core' not in sys.modules\n"
        "megatron.install(); megatron.install()\n"
        "assert sum(type(f).__name__ == '_Finder' for f in sys.meta_path) == 1\n"
        "import megatron.core.tensor_parallel.layers, megatron.core.transformer.moe.moe_utils as moe\n"
        "assert torch.cuda.current_device is before\n"
        "assert moe.te_general_gemm is None\n"
        "import megatron.core.timers, megatron.core.inference.contexts.dynamic_context\n"
        "assert not {'wandb', 'tensorboard'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True, timeout=500)


def test_rewritten_modules_are_compiled_once_for_each_set_of_entries(tmp_path, monkeypatch):
    (tmp_path / "timers.py").write_text("try:\n    import wandb\nexcept ImportError:\n    wandb = None\n")
    loader = compat._Loader("megatron.core.timers", str(tmp_path / "timers.py"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    rewritten = []

    def seen(module, source, *, cuda):
        rewritten.append(module)
        return source.replace("import wandb", "raise ImportError")

    monkeypatch.setattr(compat, "rewrite", seen)
    for _ in range(2):
        found: dict = {}
        exec(loader.get_code("megatron.core.timers"), found)
        assert found["wandb"] is None
    assert rewritten == ["megatron.core.timers"]
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert ".megarl-" in compiled.name, "Python itself would take it for its own"
    monkeypatch.setattr(compat, "REWRITES", compat.REWRITES[1:])
    compat._compiled_tag.cache_clear()
    loader.get_code("megatron.core.timers")
    assert len(rewritten) == 2
    compat._compiled_tag.cache_clear()


def test_install_after_megatron_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="before"):
        compat.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for machines without CUDA")
def test_stand_in_answers_for_the_cpu():
    cuda = compat._CudaOnCpu()
    assert cuda.current_device() == torch.device("cpu")
    assert cuda.current_stream() is cuda.Stream()
    state = cuda.get_rng_state()
    cuda.manual_seed(3)
    first = torch.rand(2)
    cuda.set_rng_state(state)
    cuda.manual_seed(3)
    assert torch.equal(torch.rand(2), first)
    assert cuda.is_available() is False
