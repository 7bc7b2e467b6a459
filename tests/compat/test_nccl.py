"""NCCL versions of both interpreters, from package metadata."""

import runpy
import subprocess
from pathlib import Path

import pytest

from megarl.compat.sglang import check_same_nccl
from megarl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def site(folder, version):
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    if version is not None:
        info = packages / f"nvidia_nccl_cu13-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {version}\n")
    return packages


def check(tmp_path, ours, theirs):
    trainer = site(tmp_path / "trainer", ours)
    site(tmp_path / "servers", theirs)
    check_same_nccl(tmp_path / "servers" / "bin" / "python", trainer=str(trainer))


@pytest.mark.parametrize(("ours", "theirs"), [("2.29.7", "2.29.7"), (None, "2.30.7"), ("2.29.7", None)])
def test_equal_or_unknown_versions_pass(tmp_path, ours, theirs):
    check(tmp_path, ours, theirs)


def test_different_versions_are_refused_with_the_older_one_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer 2\.29\.7, servers 2\.30\.7") as caught:
        check(tmp_path, "2.29.7", "2.30.7")
    assert "in the trainer's interpreter: pip install --no-deps nvidia-nccl-cu13==2.30.7" in caught.value.fix


def test_both_interpreters_get_one_version(tmp_path, monkeypatch):
    """An interpreter without a wheel, as of a CPU build of torch, gets none."""
    tool = runpy.run_path(str(ROOT / "tools" / "sglang_env.py"))
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    for name, version in (("trainer", "2.29.7"), ("servers", tool["NCCL"]), ("cpu", None)):
        site(tmp_path / name, version)
    tool["agree_on_nccl"](*(tmp_path / name / "bin" / "python" for name in ("trainer", "servers", "cpu")))
    assert [(command[0], command[-1]) for command in commands] == [
        (str(tmp_path / "trainer" / "bin" / "python"), f"nvidia-nccl-cu13=={tool['NCCL']}")
    ]
