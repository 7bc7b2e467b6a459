"""Whatever is killed, stopped, filled, cut or deleted, and whenever: `make campaign-faults`.

    a run to be disturbed:  command, fault at moment 1 -> the same command, fault at moment 2 -> ... -> the command
    after every fault:      the command ends, with an exit code of its kind; no process is left
    in the end:             the metrics and exported weights of a run that nothing happened to, byte for byte

A run that survives a fault is compared at once, and the next moment is one of a new run. A moment is a phase: the
module of the rows holds every rank that opens it until the fault has happened. Results go to FAULTS (faults.json),
where a chain that was cut goes on with its next moment in the same folder beside them, and one that is over is not
repeated; `python -m tests.test_faults faults.json` prints a table of them, which docs/launching.md sums up.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from megarl.runtime.health import read_beat
from tests.forked import Command
from tests.robots.recipes import write_robots_recipe
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(3600), pytest.mark.campaign("faults")]

RESULTS = Path(os.environ.get("FAULTS", "faults.json")).resolve()
LAUNCHERS = ("local", "torchrun", "ray")
#: Ends of phases, and the first step in which they count. "imports" is a rank's process, "loading" its first beat.
MOMENTS = {
    "generation": (3, "step/rollout"),
    "imports": (0, ""),
    "loading": (0, ""),
    "reward": (3, "reward"),
    "update": (3, "step/actor_train/forward_backward"),
    "save": (4, "checkpoint"),
    "export": (4, "export"),
}
MARK = "MEGARL_TEST_RUN"  # in the environment of all processes of a command
ENDS_S = 480.0  # a run's longest deadline is 150 s; a machine that is busy takes longer to start one
GONE_S = 90.0  # Ray's processes notice within a minute that their launcher was killed
SETTINGS = (
    "sft.steps=0",
    "validation.every=0",
    "data.val_files=[]",
    "cluster.timeout_s=150",
    "reward.timeout_s=15",
)
ROWS = """
import os, time
from pathlib import Path
from megarl.system import tracing
from megarl.recipes.grpo import build_graph as grpo
from megarl.recipes.srpo import build_graph as srpo
from megarl.recipes.arithmetic import make_rows

FILE = Path(__file__).with_name("hold")

def hold(path):
    try:
        step, wanted = FILE.read_text().split()
    except (FileNotFoundError, ValueError):
        return
    if path.endswith(wanted) and tracing.step_now >= int(step) and "RANK" in os.environ:
        FILE.with_name("held_" + os.environ["RANK"]).touch()
        while FILE.exists():
            time.sleep(0.002)

