"""Processes of pytest-xdist: where they come from, and what they send."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from megarl.system.processes import has_nvidia_device
from tests import workers


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="this process is not one of several")
@pytest.mark.skipif(has_nvidia_device(), reason="they are not forked where there is a GPU")
def test_a_process_is_forked_with_its_imports_done() -> None:
    assert any("multiprocessing.forkserver" in word for word in psutil.Process().parent().cmdline())


@pytest.mark.parametrize(
    ("outcomes", "sent"),
    [
        ({"setup": True, "call": True, "teardown": True}, ["call"]),
        ({"setup": True, "call": False, "teardown": True}, ["call"]),
        ({"setup": False, "teardown": True}, ["setup"]),
        ({"setup": True, "call": True, "teardown": False}, ["call", "teardown"]),
    ],
)
def test_of_a_test_its_call_is_sent_and_what_fails_before_and_after_it(
    outcomes: dict[str, bool], sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [SimpleNamespace(when=when, passed=passed) for when, passed in outcomes.items()]
    monkeypatch.setattr(workers, "runtestprotocol", lambda item, log, nextitem: reports)
    calls: list[str] = []
    hooks = SimpleNamespace(
        pytest_runtest_logreport=lambda report: calls.append(report.when),
        pytest_runtest_logfinish=lambda nodeid, location: calls.append(f"end of {nodeid}"),
    )
    item = SimpleNamespace(ihook=hooks, nodeid="a test", location=("file.py", 1, "a test"))

    assert workers.FewReports().pytest_runtest_protocol(item, None)
    assert calls == [*sent, "end of a test"]
