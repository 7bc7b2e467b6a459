"""Simulators in processes of their own: real processes, with a simulator that fails as it is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.robots.envs import Advice, Answer, Failure, SimulatorError, SimulatorPool, SimulatorSettings
from megarl.robots.envs.messages import check_answer
from megarl.robots.envs.process import SimulatorProcess
from megarl.robots.simulators.protocol import Observation, Outcome, Recording, TaskSpec
from megarl.system.errors import ConfigError
from megarl.system.plain import Malformed
from tests.forked import forked_simulators
from tests.house.test_docs import code_with
from tests.robots.envs.playback import play

LINE = f"{Path(__file__).resolve().parents[1] / 'simulators/line.py'}:Line"
SLOW = np.full((2, 2), 0.1, np.float32)  # two environment steps that do not reach the end

pytestmark = pytest.mark.procs


def settings(**given: Any) -> SimulatorSettings:
    return SimulatorSettings.model_validate(
        {"name": LINE, "workers": 1, "retries": 0, "answer_s": 60.0, "construct_s": 120.0} | given
    )


@contextlib.contextmanager
def pool_of(*, program: bool = False, **given: Any) -> Iterator[SimulatorPool]:
    """A pool; `program`: its processes are started as those of users are, and not forked."""
    with contextlib.nullcontext() if program else forked_simulators(), SimulatorPool(settings(**given)) as pool:
        yield pool


def answer(pool: SimulatorPool, slot: int = 0) -> Answer:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if found := pool.answers(1.0):
            assert list(found) == [slot]
            return found[slot]
    raise AssertionError(f"slot {slot} gave no answer within 120 s")


def episode(pool: SimulatorPool, actions: np.ndarray = SLOW, chunks: int = 3) -> list[Answer]:
    return play(pool, "left", 3, [actions] * chunks)


def pids(pool: SimulatorPool) -> list[int]:
    return [slot.process.process.pid for slot in pool._slots]


def kill_first(pool: SimulatorPool) -> None:
    """Kill the first slot's process."""
    kill_all(pids(pool)[0])


def kill_all(pid: int) -> None:
    """Kill a process. Its simulator, a child, ends a moment later: it could answer once more."""
    process = psutil.Process(pid)
    children = process.children(recursive=True)
    process.kill()
    assert not psutil.wait_procs(children, timeout=120)[1]


def test_an_episode_goes_from_its_trial_to_the_limit_of_environment_steps() -> None:
    with pool_of(program=True, limit=5) as pool:
        assert list(pool.tasks) == ["left", "right"]
        first, *outcomes = episode(pool)
        assert isinstance(first, Observation)
        assert first.frames["front"].shape == (4, 6, 3)
        assert np.all(first.frames["wrist"] == 30)
        assert first.state.tolist() == pytest.approx([0.3, 0])
        assert [outcome.executed for outcome in outcomes] == [2, 2, 1]
        assert [outcome.over for outcome in outcomes] == [False, False, True]
        last = outcomes[-1]
        assert last.progress == pytest.approx(0.8)
        assert not last.success
        assert last.seconds["physics"] > 0
        assert np.all(first.frames["wrist"] == 30), "pictures of the past stay as they were"
        assert np.all(last.observation.frames["wrist"] == 80)
        assert (pool.counts.steps, pool.counts.chunks, pool.counts.resets) == (5, 3, 1)


def test_a_recorded_episode_brings_a_clip_of_every_environment_step() -> None:
    with pool_of(limit=5) as pool:
        plain = episode(pool)
        for frames, shown in ((8, [30, 40, 50, 60, 70, 80]), (3, [30, 50, 80])):
            found = play(pool, "left", 3, [SLOW] * 3, record=Recording(("wrist",), frames))
            for one, other in zip(found[1:], plain[1:], strict=True):
                assert isinstance(one, Outcome)
                assert isinstance(other, Outcome)
                assert (one.executed, one.success, one.over, one.progress) == (
                    other.executed,
                    other.success,
                    other.over,
                    other.progress,
                )
                assert np.array_equal(one.observation.frames["front"], other.observation.frames["front"])
                assert one.seconds["physics"] > 0
                assert bool(one.clip) == one.over
            assert list(found[-1].clip) == ["wrist"]
            assert found[-1].clip["wrist"][:, 0, 0, 0].tolist() == shown
            assert found[-1].clip["wrist"].shape == (len(shown), 2, 2, 3)
        assert plain[-1].clip == {}


def test_a_simulator_is_constructed_once_per_process_and_task() -> None:
    with pool_of(workers=2) as pool:
        for _ in range(3):
            for slot, task in ((0, "left"), (1, "left")):
                pool.begin(slot, task, 0)
            while pool.busy:
                pool.answers(1.0)
        assert pool.counts.constructions == {"left": 2}
        assert pool.counts.resets == 6


