"""The program of a simulator's process needs nothing of its interpreter but numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy

from megarl.robots.simulators import start

CODE = """
import importlib, json, runpy, sys
sys.path.append(sys.argv[2])
runpy.run_path(sys.argv[1])["load"](__import__("pathlib").Path(sys.argv[1]).parents[2])
importlib.import_module("megarl.system.reaper")
importlib.import_module("megarl.robots.simulators.worker")
protocol = importlib.import_module("megarl.robots.simulators.protocol")
print(json.dumps(sorted(sys.modules)))
"""


def test_it_starts_without_megarl_and_its_packages(tmp_path: Path) -> None:
    (tmp_path / "numpy").symlink_to(Path(numpy.__file__).parent)  # the only package of this interpreter
    if (libraries := Path(numpy.__file__).parents[1] / "numpy.libs").is_dir():
        (tmp_path / "numpy.libs").symlink_to(libraries)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CODE, start.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.partition(".")[0] == "megarl"] == [
        "megarl",
        "megarl.robots",
        "megarl.robots.simulators",
        *(f"megarl.robots.simulators.{part}" for part in ("batched", "batched_worker", "checked", "clip", "protocol")),
        *(f"megarl.robots.simulators.{part}" for part in ("registry", "wire", "work", "worker")),
        *(f"megarl.system{part}" for part in ("", ".parents", ".plain", ".reaper")),
    ]
    assert not {"pydantic", "torch", "worker", "protocol"} & set(loaded)
