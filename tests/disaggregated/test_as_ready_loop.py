"""Runs whose samples go to training as they get ready: `async.order=as_ready`."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl.artifacts.trained import steps_in
from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader
from megarl.system.rendezvous import write_token
from tests.disaggregated.test_in_order_loop import wait_for
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900)]

STEPS = 5
AS_READY = (
    "async={max_staleness: 2, order: as_ready}",
    "cluster.nproc=2",
    "placement.teams.train={roles: [actor, reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
    "rollout.max_running=8",
    "sft.steps=0",
    f"trainer.steps={STEPS}",
    "validation.every=3",
    "rollout_correction.preset=decoupled_token_is",
)
PARTIAL = "async.partial=true"
#: Scores of 0 and 1; a group of two often has no 1.
BINARY = ("reward.name=reward.py:first_is_digit", "rollout.sampling.n=2", "validation.every=0")
#: So that samples differ in length, and one that is interrupted has tokens left to draw.
LONG = ("rollout.sampling.max_new_tokens=40", "actor.engine.micro_batch_tokens=256")
#: Room for 8 of the 12 groups that may have begun: a ninth is in hand.
IN_HAND = "rollout.max_running=32"
TWO_REPLICAS = ("cluster.nproc=3", "placement.teams.draw={roles: [rollout], devices: 2}")

#: Episodes of an environment that is slow now and then.
SLOW = """
import asyncio, random, sys
sys.path.append({folder!r})
from guess import Guess

class Slow(Guess):
    replayable = True

    async def step(self, action):
        await asyncio.sleep(random.choice([0, 0, 0, 0.3]))
        return await super().step(action)
"""

Trained = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.campaign("teams")),
        (PARTIAL, *LONG, IN_HAND, *harness.KEPT, *TWO_REPLICAS),
        pytest.param(TWO_REPLICAS, marks=pytest.mark.campaign("teams")),
        pytest.param((PARTIAL, *LONG, IN_HAND, *harness.KEPT), marks=pytest.mark.campaign("teams")),
        pytest.param((PARTIAL, *LONG, *TWO_REPLICAS), marks=pytest.mark.campaign("teams")),
    ],
)
def test_every_prompt_is_trained_on_once_and_nothing_is_too_old(recipe, tmp_path, overrides):
    numbers = train(recipe, tmp_path, *overrides)
    check(tmp_path, STEPS)
    assert all(math.isfinite(numbers[step]["actor/pg_loss"]) for step in range(1, STEPS + 1))
    assert [step for step in numbers if "val/acc" in numbers[step]] == [0, 3, 5]
    assert all("critic/score/mean" in numbers[step] for step in range(1, STEPS + 1))
    check_time(numbers)


@pytest.mark.parametrize(
    ("partial", "killed"), [pytest.param((), "actor", marks=pytest.mark.campaign("kills")), ((PARTIAL,), "rollout")]
)
def test_episodes_of_a_slow_environment_are_trained_on_once_and_none_is_lost_in_a_kill(
    recipe, tmp_path, partial, killed
):
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format(folder=str(Path(harness.__file__).parents[1] / "envs")))
    episodes = (*harness.GUESSING, *harness.KEPT, f"env.name={file}:Slow", *partial)
    work = killed_in_step_3 if killed == "actor" else rollout_killed
    numbers = killed_and_resumed(recipe, tmp_path, *episodes, work=work)
    check(tmp_path, STEPS)
    assert max(numbers[step]["env/turns/max"] for step in numbers if step) == 3
    assert all(numbers[step]["env/errors"] == 0 for step in numbers if step)


def test_an_interrupted_sample_keeps_the_versions_of_its_tokens(recipe, tmp_path):
    """Its log-probs are those of these versions, too; the engine's own tests compare them with a forward pass."""
    train(recipe, tmp_path, PARTIAL, *LONG, work=stands_still_until_weights_come)
    samples = [sample for step in trained(tmp_path).values() for sample in step]
    assert any(len(sample["versions"]) > 1 for sample in samples), "nothing was interrupted"
    for sample in samples:
        assert sample["versions"] == sorted(set(sample["versions"]))
        assert sum(sample["tokens"]) == sample["length"]