def test_the_least_recently_used_simulator_makes_room() -> None:
    with pool_of(kept=1) as pool:
        for task in ("left", "right", "right", "left"):
            play(pool, task, 0, [])
        assert pool.counts.constructions == {"left": 2, "right": 1}


def test_the_expert_of_a_simulator_is_asked_where_the_episode_is() -> None:
    with pool_of() as pool:
        pool.begin(0, "left", 0)
        assert isinstance(answer(pool), Observation)
        pool.expert(0)
        advice = answer(pool)
        assert isinstance(advice, Advice)
        assert advice.action is not None
        assert advice.action.tolist() == [0.25, 0]


@pytest.mark.parametrize(
    "kind", ["pickle", "pickle as a body", "oversized", "deep", "garbage", "list", "other types", "no array"]
)
def test_what_is_no_answer_fails_its_episode_and_executes_nothing(kind: str, tmp_path: Path) -> None:
    marker, once = tmp_path / "executed", tmp_path / "once"
    # A forked process has descriptors of others, too, which nobody may read: writing to them would never end.
    with pool_of(program=True, wrong="write", writes=kind, marker=str(marker), once=str(once)) as pool:
        *_, failure = episode(pool)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.task) == ("crash", "left")
        assert failure.text.startswith("its process wrote ")
        assert isinstance(episode(pool)[-1], Outcome), "its process is replaced"
    assert not marker.exists()


def test_the_memory_of_pictures_cannot_become_shorter_than_what_is_mapped() -> None:
    with pool_of(wrong="shrink") as pool:
        *_, last = episode(pool)
        assert isinstance(last, Outcome)
        assert np.all(last.observation.frames["wrist"] == 90)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ("exit", "crash", "ended (exit code 7) during step"),
        ("raise", "raised", "RuntimeError: a joint is out of range"),
        ("state", "state", "the state is not finite at [0] of 2 numbers"),
        ("frames", "frames", "the picture of camera 'wrist' is not finite"),
        ("shape", "frames", "the picture of camera 'front' is uint8 [3, 6, 3]; allowed: uint8 [4, 6, 3]"),
        ("camera", "frames", "the pictures are of the cameras ['front']; allowed: ['front', 'wrist']"),
    ],
)
def test_an_episode_that_a_simulator_fails_is_never_an_outcome(wrong: str, kind: str, text: str) -> None:
    with pool_of(wrong=wrong) as pool:
        found = episode(pool)
        failure = found[-1]
        assert isinstance(failure, Failure)
        assert failure.kind == kind
        assert text in failure.text
        assert (failure.task, failure.trial) == ("left", 3)
        assert "constructs left" in failure.output
        if wrong == "exit":
            assert "the physics engine gives up" in failure.output
        assert not pool.busy, "the slot is free"
        assert len(play(pool, "left", 0, [SLOW[:1]])) == 2, "and plays the next episode"


def test_a_simulator_that_hangs_is_killed_and_says_where_it_was() -> None:
    with pool_of(program=True, wrong="hang", answer_s=3.0) as pool:
        (pid,) = pids(pool)
        failure = episode(pool)[-1]
        assert isinstance(failure, Failure)
        assert failure.kind == "hang"
        assert failure.text == "no answer to step within env.answer_s = 3 s"
        assert "line.py" in failure.output
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("wrong", ["exit", "state", "hang"])
def test_a_cut_episode_is_played_again_and_comes_out_the_same(wrong: str, tmp_path: Path) -> None:
    with pool_of() as pool:
        undisturbed = episode(pool)
    with pool_of(wrong=wrong, once=str(tmp_path / "it_was"), retries=1, answer_s=4.0, at=4) as pool:
        cut = episode(pool)
        assert sum(pool.counts.failures.values()) == 1
        assert pool.counts.constructions == {"left": 2}
    assert len(cut) == len(undisturbed)
    for one, other in zip(cut[1:], undisturbed[1:], strict=True):
        assert isinstance(one, Outcome)
        assert isinstance(other, Outcome)
        assert (one.executed, one.success, one.over, one.progress) == (
            other.executed,
            other.success,
            other.over,
            other.progress,
        )
        assert np.array_equal(one.observation.frames["front"], other.observation.frames["front"])
        assert np.array_equal(one.observation.state, other.observation.state)


