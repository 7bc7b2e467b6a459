"""The messages between teams: names, fields, and what is refused."""

from __future__ import annotations

import math

import pytest

from megarl.dag import messages
from megarl.dag.messages import EngineAddresses, Message, PartCopied, RunStart, StepIsLast, StepMetrics, Validated
from megarl.system.errors import WorkerError
from megarl.system.metrics import Metrics

KINDS = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)][1:]


def test_a_message_comes_as_it_was_sent():
    metrics = Metrics()
    metrics.mean("val/acc", 5, 8)
    metrics.max("val/loss", 0.1 + 0.2)
    rows = [{"prompt": "1+1=", "response": "2", "answer": None, "score": 1.0}]
    for message in (
        Validated(4, 0.625, metrics.to_json(), rows),
        PartCopied("critic", 4, [2, 1], {"tp": 1}, {"critic": 7}, {"critic": 32}, 10**12),
        EngineAddresses("actor", [[["127.0.0.1", 4711]]]),
        RunStart(None, None, "model", None),
    ):
        assert type(message).decode(message.encode()) == message
    assert Metrics.from_json(Validated.decode(Validated(4, 1.0, metrics.to_json(), []).encode()).metrics).result() == (
        metrics.result()
    )
    assert math.isnan(Validated.decode(Validated(4, math.nan, {}, []).encode()).accuracy)


def test_its_name_is_its_topic_and_its_keys():
    assert StepMetrics("critic", 7, {}).name == StepMetrics.name_of("critic", 7) == "metrics/critic/7"
    with pytest.raises(AssertionError, match="StepMetrics has 2 keys"):
        StepMetrics.name_of(7)


def test_no_two_kinds_have_one_name():
    assert len(KINDS) > 15
    assert len({(kind.topic, kind.keys) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"step": 7}', "last"),
        ('{"step": 7, "last": "yes"}', "last"),
        ('{"step": 7, "last": true, "early": true}', "early"),
        ('{"step": "7", "last": true}', "step"),
    ],
    ids=["missing", "another type", "unknown", "a key of another type"],
)
def test_wrong_fields_are_an_error_that_names_them(text, field):
    with pytest.raises(WorkerError, match=rf"the message StepIsLast of another team has wrong fields: {field};"):
        StepIsLast.decode(text)
