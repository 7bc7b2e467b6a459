"""Where a rollout's team goes on that begins again as samples get ready, by what it has told before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.comm import WorkerGroup
from megarl.runtime import flow_begun
from megarl.runtime.flow_begun import FlowBegun, find_flow_begun, go_on_as_ready
from tests.runtime.test_begun import config

#: The first step is to come.
START = {"flow_place": "place", "metrics/draw/0": 1}
#: Gates 1 to 3 are passed, the last one with the weights after step 8: these are validated, and may be saved.
PASSED = START | {"metrics/draw/1": 1, "metrics/draw/2": 1, "metrics/draw/3": 1, "gate/3": 8}
VALIDATED = PASSED | {"validation/8": 1}
ALL_OPEN = VALIDATED | {"open/4": True, "gate/4": 9}
LAST = PASSED | {"gate/3": 20}


def run(mail: dict[str, Any], opened: bool = True) -> Any:
    store = SimpleNamespace(
        peek=mail.get,
        read=mail.__getitem__,
        flow_state=lambda: {"next": 30 if opened else None},
        left=lambda number: {},
    )
    loader = SimpleNamespace(load_state_dict=lambda state: None)
    return SimpleNamespace(
        config=config(2),
        context=SimpleNamespace(step=2),
        layout=SimpleNamespace(rank=0, world=WorkerGroup.alone()),
        team=SimpleNamespace(store=store, plan=SimpleNamespace(name="draw", replicas=2), of=lambda role: "train"),
        loader=loader,
        mail=store,
    )


@pytest.mark.parametrize(
    ("mail", "saves", "found", "completed", "told"),
    [
        ({"flow_place": "place"}, {}, FlowBegun(True, True, 1, False, False, 2), [], []),
        (START, {}, FlowBegun(True, False, 1, False, False, 2), [], []),
        (
            PASSED,
            {6},
            FlowBegun(True, False, 4, False, True, 8),
            [6],
            [],
        ),  # who waits for the validation has not saved step 8
        (VALIDATED, {8}, FlowBegun(True, False, 4, False, False, 8), [8], [8]),
        (VALIDATED, {6}, FlowBegun(True, False, 4, False, False, 8), [8, 6], [8]),
        (ALL_OPEN, {8}, FlowBegun(True, False, 4, True, True, 9), [8], [8]),
        (LAST, {18}, FlowBegun(True, False, 4, False, True, 20), [18], []),
        (LAST | {"validation/20": 1}, {20}, FlowBegun(True, False, 4, False, False, None), [20], [20]),
    ],
    ids=["first", "measured", "not validated", "validated", "not the best", "all wait", "last", "over"],
)
def test_it_goes_on_at_the_gate_of_which_it_has_not_told_its_numbers(monkeypatch, mail, saves, found, completed, told):
    c, asked, places = run(mail), list[int](), list[int]()
    monkeypatch.setattr(flow_begun, "tell_place", lambda c: places.append(c.context.step))

    def complete(version: int, files: Any) -> bool:
        asked.append(version)
        return version in saves

    begun = go_on_as_ready(c, find_flow_begun(c), SimpleNamespace(complete=complete))  # type: ignore[arg-type]
    assert (begun, asked, places) == (found, completed, told)
    assert c.context.step == (20 if begun.version is None else begun.version)


def test_one_that_died_before_prompts_were_handed_out_begins_with_the_checkpoint():
    c = run({}, opened=False)
    begun = go_on_as_ready(c, find_flow_begun(c), SimpleNamespace())  # type: ignore[arg-type]
    assert begun == FlowBegun(False, True, 1, False, False, 2)
    assert not begun.is_past_checkpoint(c.config)


def test_what_was_copied_for_a_checkpoint_is_written_as_it_was(monkeypatch):
    monkeypatch.setattr(flow_begun, "tell_place", lambda c: None)
    monkeypatch.setattr(flow_begun, "files_of_flow", lambda c, version, *_: {"made": b"again"})
    for mail, files in ((VALIDATED, {"made": b"again"}), (VALIDATED | {"checkpoint/draw/8": 1}, {"left": b"8"})):
        c = run(mail)
        c.team.store.left = lambda number: {"left": b"%d" % number}
        written: list[Any] = []
        checkpoints: Any = SimpleNamespace(complete=lambda version, files, to=written: to.append(files()) or True)
        go_on_as_ready(c, find_flow_begun(c), checkpoints)
        assert written == [files]
