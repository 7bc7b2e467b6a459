"""A process that outlives a trainer and restores external servers if the trainer dies during an update.

    python -m megarl.rollout.sglang.keeper DEADLINE_S        (its output: RUN/sync/keeper.log)

    trainer                        pipe                             keeper                   server
    before `pause`                 open      url, API key    --->   stores the server
    before tensors may be loaded   loading   versions        --->   stores the versions
    after `resume`                 done      folder          --->   drops the server
    closes, or is killed           end of file               --->   no server open: ends
                                                                    else, per server   --->  old weights, resume

Servers that the run started end with it. Servers of `rollout.sglang.urls` would stay paused, with a part of the new
weights. A server that was only paused, and held all of the version before, is resumed. Any other server may hold
tensors of two versions. It reads weights from disk: the folder of its last complete version (transport `disk`), or the
weights that it was started with, and gets the version name of these weights. If it can read neither, it stays paused,
and the log contains the reason.

While the keeper restores a server, the server's version is `RESTORING...`; the next trainer waits until that has
changed (receiver.py).
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

# beginning of the version that a server reports while it is restored after its trainer's death
RESTORING = "being restored"
MIXED = "mixed weights"  # shown as the version of a server that could not be restored
_PHASE = "after the trainer's death"
_SETTLE_S = 1.0  # seconds after which the last request of a killed trainer has reached the server
_END_S = 5.0


@dataclass(frozen=True)
class Weights:
    """Weights that a server can read from disk, and the name of their version."""

    path: str
    load_format: str
    version: str


class Keeper:
    """Starts the keeper process for the trainer and sends messages to it. Methods may be called from any thread.

    Args:
        folder: folder of the log, keeper.log.
        deadline_s: deadline in seconds of each call that restores a server.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._log = folder / "keeper.log"
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rollout.sglang.keeper", str(deadline_s)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a signal to the trainer's process group must not reach the keeper process
            )
        assert process.stdin is not None
        self._pipe = process.stdin

    def open(self, api: ServerApi) -> None:
        """Note that an update of this server begins."""
        self._send({"event": "open", "url": api.url, "api_key": api.api_key, "name": api.name})

    def loading(self, api: ServerApi, version: str) -> None:
        """Note that from now on the server may hold tensors of both its old version and `version`.

        Raises:
            ServerError: the server does not answer the query for its old version.
        """
        self._send({"event": "loading", "url": api.url, "versions": [_version_of(api, self._deadline_s), version]})

    def done(self, api: ServerApi, version: str, folder: Path | None) -> None:
        """Note that the server serves `version`, which it can read from `folder`; None: it is in no folder."""
        path = None if folder is None else str(folder)
        self._send({"event": "done", "url": api.url, "version": version, "folder": path})

    def close(self) -> None:
        """Close the pipe. The keeper process then restores the servers whose update is not done, and ends."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        # A keeper process that needs longer to restore servers is left running: it does not need the trainer.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._pipe.write(json.dumps(message).encode() + b"\n")
                self._pipe.flush()
        except BrokenPipeError:
            reason = f"the keeper ended; see {self._log}"
            raise ServerError(message.get("name", "server"), message["url"], "update", reason) from None


class KeeperState:
    """The state of each server, from the trainer's messages. All attributes are dicts or sets of URLs.

    Attributes:
        opened: servers whose update is not done.
        versions: the old and the new version of a server that may hold tensors of both. A server with another version
            now belongs to another trainer.
        whole: servers that hold all tensors of a version that this trainer sent; other servers' state is not known.
        folders: the weights in the last complete version, for servers that can read them from a folder.
    """

    def __init__(self) -> None:
        self.opened: dict[str, ServerApi] = {}
        self.versions: dict[str, list[str]] = {}
        self.whole: set[str] = set()
        self.folders: dict[str, Weights] = {}

    def read_events(self, lines: Iterable[str]) -> None:
        """Read messages until the trainer closes the pipe."""
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

    def restore_servers(self, deadline_s: float) -> None:
        """Restore every server whose weight update was not completed, all in parallel."""
        if not self.opened:
            return
        _log("the trainer ended in the middle of an update")
        time.sleep(_SETTLE_S)
        with ThreadPoolExecutor(len(self.opened)) as pool:
            list(pool.map(lambda api: self._restore(api, deadline_s), self.opened.values()))

    def _restore(self, api: ServerApi, deadline_s: float) -> None:
        recovery = Recovery(api, deadline_s)
        try:
            version = _version_of(api, deadline_s)
            if version not in self.versions.get(api.url, [version]):
                recovery.log(f"another trainer has sent it weights ({version!r}); nothing is restored")
            elif api.url in self.whole:
                recovery.resume()
            else:
                recovery.restore(self.folders.get(api.url))
        except ServerError as error:
            recovery.log(f"STAYS PAUSED until a trainer sends it weights: {error}")
            with contextlib.suppress(ServerError):
                recovery.name(MIXED)


class Recovery:
    """Restores one server whose trainer has died during a weight update."""

    def __init__(self, api: ServerApi, deadline_s: float) -> None:
        self.api, self.deadline_s = api, deadline_s
        self._claim = f"{RESTORING} {secrets.token_hex(4)}"

    def log(self, text: str) -> None:
        """Write a line about the server into the log."""
        _log(f"{self.api.name} at {self.api.url}: {text}")

    def name(self, version: str) -> None:
        """Set the name of the weight version that the server holds."""
        self._call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def resume(self) -> None:
        """Resume generation with the weights that the server holds."""
        self._call("/continue_generation", {"torch_empty_cache": False})
        self.log("it was only paused, and generates again")

    def restore(self, weights: Weights | None) -> None:
        """End the open update, load weights of one version, set the version's name, drop the cache, and resume.

        The server is paused again first, in a way that returns running requests to its queue: the cache cannot be
        dropped while they run, and the update may have paused it `in_place`.

        Args:
            weights: folder of the server's last complete weights; None: there is none, so it loads those of its start.

        Raises:
            ServerError: the server does not answer in time, or can load no weights.
        """
        self._call("/pause_generation", {"mode": "retract"})
        self.name(self._claim)
        try:
            self._call("/end_weight_update", {})
        except ServerError as error:
            if error.status is None:  # an HTTP status is the server's answer that no update is open
                raise
        loaded = self._load(([weights] if weights else []) + self._started_with())
        version = _version_of(self.api, self.deadline_s)
        if version != self._claim:
            self.log(f"another trainer has sent it weights ({version!r}); nothing is restored")
            return
        self.name(loaded.version)
        self._call("/flush_cache", {})
        self._call("/continue_generation", {"torch_empty_cache": False})
        self.log(f"serves {loaded.path} again, under version {loaded.version!r}")

    def _load(self, choices: Iterable[Weights]) -> Weights:
        """Let the server load the first of these folders of weights that it can read; return which."""
        reasons = []
        for weights in choices:
            payload = {"model_path": weights.path, "load_format": weights.load_format, "flush_cache": False}
            try:
                self._call("/update_weights_from_disk", payload)
            except ServerError as error:
                reasons.append(error.reason)
                self.log(f"cannot read {weights.path}: {error.reason}")
            else:
                return weights
        why = "; ".join(reasons) or "it was started with random weights (load format dummy), which no folder contains"
        raise ServerError(self.api.name, self.api.url, _PHASE, why)

    def _started_with(self) -> list[Weights]:
        """Return the weights that the server loaded at its start, as /server_info always names them; empty if they were
        random.
        """
        info = self._call("/server_info", None, "GET")
        if info.get("load_format") == "dummy":
            return []
        return [Weights(info["model_path"], info.get("load_format") or "auto", info.get("weight_version") or "default")]

    def _call(self, path: str, payload: dict[str, Any] | None, method: str = "POST") -> dict[str, Any]:
        return self.api.call(path, payload, deadline_s=self.deadline_s, phase=_PHASE, method=method)


def _version_of(api: ServerApi, deadline_s: float) -> str:
    return str(api.call("/model_info", None, deadline_s=deadline_s, phase=_PHASE, method="GET").get("weight_version"))


def _log(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    state = KeeperState()
    state.read_events(sys.stdin)
    state.restore_servers(float(sys.argv[1]))
