"""Which tests run beside which, when several processes of pytest-xdist share the suite.

A file is of the first of `KINDS` that one of its tests is marked with; others work in the process of their test.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

KINDS = ("alone", "wide", "servers", "procs")
#: One process takes all files of these, one after the other.
SINGLY = ("alone", "wide")
#: How much lower the priority of tests that start no processes is: they run on what the others leave of the cores.
_NICE = 3


def kinds_of(items: list[pytest.Item]) -> dict[Path, str]:
    """The kind of every file; empty: of none."""

    def kind(marked: set[str]) -> str:
        return next((name for name in KINDS if name in marked), "")

    found: dict[Path, set[str]] = {}
    for item in items:
        found.setdefault(item.path, set()).update(name for name in KINDS if item.get_closest_marker(name))
    return {path: kind(marked) for path, marked in found.items()}


def longest_first(items: list[pytest.Item], kinds: dict[Path, str]) -> list[pytest.Item]:
    """Files in the order of `KINDS`, then the rest, so that the processes end at about one time."""
    order = [*KINDS, ""]
    return sorted(items, key=lambda item: order.index(kinds[item.path]))


class FairLock:
    """A lock file, held by one or shared by several; who waits for it holds `gate`, so that nobody overtakes."""

    def __init__(self, path: Path) -> None:
        self._paths = (path, path.with_name(f"{path.name}.gate"))
        self._lock, self._gate = (one.open("w") for one in self._paths)

    def enter(self, *, alone: bool) -> None:
        """Wait until nobody has it for itself or, for `alone`, until nobody has it."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Let others in."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Remove the files; others that still hold them are not disturbed."""
        for file, path in zip((self._lock, self._gate), self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


class Turns:
    """When a test of a kind may run: beside one that is `alone` nothing, beside a `wide` one what starts no processes.

    Args:
        stem: path that all processes of the run give; the files are called after it.
    """

    def __init__(self, stem: Path) -> None:
        self._machine, self._cores = (FairLock(stem.with_name(f"{stem.name}.{name}")) for name in ("machine", "cores"))
        self._held = ""
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)

    def enter(self, kind: str) -> None:
        """Wait for the turn of a test of this kind. Nothing to wait for while one's own file holds it."""
        if self._held:
            return
        self._set_nice(self._priority + (0 if kind else _NICE))
        self._machine.enter(alone=kind == "alone")
        if kind and kind != "alone":
            self._cores.enter(alone=kind == "wide")
        self._held = kind if kind in SINGLY else ""

    def _set_nice(self, value: int) -> None:
        """Change the priority of this thread and what it starts; without the right to go back up it stays as it is."""
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, value)

    def leave(self) -> None:
        """Let others in."""
        self._held = ""
        self._machine.leave()
        self._cores.leave()

    def close(self) -> None:
        """Remove the files."""
        self._machine.close()
        self._cores.close()


class FirstCollects:
    """One process of the run collects first; the others wait, and read the bytecode that it leaves.

    In a fresh clone it takes 12 of 19 CPU-seconds to compile the tests and to rewrite their asserts.

    Args:
        path: a file that all processes of the run give; it has content as soon as one of them has collected.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # a process that ends early gives it back
        self._file.seek(0)
        if self._file.read():
            self._file.close()

    def leave(self) -> None:
        """Let the others collect."""
        if not self._file.closed:
            self._file.write("collected")
            self._file.close()


def write_kinds(file: Path, items: list[pytest.Item], kinds: dict[Path, str]) -> None:
    """Leave kinds, by the file's part of the node id, for the process that deals the files out and collects nothing."""
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_text(json.dumps({item.nodeid.partition("::")[0]: kinds[item.path] for item in items}))
    written.replace(file)


class OneTakesTheWide(LoadFileScheduling):
    """The first process takes the files that run singly; beside them the others take those that start no processes.

    So there is something to compute whenever tests with several processes wait. After those that run singly, the first
    process goes on with those that start servers, the last one with those that start no processes, and others with
    those that start groups of processes. Others start servers when nothing else is left: each process that does so
    imports SGLang, in nine CPU-seconds, to fork them.
    """

    def __init__(self, config: pytest.Config, log: Any, kinds: Path) -> None:
        super().__init__(config, log)
        self._file, self._kinds = kinds, dict[str, str]()

    def schedule(self) -> None:
        """As it is; all processes have collected by now."""
        if not self._kinds:
            self._kinds = json.loads(self._file.read_text())
            self._file.unlink()
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next(node), last=False)
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str:
        """The file that a process takes."""
        under_way = [scope for scope, tests in self.assigned_work[self.nodes[0]].items() if not all(tests.values())]
        singly = any(self._kinds[scope] in SINGLY for scope in (*self.workqueue, *under_way))
        if node is self.nodes[0]:
            order: tuple[str, ...] = (*KINDS, "")
        elif singly or node is self.nodes[-1]:  # another kind waits for a turn between two files that run singly
            order = ("", "procs", "servers")
        else:
            order = ("procs", "", "servers")
        return min(self.workqueue, key=lambda scope: [*order, *KINDS].index(self._kinds[scope]))
