"""Environments that are made from setup.py, with its newest and its oldest versions, train with every launcher."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.servers import need_interpreter

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
LIMIT_S = 1200
SHORT = ("sft.steps=1", "trainer.steps=2", "data.max_val_samples=16")

pytestmark = [pytest.mark.campaign("install"), pytest.mark.timeout(3 * LIMIT_S)]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module", params=["newest", "oldest"])
def installed(request: pytest.FixtureRequest) -> Path:
    """The folder of programs of a new environment."""
    folder = CACHE / f"install-{request.param}"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    if request.param == "newest":
        run(python, "-m", "pip", "install", "--quiet", "-e", ROOT)
    else:
        run(sys.executable, ROOT / "tools/installer.py", python, "--resolution", "lowest-direct", "-e", ROOT)
    print(run(python, "-m", "pip", "list", "--format", "freeze"))
    return python.parent


@pytest.mark.parametrize(
    "how", [*(["--launcher", name] for name in ("local", "torchrun", "ray")), ["servers"]], ids=lambda how: how[-1]
)
def test_a_short_run_trains(installed: Path, how: list[str], tmp_path: Path) -> None:
    if how == ["servers"]:
        need_interpreter()
        how = ["rollout.engine=sglang"]
    run(installed / "megarl", "train", "grpo_quickstart", *SHORT, *how, "--run-dir", tmp_path / "run", cwd=tmp_path)
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.startswith("val/") for name in last)
    assert all(math.isfinite(value) for value in last.values() if isinstance(value, float))


def test_doctor_knows_the_versions(installed: Path) -> None:
    said = run(installed / "megarl", "doctor")
    assert "NOT TESTED" not in said
    assert "MISSING" not in said
