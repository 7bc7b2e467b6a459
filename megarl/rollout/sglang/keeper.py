"""A process that outlives a trainer and brings external servers back when that dies in the middle of an update.

    python -m megarl.rollout.sglang.keeper DEADLINE_S        (its output: RUN/sync/keeper.log)

    trainer                        pipe                             keeper                 server
    before `pause`                 open   url, API key       --->   remembers it
    before tensors may be loaded   loading   versions        --->
    after `resume`                 done   folder it holds    --->   forgets it
    closes, or is killed           end of file               --->   nothing open: ends
                                                                    else, per server  ---> old weights, go on

Servers that the run started itself end with it; those of `rollout.sglang.urls` would stay paused, with a part of the
new weights. A server that was only paused, and got all of the version before, goes on. Any other may hold tensors of
two versions and reads weights that it can reach by itself: the folder of the last version it got as a whole (`disk`),
or what it was started with. They get the name they had then. When neither can be read it stays paused, and the log
says so.

While it works the server's version is called `RESTORING...`; the next trainer waits for that to end (receiver.py).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rollout.sglang.api import ServerApi
from megarl.system.errors import ServerError

RESTORING = "being restored"  # how the version begins while a keeper works
MIXED = "mixed weights"  # the version of a server that could not be brought back
_PHASE = "after the trainer's death"
_SETTLE_S = 1.0  # what a killed trainer sent last has reached the server by then
_END_S = 5.0


@dataclass(frozen=True)
class Weights:
    """The weights that a server can load by itself, and the version's name."""

    path: str
    load_format: str
    version: str


class Keeper:
    """The trainer's end. Calls may come from several threads.

    Args:
        deadline_s: deadline in seconds of each step that brings a server back.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._log = folder / "keeper.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rollout.sglang.keeper", str(deadline_s)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # what kills the trainer's process group must not reach it
            )

    def open(self, api: ServerApi) -> None:
        """Begin an update of this server."""
        self._tell({"event": "open", "url": api.url, "api_key": api.api_key, "name": api.name})

    def loading(self, api: ServerApi, version: str) -> None:
        """Note that from now on the server may hold tensors of both its old version and `version`.

        Raises:
            ServerError: it does not say which version it is on.
        """
        self._tell({"event": "loading", "url": api.url, "versions": [_version_of(api, self._deadline_s), version]})

    def done(self, api: ServerApi, version: str, folder: Path | None) -> None:
        """Note that the server serves `version`; `folder`: where it can read all of it again, if anywhere."""
        where = None if folder is None else str(folder)
        self._tell({"event": "done", "url": api.url, "version": version, "folder": where})

    def close(self) -> None:
        """End with the trainer. Servers whose update was not done are brought back."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is at work, and needs nobody for that
            self._process.wait(_END_S)

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError(
                message.get("name", "server"), message["url"], "update", f"the keeper ended; see {self._log}"
            ) from None


class KeeperState:
    """The keeper's state: the messages about each server.

    Attributes:
        opened: servers whose update is not done, by URL.
        versions: tag of a server that may hold parts, unless somebody else has taken it since.
        whole: those that hold all of a version that this trainer sent. The state of others is not known.
        folders: folders from which servers can read that version.
    """

    def __init__(self) -> None:
        self.opened: dict[str, ServerApi] = {}
        self.versions: dict[str, list[str]] = {}
        self.whole: set[str] = set()
        self.folders: dict[str, Weights] = {}

    def hear(self, lines: Iterable[str]) -> None:
        """Take messages until the trainer closes the pipe."""
        for line in lines:
            message = json.loads(line)
            event, url = message["event"], message["url"]
            if event == "open":
                self.opened[url] = ServerApi(url, message["api_key"], message["name"])
                self.versions.pop(url, None)
            elif event == "loading":
                self.whole.discard(url)
                self.versions[url] = message["versions"]
            else:
                self.opened.pop(url, None)
                self.whole.add(url)
                self.folders.pop(url, None)
                if message["folder"] is not None:
                    self.folders[url] = Weights(message["folder"], "safetensors", message["version"])

    def bring_back(self, deadline_s: float) -> None:
        """Bring back every server whose update was not done, side by side."""
        if not self.opened:
            return
        _say("the trainer ended in the middle of an update")
        time.sleep(_SETTLE_S)
        with ThreadPoolExecutor(len(self.opened)) as pool:
            list(pool.map(lambda api: self._bring_back(api, deadline_s), self.opened.values()))

    def _bring_back(self, api: ServerApi, deadline_s: float) -> None:
        recovery = Recovery(api, deadline_s)
        try:
            found = _version_of(api, deadline_s)
            if found not in self.versions.get(api.url, [found]):
                recovery.say(f"another trainer has it ({found!r})")
            elif api.url in self.whole:
                recovery.resume()
            else:
                recovery.restore(self.folders.get(api.url))
        except ServerError as error:
            recovery.say(f"STAYS PAUSED until a trainer sends it weights: {error}")
            with contextlib.suppress(ServerError):
                recovery.name(MIXED)


