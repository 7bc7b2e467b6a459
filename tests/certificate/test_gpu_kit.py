"""The kit for a machine without a network: versions of this checkout, a short command, a folder that git ignores."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

from tests.house.test_repository import ROOT


@pytest.fixture(scope="module")
def kit() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "gpu_kit.py"))


def test_wheels_are_of_the_versions_that_are_tested(kit):
    pinned = [line.partition(";")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    for python, megatron in (("3.11", "0.16.1"), ("3.12", "0.19.2")):
        pins = kit["pins"](python)
        assert len(pins) == len(kit["PACKAGES"])
        assert set(pins) <= set(pinned)
        assert f"megatron-core=={megatron}" in pins


def test_the_command_is_short_and_is_a_program(kit):
    command = kit["command_there"](".whl", "--only kernels,training")
    assert len(command) < kit["MOST_CHARACTERS"]
    assert "megarl doctor gpu --out /tmp/certificate --only kernels,training" in command
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_git_ignores_the_folder_once(kit, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setitem(kit["ignore"].__globals__, "ROOT", tmp_path)
    for _ in range(2):
        kit["ignore"](tmp_path / ".whl")
    assert Path(tmp_path / ".git/info/exclude").read_text().splitlines().count("/.whl/") == 1
