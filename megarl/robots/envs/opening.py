"""The first answer of a simulator's process, and the errors that end a run."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from megarl.robots.envs.answers import Failure, SimulatorError
from megarl.robots.envs.messages import check_answer
from megarl.robots.envs.process import SimulatorProcess
from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.simulators.protocol import TaskSpec
from megarl.robots.simulators.wire import spec_of
from megarl.system.errors import ConfigError, choose, close_matches
from megarl.system.plain import Malformed
from megarl.system.processes import how_it_ended
from megarl.system.tracing import beat

BEAT_S = 1.0  # seconds between two heartbeats of a rank that waits for simulators


def first_answer(process: SimulatorProcess, settings: SimulatorSettings, where: str) -> dict[str, TaskSpec]:
    """Wait until a simulator's process has sent its list of tasks; return the tasks that the recipe names, or all if it
    names none, by name.

    Args:
        where: dotted path of the recipe's section with `settings`.

    Raises:
        ConfigError: a setting is invalid, or the simulator has no such task.
        SimulatorError: the process sent no list.
    """
    text, header = "", dict[str, Any]()
    while not header and not text:
        readable([process.socket], BEAT_S)
        beat()
        try:
            for header, arrays in process.read():
                check_answer("open", header, arrays, None, 0)
        except EOFError:
            text = f"its process ended ({how_it_ended(process.process)})"
        except Malformed as error:
            text = f"its process wrote an invalid message: {error}"
        if not header and time.monotonic() - process.since > settings.construct_s:
            process.print_stack()
            text = (
                f"it did not start within {where}.construct_s = {settings.construct_s:g} s; raise it if it is only slow"
            )
    if not text and header.get("error") == "settings":
        raise _refused(header, settings, where)
    if text or "error" in header:
        text = text or header["text"]
        raise pool_error(
            settings, where, "the simulator's process did not send its list of tasks", None, text, process.kill()
        )
    process.waiting.popleft()
    known = {spec.name: spec for spec in (spec_of(task) for task in header["tasks"])}
    problem, key = f"unknown task of simulator {settings.name!r}", f"{where}.tasks"
    return {name: choose(known, name, problem, where=key) for name in settings.tasks or known}


def pool_error(
    settings: SimulatorSettings, where: str, what: str, failure: Failure | None, text: str = "", output: str = ""
) -> SimulatorError:
    """Return the error about a simulator that ends the run.

    Args:
        where: dotted path of the recipe's section with `settings`.
        what: the problem, in one clause.
        failure: the episode whose failure ends the run; None: no episode was in flight.
        text, output: the reason and the last lines that the process printed; ignored if there is a `failure`.
    """
    lines = [("reason", failure.text if failure else text)]
    if failure:
        lines.insert(0, ("episode", f"{failure.task}, trial {failure.trial}, after {failure.chunks} policy calls"))
    kind = failure.kind if failure else ""
    fixes = {
        "hang": f"raise {where}.answer_s or construct_s if it is only slow; else see its stack traces",
        "crash": f"fix the error in its last lines; lower {where}.workers if memory ran out",
    }
    fix = fixes.get(kind, f"fix this error; {where}.python must be the interpreter that has the simulator")
    python = settings.python or "megarl's own interpreter"
    return SimulatorError(settings.name, python, what, lines, failure.output if failure else output, fix)


def _refused(header: dict[str, Any], settings: SimulatorSettings, where: str) -> ConfigError:
    key, allowed = header["key"], header.get("allowed")
    near = close_matches(key, allowed) if isinstance(allowed, list) else []
    fix = f"did you mean {near[0]!r}?" if near else None
    problem = f"simulator {settings.name!r}: {header['text']}"
    return ConfigError(problem, where=f"{where}.{key}", found=header["found"], allowed=allowed, fix=fix)


def readable(sockets: Sequence[socket.socket], wait_s: float) -> list[socket.socket]:
    """Wait up to `wait_s` seconds, and return the `sockets` that are readable or broken."""
    poll, by_handle = select.poll(), {connection.fileno(): connection for connection in sockets}
    for handle in by_handle:
        poll.register(handle, select.POLLIN)
    return [by_handle[handle] for handle, _ in poll.poll(max(0.0, wait_s) * 1000)]
