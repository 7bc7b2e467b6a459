"""Memory that is used again, and never while something of it is in use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megarl.data.buffer_pool import BufferPool
from megarl.data.jagged import Jagged

SIZE = 5 << 20


def address(memory: np.ndarray) -> int:
    return memory.ctypes.data


def test_memory_that_nobody_uses_is_used_again() -> None:
    buffer_pool = BufferPool()
    first = buffer_pool.take(SIZE)
    first[:] = 7
    where = address(first)
    del first
    again = buffer_pool.take(SIZE - (1 << 20))
    assert address(again) == where
    assert len(again) == SIZE - (1 << 20)
    assert again[0] == 7, "its pages are there"


VIEWS: list[Callable[[np.ndarray], object]] = [
    lambda memory: memory[3:100],
    lambda memory: memory[:80].view(np.int64).reshape(2, 5)[1:],
    lambda memory: memoryview(memory)[5:7],
    lambda memory: torch.from_numpy(memory).view(torch.float32)[4:9],
    lambda memory: torch.from_numpy(memory[: 1 << 20]).view(torch.int64).view(-1, 4).detach().numpy()[1:],
    lambda memory: torch.nested.nested_tensor_from_jagged(
        Jagged.from_lengths(torch.from_numpy(memory[:6]), [2, 4]).values, offsets=torch.tensor([0, 2, 6])
    ),
]


@pytest.mark.parametrize("view", VIEWS)
def test_the_smallest_view_keeps_all_of_it(view: Callable[[np.ndarray], object]) -> None:
    buffer_pool = BufferPool()
    memory = buffer_pool.take(SIZE)
    held, where = view(memory), address(memory)
    del memory
    gc.collect()
    other = buffer_pool.take(SIZE)
    assert address(other) != where
    assert buffer_pool.used == 2 * len(other)
    del held
    gc.collect()
    assert address(buffer_pool.take(SIZE)) == where


def test_there_is_never_more_of_it_than_was_in_use_at_once() -> None:
    buffer_pool, rng, held, most = BufferPool(), np.random.default_rng(0), list[np.ndarray](), 0
    for _ in range(300):
        if rng.random() < 0.5 and held:
            held.pop(int(rng.integers(len(held))))
        memory = buffer_pool.take(int(rng.integers(4 << 20, 16 << 20)))
        memory[:8] = len(held)
        if rng.random() < 0.8:
            held.append(memory)
        del memory
        most = max(most, buffer_pool.used)
        assert buffer_pool.used + buffer_pool.kept <= most
    assert len({address(one) for one in held}) == len(held)
    assert buffer_pool.used <= 2.3 * sum(map(len, held)) + (128 << 20), "memory is not much larger than what is in it"


def test_what_is_kept_goes_back_when_it_is_asked_for() -> None:
    buffer_pool = BufferPool()
    held = buffer_pool.take(SIZE)
    del held
    buffer_pool.give_back()
    assert (buffer_pool.used, buffer_pool.kept) == (0, 0)


def test_memory_may_come_back_in_another_thread_while_it_is_asked_for() -> None:
    buffer_pool, wrong = BufferPool(), list[int]()

    def work(number: int) -> None:
        for _ in range(200):
            memory = buffer_pool.take(SIZE)
            memory[:64] = number
            memory[-64:] = number
            if {*memory[:64].tolist(), *memory[-64:].tolist()} != {number}:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    buffer_pool.take(SIZE)
    assert buffer_pool.used + buffer_pool.kept <= len(threads) * 2 * SIZE, (
        "a thread has at most the last one and the next"
    )


def test_little_memory_is_the_allocators() -> None:
    assert BufferPool().take(100).base is None
