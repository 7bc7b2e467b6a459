"""Who waits for whom when several processes share the suite."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

from tests.turns import Turns, files_alone, longest_first


def wants(turns: Turns, *, alone: bool) -> threading.Event:
    """Set once `turns` has entered."""
    entered = threading.Event()
    threading.Thread(target=lambda: (turns.enter(alone=alone), entered.set()), daemon=True).start()
    return entered


def test_one_is_alone_after_those_before_it_and_before_those_after_it(tmp_path: Path) -> None:
    first, second, alone, late = (Turns(tmp_path / "run") for _ in range(4))
    first.enter(alone=False)
    assert wants(second, alone=False).wait(60)
    single = wants(alone, alone=True)
    assert not single.wait(0.1)
    others = wants(late, alone=False)
    first.leave()
    assert not single.wait(0.1)
    assert not others.is_set()
    second.leave()
    assert single.wait(60)
    alone.enter(alone=True)  # the next test of the same file, while another waits
    assert not others.is_set()
    alone.leave()
    assert others.wait(60)
    late.leave()
    late.close()
    assert not list(tmp_path.iterdir())


def test_files_alone_come_first_then_servers_then_groups_of_processes() -> None:
    def item(path: str, *marks: str) -> SimpleNamespace:
        return SimpleNamespace(path=Path(path), get_closest_marker=lambda name: name in marks)

    items = [item("a"), item("b", "procs"), item("c", "servers", "procs"), item("c"), item("d", "alone"), item("e")]
    ordered = longest_first(items, files_alone(items))
    assert [str(one.path) for one in ordered] == ["d", "c", "c", "b", "a", "e"]
