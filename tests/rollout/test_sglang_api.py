"""Calls to a server: what comes back, and that every way to fail is an error that names server, phase and reason."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.rollout.sglang.api import ServerApi
from megarl.system.errors import ServerError

KEY = "secret-key"
OVER = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    """Answers by path; without the right key nothing."""

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client leaves what takes too long
            super().handle_one_request()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self._answer(401, {"error": "Unauthorized"})
        elif self.path == "/echo":
            self._answer(200, {"got": json.loads(body) if body else None, "success": True})
        elif self.path == "/refuse":
            self._answer(200, {"success": False, "message": "no update session is open"})
        elif self.path == "/moved":
            self.send_response(307)
            self.send_header("Location", "/echo")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/hang":
            OVER.wait()
        elif self.path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while not OVER.wait(0.1):
                self.wfile.write(b"x")
                self.wfile.flush()
        elif self.path == "/text":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"Cache flushed.")

    do_GET = do_POST

    def _answer(self, status: int, value: dict[str, object]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    OVER.set()
    server.shutdown()


def test_a_call_sends_json_and_returns_the_answer(url: str) -> None:
    api = ServerApi(url, KEY)
    assert api.call("/echo", {"a": [1, 2]}, deadline_s=60, phase="test")["got"] == {"a": [1, 2]}
    assert api.call("/echo", deadline_s=60, phase="test", method="GET")["got"] is None


def test_an_answer_that_is_no_json_comes_back_as_text(url: str) -> None:
    assert ServerApi(url, KEY).call("/text", deadline_s=60, phase="flush") == {"text": "Cache flushed."}


def test_a_refusal_with_status_200_is_an_error(url: str) -> None:
    with pytest.raises(ServerError, match=r"server 3 at http://.*: sync \(/refuse\): refused: no update session"):
        ServerApi(url, KEY, "server 3").call("/refuse", {}, deadline_s=60, phase="sync")


def test_a_redirect_is_an_error_and_the_key_does_not_follow_it(url: str) -> None:
    with pytest.raises(ServerError, match="HTTP 307") as caught:
        ServerApi(url, KEY).call("/moved", {}, deadline_s=60, phase="test")
    assert caught.value.status == 307


def test_without_the_key_the_status_is_told_and_the_key_is_not(url: str) -> None:
    with pytest.raises(ServerError, match="HTTP 401") as caught:
        ServerApi(url, "wrong-key").call("/echo", {}, deadline_s=60, phase="test")
    assert caught.value.status == 401
    assert "wrong-key" not in str(caught.value) + repr(ServerApi(url, "wrong-key"))


@pytest.mark.parametrize("path", ["/hang", "/drip"])
def test_the_deadline_is_that_of_the_whole_answer(url: str, path: str) -> None:
    with pytest.raises(ServerError, match=r"no answer within 0\.5 s"):
        ServerApi(url, KEY).call(path, {}, deadline_s=0.5, phase="test")


def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        api = ServerApi(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ServerError, match="ConnectionRefusedError"):
            api.call("/health", deadline_s=60, phase="health", method="GET")


@pytest.mark.parametrize("host", ["a" * 70, "127.0.0.1:port"])
def test_a_url_that_cannot_be_one_is_an_error(host: str) -> None:
    with pytest.raises(ServerError, match=f"server at http://{host}: health"):
        ServerApi(f"http://{host}").call("/health", deadline_s=5, phase="health", method="GET")
