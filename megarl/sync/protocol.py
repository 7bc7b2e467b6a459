"""The steps that bring one receiver from one weight version to the next.

           pause       begin       buckets ...      end         tag          flush        resume
    SERVING ---> PAUSED ---> OPEN ----------> OPEN ---> LOADED ---> TAGGED ---> FLUSHED ---> SERVING
                    |          |                |          |           |           |
                    '----------'----------------'----------'-----------'-----------'--> FAILED
                                    the receiver refuses, answers too late, or is gone

After a failed step no further step runs, so the receiver stays paused and generates nothing with half-updated weights.
It has a known version again after a complete synchronisation, which can start from any state of the receiver, or when
its engine loads weights that it can read without the trainer (SGLang's servers: rollout/sglang/keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.sync.receiver import PauseMode, Receiver, UpdateStep
from megarl.system.errors import ServerError


@dataclass(frozen=True)
class ReceiverUpdate:
    """One weight update of one receiver: call `open`, send all buckets, then call `load` and `reopen`.

    Raises:
        ServerError: from every method, if its step failed; then call no further method.
    """

    receiver: Receiver
    version: str  # name of the new version (`version_tag`)
    mode: PauseMode
    session: bool  # whether tensors come in buckets between begin and end; False: the receiver loads them in one call
    step: UpdateStep  # name in errors, and deadline, of every step of the update

    def open(self) -> None:
        """Pause generation, and prepare the receiver to get tensors."""
        self.receiver.pause(self.mode, self.step)
        if self.session:
            self.receiver.loading(self.version, self.step)
            self.receiver.begin(self.step)

    def load(self, commit: Callable[[Receiver], None]) -> None:
        """Complete the new weights with `commit`, set their version's name, and check that the receiver returns it."""
        self.receiver.loading(self.version, self.step)
        commit(self.receiver)
        if self.session:
            self.receiver.end(self.step)
        self.receiver.set_version(self.version, self.step)
        reported = self.receiver.held_version(self.step)
        if reported != self.version:
            raise failure(self.receiver, self.step.phase, f"the server reports version {reported!r}")

    def reopen(self, folder: Path | None = None) -> None:
        """Drop the cache of the old weights and resume generation. `folder`: a folder with the new weights, if any."""
        self.receiver.flush(self.mode, self.step)
        self.receiver.resume(self.step)
        self.receiver.done(self.version, folder)


def failure(receiver: Receiver, phase: str, reason: str) -> ServerError:
    """Return the error for a receiver that failed in `phase` of its weight update."""
    return ServerError(receiver.name, receiver.url, phase, reason)


def holds_last_version(receiver: Receiver, run: str, deadline_s: float) -> bool:
    """Return whether the receiver reports the version that `run` sent it last; False if it does not answer.

    It reports a different version if it restarted, or if another trainer has sent weights since.
    """
    if receiver.version is None:
        return False
    try:
        return receiver.held_version(UpdateStep("its version", deadline_s)) == version_tag(receiver.version, run)
    except ServerError:
        return False


def version_tag(number: int, run: str) -> str:
    """Return the tag of version `number` of a run; it names the run because every run counts from 0."""
    return f"{number}@{run}"


def read_tag(tag: object) -> tuple[int, str]:
    """Return the version and run of a tag.

    Raises:
        ValueError: no run has sent these weights.

    >>> read_tag("4@1f")
    (4, '1f')
    """
    number, _, run = tag.partition("@") if isinstance(tag, str) else ("", "", "")
    if not (number.isdecimal() and run):
        raise ValueError(
            f"the server's weight version {tag!r} was not sent by a run: the server has restarted, or another program "
            "has loaded its weights; let only this run load weights into its servers"
        )
    return int(number), run
