"""Packed streams and their shares under context parallelism."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.packing import cp_split, pack_stream

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4]), multiple=st.sampled_from([1, 2, 3, 4]))
def test_every_token_is_held_by_exactly_one_rank(lengths, cp, multiple):
    streams = [pack_stream(lengths, cp_size=cp, cp_rank=r, multiple=multiple) for r in range(cp)]
    held = torch.cat([s.index for s in streams])
    assert sorted(held[held >= 0].tolist()) == list(range(sum(lengths)))
    assert len({len(s.index) for s in streams}) == 1
    assert len(streams[0].index) % multiple == 0


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 4]))
def test_positions_count_from_the_start_of_each_sequence(lengths, cp):
    expected = torch.cat([torch.arange(n) for n in lengths])
    for rank in range(cp):
        stream = pack_stream(lengths, cp_size=cp, cp_rank=rank)
        real = stream.index >= 0
        assert torch.equal(stream.position_ids[0, real], expected[stream.index[real]])


def test_nothing_is_padded_without_context_parallelism():
    stream = pack_stream([3, 5])
    assert stream.index.tolist() == list(range(8))
    assert stream.params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert stream.params.max_seqlen_q == 5


def test_padding_is_filled():
    stream = pack_stream([3], multiple=4)
    assert stream.input_ids(torch.tensor([7, 8, 9])).tolist() == [[7, 8, 9, 0]]
    assert stream.take(torch.tensor([1.0, 2.0, 3.0]), fill=-1.0).tolist() == [1.0, 2.0, 3.0, -1.0]


def test_zigzag_gives_each_rank_its_two_chunks():
    assert cp_split([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert cp_split([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one"):
        pack_stream(lengths)


@pytest.mark.parametrize(("open_from", "cp"), [([0], 1), ([0, 0, 0], 1), ([0, 1], 2)])
def test_places_that_do_not_fit_are_refused(open_from, cp):
    with pytest.raises(ValueError, match="open_from needs one number"):
        pack_stream([4, 4], cp_size=cp, open_from=open_from)


def test_what_fills_a_stream_up_is_open_from_its_beginning():
    """So that a stream that is open throughout stays so."""
    packed = pack_stream([3, 2], multiple=4, open_from=[0, 0]).params
    assert packed.lengths == (3, 2, 3)
    assert packed.open_from == (0, 0, 0)
