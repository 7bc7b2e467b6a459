"""Who waits for whom when several processes share the suite, and which of them takes which files."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.workermanage import Producer

from tests.turns import FirstCollects, OneTakesTheWide, Turns, kinds_of, longest_first


def wants(turns: Turns, kind: str) -> threading.Event:
    """Set once `turns` has entered."""
    entered = threading.Event()
    threading.Thread(target=lambda: (turns.enter(kind), entered.set()), daemon=True).start()
    return entered


def test_one_is_alone_after_those_before_it_and_before_those_after_it(tmp_path: Path) -> None:
    first, second, alone, late = (Turns(tmp_path / "run") for _ in range(4))
    first.enter("")
    assert wants(second, "procs").wait(60)
    single = wants(alone, "alone")
    assert not single.wait(0.1)
    others = wants(late, "")
    first.leave()
    assert not single.wait(0.1)
    assert not others.is_set()
    second.leave()
    assert single.wait(60)
    alone.enter("alone")  # the next test of the same file, while another waits
    assert not others.is_set()
    alone.leave()
    assert others.wait(60)
    late.leave()
    for turns in (first, second, alone, late):
        turns.close()
    assert not list(tmp_path.iterdir())


def test_the_first_process_collects_before_the_others(tmp_path: Path) -> None:
    first = FirstCollects(tmp_path / "collected")
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(FirstCollects, tmp_path / "collected") for _ in range(2)]
        assert not wait(others, 0.1).done
        first.leave()
        for other in as_completed(others, 60):
            other.result().leave()  # it collects beside the other one


def test_where_the_first_process_ends_before_it_has_collected_the_next_one_collects_first(tmp_path: Path) -> None:
    first = FirstCollects(tmp_path / "collected")
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(FirstCollects, tmp_path / "collected") for _ in range(2)]
        del first
        second = wait(others, 60, FIRST_COMPLETED).done.pop()
        assert not wait(set(others) - {second}, 0.1).done
        second.result().leave()
        assert not wait(others, 60).not_done


def test_beside_a_wide_one_runs_what_starts_no_processes(tmp_path: Path) -> None:
    wide, single, group = (Turns(tmp_path / "run") for _ in range(3))
    wide.enter("wide")
    assert wants(single, "").wait(60)
    waits = wants(group, "servers")
    assert not waits.wait(0.1)
    single.leave()
    wide.enter("wide")
    assert not waits.wait(0.1)
    wide.leave()
    assert waits.wait(60)
    assert not wants(wide, "wide").wait(0.1)
    group.leave()


def items() -> list[Any]:
    def item(path: str, *marks: str) -> SimpleNamespace:
        return SimpleNamespace(path=Path(path), get_closest_marker=lambda name: name in marks)

    marked = [("a",), ("b", "procs"), ("c", "servers", "procs"), ("c",), ("d", "alone"), ("e",), ("f", "wide", "procs")]
    return [item(*one) for one in marked]


def test_files_alone_come_first_then_wide_ones_then_servers_then_groups_of_processes() -> None:
    ordered = longest_first(items(), kinds_of(items()))
    assert [str(one.path) for one in ordered] == ["d", "f", "c", "c", "b", "a", "e"]


class Node:
    """A process that takes what it is sent."""

    shutting_down = False

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.gateway = SimpleNamespace(id="x")

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.sent += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


def test_tests_that_start_nothing_have_a_lower_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = os.getpriority(os.PRIO_PROCESS, 0), []

    def only_down(which: int, who: int, value: int) -> None:
        asked.append((which, who, value))
        if value == own:
            raise PermissionError("processes may not go back up")

    monkeypatch.setattr(os, "setpriority", only_down)
    turns = Turns(tmp_path / "run")
    for kind in ("", "procs"):
        turns.enter(kind)
        turns.leave()
    turns.close()
    assert asked == [(os.PRIO_PROCESS, 0, own + 3), (os.PRIO_PROCESS, 0, own)]


@pytest.mark.parametrize(
    ("quick", "expected"),
    [
        ({0}, ["a w1 w2 w3 s t p q r z", "u v w x y"]),
        ({1}, ["a w1 w2 w3 s", "u v w x y z p q r t"]),
        ({0, 1}, ["a w1 w2 w3 s t", "u w y z q r", "v x p"]),
        ({0, 2}, ["a w1 w2 w3 s t", "u x p", "v w y z q r"]),
        ({0, 1, 2}, ["a w1 w2 w3 s", "u w y p r", "v x z q t"]),
    ],
)
def test_one_process_takes_the_wide_files_and_the_others_those_that_start_nothing_beside_them(
    tmp_path: Path, quick: set[int], expected: list[str]
) -> None:
    kinds = {"a": "alone", **dict.fromkeys(("w1", "w2", "w3"), "wide"), **dict.fromkeys("st", "servers")}
    kinds |= dict.fromkeys("pqr", "procs") | dict.fromkeys("uvwxyz", "")
    (tmp_path / "kinds").write_text(json.dumps(kinds))
    tests = [f"{file}::t{number}" for file in kinds for number in range(3)]
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["popen"] * len(expected),
        option=SimpleNamespace(loadscopereorder=False),
        rootpath=tmp_path,
    )
    scheduler, nodes = OneTakesTheWide(config, Producer("test"), tmp_path / "kinds"), [Node() for _ in expected]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    for turn in range(200):  # others take twice as long
        for number, node in enumerate(nodes):
            done = sum(map(sum, (found.values() for found in scheduler.assigned_work[node].values())))
            if done < len(node.sent) and (number in quick or turn % 2):
                scheduler.mark_test_complete(node, node.sent[done])
    order = [" ".join(dict.fromkeys(tests[index][:-4] for index in node.sent)) for node in nodes]
    assert order == expected
