"""Which files each rank reads when a checkpoint is checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.training import checksums


def test_a_rank_checks_the_files_that_it_will_load(monkeypatch: pytest.MonkeyPatch):
    size = 12
    kinds = ("rank_{}.safetensors", "rng_{}.safetensors")
    names = {"state.json", *(kind.format(rank) for kind in kinds for rank in range(size))}
    read: list[set[str]] = []
    for rank in range(size):
        seen = set[str]()
        monkeypatch.setattr(checksums, "_fault", lambda path, *_, seen=seen: seen.add(path.name))
        world: Any = SimpleNamespace(rank=rank, size=size, all_gather_json=lambda value: [value])
        assert checksums.faults(Path("folder"), {name: [0, ""] for name in names}, world) == []
        assert {kind.format(rank) for kind in kinds} <= seen
        read.append(seen)
    assert sorted(name for seen in read for name in seen) == sorted(names)


def test_every_machine_reads_all_files_although_another_has_the_same_host_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checksums, "machine_name", lambda: "clone-a")
    world: Any = SimpleNamespace(rank=0, size=3, all_gather_json=lambda here: [here, "clone-b", here])
    assert checksums._share(["a", "b", "c"], world, per_machine=True) == ["a", "c"]
    world.rank = 1
    monkeypatch.setattr(checksums, "machine_name", lambda: "clone-b")
    world.all_gather_json = lambda here: ["clone-a", here, "clone-a"]
    assert checksums._share(["a", "b", "c"], world, per_machine=True) == ["a", "b", "c"]
