"""The loader: full batches, every sample once per epoch, the same batches on any number of ranks and after a resume."""

import contextlib
import itertools
import json
import threading
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megarl.data.batch import Batch
from megarl.data.loader import PromptLoader, rounds
from megarl.system.errors import DataError


class Numbers:
    """Dataset whose samples are (epoch, index)."""

    def __init__(self, size: int, fingerprint: str = "same") -> None:
        self.size, self.fingerprint = size, fingerprint

    def __len__(self) -> int:
        return self.size

    def batch(self, indices, epoch=0) -> Batch:
        return Batch({}, {"at": [[epoch, i] for i in indices]})


def take(loader: PromptLoader, steps: int) -> list[list]:
    return [next(loader)["at"] for _ in range(steps)]


sizes = st.integers(1, 12)


@given(sizes, sizes, st.integers(-3, 3), st.booleans())
def test_batches_are_full_and_each_epoch_holds_each_sample_once(size, batch_size, seed, shuffle):
    batches = take(PromptLoader(Numbers(size), batch_size, seed=seed, shuffle=shuffle), 3 * size)
    assert all(len(batch) == batch_size for batch in batches)
    stream = list(itertools.chain.from_iterable(batches))
    for epoch in range(len(stream) // size):
        part = stream[epoch * size : (epoch + 1) * size]
        assert sorted(part) == [[epoch, i] for i in range(size)]


def dealt(shares):
    """The global batch that was dealt out to the ranks one by one."""
    turns = itertools.zip_longest(*shares)
    return [sample for turn in turns for sample in turn if sample is not None]


@given(sizes, sizes, st.integers(1, 5))
def test_shares_dealt_out_in_turn_are_the_global_batch(size, batch_size, dp):
    whole = take(PromptLoader(Numbers(size), batch_size), 7)
    shares = [take(PromptLoader(Numbers(size), batch_size, rank, dp), 7) for rank in range(dp)]
    assert [dealt(step) for step in zip(*shares, strict=True)] == whole
    counts = [len(share[0]) for share in shares]
    assert max(counts) - min(counts) <= 1


@given(sizes, sizes, st.integers(0, 9), st.integers(1, 4), st.sampled_from([0, 1, 3]))
def test_a_resumed_run_on_other_ranks_sees_the_same_batches(size, batch_size, steps, dp, workers):
    undisturbed = take(PromptLoader(Numbers(size), batch_size, seed=5), steps + 4)
    with contextlib.closing(PromptLoader(Numbers(size), batch_size, seed=5, workers=workers)) as first:
        take(first, steps)
        state = json.loads(json.dumps(first.state_dict()))
    shares = []
    for rank in range(dp):
        other = PromptLoader(Numbers(size), batch_size, rank, dp, seed=0, shuffle=False, workers=workers)
        with contextlib.closing(other) as loader:
            next(loader)  # the batch that is read ahead of it is not of the state
            loader.load_state_dict(state)
            shares.append(take(loader, 4))
    assert [dealt(step) for step in zip(*shares, strict=True)] == undisturbed[steps:]


class Watched(Numbers):
    """A data set that records which samples were read, and cannot read sample `bad`."""

    def __init__(self, size: int, bad: int | None = None) -> None:
        super().__init__(size)
        self.bad, self.read, self.grown = bad, set(), threading.Condition()

    def batch(self, indices, epoch=0) -> Batch:
        if self.bad in indices:
            raise DataError("the file is not an image", where=f"rows.jsonl:{self.bad}")
        with self.grown:
            self.read.update(indices)
            self.grown.notify_all()
        return super().batch(indices, epoch)

    def has_read(self, *indices: int) -> bool:
        with self.grown:
            return self.grown.wait_for(lambda: self.read.issuperset(indices), timeout=60)


def test_threads_read_the_next_batch_while_the_current_one_is_used():
    data = Watched(100)
    with contextlib.closing(PromptLoader(data, 4, shuffle=False, workers=2)) as loader:
        assert take(loader, 1) == [[[0, i] for i in range(4)]]
        assert data.has_read(4, 5, 6, 7)
        assert loader.number == 4, "the state counts what was used"
        loader.prepare([50, 60])
        assert data.has_read(50, 60)
        assert loader.at(60)["at"] == [[0, 60]]


def test_a_sample_that_a_thread_cannot_read_stops_the_run_at_its_own_batch():
    with contextlib.closing(PromptLoader(Watched(12, bad=6), 4, shuffle=False, workers=3)) as loader:
        assert len(next(loader)) == 4
        with pytest.raises(DataError, match=r"rows.jsonl:6: the file is not an image"):
            next(loader)
        assert loader.number == 4


def test_all_ranks_have_the_same_state():
    loaders = [PromptLoader(Numbers(10), 4, rank, 2) for rank in range(2)]
    for loader in loaders:
        take(loader, 3)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    assert (loaders[0].state_dict()["epoch"], loaders[0].state_dict()["position"]) == (1, 2)
    assert loaders[0].epoch == 1.2


def test_order_depends_on_seed_and_epoch():
    one, two = (take(PromptLoader(Numbers(50), 50, seed=seed), 2) for seed in (0, 1))
    orders = [[i for _, i in batch] for batch in (*one, *two)]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_the_order_is_that_of_the_files():
    assert take(PromptLoader(Numbers(3), 2, shuffle=False), 3) == [[[0, 0], [0, 1]], [[0, 2], [1, 0]], [[1, 1], [1, 2]]]


def test_a_batch_larger_than_the_data_meets_samples_again_in_later_epochs():
    batch = next(PromptLoader(Numbers(2), 5))["at"]
    assert Counter(epoch for epoch, _ in batch) == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize("other", [Numbers(3), Numbers(4, "other")])
def test_other_data_is_refused_on_resume(other):
    state = PromptLoader(Numbers(4), 2).state_dict()
    with pytest.raises(
        DataError, match=r"the data is not what the checkpoint was trained on(?s:.*)trainer.resume: never"
    ):
        PromptLoader(other, 2).load_state_dict(state)


@given(sizes, st.none() | sizes, st.integers(1, 4))
def test_validation_rounds_hold_each_sample_once_in_order(size, batch_size, dp):
    shares = [list(rounds(Numbers(size), batch_size, rank, dp)) for rank in range(dp)]
    joined = [i for step in zip(*shares, strict=True) for share in step for _, i in share["at"]]
    assert joined == list(range(size))


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"a loader needs samples, .*got 0 samples"):
        PromptLoader(Numbers(0), 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        PromptLoader(Numbers(1), 1, 2, 2)