@pytest.mark.campaign("kills")  # a killed rollout: tests/runtime/test_rollout_killed.py; a killed actor: below
def test_a_killed_run_goes_on_with_what_was_begun(recipe, tmp_path):
    killed_and_resumed(recipe, tmp_path, PARTIAL, *LONG)
    check(tmp_path, STEPS)


def test_groups_that_the_filter_leaves_nothing_of_are_replaced_and_none_is_lost_in_a_kill(recipe, tmp_path):
    numbers = killed_and_resumed(recipe, tmp_path, f"algorithm.filter.name={scored_ones(tmp_path)}", *BINARY)
    assert {len(step) for step in trained(tmp_path).values()} == {4 * 2}
    samples = [sample for step in trained(tmp_path).values() for sample in step]
    assert any(sample["masked"] for sample in samples)
    groups = {prompt_of(sample) for sample in samples if not sample["masked"]}
    assert len(groups) == 4 * STEPS, "every group is another one, and has a sample that is trained on"
    judged = [json.loads(line) for line in (tmp_path / "judged").read_text().splitlines()]
    assert all(kept == (max(scores) > 0) for _, scores, kept in judged)
    rejected = {prompt for prompt, _, kept in judged if not kept} - groups
    assert sorted(groups | rejected) == sorted(first_prompts(tmp_path, 4 * STEPS + len(rejected)))
    assert min(numbers[step]["filter/groups_kept"] for step in numbers if step) < 1
    assert all(numbers[step]["filter/kept"] <= numbers[step]["filter/groups_kept"] for step in numbers if step)


@pytest.mark.parametrize(
    ("more", "n"),
    [
        pytest.param((), 2, marks=pytest.mark.campaign("teams"), id="samples"),
        pytest.param((*harness.GUESSING, PARTIAL, "rollout.sampling.n=2"), 2, id="episodes"),
    ],
)
def test_with_dynamic_sampling_only_groups_with_a_signal_are_trained_on(recipe, tmp_path, more, n):
    """The environment of episodes rewards no guess at all alike, and others by how near they come."""
    numbers = train(recipe, tmp_path, *harness.DAPO, *more, "validation.every=0")
    found = trained(tmp_path)
    assert {step: len(samples) for step, samples in found.items()} == dict.fromkeys(range(1, STEPS + 1), 4 * n)
    for samples in found.values():
        scores: dict[str, set[float]] = {}
        for sample in samples:
            scores.setdefault(prompt_of(sample), set()).add(sample["score"])
        assert all(len(some) > 1 for some in scores.values())
    assert min(numbers[step]["sampling/kept"] for step in numbers if step) < 1


def test_other_replicas_and_another_staleness_go_on_from_its_checkpoint(recipe, tmp_path):
    train(recipe, tmp_path, "trainer.steps=3", PARTIAL, *LONG)
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")  # the last one holds nothing: go on from the one before it
    forget_after(tmp_path, 2)
    train(recipe, tmp_path, PARTIAL, *LONG, *TWO_REPLICAS, "async.max_staleness=1")
    check(tmp_path, STEPS)


def test_a_checkpoint_that_is_asked_for_and_those_to_go_on_from_have_the_parts_of_all_teams(recipe, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "save").touch()  # by a batch job
    settings = ("trainer.save_every=0", "trainer.resume_every=2")
    train(recipe, tmp_path, *settings)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step_*")) == ["step_1", "step_5"]
    shutil.rmtree(tmp_path / "checkpoints" / "step_5")
    forget_after(tmp_path, 1)
    train(recipe, tmp_path, *settings)
    check(tmp_path, STEPS)


# -- runs -------------------------------------------------------------------------------------------------------------


