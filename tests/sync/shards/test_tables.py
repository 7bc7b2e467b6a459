"""The tables of shard-to-shard updates, and their form on the wire."""

from __future__ import annotations

import io

import numpy as np
import pytest

from megarl.sync.shards.boxes import BoxRule, BoxTable, ParameterTable, RankStorage, padded_shape, row_major
from megarl.sync.shards.program import FanTable, LinkTable, MessageTable, RoundTable, TargetTable, TransferProgram
from megarl.sync.shards.table import pack, unpack


def storage() -> RankStorage:
    """A parameter [3, 4]: two rows of tensor 5, and a row of padding."""
    shape = np.array([padded_shape((3, 4))])
    strides = np.repeat(row_major(shape), 2, 0)
    boxes = BoxTable(
        tensor=np.array([5, -1]),
        lo=np.array([[2, 0, 0], [0, 0, 0]]),
        hi=np.array([[4, 4, 1], [1, 4, 1]]),
        parameter=np.zeros(2, int),
        offset=np.array([0, 8]),
        strides=strides,
        rule=np.array([BoxRule.COPY, BoxRule.ZERO]),
    )
    return RankStorage(ParameterTable(np.array(["embed.weight"]), shape, np.array(["bfloat16"])), boxes)


def program() -> TransferProgram:
    """Trainer ranks 0 and 1 each send one box to rank 0 of server 0, which passes it to rank 1."""
    rounds = RoundTable(*(np.array([value]) for value in (0, 0, 0)))
    zeros = np.zeros(2, int)
    messages = MessageTable(zeros, np.arange(2), zeros, zeros, zeros + 32, zeros, np.array([0, 32]))
    box = np.zeros((2, 3), int)
    links = LinkTable(np.arange(2), zeros, zeros + 32, zeros, box, box + np.array([16, 1, 1]), zeros, zeros, box)
    four = np.zeros(4, int)
    targets = TargetTable(np.array([0, 0, 1, 1]), four, np.array([0, 1, 0, 1]), four, four, np.zeros((4, 3), int))
    fans = FanTable(zeros, zeros, zeros, np.arange(2), np.array([0, 64]), zeros + 64)
    return TransferProgram(rounds, messages, links, targets, fans)


def test_a_description_survives_the_wire() -> None:
    sent = storage()

    received = RankStorage.decode(sent.encode())

    assert received.digest == sent.digest
    assert received.boxes.numel.tolist() == [8, 4]


def test_a_process_without_megarl_can_write_a_description() -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **storage().arrays())

    assert RankStorage.decode(file.getvalue()).digest == storage().digest


def test_a_digest_depends_on_every_number() -> None:
    sent = storage()

    other = RankStorage(sent.parameters, sent.boxes.replace(offset=np.array([0, 7])))

    assert other.digest != sent.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes.offset": np.zeros(3, int)}, "column offset of BoxTable"),
        ({"boxes.offset": np.zeros(2)}, "column offset of BoxTable"),
        ({"boxes.parameter": np.array([0, 1])}, "boxes.parameter .* 0 to 1; allowed: 0 to 0"),
        ({"boxes.rule": np.array([0, 9])}, "has an unknown rule"),
    ],
)
def test_a_wrong_description_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankStorage.decode(pack(storage().arrays() | changes))


def test_no_pickle_is_read() -> None:
    file = io.BytesIO()
    np.savez(file, x=np.array([{}], dtype=object))

    with pytest.raises(ValueError, match="allow_pickle"):
        unpack(file.getvalue())


def test_a_rank_keeps_what_it_sends_or_unpacks() -> None:
    whole = TransferProgram.decode(program().encode())

    sent, unpacked = whole.of_sender(1), whole.of_receiver(0, 1)

    assert whole.digest == program().digest
    assert (len(sent.messages), sent.links.message.tolist(), len(sent.fans)) == (1, [0], 0)
    # rank 1 receives no message, and unpacks what rank 0 received
    assert (len(unpacked.messages), unpacked.targets.rank.tolist(), len(unpacked.fans)) == (2, [1, 1], 2)
