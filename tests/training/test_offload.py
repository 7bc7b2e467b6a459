"""What a GPU does, on the CPU: storages are emptied and filled again under tensors that stay where they are."""

import pytest
import torch

from megarl.system.errors import UserError
from megarl.training import host_memory
from megarl.training.host_memory import HostArena
from megarl.training.offload import OffloadedPart, kept_in, unkept


def test_kept_storages_come_back_with_their_contents_under_every_view():
    whole = torch.arange(12.0)
    view = whole[4:8].view(2, 2)
    offloaded = OffloadedPart(kept_in(HostArena(), [whole]))
    assert whole.untyped_storage().nbytes() == 0
    assert offloaded.nbytes == 48
    offloaded.restore()
    assert torch.equal(whole, torch.arange(12.0))
    assert torch.equal(view, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert offloaded.nbytes == 0


def test_other_storages_come_back_as_zeros():
    whole = torch.ones(5, dtype=torch.bfloat16)
    view = whole[1:]
    OffloadedPart(unkept([whole])).restore()
    assert view.tolist() == [0.0] * 4


class Runtime:
    """CUDA's calls that lock memory: `locked` is what it has of it, in bytes by address."""

    def __init__(self, most: int) -> None:
        self.locked: dict[int, int] = {}
        self.most, self.calls = most, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if sum(self.locked.values()) + nbytes > self.most:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(20_000)
    monkeypatch.setattr(host_memory, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_copies_lie_in_one_block_that_is_no_larger_and_is_kept(runtime):
    arena = HostArena()
    sizes = [4097, 0, 513, 2]
    for _ in range(3):
        copies = arena.take(sizes)
        assert list(runtime.locked.values()) == [arena.nbytes] == [4608 + 1024 + 512]
        assert runtime.calls == 1
    for number, copy in enumerate(copies):
        copy.fill_(number)
    assert [copy.nbytes for copy in copies] == sizes
    assert all((copy == number).all() for number, copy in enumerate(copies))
    assert arena.take([100])[0].data_ptr() == copies[0].data_ptr()


def test_a_larger_block_takes_the_place_of_the_smaller(runtime):
    arena = HostArena()
    arena.take([9000])
    arena.take([12_000])  # both do not fit
    assert list(runtime.locked.values()) == [12_288]
    arena.close()
    assert runtime.locked == {}
    arena.take([512])
    del arena
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_an_error_that_says_how_much(runtime):
    with pytest.raises(UserError, match=r"cannot lock 0.0 GB of host memory.*error 2"):
        HostArena().take([30_000])