class Recovery:
    """The recovery of one server."""

    def __init__(self, api: ServerApi, deadline_s: float) -> None:
        self.api, self.deadline_s = api, deadline_s
        self._claim = f"{RESTORING} {secrets.token_hex(4)}"

    def say(self, text: str) -> None:
        """Write into the log."""
        _say(f"{self.api.name} at {self.api.url}: {text}")

    def name(self, version: str) -> None:
        """Set the name of the weight version that the server holds."""
        self._call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def resume(self) -> None:
        """Go on with the weights that are there."""
        self._call("/continue_generation", {"torch_empty_cache": False})
        self.say("was only paused: it goes on")

    def restore(self, held: Weights | None) -> None:
        """Close the session, load weights of one version, name them, drop the cache, go on.

        Pausing again puts requests back that an `in_place` pause left running: with them the cache cannot be dropped.

        Raises:
            ServerError: the server is gone or too slow, or no weights could be loaded.
        """
        self._call("/pause_generation", {"mode": "retract"})
        self.name(self._claim)
        try:
            self._call("/end_weight_update", {})
        except ServerError as error:
            if error.status is None:  # any answer will do: an update that it refuses to end is not open
                raise
        weights = self._reload(held)
        found = _version_of(self.api, self.deadline_s)
        if found != self._claim:
            self.say(f"another trainer has it ({found!r})")
            return
        self.name(weights.version)
        self._call("/flush_cache", {})
        self._call("/continue_generation", {"torch_empty_cache": False})
        self.say(f"serves {weights.path} again, under version {weights.version!r}")

    def _reload(self, held: Weights | None) -> Weights:
        """Load the first weights that can be."""
        reasons = []
        for weights in ([held] if held else []) + self._started_with():
            payload = {"model_path": weights.path, "load_format": weights.load_format, "flush_cache": False}
            try:
                self._call("/update_weights_from_disk", payload)
            except ServerError as error:
                reasons.append(error.reason)
                self.say(f"cannot read {weights.path}: {error.reason}")
            else:
                return weights
        why = "; ".join(reasons) or "it was started with random weights (load format dummy), so there are none to read"
        raise ServerError(self.api.name, self.api.url, _PHASE, why)

    def _started_with(self) -> list[Weights]:
        """Return the weights on its command line; updates do not change what /server_info says of them."""
        info = self._call("/server_info", None, "GET")
        if info.get("load_format") == "dummy":
            return []
        return [Weights(info["model_path"], info.get("load_format") or "auto", info.get("weight_version") or "default")]

    def _call(self, path: str, payload: dict[str, Any] | None, method: str = "POST") -> dict[str, Any]:
        """Make one call, with its deadline."""
        return self.api.call(path, payload, deadline_s=self.deadline_s, phase=_PHASE, method=method)


def _version_of(api: ServerApi, deadline_s: float) -> str:
    return str(api.call("/model_info", None, deadline_s=deadline_s, phase=_PHASE, method="GET").get("weight_version"))


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    watch = KeeperState()
    watch.hear(sys.stdin)
    watch.bring_back(float(sys.argv[1]))
