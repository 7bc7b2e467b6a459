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
