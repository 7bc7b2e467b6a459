"""Hashes of parameters that add up over any partition."""

from __future__ import annotations

from collections import UserList
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.sync.shards.compare import sent_hashes
from megarl.sync.shards.hashes import box_hash, parameter_hash

MODULUS = 1 << 64


def brute_force(values: torch.Tensor) -> int:
    """The hash with Python's integers."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    total = 0
    for place, bits in enumerate(values.flatten().view(word).tolist()):
        x = (place + 1) * 0x9E3779B97F4A7C15 % MODULUS
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
        total += bits % (1 << 8 * values.element_size()) * ((x ^ x >> 31) | 1)
    return total % MODULUS


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_hash_is_that_of_the_formula(dtype: torch.dtype) -> None:
    values = drawn(5, 7, dtype=dtype)

    assert parameter_hash(values).item() % MODULUS == brute_force(values)


def test_hashes_of_parts_add_up() -> None:
    parameter = drawn(6, 10)
    rows, columns, transposed = parameter[:2], parameter[2:, 3:], parameter[2:, :3].T

    parts = [box_hash(rows, 0, (10, 1)), box_hash(columns, 23, (10, 1)), box_hash(transposed, 20, (1, 10))]

    assert sum(part.item() for part in parts) % MODULUS == parameter_hash(parameter).item() % MODULUS


def test_a_large_part_is_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = drawn(6, 10)
    whole = parameter_hash(parameter)

    monkeypatch.setattr("megarl.sync.shards.hashes._CHUNK", 20)

    assert box_hash(parameter, 0, (10, 1)) == whole


def test_any_flipped_bit_and_swapped_words_are_noticed() -> None:
    parameter = drawn(64)
    hashes = {parameter_hash(parameter).item()}
    for place in range(64):
        for bit in range(16):
            changed = parameter.clone()
            changed.view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
            hashes.add(parameter_hash(changed).item())
    swapped = [parameter.clone() for _ in range(63)]
    for place, values in enumerate(swapped):
        values[[place, place + 1]] = values[[place + 1, place]]
        hashes.add(parameter_hash(values).item())

    assert len(hashes) == 1 + 64 * 16 + len([v for v in swapped if not torch.equal(v, parameter)])


def test_what_was_sent_is_hashed_without_waiting_for_the_device_at_every_box(monkeypatch):
    """Two halves of a parameter of six elements, as two boxes."""
    values = torch.randn(6)
    box = {"offset": np.array([0, 3]), "strides": np.array([[1], [1]]), "parameter": np.array([0, 0])}
    links = SimpleNamespace(lo=np.array([[0], [3]]), hi=np.array([[3], [6]]), **box)
    zeros = np.array([0, 0])
    targets: Any = UserList([0, 1])
    vars(targets).update(server=zeros, rank=zeros, link=np.array([0, 1]), **box)
    stored: Any = SimpleNamespace(parameters=SimpleNamespace(dtypes=["float32"], names=["w"]))
    program: Any = SimpleNamespace(links=links, targets=targets)
    whole = int(parameter_hash(values)) % (1 << 64)
    waits = []
    for name in ("__int__", "item", "tolist"):
        method = getattr(torch.Tensor, name)
        counted = lambda tensor, method=method, name=name: waits.append(name) or method(tensor)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, counted)
    assert sent_hashes(program, [values], [[stored]]) == {"0/0": {"w": whole}}
    assert waits == ["tolist"]
