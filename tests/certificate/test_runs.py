"""Runs that sections start: what is told of one that failed."""

from __future__ import annotations

import pytest

from megarl.certificate.runs import reason_of
from megarl.system.errors import WorkerError

COMMAND = "python -m megarl train grpo_quickstart ended with exit code 1:"
IDLE = "megarl: rank 0 failed in phase idle at step 0: ModuleNotFoundError: No module named 'xxhash'"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([IDLE, "to go on: megarl train --resume " + "x" * 400], IDLE),
        (["megarl: rank 0: first", IDLE, "megarl: warning: the folder is kept"], IDLE),
        (
            ["megarl: no such recipe", "  found: grpo", "  fix: name one", "bye"],
            "megarl: no such recipe; found: grpo; fix: name one",
        ),
    ],
    ids=["among other lines", "the last one", "with its details"],
)
def test_the_error_of_a_failed_run_is_told(said, reason):
    assert reason_of(WorkerError("\n".join([COMMAND, *said]))) == reason


def test_a_run_that_names_no_error_is_told_by_its_last_words():
    found = reason_of(WorkerError(f"{COMMAND}\n{'x' * 400}Killed"))
    assert len(found) == 300
    assert found.endswith("xKilled")