def test_an_episode_that_cannot_be_played_again_is_no_episode() -> None:
    """The second time its simulator answers something else, and what was drawn for the first would not fit."""
    with pool_of(wrong="chance", at=0, retries=3, max_restarts=9, limit=20) as pool:
        assert [type(found) for found in episode(pool, chunks=1)] == [Observation, Outcome]
        kill_first(pool)
        pool.begin(0, "left", 0)
        assert isinstance(answer(pool), Observation), "idle, it is replaced and nobody notices"
        pool.act(0, SLOW)
        assert isinstance(answer(pool), Outcome)
        kill_first(pool)
        pool.act(0, SLOW)
        failure = answer(pool)
        assert isinstance(failure, Failure)
        assert failure.kind == "differs"


def test_when_no_process_works_any_more_the_run_ends_with_what_they_said() -> None:
    with pool_of(workers=2, wrong="exit", at=0, retries=2, max_restarts=2) as pool:
        pool.begin(0, "left", 1)
        pool.begin(1, "right", 2)
        with pytest.raises(SimulatorError) as caught:
            act_on_answers(pool)
    shown = str(caught.value)
    assert (
        f"simulator '{LINE}' in megarl's own interpreter: "
        "every simulator process in use, 2 in all, failed at least 2 times in a row" in shown
    )
    assert "trial" in shown
    assert "reason:  its process ended (exit code 7) during step" in shown
    assert "    the physics engine gives up" in shown
    assert "fix:" in shown


def test_a_simulator_that_was_never_constructed_ends_the_run_at_once() -> None:
    with pool_of(wrong="construct", retries=5) as pool:
        pool.begin(0, "right", 0)
        with pytest.raises(SimulatorError, match=r"the simulator could not be constructed(?s:.*)Error: meshes are"):
            answer(pool)


def act_on_answers(pool: SimulatorPool) -> None:
    """Answer every observation with actions; an episode that fails is not begun again."""
    deadline = time.monotonic() + 120
    while pool.busy and time.monotonic() < deadline:
        for slot, found in pool.answers(1.0).items():
            if isinstance(found, Observation):
                pool.act(slot, SLOW)


