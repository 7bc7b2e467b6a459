"""The folder of a Ray that megarl starts: other users cannot enter it, and cannot put one of theirs in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.launchers import ray_folder, ray_start
from megarl.system.errors import ConfigError, UnavailableError

STRANGER = 61234
as_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user, with setpriv"
)


@pytest.fixture
def parent(monkeypatch):
    """RAY_TMPDIR, as short as it has to be and in folders that everybody can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="f") as folder:
        path = Path(folder)
        path.chmod(0o1777)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield path


def by_stranger(*command: str) -> int:
    """Exit code of a command that another user runs."""
    switch = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    return subprocess.run([*switch, *command], check=False, capture_output=True).returncode


def test_every_ray_gets_a_new_folder_of_its_user_alone(parent: Path) -> None:
    folders = [ray_folder.make_ray_folder() for _ in range(2)]
    assert len(set(folders)) == 2
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 2
    assert {folder.parent for folder in folders} == {parent}


@as_root
def test_another_user_cannot_enter_it_whatever_ray_makes_inside(parent: Path) -> None:
    folder = ray_folder.make_ray_folder()
    inner = folder / ray_folder.INNER
    inner.mkdir()
    inner.chmod(0o777)  # as Ray leaves it
    (inner / "socket").touch()
    assert by_stranger("ls", str(parent)) == 0
    assert by_stranger("ls", str(inner)) != 0
    assert by_stranger("touch", str(inner / "planted")) != 0
    assert by_stranger("mv", str(folder), str(parent / "moved")) != 0
    assert by_stranger("rm", str(inner / "socket")) != 0


@as_root
@pytest.mark.parametrize("way", ["link", "folder of mode 0777"])
def test_what_another_user_has_put_there_is_not_taken(parent: Path, monkeypatch, way: str) -> None:
    names = iter(["taken_by", "another_"])
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: names)
    taken = str(parent / "megarl-taken_by")
    made = ["ln", "-s", str(parent), taken] if way == "link" else ["mkdir", "-m", "777", taken]
    assert by_stranger(*made) == 0
    assert ray_folder.make_ray_folder() == parent / "megarl-another_"


def test_a_folder_in_which_everybody_can_rename_is_refused(parent: Path) -> None:
    inside = parent / "in"
    inside.mkdir()
    os.environ["RAY_TMPDIR"] = str(inside)
    for folder in (inside, parent):
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=rf"RAY_TMPDIR: other users can replace [^\0]*'{folder}, mode 0777"):
            ray_folder.make_ray_folder()
        folder.chmod(0o1777)
    assert ray_folder.make_ray_folder().parent == inside


@as_root
def test_a_folder_of_another_user_is_refused_also_through_a_link(parent: Path) -> None:
    theirs = parent / "theirs"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    (parent / "link").symlink_to(theirs)
    os.environ["RAY_TMPDIR"] = str(parent / "link")
    with pytest.raises(ConfigError, match=rf"'{theirs}, mode 0755, of user {STRANGER}'"):
        ray_folder.make_ray_folder()


def test_a_folder_that_is_missing_is_made_for_this_user_alone(parent: Path) -> None:
    os.environ["RAY_TMPDIR"] = str(parent / "new")
    ray_folder.make_ray_folder()
    assert stat.S_IMODE((parent / "new").stat().st_mode) == 0o700


def test_what_cannot_be_made_is_named(parent: Path) -> None:
    (parent / "file").touch()
    os.environ["RAY_TMPDIR"] = str(parent / "file")
    with pytest.raises(UnavailableError, match="RAY_TMPDIR: Ray's folder cannot be created"):
        ray_folder.make_ray_folder()


def test_paths_of_sockets_fit_or_the_folder_is_refused_or_another_one_is_taken(parent: Path, monkeypatch) -> None:
    room = ray_folder._room()
    long = str(parent / ("x" * 200))
    fits = str(parent) + "/" + "x" * (room - len(str(parent)) - 1)
    for given, good in ((fits, True), (fits + "x", False)):
        monkeypatch.setenv("RAY_TMPDIR", given)
        with (
            contextlib.nullcontext() if good else pytest.raises(ConfigError, match=f"RAY_TMPDIR: .*[^\\0]*{room} bytes")
        ):
            socket = ray_folder.make_ray_folder() / ray_folder.INNER / ray_folder._SOCKET
            assert len(os.fsencode(socket)) == 107
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", long)
    folder = ray_folder.make_ray_folder()
    folder.rmdir()
    assert folder.parent == Path("/tmp").resolve()


def test_the_ray_of_a_node_has_such_a_folder(parent: Path, monkeypatch) -> None:
    calls: list[list[str]] = []
    scripts = SimpleNamespace(cli=calls.append)
    monkeypatch.setitem(sys.modules, "ray.scripts", SimpleNamespace(scripts=scripts))
    monkeypatch.setitem(sys.modules, "ray.serve.scripts", None)
    monkeypatch.setattr(ray_start, "without_unused_programs", contextlib.nullcontext)
    ray_start.main(["--head", "--block"])
    (made,) = parent.iterdir()
    assert calls == [["start", f"--temp-dir={made / ray_folder.INNER}", "--head", "--block"]]
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
