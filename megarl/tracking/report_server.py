"""`megarl report --serve`: serve the report over HTTP to browsers on this machine; the page follows runs in flight."""

from __future__ import annotations

import datetime
import errno
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megarl.artifacts.profiles import profile_files
from megarl.system.errors import ConfigError, MegarlError
from megarl.tracking.close import close_if_killed
from megarl.tracking.report import render, report_data
from megarl.tracking.report_runs import load_run

HOST = "127.0.0.1"
_PERIOD_S = 5.0  # seconds after which a page checks for changes
_FILES = ("metrics.jsonl", "samples.jsonl", "training_samples.jsonl", "run.json", "restarts.jsonl", "graph.svg")


class ReportServer(ThreadingHTTPServer):
    """An HTTP server of one report: `/` is its page, `/data?tag=TAG` its data as JSON, or 204 if these have tag TAG,
    `/profile/NAME` a file of the profiler.

    Only this machine can reach the server, under a name of this machine. Requests under other host names, which a
    foreign web page can cause (DNS rebinding), are rejected.

    Args:
        folders: run folders; the report is about the first one.
        port: port number; 0: any free port.
        period_s: seconds after which a page looks for changes.

    Raises:
        ConfigError: the port is in use.
        DataError: a folder has no metrics.jsonl.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int, period_s: float = _PERIOD_S) -> None:
        self.folders, self._period_s = list(folders), period_s
        self.data()  # raises for folders without a run
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            fix = "name another port, or 0 for a free one: --serve PORT"
            raise ConfigError("the port is already in use", where="--serve", found=str(port), fix=fix) from error

    @property
    def address(self) -> str:
        """The URL of the report's page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def tag(self) -> str:
        """Return a text that changes whenever the files of the runs change."""
        for folder in self.folders:
            close_if_killed(folder)
        stats = [path.stat() for folder in self.folders for name in _FILES if (path := folder / name).is_file()]
        return "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats)

    def profile(self, path: str) -> Path | None:
        """Return the profiler's file that a request names; None: the report links to no such file."""
        folder = self.folders[0]
        return next((folder / file for file in profile_files(folder) if f"/{file.as_posix()}" == path), None)

    def data(self) -> dict[str, Any]:
        """Return the data of the report's page, with their tag and the period at which the page polls for changes."""
        tag = self.tag()  # computed before the files are read, so that the next check finds later changes
        now = f"{datetime.datetime.now():%H:%M:%S}"
        data = report_data([load_run(folder) for folder in self.folders])
        return data | {"live": {"tag": tag, "at": now, "period_s": self._period_s}}


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Reply to an HTTP request with the report's page or its data."""
        if (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") not in (HOST, "localhost"):
            self._answer(403, "text/plain", "this server is only for this machine")
            return
        where = urlsplit(self.path)
        try:
            if where.path == "/":
                data = self.server.data()
                self._answer(200, "text/html", render(data["runs"][0]["name"], data))
            elif (file := self.server.profile(where.path)) is not None:
                self._send(200, "application/gzip", file.read_bytes())
            elif where.path != "/data":
                self._answer(404, "text/plain", "/ is the report")
            elif parse_qs(where.query).get("tag") == [self.server.tag()]:
                self._answer(204, "application/json", "")
            else:
                self._answer(200, "application/json", json.dumps(self.server.data(), allow_nan=False))
        except (MegarlError, OSError) as error:
            self._answer(500, "text/plain", str(error))

    def _answer(self, status: int, kind: str, text: str) -> None:
        self._send(status, f"{kind}; charset=utf-8", text.encode("utf-8", "backslashreplace"))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def serve(folders: Sequence[Path], port: int) -> None:
    """Serve the report of run folders until Ctrl-C."""
    with ReportServer(folders, port) as server:
        number = server.server_address[1]
        tunnel = f"ssh -L {number}:{HOST}:{number} THIS_MACHINE"
        print(f"{server.address} (Ctrl-C ends it; from elsewhere: {tunnel})", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
