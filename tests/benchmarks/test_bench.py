"""The command `megarl bench` on a case that takes seconds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megarl.kernels import cpu
from tests import forked
from tests.forked import Ended

CASES = Path(__file__).resolve().parents[2] / "benchmarks" / "cases"
MINI = """
extends: {parent}
name: mini
model:
  hf_config: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 8, intermediate_size: 64}}
data: {{batch_size: 4}}
rollout: {{sampling: {{n: 2, max_new_tokens: 4}}}}
"""


def bench(folder: Path, *arguments: str) -> Ended:
    """`megarl bench` with a cache of its own for models and rates; kernels are compiled once on a machine."""
    usual, own = (Path(root) / "megarl" for root in (os.environ.get("XDG_CACHE_HOME") or "~/.cache", folder / "cache"))
    cpu.load()
    own.mkdir(parents=True)
    for file in usual.expanduser().glob("*-*.*"):
        if file.suffix in (".so", ".verdict"):
            shutil.copy(file, own)
    return forked.run(["bench", *arguments], folder, XDG_CACHE_HOME=str(own.parent))


@pytest.mark.procs
def test_a_case_is_measured_by_phase_against_its_floor(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(MINI.format(parent=CASES / "S.yaml"))
    shape = ["--case", "mini.yaml", "--steps", "2", "--nproc", "2", "--threads", "1"]
    done = bench(tmp_path, *shape, "trainer.seed=1", "--json", "out.json")

    assert done.code == 0, done.output
    assert "actor_train" in done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["dtype"] == "bf16"
    assert result["overrides"] == ["trainer.seed=1"]
    assert len(result["steps"]) == 2
    for step in result["steps"]:
        assert {"rollout", "reward", "advantage", "actor_train", "other"} <= set(step["phases"])
        assert sum(step["phases"].values()) == pytest.approx(step["wall_s"])
        assert step["cpu_s"] > 0
        assert step["total_tokens"] == step["generated_tokens"] + 4 * 2 * 6
    assert result["summary"]["times_floor"] > 1
    assert result["summary"]["memory_gb"] > 0.3  # of two processes


@pytest.mark.procs
def test_an_unknown_case_is_the_users_to_fix(tmp_path: Path) -> None:
    done = bench(tmp_path, "--case", "XL")

    assert done.code == 2
    assert "found:   'XL'" in done.output
