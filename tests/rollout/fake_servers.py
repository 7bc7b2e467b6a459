"""Servers in threads of this process, which answer by the rule of answers.py."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Request
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch
from megarl.rollout.sglang.fleet import LostServer
from megarl.rollout.sglang.images import ServedImages
from megarl.rollout.sglang.samples import ServedSample
from megarl.rollout.sglang.turns import TurnClient
from megarl.rollout.stop_strings import StopStrings
from tests.rollout.answers import TAG, answer

KEY = "key"
WAIT_S = 120.0  # for a request that is on its way
Rule = Callable[["FakeServer", dict[str, Any]], str]


def samples_of(requests: Sequence[Request], strings: StopStrings | None = None) -> list[ServedSample]:
    images = [None if request.images is None else ServedImages(request.images) for request in requests]
    return [
        ServedSample(
            number,
            list(request.prompt_ids),
            seed,
            room=request.room,
            images=images[number],
            strings=strings,
            begun=request.begun,
        )
        for number, request in enumerate(requests)
        for seed in request.seeds
    ]


def finish(
    samples: list[ServedSample],
    apis: dict[int, ServerApi],
    sampling: SamplingConfig,
    config: SGLangConfig | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[LostServer]:
    """Finish the unfinished samples, as far as servers are left, and return the servers that failed."""
    settings = config or SGLangConfig(), apis, sampling, [], TAG
    client = TurnClient(lambda done, failures: Dispatch(*settings, done, failures), advance)
    groups: dict[int, list[ServedSample]] = {}
    for sample in samples:
        if sample.finish_reason is None:
            groups.setdefault(sample.prompt, []).append(sample)
    try:
        for group in groups.values():
            client.send(group, last=True)
        client.pause(WAIT_S, whole=True)
        if client.error is not None:
            raise client.error
        return client.failures()
    finally:
        client.close()


class FakeServer(ThreadingHTTPServer):
    """`rule(server, payload)` says how a request is treated: ok, abort, wait, foreign, empty, die, hang, or an HTTP
    status; "unloaded": the server was restarted and has no adapter.

    wait: nothing comes until the request is aborted, then half of it; foreign: with another run's weights; empty: no
    token, and the length limit is said to be reached.

    `info`: what it says of itself; bytes go as they are, at None it hangs up. `health_s`: how long it takes to say that
    it is well; `looks`: how often it has said so. `keeps`: a connection takes more than one request, until `end_idle`
    ends all that are there, which the client finds out with its next request on one.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, rule: Rule) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule, self.payloads, self.lock = rule, list[dict[str, Any]](), threading.Lock()
        self.running = self.most = 0
        self.hangs, self.over = threading.Event(), threading.Event()
        self.aborts, self.aborted = list[str](), threading.Condition()
        self.health_s, self.looks, self.keeps = 0.0, 0, False
        self.open, self.ended = set[object](), set[object]()
        self.info: Any = {
            "tp_size": 1,
            "ep_size": 1,
            "dp_size": 1,
            "nnodes": 1,
            "dtype": "float32",
            "context_length": None,
        }

    @property
    def api(self) -> ServerApi:
        return ServerApi(f"http://127.0.0.1:{self.server_port}", KEY, "fake")

    def end_idle(self) -> None:
        self.ended |= self.open


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        if self.server.keeps:
            self.protocol_version = "HTTP/1.1"
            self.server.open.add(self)

    def do_GET(self) -> None:
        time.sleep(self.server.health_s)
        if self.server.hangs.is_set() and self.path != "/health":  # which a colocated server's scheduler does not see
            self.server.over.wait()
        if self.path != "/server_info":
            self._send(200, {})
        elif self.server.info is None:
            self.close_connection = True
        else:
            self._send(200, self.server.info)
        self.server.looks += self.path == "/health_generate"

    def do_POST(self) -> None:
        if self in self.server.ended:
            self.close_connection = True
            return
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/abort_request":
            with self.server.aborted:
                self.server.aborts.append(payload["rid"])
                self.server.aborted.notify_all()
            self._send(200, {})
            return
        with self.server.lock:
            self.server.payloads.append(payload)
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            verdict = self.server.rule(self.server, payload)
        if verdict == "wait":
            with self.server.aborted:
                assert self.server.aborted.wait_for(lambda: payload["rid"] in self.server.aborts, WAIT_S)
            verdict = "abort"
        time.sleep(0.01)
        with self.server.lock:
            self.server.running -= 1
        if verdict == "die":
            self.connection.close()
        elif verdict == "hang":
            self.server.hangs.set()
            self.server.over.wait()
        elif verdict == "unloaded":
            self._send(400, {"error": f"Got LoRA adapter that has never been loaded: {payload['lora_path']}"})
        elif verdict.isdigit():
            self._send(int(verdict), {"error": "no"})
        else:
            self._send(200, answer(payload, verdict))

    def _send(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 307:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client leaves a server that it takes for dead
            super().handle_one_request()

    def log_message(self, *args: object) -> None: ...


@contextlib.contextmanager
def servers(*rules: Rule) -> Iterator[list[FakeServer]]:
    made = [FakeServer(rule) for rule in rules]
    for server in made:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        for server in made:
            server.over.set()
            server.shutdown()
            server.server_close()


def ok(server: FakeServer, payload: dict[str, Any]) -> str:
    """Every request is answered."""
    return "ok"
