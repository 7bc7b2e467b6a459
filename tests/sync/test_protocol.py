"""The steps of one receiver's update, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.sync.protocol import ReceiverUpdate, holds_last_version
from megarl.sync.receiver import UpdateStep
from megarl.system.errors import ServerError

STEP = UpdateStep("update to version 3@run", 1.0)


class Recorder:
    """A receiver that lists the calls it gets, and reports a version."""

    name, url = "server 0", "http://server"

    def __init__(self, reports: str = "3@run", version: int | None = None) -> None:
        self.calls: list[str] = []
        self._reports, self.version = reports, version

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> str:
            self.calls.append(name)
            return self._reports

        return call


def update_of(receiver: Recorder, *, session: bool) -> ReceiverUpdate:
    return ReceiverUpdate(receiver, "3@run", "abort", session, STEP)  # type: ignore[arg-type]


@pytest.mark.parametrize("session", [True, False])
def test_a_receiver_is_open_only_in_a_session_and_generates_after_all_steps(session: bool) -> None:
    receiver = Recorder()
    update = update_of(receiver, session=session)
    update.open()
    update.load(lambda receiver: receiver.read_folder())  # type: ignore[call-arg]
    update.reopen(Path("v3"))
    opened, ended = (["loading", "begin"], ["end"]) if session else ([], [])
    loaded = ["loading", "read_folder", *ended, "set_version", "held_version"]
    assert receiver.calls == ["pause", *opened, *loaded, "flush", "resume", "done"]


def test_a_receiver_that_reports_another_version_stays_paused() -> None:
    receiver = Recorder(reports="2@run")
    update = update_of(receiver, session=True)
    update.open()
    with pytest.raises(ServerError, match=r"server 0 .*update to version 3@run: the server reports version '2@run'"):
        update.load(lambda receiver: None)
    assert "resume" not in receiver.calls


@pytest.mark.parametrize(
    ("reports", "version", "holds"), [("2@run", 2, True), ("2@other", 2, False), ("2@run", None, False)]
)
def test_a_receiver_holds_what_this_run_sent_it_last(reports: str, version: int | None, holds: bool) -> None:
    assert holds_last_version(Recorder(reports, version), "run", 1.0) is holds  # type: ignore[arg-type]