def train(recipe: Path, run_dir: Path, *overrides: str, work: Any = None) -> dict[int, dict[str, float]]:
    """A run without Ray, which notes what it trains on."""
    write_token(run_dir)
    return harness.train(recipe, run_dir, *AS_READY, *overrides, work=work or noting)


def killed_and_resumed(recipe: Path, run_dir: Path, *overrides: str, work: Any = None) -> dict[int, dict[str, float]]:
    """The run, whose actor is killed in step 3, and what was trained on until its last checkpoint and after it.

    Args:
        work: of each rank, in place of `killed_in_step_3`.
    """
    with pytest.raises(AssertionError, match=r"rank \d|exit codes"):
        train(recipe, run_dir, *overrides, work=work or killed_in_step_3)
    saved = [int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_?")]
    forget_after(run_dir, max(saved))
    return train(recipe, run_dir, *overrides)


def scored_ones(folder: Path) -> str:
    """A filter of a user's, which keeps the samples with a score."""
    (folder / "scored.py").write_text("def scored(score, uid):\n    return score > 0\n")
    return f"{folder / 'scored.py'}:scored"


def prompt_of(sample: dict[str, Any]) -> str:
    return sample["id"].partition("#")[0]


def check(run_dir: Path, steps: int, n: int = 4) -> None:
    """Every step has its groups, all prompts until the last one are there once, and no token is too old."""
    found = trained(run_dir)
    assert sorted(found) == list(range(1, steps + 1))
    assert {len(samples) for samples in found.values()} == {4 * n}
    names = sorted(sample["id"] for samples in found.values() for sample in samples)
    assert names == sorted(f"{uid}#{sample}" for uid in first_prompts(run_dir, 4 * steps) for sample in range(n))
    ages = [step - 1 - min(sample["versions"]) for step, samples in found.items() for sample in samples]
    assert set(ages) <= {0, 1, 2}, ages


def first_prompts(run_dir: Path, count: int) -> list[str]:
    """Names of the first `count` prompts, in the order of the last checkpoint's loader."""
    newest = run_dir / "checkpoints" / f"step_{max(steps_in(run_dir / 'checkpoints'))}"
    state = json.loads((newest / "state.json").read_text())["loader"]
    rows = MagicMock(__len__=lambda self: state["samples"])
    rows.batch = lambda places, epoch: Batch({}, {"uid": [f"train-{epoch}-{place}" for place in places]})
    loader = PromptLoader(rows, 4, seed=state["seed"])
    return [uid for number in range(count) for uid in loader.at(number)["uid"]]


def check_time(numbers: dict[int, dict[str, float]]) -> None:
    """What the teams did with their time, of every step, although samples go from one weight update to the next."""
    for step in range(1, STEPS + 1):
        told = numbers[step]
        for name, other in (("train", "draw"), ("draw", "train")):
            assert told[f"team/{name}/wait_for/{other}_s"] == pytest.approx(told[f"team/{name}/wait_s"])
        assert 0 <= told["store/queue/under_way"] + told["store/queue/ready"] <= 3 * 4, "as many as are admitted"
    assert sum(numbers[step]["team/draw/busy_s"] for step in range(1, STEPS + 1)) > 0
    assert max(numbers[step].get("team/draw/tokens_per_s", 0) for step in range(1, STEPS + 1)) > 0


def trained(run_dir: Path) -> Trained:
    """Samples of each step."""
    found: Trained = {}
    for line in (run_dir / "trained").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["step"], []).append(sample)
    return found


def forget_after(run_dir: Path, step: int) -> None:
    """What later steps were trained on is trained on again, from the checkpoint of `step`."""
    kept = [line for number, lines in trained(run_dir).items() if number <= step for line in lines]
    (run_dir / "trained").write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def before_training(call: Callable[[Any, Any], None]) -> None:
    """In a worker's process: `call(context, samples)` before the policy's update, with all that is there."""
    from megarl.dag.executor import Executor

    call_node = Executor._call

    def calling(self: Any, node: Any, context: Any, batch: Any, more: Any) -> Any:
        if node.id == "actor_train":
            call(context, batch)
        return call_node(self, node, context, batch, more)

    Executor._call = calling  # type: ignore[method-assign]