def frames_in_memory() -> int:
    return sum("memfd:megarl-frames" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_shared_memory_is_free_after_a_process_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pool_of(program=True, retries=1) as pool:
        for _ in range(3):
            episode(pool, chunks=1)
            kill_first(pool)
            assert isinstance(episode(pool, chunks=1)[-1], Outcome)
        assert frames_in_memory() == 1
    assert frames_in_memory() == 0
    assert len(os.listdir("/proc/self/fd")) == files
    assert capfd.readouterr() == ("", "")


def test_processes_end_with_their_pool_and_what_they_print_is_no_answer() -> None:
    with pool_of(program=True, workers=2) as pool:
        episode(pool)
        ours = pids(pool)
    for pid in ours:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


KILLED = """
import os, signal, sys, time
import numpy as np
from megarl.robots.envs import SimulatorPool, SimulatorSettings
pool = SimulatorPool(SimulatorSettings(name=sys.argv[1], workers=1, wrong="hang", at=0))
pool.begin(0, "left", 0)
while not pool.answers(1.0):
    pass
pool.act(0, np.zeros((1, 2)))
print(pool._slots[0].process.process.pid, flush=True)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_simulator_that_hangs_ends_with_a_trainer_that_is_killed() -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, LINE], capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == -signal.SIGKILL, run.stderr
    deadline = time.monotonic() + 120
    while runs(int(run.stdout)):
        assert time.monotonic() < deadline, "the simulator's process still runs after 120 s"
        time.sleep(0.1)


ESCAPED = KILLED.replace('wrong="hang"', 'wrong="escape", marker=sys.argv[2]').replace(
    "time.sleep(0.5)", "while not os.path.exists(sys.argv[2]): time.sleep(0.01)"
)


@pytest.mark.parametrize("killed", [False, True])
def test_what_leaves_the_group_of_a_simulator_ends_with_it(killed: bool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = ESCAPED if killed else ESCAPED.replace("os.kill(os.getpid(), signal.SIGKILL)", "pool.close()")
    subprocess.run([sys.executable, "-c", code, LINE, str(note)], capture_output=True, check=False, timeout=240)
    deadline = time.monotonic() + 120
    while runs(int(note.read_text())):
        assert time.monotonic() < deadline, "what the simulator started still runs after 120 s"
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_simulator_of_the_documentation_works(tmp_path: Path) -> None:
    (tmp_path / "my_robot.py").write_text(code_with("class Slide(Simulator)", "embodied.md"))
    with pool_of(program=True, name=f"{tmp_path / 'my_robot.py'}:Slide") as pool:
        first, outcome = play(pool, "slide", 7, [np.full((8, 1), 1.0)])
        assert isinstance(first, Observation)
        assert isinstance(outcome, Outcome)
        assert outcome.success
        assert outcome.executed < 8
        assert np.any(first.frames["top"] != outcome.observation.frames["top"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "lien"}, r"env.name: unknown simulator(?s:.*)allowed: (?s:.*)file.py:Class"),
        ({"name": "no/such.py:Line"}, r"env.name: (?s:.*)file not found: (?s:.*)/no/such.py"),
        ({"name": LINE.replace("Line", "Lien")}, r"env.name: (?s:.*)has no simulator 'Lien'; allowed: Line"),
        ({"python": "/no/such/python"}, r"env.python: the simulator's interpreter does not start: No such file"),
        ({"wrnog": "exit"}, r"env.wrnog: (?s:.*)unknown setting(?s:.*)did you mean 'wrong'"),
        ({"limit": "5"}, r"env.limit: (?s:.*)value of the wrong type(?s:.*)allowed: a whole number"),
        ({"tasks": {"left": {"instruction": "go"}}}, r"env.tasks: (?s:.*)unknown setting"),
        ({"wrong": "setting"}, r"env.wrong: (?s:.*)a line has no such end(?s:.*)allowed: (?s:.*)exit, hang"),
        ({"tasks": ["lefft"]}, r"env.tasks: (?s:.*)unknown task(?s:.*)did you mean 'left'"),
    ],
)
def test_what_a_recipe_says_wrong_is_found_before_an_episode(given: dict[str, Any], message: str) -> None:
    with forked_simulators(), pytest.raises(ConfigError, match=message):
        SimulatorPool(settings(**given))


def test_a_simulator_that_does_not_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "its.py").write_text("import no_such_physics\n")
    with pytest.raises(SimulatorError, match=r"No module named 'no_such_physics'(?s:.*)env.python must be"):
        SimulatorPool(settings(name=f"{tmp_path / 'its.py'}:Its"))


def test_rendering_is_on_the_device_that_the_recipe_names() -> None:
    from megarl.robots.envs.process import environment

    its = settings(egl_devices={0: 2}, threads=3)
    assert environment(its, "env", 0)["MUJOCO_EGL_DEVICE_ID"] == "2"
    assert environment(its, "env", 0)["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match=r"env.egl_devices: CUDA device 1 has no EGL device"):
        environment(its, "env", 1)


def test_a_process_of_many_environments_sees_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.robots.envs.process import environment

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    many = settings(egl_devices={1: 2}, batched=True)
    made = environment(many, "env", 1)
    assert (made["CUDA_VISIBLE_DEVICES"], made["MUJOCO_EGL_DEVICE_ID"]) == ("6", "2")
    assert environment(many, "env", None)["CUDA_VISIBLE_DEVICES"] == "4,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment(many, "env", 1)["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_interpreter_is_another_one(tmp_path: Path) -> None:
    """Whatever is in this one's packages, the simulator's does not see it."""
    python = tmp_path / "python"
    numpy = Path(np.__file__).parents[1]
    (tmp_path / "site").mkdir()
    for part in ("numpy", "numpy.libs"):
        if (numpy / part).exists():
            (tmp_path / "site" / part).symlink_to(numpy / part)
    # -S: no site-packages, as a bare environment has none; its only package is put on the path
    code = f"import runpy, sys; sys.path.append({str(tmp_path / 'site')!r}); sys.argv = sys.argv[1:]"
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    python.write_text(f'#!/bin/sh\nshift 2\n{sys.executable} -I -S -u -c "{code}; {run}" "$@"\n')
    python.chmod(0o755)
    with pool_of(python=str(python)) as pool:
        assert len(episode(pool, chunks=1)) == 2


@pytest.mark.parametrize("counts", [None, [3], {"front": 3}, {"wrist": 0}, {"wrist": 9}, {"wrist": 2.0}])
def test_a_clip_that_was_not_asked_for_is_no_answer(counts) -> None:
    spec = TaskSpec("left", "go left", 5, 6, 2, 2, {"front": (4, 6), "wrist": (2, 2)})
    with pytest.raises(Malformed, match="clip"):
        SimulatorProcess.clip(None, spec, Recording(("wrist",), 8), counts)  # before it looks at any memory


@pytest.mark.parametrize("told", [None, 3, "x" * 5000])
def test_an_instruction_is_a_short_text(told) -> None:
    state = {"state": np.zeros(2, np.float32)}
    answer = {"call": "reset", "seconds": 0.1, "sum": 1}
    check_answer("reset", answer | {"instruction": "go"}, state, None, 0)
    with pytest.raises(Malformed, match="an instruction"):
        check_answer("reset", answer | {"instruction": told}, state, None, 0)
