"""The installer of `make`: uv takes packages from where pip is told to take them; pip installs what uv does not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tools import installer


def write_wheel(folder: Path) -> None:
    """Write a package `megarl_probe` of version 1.0, which is on no index."""
    info = "megarl_probe-1.0.dist-info"
    with zipfile.ZipFile(folder / "megarl_probe-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("megarl_probe.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: megarl_probe\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_environment_has_precedence_over_files_and_what_says_no_place_is_left_out() -> None:
    listed = "\n".join(
        [
            ":env:.extra-index-url='https://a.example/simple https://b.example/simple'",
            ":env:.disable-pip-version-check='1'",
            r"global.find-links='/one\n/two'",
            "global.extra-index-url='https://c.example/simple'",
            "global.index-url='https://d.example/simple?a=b'",
            "install.index-url='https://e.example/simple?a=b'",
            "freeze.constraint='/never.txt'",
            "global.proxy='http://proxy.example:3128'",
        ]
    )
    assert installer.uv_variables(installer.read_settings(listed)) == {
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_DEFAULT_INDEX": "https://e.example/simple?a=b",
        "ALL_PROXY": "http://proxy.example:3128",
    }


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed here: `make install` brings it")
@pytest.mark.parametrize("setting", ["file", "environment"])
def test_uv_finds_a_package_where_pip_does(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, target = tmp_path / "wheels", tmp_path / "target"
    place.mkdir()
    write_wheel(place)
    if setting == "file":
        (tmp_path / "pip.conf").write_text(f"[install]\nfind-links =\n    {place}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    else:
        monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    installer.install(Path(sys.executable), "--no-index", "--target", str(target), "megarl_probe==1.0")
    assert (target / "megarl_probe.py").exists()
    assert (target / "megarl_probe-1.0.dist-info" / "INSTALLER").read_text() == "uv"


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed here: `make install` brings it")
def test_pip_installs_where_it_is_told_to_ask_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """uv would ask PyPI: it has no variable for this setting. That pip's command installs is tested below."""
    run, commands = subprocess.run, []

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "config" in command:
            return run(command, **options)
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(installer.subprocess, "run", record)
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    installer.install(Path("python"), "megarl_probe==1.0")
    assert [command[:4] for command in commands] == [["python", "-m", "pip", "install"]]
    monkeypatch.setenv("PIP_NO_INDEX", "false")
    installer.install(Path("python"), "megarl_probe==1.0")
    assert commands[1][1:5] == ["-m", "uv", "pip", "install"]


@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed here: `make install` brings it")
def test_pip_installs_what_uv_does_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """uv knows no `--use-pep517`."""
    write_wheel(tmp_path)
    there = ["--no-index", f"--find-links={tmp_path}", "--target", str(tmp_path / "target"), "--no-cache-dir"]
    installer.install(Path(sys.executable), *there, "--use-pep517", "megarl_probe==1.0")
    assert (tmp_path / "target" / "megarl_probe-1.0.dist-info" / "INSTALLER").read_text().strip() == "pip"
    assert "pip tries it" in capfd.readouterr().err


def test_what_neither_can_install_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        installer.install(Path(sys.executable), "--no-index", "--target", str(tmp_path), "megarl_probe==2.0")


def test_an_environment_has_a_pip_of_its_own(tmp_path: Path) -> None:
    installer.make_environment(tmp_path / "made")
    python = tmp_path / "made" / "bin" / "python"
    done = subprocess.run([str(python), "-m", "pip", "--version"], check=True, capture_output=True, text=True)
    assert str(tmp_path / "made") in done.stdout
