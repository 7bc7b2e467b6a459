"""Where a rollout's team goes on that begins again, by what it has told before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.comm import WorkerGroup
from megarl.metrics import Metrics
from megarl.runtime import begun
from megarl.runtime.begun import Begun, find_begun, first_missing


@pytest.mark.parametrize("there", [0, 1, 2, 3, 7, 8, 1000])
def test_the_first_number_that_is_not_there(there):
    asked: list[int] = []
    assert first_missing(lambda number: (asked.append(number), number < 5 + there)[1], 5) == 5 + there
    assert len(asked) <= 2 + 2 * max(there, 1).bit_length()


def config(lag: int, *, steps: int = 20, save_every: int = 3, validate_every: int = 4) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(steps=steps, save_every=save_every),
        validation=SimpleNamespace(every=validate_every),
        data=SimpleNamespace(val_files=["rows.jsonl"]),
        async_=SimpleNamespace(max_staleness=lag),
    )


@pytest.mark.parametrize(
    ("lag", "step", "drawn", "used", "followed", "version", "saved"),
    [
        (0, 9, False, (), 8, 8, 8),
        (0, 9, True, (), 8, 9, 8),
        (0, 20, True, (), 19, 20, 19),
        (0, 20, True, (20,), 20, None, 19),  # its numbers of step 20 are to come, and then its part of the checkpoint
        (0, 21, False, (20,), 20, None, 20),
        (2, 3, False, (), 2, 2, 2),  # nobody has drawn anything
        (2, 5, False, (), 2, 2, 2),
        (2, 4, True, (), 2, 2, 2),  # step 5 is drawn with 2, too
        (2, 5, True, (), 2, 3, 2),
        (2, 9, False, (), 6, 6, 6),
        (2, 9, True, (), 6, 7, 6),
        (2, 20, False, (), 17, 17, 17),
        (2, 20, True, (), 19, 20, 19),  # nothing is drawn with 18 and 19
        (4, 20, True, (), 15, 16, 15),  # 16 is validated
        (4, 20, True, (16,), 19, 20, 19),
        (2, 21, False, (), 19, 20, 19),
        (2, 21, False, (20,), 20, None, 20),
    ],
)
def test_it_needs_the_weights_that_it_had_or_the_next_that_something_is_drawn_with(
    lag, step, drawn, used, followed, version, saved
):
    found = Begun.at(config(lag), 2, step, [Metrics()] if drawn else None, used.__contains__)
    assert (found.followed, found.version, found.saved) == (followed, version, saved)
    assert found.draws_first == (step == 3)


@pytest.mark.parametrize(
    ("lag", "step", "saves", "completed"),
    [
        (0, 9, {6}, [8, 6]),  # 8 might have been the best, and was not
        (0, 9, {6, 8}, [8]),
        (2, 11, {6}, [8, 6]),
        (2, 21, {18, 20}, [18, 20]),
    ],
)
def test_it_completes_the_newest_checkpoint_and_is_done_with_the_steps_that_it_was_done_with(
    monkeypatch, lag, step, saves, completed
):
    done: list[int] = []
    asked: list[int] = []
    monkeypatch.setattr(begun, "files_ahead", lambda c, version, drawn: {"drawn": b"made again"})
    told = ("checkpoint/draw/6", "checkpoint/draw/8")
    kept = SimpleNamespace(
        done=done.append,
        left=lambda number: {"drawn": b"left"} if number == 8 else {},
        peek=lambda name: True if name in told else None,
    )
    c: Any = SimpleNamespace(
        config=config(lag),
        context=SimpleNamespace(step=2),
        team=SimpleNamespace(finished=5, store=kept, plan=SimpleNamespace(name="draw")),
        loader=SimpleNamespace(load_state_dict=lambda state: None),
        mail=SimpleNamespace(read=lambda name: name),
    )

    def complete(version: int, files: Any) -> bool:
        asked.append(version)
        assert files() == ({} if version == 6 else {"drawn": b"left" if version == 8 else b"made again"})
        return version in saves

    at = Begun.at(c.config, 2, step, None, (20,).__contains__)
    begun.go_on(c, at, SimpleNamespace(complete=complete))  # type: ignore[arg-type]
    assert (asked, done, c.context.step) == (completed, list(range(6, step)), step - 1)


@pytest.mark.parametrize("all_came", [False, True])
def test_a_step_is_drawn_when_the_mail_has_come_that_the_actors_team_waits_for(all_came):
    """All replicas may have said what they measured, and have died before they said that they are through."""
    mail = {"metrics/draw/3": {}, "drawn/0/4": Metrics().to_json(), "drawn/1/4": Metrics().to_json()}
    c: Any = SimpleNamespace(
        config=config(1),
        context=SimpleNamespace(step=2),
        layout=SimpleNamespace(rank=0, world=WorkerGroup.alone()),
        team=SimpleNamespace(
            store=SimpleNamespace(peek=(mail | ({"drawn/4": True} if all_came else {})).get),
            plan=SimpleNamespace(name="draw", replicas=2),
            restarts=1,
        ),
    )
    found = find_begun(c)
    assert (found.step, found.drawn is not None, found.version) == (4, all_came, 3 if all_came else 2)
