"""Tests nodes, evaluates their results, and runs steps on nodes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import LOOK_S, CommandFailed, Folder, answer, fields_of, read_object

#: Seconds in which a job step (srun) may end after the signal to end.
STOP_S = 60.0
#: States of nodes that cannot run job steps; a star marks nodes that do not reply.
LOST = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT")
#: Rendezvous ports of the first node: the lowest port, the number of consecutive jobs with different ports (they may
#: share a node), and the number of ports per job.
PORTS = (20000, 100, 100)
#: Options of srun to run something on one node beside the job's other steps.
ONE_NODE = ("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--no-kill=off")


def port_of(job: int, step: int) -> int:
    """Return the rendezvous port of a step on its first node."""
    first, jobs, steps = PORTS
    return first + job % jobs * steps + step % steps


def is_free(port: int) -> bool:
    """Return whether nothing listens on this port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that has only closed connections is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Nodes:
    """The nodes of a job.

    Args:
        look: called several times a second while nodes are tested; its exception ends the tests without blaming a node.
    """

    def __init__(self, files: Folder, job: str, look: Callable[[], None]) -> None:
        self._files, self._plan, self._job, self._look = files, files.plan, job, look
        self._steps = 0
        #: Node of the job -> its group in the plan.
        self.group_of: dict[str, int] = {}
        for number in range(len(self._plan["groups"])):
            listed = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{number}") or os.environ["SLURM_JOB_NODELIST"]
            self.group_of.update(dict.fromkeys(answer("scontrol", "show", "hostnames", listed).split(), number))

    def start(self, nodes: list[str], more: list[str], output: str = "") -> subprocess.Popen[bytes]:
        """Start node.sh on these nodes. With `output`, a file in RUN_DIR/launch, the step ends when one of its tasks or
        nodes fails; without `output` it is a test, which continues when a task fails.
        """
        port = self._next_port(nodes[0])
        environment = {"MEGARL_NODES": str(len(nodes)), "MEGARL_ATTEMPT": f"{self._job}.{self._steps}"}
        if len(nodes) > 1:
            environment.update(MASTER_ADDR=self._address(nodes[0]), MASTER_PORT=str(port))
        if self._plan["ray"]:  # Ray refuses clients without the token, which is only in the environment, not in a file
            environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
        command = ["srun"]
        for number, group in enumerate(self._plan["groups"]):
            members = [node for node in nodes if self.group_of[node] == number]
            count = [f"--nodes={len(members)}", f"--ntasks={len(members)}", "--ntasks-per-node=1"]
            command += [":"] if number else []
            ends = ["--kill-on-bad-exit=1"] if output else ["--kill-on-bad-exit=0", "--wait=0"]
            command += ["--overlap", *ends, "--no-kill=off", *self._group(number)]
            command += [*count, f"--nodelist={','.join(members)}"]
            if output:
                name = output.replace("TEAM", group["team"] or "node")
                command += [f"--output={str(self._files.path).replace('%', '%%')}/{name}", "--open-mode=append"]
            command += [*group["srun"], *group["start"], *more]
        return subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)

    def _next_port(self, first: str) -> int:
        """Return the rendezvous port of the next step on its first node; if that is this node, a free port. If all
        ports of the node are in use it is the last port, and the step reports the error itself.
        """
        for _ in range(PORTS[2]):
            self._steps += 1
            port = port_of(int(self._job), self._steps)
            if first != os.environ.get("SLURMD_NODENAME") or is_free(port):
                break
        return port

    def stop(self, step: subprocess.Popen[bytes], seconds: float | None = None) -> None:
        """End a step within `seconds`, by default STOP_S."""
        step.terminate()
        self._wait(step, STOP_S if seconds is None else seconds, self._files.write_heartbeat)
        if step.poll() is None:
            step.kill()

    def _wait(self, step: subprocess.Popen[bytes], seconds: float, look: Callable[[], None]) -> None:
        end = time.monotonic() + seconds
        while step.poll() is None and time.monotonic() < end:
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(LOOK_S)

    def _group(self, number: int) -> list[str]:
        """Return the srun options that choose component `number` of a heterogeneous job; empty for other jobs."""
        return [f"--het-group={number}"] if len(self._plan["groups"]) > 1 else []

    def _address(self, node: str) -> str:
        """Return a node's IPv4 address on the interface `launch.slurm.interface`, or else Slurm's address of it
        (NodeAddr).
        """
        name = self._plan["interface"]
        try:
            if name is None:
                address = fields_of(answer("scontrol", "show", "node", "--oneliner", node))["NodeAddr"]
            else:
                command = ["ip", "-4", "-oneline", "address", "show", "dev", name]
                words = answer("srun", *ONE_NODE, f"--nodelist={node}", *command).split()
                address = words[words.index("inet") + 1].partition("/")[0]
        except (KeyError, ValueError) as error:
            lacks = (
                "has no NodeAddr in Slurm" if name is None else f"has no IPv4 address on launch.slurm.interface={name}"
            )
            raise CommandFailed(f"the first node, {node}, {lacks}") from error
        return address

    def lost_state(self, node: str) -> str:
        """Return Slurm's state of a lost node; empty if the node is not lost. Raise CommandFailed if Slurm does not
        reply, which proves nothing about the node.
        """
        self._files.write_heartbeat()
        try:
            state = fields_of(answer("scontrol", "show", "node", "--oneliner", node)).get("State", "")
        except CommandFailed as error:
            if f"Node {node} not found" in str(error):
                return "Slurm does not list it any more"
            raise
        return f"Slurm says {state}" if state.endswith("*") or any(word in state for word in LOST) else ""

    def roll_call(self, nodes: list[str]) -> dict[str, str]:
        """Return the nodes of a failed step that do not reply or fail their own tests, with reasons."""
        if self._plan["preflight"]:
            return self._test_nodes(nodes, self._results())
        return self._ask_each({node: ["true"] for node in nodes})

    def _results(self) -> Path:
        root, number = self._files.path / "preflight", 1
        while (root / f"{self._job}-{number}").exists():
            number += 1
        folder = root / f"{self._job}-{number}"
        folder.mkdir(parents=True)
        return folder

    def preflight(self, nodes: list[str]) -> dict[str, str]:
        """Return the nodes that fail their tests, with reasons."""
        folder = self._results()
        bad = self._test_nodes(nodes, folder)
        well = [node for node in nodes if node not in bad]
        versions = {node: read_object(folder / f"{node}.json").get("versions", {}) for node in well}
        bad.update(odd_versions(versions))
        well = [node for node in well if node not in bad]
        if len(well) > 1:
            bad.update(self._test_links(well, folder))
        (folder / "failed.json").write_text(json.dumps(bad, indent=1))
        self._files.say(self._job, "preflight", f"pre-flight: {len(nodes) - len(bad)} of {len(nodes)} nodes pass")
        return bad

    def _test_nodes(self, nodes: list[str], folder: Path) -> dict[str, str]:
        commands = {}
        for node in nodes:
            group = self._plan["groups"][self.group_of[node]]
            tests = ["preflight", "node", str(folder), *self._plan["tests"], "--gpus", str(group["gpus"])]
            commands[node] = [*group["srun"], *group["start"], *tests]
        bad = self._ask_each(commands)
        for node in nodes:
            if node not in bad:
                result = read_object(folder / f"{node}.json")
                why = failed_checks(result) if result else "it left no result"
                bad.update({node: why} if why else {})
        return bad

    def _ask_each(self, commands: dict[str, list[str]]) -> dict[str, str]:
        """Run a command on each node separately; return the nodes where it fails or takes too long, with reasons.

        Raises:
            CommandFailed: it fails on all nodes although some of them run, so the nodes are not the cause; or Slurm
                does not reply.
        """
        processes = {
            node: subprocess.Popen(
                ["srun", *ONE_NODE, *self._group(self.group_of[node]), f"--nodelist={node}", *command],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for node, command in commands.items()
        }  # fmt: skip
        bad, lost, end = dict[str, str](), set[str](), time.monotonic() + self._plan["limit_s"]
        try:
            for node, process in processes.items():
                lines = self._stderr_lines(process, end)
                if lines is None:
                    bad[node] = f"not finished within {self._plan['limit_s']:g} s"
                elif process.returncode:
                    if state := self.lost_state(node):
                        lost.add(node)
                    bad[node] = state or " / ".join(lines[:2])[:300] or f"srun ended with {process.returncode}"
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
        self._look()
        here = os.environ.get("SLURMD_NODENAME")
        if len(bad) == len(commands) and (here in bad or len(lost) < len(bad)):
            # Slurm or node.sh is at fault: this node runs and fails, too, or Slurm does not report all nodes as lost.
            why = bad[here] if here in bad else next(why for node, why in bad.items() if node not in lost)
            raise CommandFailed(f"no program succeeds on any of the nodes {', '.join(commands)}: {why}")
        return bad

    def _stderr_lines(self, process: subprocess.Popen[str], end: float) -> list[str] | None:
        """Return the lines that a program printed to stderr until it ended; None if it still runs at `end`."""
        while True:
            self._look()
            late = time.monotonic() > end
            if late and process.poll() is None:  # not another LOOK_S for each of a thousand nodes that hang
                return None
            try:
                return process.communicate(timeout=LOOK_S)[1].strip().splitlines()
            except subprocess.TimeoutExpired:
                if late:
                    return None

    def _test_links(self, nodes: list[str], folder: Path) -> dict[str, str]:
        """Return the nodes with slow links to others, or with a wrong clock, with reasons."""
        gpus = min(group["gpus"] for group in self._plan["groups"])
        # A node waits at most this long for each of its one or two neighbours; half of the whole limit is for Python's
        # start.
        limit = ["--limit-s", f"{self._plan['limit_s'] / 4:g}"]
        more = ["preflight", "links", str(folder), *self._plan["tests"], "--gpus", str(gpus), *limit]
        step = self.start(nodes, more)
        try:
            self._wait(step, self._plan["limit_s"], self._look)
        finally:
            if step.poll() is None:
                self.stop(step)
        results = read_object(folder / "links.json")
        if not results:
            text = "pre-flight: the links between nodes could not be measured; the run starts anyway"
            self._files.say(self._job, "preflight", text)
            return {}
        return link_faults(results, nodes, self._plan["clock_s"], self._plan["bandwidth"])


def failed_checks(result: dict[str, Any]) -> str:
    """Return as text which checks the node failed and why; empty: the run may use the node."""
    return "; ".join(f"{name}: {check['reason']}" for name, check in result["checks"].items() if not check["ok"])


def odd_versions(versions: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the nodes with other package versions than most nodes."""
    bad = {}
    for package in sorted({name for installed in versions.values() for name in installed}):
        most = Counter(installed.get(package, "none") for installed in versions.values()).most_common(1)[0][0]
        for node, installed in versions.items():
            if installed.get(package, "none") != most:
                bad[node] = f"versions: {package} {installed.get(package, 'none')}, and {most} on other nodes"
    return bad


def wrong_clocks(offsets: dict[str, float], limit_s: float) -> dict[str, str]:
    """Return the nodes whose clock is too far from the median. `offsets` are the seconds by which each clock is ahead
    of the clock of one node.
    """
    if not offsets:
        return {}
    middle = statistics.median_low(offsets.values())
    return {
        node: f"clock: {at - middle:+.2f} s from the median, launch.preflight_clock_s = {limit_s:g}"
        for node, at in offsets.items()
        if abs(at - middle) > limit_s
    }


def slow_nodes(edges: list[dict[str, Any]], share: float) -> dict[str, str]:
    """Return nodes without a working link, or whose best link is far slower than the median of all nodes' best links.

    The best link counts, because a slow node makes both its links slow, and its neighbours must not be blamed. With
    only two nodes, speeds are not compared.
    """
    best: dict[str, float] = {}
    errors: dict[str, str] = {}
    for edge in edges:
        for node in edge["nodes"]:
            best[node] = max(best.get(node, 0.0), edge.get("gb_per_s", 0.0))
            other = next(name for name in edge["nodes"] if name != node)
            if "error" in edge:
                errors[node] = f"all-reduce with {other}: {edge['error']}"
    bad = {node: errors[node] for node, speed in best.items() if not speed}
    if len(best) > 2:
        middle = statistics.median(best.values())
        for node, speed in best.items():
            if node not in bad and speed < share * middle:
                bad[node] = f"all-reduce: {speed:g} GB/s with its best neighbour, the median is {middle:g}"
    return bad


def link_faults(found: dict[str, Any], nodes: list[str], clock_s: float, share: float) -> dict[str, str]:
    """Return what is wrong with nodes by the measurements of links between them (links.json).

    Nodes that did not reach the first one are named, but if none of at least two others did, only the first is.

    Args:
        clock_s: largest difference between clocks.
        share: least share of the usual speed that a link must have.
    """
    present = found["nodes"]
    if len(present) == 1 and len(nodes) > 2:
        return {present[0]: "links: no other node can reach it"}
    absent = {node: f"links: it did not reach {nodes[0]} in time" for node in nodes if node not in present}
    return {**slow_nodes(found["edges"], share), **wrong_clocks(found["clocks"], clock_s), **absent}
