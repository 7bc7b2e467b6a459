"""kill -9 of one process of a run whose episodes are programs: nothing is lost, and nothing is counted twice.

The gateway lives in the process that generates. A killed SGLang server: tests/runtime/test_sglang_run.py.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.disaggregated import test_as_ready_loop as test_flow
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900), pytest.mark.campaign("agents")]
#: A synchronous run of two replicas.
IN_TURN = ("sft.steps=0", "trainer.steps=4", "validation.every=0", "algorithm.kl.use=none")
#: Programs of which one, or the process that starts them, is killed before its second call, once.
KILLED = """
import os, pathlib, sys
sys.path.append({folder!r})
import agents

def play(task):
    def say(messages):
        mark = pathlib.Path({mark!r})
        if len(messages) == 3 and pathlib.Path({saved!r}).exists() and not mark.exists():
            mark.touch()
            victim = os.getpid()
            for _ in range({above}):  # the program's guardian, and what started this one
                with open(f"/proc/{{victim}}/stat") as file:
                    victim = int(file.read().rpartition(")")[2].split()[1])
            os.kill(victim, 9)
            if {above}:
                import time
                time.sleep(60)
        return choice(messages)
    choice, agents.say = agents.say, say
    return agents.asks_thrice(task)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


def check(run_dir: Path) -> None:
    """Every prompt is trained on once, with each of its samples; further sequences of an episode are there once."""
    lines = [json.loads(line) for line in (run_dir / "trained").read_text().splitlines()]
    names = [line["id"] for line in lines]
    assert len(names) == len(set(names))
    led = [json.dumps(line) + "\n" for line in lines if "." not in line["id"].partition("#")[2]]
    (run_dir / "trained").write_text("".join(led))
    test_flow.check(run_dir, test_flow.STEPS)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("killed", ["gateway", "actor"])
def test_as_ready_a_run_that_lost_a_process_trains_on_every_episode_once(recipe, tmp_path, killed, partial):
    work = test_flow.killed_in_step_3 if killed == "actor" else test_flow.rollout_killed
    more = (test_flow.PARTIAL,) if partial else ()
    numbers = test_flow.killed_and_resumed(recipe, tmp_path, *harness.ASKING, *more, work=work)
    check(tmp_path)
    assert all(numbers[step]["env/errors"] == 0 for step in numbers if step)


@pytest.mark.parametrize("on_error", ["mark", "fail"])
@pytest.mark.parametrize("above", [0, 2])
def test_as_ready_a_killed_program_is_an_error_of_its_episode_only(recipe, tmp_path, on_error, above):
    """`above`: 0 kills a program, 2 the process that starts all of them."""
    file, folder = tmp_path / "killed.py", str(Path(__file__).parent)
    saved = str(tmp_path / "checkpoints" / "step_2" / "meta.json")
    file.write_text(KILLED.format(folder=folder, mark=str(tmp_path / "mark"), saved=saved, above=above))
    training = ("data.val_files=[]", "validation.every=0")
    agents = (*harness.ASKING, *training, f"env.function={file}:play", f"env.on_error={on_error}")
    if on_error == "fail":
        test_flow.killed_and_resumed(recipe, tmp_path, *agents, work=test_flow.noting)
    else:
        test_flow.train(recipe, tmp_path, *agents)
    assert (tmp_path / "mark").exists()
    lines = [json.loads(line) for line in (tmp_path / "trained").read_text().splitlines()]
    check(tmp_path)
    lost = sum(line["masked"] for line in lines)
    assert lost == 0 if on_error == "fail" else lost >= 1 if above else lost == 1


def killed_while_it_generates(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    from megarl.rollout.groups import GroupGenerator

    go_on = GroupGenerator._continue

    def going_on(self: Any, *arguments: Any, **more: Any) -> Any:
        if (Path(run_dir) / "checkpoints" / "step_2" / "meta.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(self, *arguments, **more)

    GroupGenerator._continue = going_on  # type: ignore[method-assign]
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def killed_while_it_trains(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    def training(c: Any, samples: Any) -> None:
        if c.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    test_flow.before_training(training)
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def test_a_synchronous_run_has_the_numbers_of_an_undisturbed_one(recipe, tmp_path):
    """The gateway and the engine are in the process that generates; then in the one that trains."""
    whole = harness.train(recipe, tmp_path / "whole", *harness.ASKING, *IN_TURN)
    assert max(numbers.get("env/calls", 0) for numbers in whole.values()) == 3
    for work in (killed_while_it_generates, killed_while_it_trains):
        with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
            harness.train(recipe, tmp_path / work.__name__, *harness.ASKING, *IN_TURN, work=work)
        assert harness.train(recipe, tmp_path / work.__name__, *harness.ASKING, *IN_TURN) == whole