tracing.on_change(hold)
"""
ASKS = '''
from megarl.envs import Step
from megarl.envs.tools.environment import Tools
from megarl.envs.tools.parsers import Call

def digits(text: str) -> str:
    """Number of digits in a text.

    Args:
        text: of a turn.
    """
    return str(sum(c.isdigit() for c in text))

class Asks(Tools):
    """Every turn calls a tool, whatever the model writes, and a call that fails is an error."""

    def step(self, action):
        [(answer, failed)] = self._run([Call("digits", {"text": action.text})])
        if failed:
            raise RuntimeError(answer)
        return Step(answer, done=action.finish_reason != "stop" or action.turn > 0)
'''
#: What is trained, as settings beside SETTINGS.
SCENES = {
    "text": (),
    "tools": (
        "env={name: 'asks.py:Asks', tools: ['asks.py:digits'], timeout_s: 5, turn_timeout_s: 15}",
        "rollout.sampling.stop_token_ids=[4,5,6,7,8,9,10,11,12,13]",
        "rollout.limits.tokens=20",
    ),
    "robots": ("algorithm.pipeline=held.py:srpo", "robot.simulator.retries=2"),
    "teams": (
        "algorithm.pipeline=held.py:grpo",  # loaded by every team, of which one loads the rows
        "async.max_staleness=1",
        "placement.teams.train={roles: [actor, reference], devices: 1}",
        "placement.teams.draw={roles: [rollout], devices: 1}",
    ),
}


class Run:
    """One command after the other on a run folder, which may be a small file system of its own."""

    def __init__(self, launcher: str, kind: Kind, recipe: Path, folder: Path) -> None:
        self.last = kind.ranks - 1
        self.settings = (*SETTINGS, *SCENES[kind.scene], f"cluster.nproc={kind.ranks}")
        self.settings += (f"cluster.timeout_s={kind.timeout_s}", f"cluster.start_timeout_s={3 * kind.timeout_s}")
        self.launcher, self.recipe, self.folder, self.run_dir = launcher, recipe, folder, folder / "run"
        self.command: Command | subprocess.Popen[bytes]
        self._seen: set[psutil.Process] = set()

    def start(self, *, program: bool, **more: Any) -> None:
        """`program`: not forked, which the local launcher may be."""
        arguments = ["train", self.recipe, *self.settings, "--launcher", self.launcher, "--run-dir", self.run_dir]
        if program or self.launcher != "local":
            environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(self.folder)}
            output = more.pop("output", None) or (self.folder / "output").open("ab")
            line = [sys.executable, "-m", "megarl", *map(str, arguments)]
            cwd = self.recipe.parent
            self.command = subprocess.Popen(line, cwd=cwd, env=environment, stdout=output, stderr=output, **more)
        else:
            self.command = Command(arguments, self.recipe.parent)

    def processes(self) -> list[psutil.Process]:
        """All of this command that live, by descent or by the mark in their environment."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {psutil.Process(self.command.pid), *psutil.Process(self.command.pid).children(recursive=True)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    self._seen.add(process)
        return [process for process in self._seen if _lives(process)]

    def ranks(self) -> dict[int, psutil.Process]:
        """By number: by their heartbeats, before these by what they were started as."""
        beating = {}
        for rank in range(2):
            beat = read_beat(self.run_dir, rank)
            with contextlib.suppress(psutil.NoSuchProcess):
                if beat is not None and _lives(psutil.Process(beat.pid)):
                    beating[rank] = psutil.Process(beat.pid)
        if beating:
            return beating
        if self.launcher == "ray":
            return dict(enumerate(sorted(self.named("ray::Actor"), key=lambda process: process.pid)))
        found = self.named("megarl.runtime.worker")
        return {int(process.environ()["RANK"]): process for process in found if "RANK" in process.environ()}

    def named(self, part: str) -> list[psutil.Process]:
        """Processes of the command with this in their command line."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()) or part == process.name():
                    found.append(process)
        return found

    def comes_to(self, moment: str) -> bool:
        """Wait until the run is there. False: it has ended first."""
        hold = self.recipe.parent / "hold"
        step, phase = MOMENTS[moment]
        if phase:
            hold.write_text(f"{step} {phase}")
        beating = lambda: any((self.run_dir / "heartbeats").glob("rank_*"))  # noqa: E731
        everywhere = lambda: self.ranks().keys() >= set(range(self.last + 1))  # noqa: E731
        there: dict[str, Callable[[], object]] = {
            "imports": everywhere,
            "loading": lambda: beating() and everywhere(),
        }
        wanted = there.get(moment, lambda: any(self.recipe.parent.glob("held_*")))
        deadline = time.monotonic() + ENDS_S
        while not wanted():
            if self.command.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"it never comes to {moment}:\n{self.told()}"
            time.sleep(0.005)
        self.processes()
        return True

    def goes_on(self) -> None:
        """Nobody is held any more."""
        for file in self.recipe.parent.glob("h[eo]ld*"):
            if file.suffix != ".py":
                file.unlink()

    def ends(self) -> int:
        """The exit code; nothing of the command is left after a while."""
        self.processes()
        try:
            code = self.command.wait(timeout=ENDS_S)
        except subprocess.TimeoutExpired:
            self.end_all()
            raise AssertionError(f"still running after {ENDS_S:g} s:\n{self.told()}") from None
        deadline = time.monotonic() + GONE_S
        while left := self.processes():
            if time.monotonic() > deadline:
                told = [" ".join(process.cmdline())[:100] for process in left]
                self.end_all()
                raise AssertionError(f"they outlive their command: {told}")
            time.sleep(0.1)
        self._seen.clear()
        return code

    def end_all(self) -> None:
        """kill -9, of all processes at once."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def told(self) -> str:
        """The end of what was printed."""
        log = self.run_dir / "log.txt"
        return "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else "no log"

    def checkpoint(self) -> Path | None:
        """The newest one."""
        found = [path for path in (self.run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
        return max(found, key=lambda path: int(path.name[5:]), default=None)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- faults: each returns False where there is nothing to do it to ----------------------------------------------------


def signals(number: int, find: Callable[[Run], list[psutil.Process]]) -> Callable[[Run], bool]:
    def deed(run: Run) -> bool:
        found = find(run)
        for process in found:
            process.send_signal(number)
        return bool(found)

    return deed


def then_all_die(damage: Callable[[Run], bool]) -> Callable[[Run], bool]:
    """As when the machine loses its power."""

    def deed(run: Run) -> bool:
        for process in run.processes():
            process.suspend()
        if done := damage(run):
            run.end_all()
        else:
            for process in run.processes():
                process.resume()
        return done

    return deed


def launcher(run: Run) -> list[psutil.Process]:
    return [psutil.Process(run.command.pid)]


def rank(number: int) -> Callable[[Run], list[psutil.Process]]:
    return lambda run: [run.ranks()[number]]


def named(part: str) -> Callable[[Run], list[psutil.Process]]:
    return lambda run: run.named(part)


def agent(run: Run) -> list[psutil.Process]:
    if run.launcher == "ray":
        return run.named("raylet")[:1]
    return run.named("megarl.launchers.torchrun")[:1]


def half(file: Path | None) -> bool:
    if file is None or not file.exists():
        return False
    os.truncate(file, file.stat().st_size // 2)
    return True


def cut_shard(run: Run) -> bool:
    """Of the newest checkpoint: without an older one there is nothing to go on from, which is refused."""
    newest = run.checkpoint()
    if newest is None or len(list(newest.parent.glob("step_?"))) < 2:
        return False
    return half(max(newest.rglob("*"), key=lambda path: path.stat().st_size))


def tear_metrics(run: Run) -> bool:
    file = run.run_dir / "metrics.jsonl"
    if not file.exists():
        return False
    with file.open("a") as lines:
        lines.write('{"stage": "train", "step": 3, "critic/sc')
    return True


def delete(find: Callable[[Run], Path | None]) -> Callable[[Run], bool]:
    def deed(run: Run) -> bool:
        folder = find(run)
        if folder is None or not folder.exists():
            return False
        while folder.exists():  # the run may write to it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        return True

    return deed


def fill(run: Run) -> bool:
    """The file system of the run folder, to the last byte, until the command has ended."""
    with (run.run_dir.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return True


def close_console(run: Run) -> bool:
    assert isinstance(run.command, subprocess.Popen)
    os.close(CONSOLE.pop())
    return True


CONSOLE: list[int] = []


class Kind(NamedTuple):
    """A fault, the exit codes with which a command may end that it happens to, the ranks, and the launchers.

    Attributes:
        timeout_s: `cluster.timeout_s`, where that is what ends the run.
        scene: what is trained, of SCENES.
    """

    deed: Callable[[Run], bool]
    codes: tuple[int, ...]
    ranks: int = 1
    launchers: tuple[str, ...] = LAUNCHERS
    timeout_s: int = 150
    scene: str = "text"


def helpers(number: int, name: str, codes: tuple[int, ...], ranks: int, scene: str) -> Kind:
    """A signal to processes of the workers, which are the same with every launcher."""
    return Kind(signals(number, named(name)), codes, ranks, ("local",), scene=scene)


KINDS = {
    "SIGKILL of the launcher": Kind(signals(signal.SIGKILL, launcher), (-9,)),
    "SIGKILL of rank 0": Kind(signals(signal.SIGKILL, rank(0)), (1,), 2),
    "SIGKILL of rank 1": Kind(signals(signal.SIGKILL, rank(1)), (1,), 2),
    "SIGKILL of all processes": Kind(then_all_die(lambda run: True), (-9,)),
    "SIGUSR1 to the launcher": Kind(signals(signal.SIGUSR1, launcher), (138, 0)),
    "SIGTERM to the launcher": Kind(signals(signal.SIGTERM, launcher), (143, 0)),
    "terminal closed (SIGHUP)": Kind(signals(signal.SIGHUP, launcher), (129, 0)),
    "console pipe closed": Kind(close_console, (0,)),
    "SIGKILL of the reward workers": Kind(signals(signal.SIGKILL, named("pool_worker")), (0, 2)),
    "SIGSTOP of the reward workers": Kind(signals(signal.SIGSTOP, named("pool_worker")), (0, 2)),
    "SIGKILL of the tool processes": helpers(signal.SIGKILL, "megarl.envs.tools.worker", (0,), 1, "tools"),
    "SIGSTOP of the tool processes": helpers(signal.SIGSTOP, "megarl.envs.tools.worker", (0, 1, 2), 1, "tools"),
    "SIGKILL of the simulators": helpers(signal.SIGKILL, "simulators/start.py", (0,), 2, "robots"),
    "SIGSTOP of the simulators": helpers(signal.SIGSTOP, "simulators/start.py", (0,), 2, "robots"),
    "disk full": Kind(fill, (0, 1, 2)),
    "newest checkpoint cut": Kind(then_all_die(cut_shard), (-9,)),
    "newest checkpoint deleted": Kind(then_all_die(delete(Run.checkpoint)), (-9,)),
    "`run.json` cut": Kind(then_all_die(lambda run: half(run.run_dir / "run.json")), (-9,)),
    "half a line in `metrics.jsonl`": Kind(then_all_die(tear_metrics), (-9,)),
    "reference deleted": Kind(then_all_die(delete(lambda run: run.run_dir / "reference")), (-9,)),
    "run folder deleted": Kind(delete(lambda run: run.run_dir), (1, 2)),
    "SIGSTOP of rank 1": Kind(signals(signal.SIGSTOP, rank(1)), (1,), 2, timeout_s=60),
    "SIGKILL of torchrun's agent, of Ray's node manager": Kind(
        signals(signal.SIGKILL, agent), (1,), 1, ("torchrun", "ray")
    ),
    "SIGKILL of Ray's control store": Kind(signals(signal.SIGKILL, named("gcs_server")), (1,), 1, ("ray",)),
    "SIGKILL of the buffer": Kind(
        signals(signal.SIGKILL, named("ray::BufferActor")), (0, 1), 2, ("ray",), scene="teams"
    ),
    "SIGSTOP of the buffer": Kind(
        signals(signal.SIGSTOP, named("ray::BufferActor")), (0, 1), 2, ("ray",), timeout_s=60, scene="teams"
    ),
}


# -- chains -----------------------------------------------------------------------------------------------------------


def write_recipe(folder: Path, scene: str) -> Path:
    (folder / "held.py").write_text(ROWS)
    (folder / "asks.py").write_text(ASKS)
    recipe = write_robots_recipe(folder) if scene == "robots" else harness.write_recipe(folder)
    recipe.write_text(recipe.read_text().replace("megarl.recipes.arithmetic:make_rows", "held:make_rows"))
    return recipe


class Numbers(NamedTuple):
    metrics: dict[int, dict[str, float]]
    weights: bytes

    @classmethod
    def of(cls, run_dir: Path) -> Numbers:
        return cls(harness.of_training(harness.metrics(run_dir)), (run_dir / "hf" / "model.safetensors").read_bytes())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Numbers]:
    """Of a run that nothing happens to, of a kind's recipe and ranks."""

    @functools.cache
    def numbers(scene: str, ranks: int) -> Numbers:
        folder = tmp_path_factory.mktemp("undisturbed")
        settings = (*SETTINGS, *SCENES[scene], f"cluster.nproc={ranks}")
        harness.run(write_recipe(folder, scene), folder / "run", *settings)
        return Numbers.of(folder / "run")

    return lambda kind: numbers(kind.scene, kind.ranks)


def mount(folder: Path) -> Path:
    """A file system of 256 MB there, which stays until its chain is over."""
    if not folder.is_mount():
        folder.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], check=True)
    return folder


def results() -> dict[str, dict[str, str]]:
    """By launcher and kind, what came of it at each moment."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def note(chain: str, told: dict[str, str]) -> None:
    RESULTS.write_text(json.dumps(results() | {chain: told}, indent=1))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_nothing_is_left_and_nothing_hangs(
    kind: str, launcher: str, undisturbed: Callable[[Kind], Numbers]
) -> None:
    chain = f"{launcher}: {kind}"
    told = {moment: code for moment, code in results().get(chain, {}).items() if "failed" not in moment}
    if launcher not in KINDS[kind].launchers or "end" in told:
        pytest.skip("it has happened, or cannot")
    numbers = undisturbed(KINDS[kind])
    folder = RESULTS.with_suffix(".runs") / "".join(filter(str.isalnum, chain))
    if not folder.exists():
        told = {}
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(launcher, KINDS[kind], write_recipe(folder, KINDS[kind].scene), folder)
    if kind == "disk full":
        run.run_dir = mount(folder / "disk") / "run"
    run.goes_on()
    try:
        for moment in [moment for moment in MOMENTS if moment not in told]:
            began = time.monotonic()
            told[moment] = disturb(run, kind, moment, numbers)
            print(f"{chain}: {moment}: {told[moment]} ({time.monotonic() - began:.0f} s)", flush=True)
        moment = "end"
        finish(run, numbers)
        told["end"] = "equal"
        if run.run_dir.parent.is_mount():
            subprocess.run(["umount", "--lazy", run.run_dir.parent], check=True)
        shutil.rmtree(folder)
    except BaseException as error:
        told[f"{moment} failed"] = str(error)[:3000]
        raise
    finally:
        run.end_all()
        note(chain, told)


def disturb(run: Run, kind: str, moment: str, undisturbed: Numbers) -> str:
    """One command and its fault; the exit code, or `-`: there was nothing to do it to."""
    console = kind == "console pipe closed"
    more: dict[str, Any] = {}
    if console:
        reading, writing = os.pipe()
        CONSOLE[:] = [reading]
        more["output"] = writing
    run.start(program=console or moment == "imports", **more)
    if console:
        os.close(writing)
    deed, codes = KINDS[kind].deed, KINDS[kind].codes
    done = run.comes_to(moment) and deed(run)
    run.goes_on()
    code = run.ends()
    (run.run_dir.parent / "filler").unlink(missing_ok=True)
    if console and CONSOLE:
        os.close(CONSOLE.pop())
    assert code in (codes if done else (0,)), f"exit code {code}:\n{run.told()}"
    if code == 0:
        assert Numbers.of(run.run_dir) == undisturbed
    if code == 0:
        shutil.rmtree(run.run_dir, ignore_errors=True)
    return str(code) if done else "-"


def finish(run: Run, undisturbed: Numbers) -> None:
    """The run goes on to its end, and nobody sees what has happened to it."""
    run.start(program=False)
    assert run.ends() == 0, run.told()
    found = Numbers.of(run.run_dir)
    assert found.metrics == undisturbed.metrics
    assert found.weights == undisturbed.weights


def table(told: dict[str, dict[str, str]]) -> str:
    """Of the chains that came to their end: a line per kind, where its exit code does not depend on the moment."""
    lines = ["| what | launchers | exit code |", "|---|---|---|"]
    for kind in KINDS:
        by_codes: dict[str, list[str]] = {}
        for launcher in LAUNCHERS:
            codes = told.get(f"{launcher}: {kind}", {})
            if "end" in codes:
                by_codes.setdefault(summary({moment: codes[moment] for moment in MOMENTS}), []).append(launcher)
        lines += [f"| {kind} | {', '.join(launchers)} | {codes} |" for codes, launchers in by_codes.items()]
    return "\n".join(lines)


def summary(codes: dict[str, str]) -> str:
    """The exit codes at all moments that had something of the kind; with more than one, the moments of each."""
    found: dict[str, list[str]] = {}
    for moment, code in codes.items():
        if code != "-":
            found.setdefault(code, []).append(moment)
    return (
        next(iter(found)) if len(found) == 1 else "; ".join(f"{code} in {', '.join(at)}" for code, at in found.items())
    )


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
