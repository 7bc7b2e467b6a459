"""A receiver with a fault.

FaultyReceiver("die:3")      dies at its third bucket
               "refuse:3"    refuses it with success=false under HTTP 200
               "hang:3"      does not answer
               "open:0"      was left with an open session by a dead trainer
               "mute:0"      does not answer when a group is to be made
               "killed:3"    is killed as it begins to receive its third round of an update from shard to shard
               "stopped:3"   is stopped there and never goes on
               "away:3"      runs on another machine, and is killed as it begins to gather its third stripes
               "absent:0"    answers and does not come to the group
               "from:DIR"    no fault: it was started with the weights in DIR and can say so
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

from megarl.benchmarks.sync.receiver import Receiver, Refused, loader_module


def end_in_round(number: int, kind: signal.Signals, step: str = "_start") -> None:
    """Send this process `kind` when `step` of its round `number` is to begin."""
    runner, left = loader_module("megarl_shards").exchange.RoundRunner, [number]
    start = getattr(runner, step)

    def counting(self: Any, now: Any, *args: Any) -> list:
        left[0] -= step == "_start" or now.stripe is not None
        if left[0] == 0:
            os.kill(os.getpid(), kind)
        return start(self, now, *args)

    setattr(runner, step, counting)


def end_in_copy(number: int, kind: signal.Signals) -> None:
    """Send this process `kind` when it is to copy its round `number` from the buffer of the trainer rank on its GPU."""
    handover, left = loader_module("megarl_shards").handover, [number]
    wait_for = handover.wait_for

    def counting(*args: Any) -> str | None:
        why = wait_for(*args)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), kind)
        return why

    handover.wait_for = counting


class FaultyReceiver(Receiver):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.kind, self.value = fault.split(":", 1)
        self.left = int(self.value) if self.value.isdigit() else 0
        self.open = self.kind == "open"
        if self.kind == "from":
            self.do_update_weights_from_disk(self.value, "auto", False)

        if self.kind in ("killed", "stopped"):
            kind = signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP
            end_in_round(self.left, kind)
            end_in_copy(self.left, kind)
        if self.kind == "away":
            socket.gethostname = lambda: "another machine"
            end_in_round(self.left, signal.SIGKILL, "_start_gather")

    def handle(self, path: str, body: dict) -> dict:
        if path.startswith("/update_weights_from"):
            self.left -= 1
            if self.left == 0:
                if self.kind == "die":
                    os._exit(1)
                if self.kind == "refuse":
                    raise Refused("no memory left")
                if self.kind == "hang":
                    time.sleep(3600)
        if path == "/init_weights_update_group" and self.kind in ("mute", "absent"):
            time.sleep(3600 if self.kind == "mute" else 0)
            return {"success": True, "message": ""}
        return super().handle(path, body)

    def do_server_info(self) -> dict[str, Any]:
        """What it was started with."""
        model = {"model_path": self.value, "load_format": "auto"} if self.kind == "from" else {"load_format": "dummy"}
        return super().do_server_info() | {"model_path": "", "weight_version": "default"} | model