def note(run_dir: Path, step: int, samples: Any) -> None:
    versions, tokens = (samples[name].unbind() for name in ("weight_versions", "version_tokens"))
    lengths = samples["response_ids"].lengths.tolist()
    scores = samples["score"].tolist() if "score" in samples else [None] * len(samples)  # dynamic sampling reads it
    masked = [not mask.any() for mask in samples["response_mask"].unbind()]
    columns = samples["sample_id"], versions, tokens, lengths, scores, masked
    with (run_dir / "trained").open("a") as file:
        for name, own, counts, length, score, out in zip(*columns, strict=True):
            line = {"step": step, "id": name, "versions": own.tolist(), "tokens": counts.tolist(), "length": length}
            file.write(json.dumps(line | {"score": score, "masked": bool(out)}) + "\n")


def note_judged(run_dir: Path) -> None:
    """In a worker's process: prompts, the scores of their samples, and whether they are handed over."""
    from megarl.runtime.stages import sampling

    choose = sampling.admitted

    def choosing(c: Any, samples: Any, seen: Any) -> list[bool]:
        kept = choose(c, samples, seen)
        with (run_dir / "judged").open("a") as file:
            for told in zip(dict.fromkeys(samples["uid"]), seen, kept, strict=True):
                file.write(json.dumps(told) + "\n")
        return kept

    sampling.admitted = choosing


def noting(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run; what each step is trained on is noted, and what is not handed over."""
    before_training(lambda c, samples: note(Path(run_dir), c.step, samples))
    note_judged(Path(run_dir))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def stands_still_until_weights_come(recipe: str, run_dir: str, overrides: list[str], teams: list) -> None:
    """`noting`; once step 1 has its groups, samples stay as they are until its weights want to come."""
    from megarl.disaggregated.as_ready_loop import AsReadyLoop
    from megarl.disaggregated.buffer.channel import GroupChannel

    swap, is_called, given, calls = GroupChannel.swap, AsReadyLoop._is_called, list[int](), list[int]()

    def swapping(self: Any, c: Any, ready: Any, *rest: Any) -> Any:
        given.extend(number for some in ready for number in some.numbers)
        return swap(self, c, ready, *rest)

    def called(self: Any) -> bool:
        if self._update_number == 1 and len(given) >= 4:
            calls.append(len(given))
        stands = self._update_number == 1 and len(calls) > 1  # since the call before samples have got tokens
        while not (found := is_called(self)) and stands:
            time.sleep(0.01)
        return found

    GroupChannel.swap = swapping  # type: ignore[method-assign]
    AsReadyLoop._is_called = called  # type: ignore[method-assign]
    noting(recipe, run_dir, overrides, teams)


def killed_in_step_3(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """`noting`; the actor is killed when it trains step 3, after the checkpoint of step 2."""

    def training(c: Any, samples: Any) -> None:
        note(Path(run_dir), c.step, samples)
        if c.step == 3:
            wait_for(Path(run_dir) / "checkpoints" / "step_2" / "meta.json")
            os.kill(os.getpid(), signal.SIGKILL)

    before_training(training)
    note_judged(Path(run_dir))
    harness.work_of_rank(recipe, run_dir, overrides, teams)


def rollout_killed(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """`noting`; who generates is killed in the middle of that, after the checkpoint of step 2."""
    from megarl.rollout.groups import GroupGenerator

    wait = GroupGenerator.wait

    def waiting(self: Any, enough: Any = None) -> Any:
        found = wait(self, enough)
        if self.busy and (Path(run_dir) / "checkpoints" / "step_2" / "meta.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    GroupGenerator.wait = waiting  # type: ignore[method-assign]
    noting(recipe, run_dir, overrides, teams)
