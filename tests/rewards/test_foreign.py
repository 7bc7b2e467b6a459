"""Code in the process of a reward writes what it likes into every descriptor that it finds there."""

import contextlib
import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from megarl.config.data import RewardConfig
from megarl.rewards.pool_process import _DEPTH, _HEADER
from megarl.rewards.runner import RewardRunner
from megarl.rewards.scoring import (
    MAX_EXTRACTED,
    MAX_NAME,
    MAX_PARTS,
    ScoringFailure,
    _checked,
    outcome_of,
    plain_outcome,
    read_reward,
)
from megarl.system.errors import RewardError
from megarl.system.plain import Malformed, PlainInbox, pack
from tests.hostile import framed, messages

CODE = """
import sys
sys.path.insert(0, {root!r})
from tests.hostile import attack

def run_it(sample):
    if sample["response"] != "fine":
        attack({marker!r}, sample["response"])
    return 1
"""
KINDS = sorted(messages(""))


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def file(tmp_path, marker):
    path = tmp_path / "runs_code.py"
    path.write_text(CODE.format(root=str(Path(__file__).parents[2]), marker=str(marker)))
    return path


def score(file, responses, **more):
    batch = [{"uid": f"u{i}", "prompt": "", "response": r, "answer": ""} for i, r in enumerate(responses)]
    cfg = RewardConfig(name=f"{file}:run_it", mode="sequential", workers=1, sample_timeout_s=3, **more)
    with closing(RewardRunner(cfg)) as runner:
        return runner.result(runner.submit(batch))


def test_what_is_no_message_fails_its_sample_and_executes_nothing(file, marker):
    kinds = ["pickle", "pickle of multiprocessing", "oversized", "deep", "truncated", "garbage", "idle too early"]
    responses = ["fine", *(response for kind in kinds for response in (kind, "fine"))]
    results = score(file, responses, on_error=-1)
    assert [r["overall"] for r in results] == [1.0, *[-1.0, 1.0] * len(kinds)]
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["itself", "itself and the next"])
def test_a_sample_that_answers_for_its_process_is_the_one_to_blame(file, marker, kind):
    results = score(file, ["fine"] * 4 + [kind, "fine", "fine", "fine"], on_error=-1)  # chunks of two samples
    assert [r["overall"] for r in results] == [1.0] * 4 + [-1.0, 1.0, 1.0, 1.0]


def test_the_error_names_the_sample_and_what_was_written(file, marker):
    with pytest.raises(RewardError) as caught:
        score(file, ["fine", "oversized", "fine"])
    for part in (
        "sample 1 of 3 lost its reward process, which wrote an invalid message",
        "4294967280 bytes",
        "'oversized'",
    ):
        assert part in str(caught.value)
    assert not marker.exists()


def test_a_file_that_writes_while_it_is_imported_is_named(file, marker):
    file.write_text(file.read_text() + f"\nattack({str(marker)!r}, 'pickle')\n")
    with pytest.raises(RewardError, match=r"runs_code\.py:run_it' wrote an invalid message(?s:.*)while it started"):
        score(file, ["fine"])
    assert not marker.exists()


def inbox():
    return PlainInbox(_HEADER, 0, _DEPTH)


def read(data):
    """What a pool makes of bytes: outcomes, or Malformed."""
    held = inbox()
    held.feed(data)
    while (message := held.take()) is not None:
        yield outcome_of(message[0], read_reward)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind not in ("truncated", "text", "another sample", "itself", "itself and the next")],
)
def test_each_kind_is_refused_by_whoever_reads_it(kind, marker):
    with pytest.raises(Malformed):
        list(read(messages(str(marker))[kind]))
    assert not marker.exists()


def test_changed_messages_are_refused_or_are_results():
    dice = random.Random(7)
    good = pack({"kind": "scored", "index": 0, "result": {"overall": 1.0, "acc": 0.5, "extracted": "42"}})
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        with contextlib.suppress(Malformed):
            for outcome in read(bytes(data)):
                assert isinstance(outcome, ScoringFailure) or json.dumps(outcome, allow_nan=False)


def test_results_go_over_as_they_are():
    result = {"overall": 0.1 + 0.2, "tiny": 5e-324, "negative": -0.0, "extracted": "3\u00bd \U0001f600"}
    for outcome in (result, ScoringFailure("raised E", "file.py:3", True)):
        held = inbox()
        held.feed(pack({"kind": "scored", "index": 0, **plain_outcome(outcome)}))
        message, _ = held.take()
        assert repr(outcome_of(message, read_reward)) == repr(outcome)


def test_texts_have_limits_in_every_process():
    long = "x" * 600_000
    extracted = _checked({"overall": 1, "extracted": long})["extracted"]
    assert len(extracted) == MAX_EXTRACTED
    assert extracted.endswith("... (of 600000 characters)")
    failure = outcome_of(plain_outcome(ScoringFailure(long, long)), read_reward)
    assert len(failure.reason) <= 2000
    assert len(failure.where) <= 1000
    for value in ({"overall": 1, "y" * (MAX_NAME + 1): 1}, {"overall": 1, **{str(i): 1 for i in range(MAX_PARTS)}}):
        with pytest.raises(Exception, match="allowed"):
            _checked(value)


def test_limits_are_of_whole_messages():
    held = PlainInbox(100, 10, 3)
    held.feed(framed(b'{"a": [[1]]}', b"0123456789"))
    assert held.take() == ({"a": [[1]]}, b"0123456789")
    for data in (framed(b'{"a": [[[1]]]}'), framed(b"{" + b" " * 99 + b"}"), framed(b"{}", b"01234567890")):
        held = PlainInbox(100, 10, 3)
        held.feed(data)
        with pytest.raises(Malformed):
            held.take()
