"""The client against servers that answer by rule: token i of a sample is a function of prompt, seed and i.

So a sample that was lost, doubled, or continued at the wrong place shows in its tokens.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.errors import ServerError
from megarl.rollout.engine import Request
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import GenerationClient
from megarl.rollout.sglang.samples import Sample, samples_of

KEY = "key"
PROMPTS = [[10 + i] * (i + 1) for i in range(6)]
SAMPLING = SamplingConfig(max_new_tokens=8)
Rule = Callable[["_Server", dict[str, Any]], str]


def token(prompt: list[int], seed: int, place: int) -> int:
    return (sum(prompt) * 31 + seed * 17 + place * 7) % 1000


class _Server(ThreadingHTTPServer):
    """`rule(server, payload)` says how a request is treated: ok, abort, die, hang, or an HTTP status."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, rule: Rule) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule, self.payloads, self.lock = rule, list[dict[str, Any]](), threading.Lock()
        self.running = self.most = 0
        self.hangs = threading.Event()

    @property
    def api(self) -> ServerApi:
        return ServerApi(f"http://127.0.0.1:{self.server_port}", KEY, "fake")


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.server.hangs.is_set():
            time.sleep(5)
        self._send(200, {})

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.payloads.append(payload)
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            verdict = self.server.rule(self.server, payload)
        time.sleep(0.01)
        with self.server.lock:
            self.server.running -= 1
        if verdict == "die":
            self.connection.close()
        elif verdict == "hang":
            self.server.hangs.set()
            time.sleep(5)
        elif verdict.isdigit():
            self._send(int(verdict), {"error": "no"})
        else:
            self._send(200, _answer(payload, cut=verdict == "abort"))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client leaves a server that it takes for dead
            super().handle_one_request()

    def log_message(self, *args: object) -> None: ...


def _answer(payload: dict[str, Any], cut: bool) -> dict[str, Any]:
    settings, ids = payload["sampling_params"], payload["input_ids"]
    prompt = next((p for p in PROMPTS if p == ids[: len(p)] and (len(ids) == len(p) or ids[len(p)] != p[0])), ids)
    start, count = len(ids) - len(prompt), settings["max_new_tokens"]
    count = count // 2 if cut else count
    out = [token(prompt, settings.get("sampling_seed", 0), start + i) for i in range(count)]
    return {
        "output_ids": out,
        "meta_info": {
            "finish_reason": {"type": "abort" if cut else "length"},
            "output_token_logprobs": [[-1.0, t, None] for t in out],
            "weight_version": "1",
        },
    }


@contextlib.contextmanager
def servers(*rules: Rule) -> Iterator[list[_Server]]:
    made = [_Server(rule) for rule in rules]
    for server in made:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        for server in made:
            server.shutdown()
            server.server_close()


def ok(server: _Server, payload: dict[str, Any]) -> str:
    return "ok"


def generate(made: list[_Server], n: int = 4, **config: Any) -> tuple[list[Sample], dict[int, str], int]:
    samples = samples_of([Request(prompt, [100 * i + k for k in range(n)]) for i, prompt in enumerate(PROMPTS)])
    advanced: list[int] = []
    client = GenerationClient(SGLangConfig(**config))
    failed = client.run(samples, {i: s.api for i, s in enumerate(made)}, SAMPLING, [], advanced.append)
    return samples, failed, sum(advanced)


def assert_right(samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.token_ids == [token(sample.prompt_ids, sample.seed, i) for i in range(8)]
        assert sample.finish_reason == "length"


def test_all_samples_come_back_and_prompts_stay_on_one_server() -> None:
    with servers(ok, ok) as made:
        samples, failed, advanced = generate(made)
        assert_right(samples)
        assert not failed
        assert advanced == 24
        homes = [{p["input_ids"][0] for p in server.payloads} for server in made]
        assert not homes[0] & homes[1]
        assert len(homes[0]) == len(homes[1]) == 3


def test_concurrency_is_bounded() -> None:
    with servers(ok) as made:
        samples, _, _ = generate(made, max_concurrency=3)
        assert_right(samples)
        assert 1 < made[0].most <= 3


def test_samples_of_a_server_that_dies_finish_on_another() -> None:
    def dies(server: _Server, payload: dict[str, Any]) -> str:
        return "die" if len(server.payloads) > 5 else "ok"

    with servers(dies, ok) as made:
        samples, failed, advanced = generate(made)
        assert_right(samples)
        assert list(failed) == [0]
        assert advanced == 24


@pytest.mark.parametrize("verdict", ["500", "503"])
def test_a_server_with_an_error_of_its_own_is_left(verdict: str) -> None:
    with servers(lambda s, p: verdict, ok) as made:
        samples, failed, _ = generate(made)
        assert_right(samples)
        assert f"HTTP {verdict}" in failed[0]


def test_when_no_server_is_left_finished_samples_are_kept() -> None:
    def dies(server: _Server, payload: dict[str, Any]) -> str:
        return "die" if len(server.payloads) > 7 else "ok"

    with servers(dies) as made:
        samples, failed, advanced = generate(made, max_concurrency=2)
        done = [sample for sample in samples if sample.finish_reason is not None]
        assert list(failed) == [0]
        assert len(done) == advanced
        assert 5 <= len(done) <= 7  # the last two may be cancelled while they are answered
        assert_right(done)
    with servers(ok) as made:  # the same samples go on elsewhere
        client = GenerationClient(SGLangConfig())
        assert client.run(samples, {0: made[0].api}, SAMPLING, [], lambda k: None) == {}
        assert_right(samples)
        assert len(made[0].payloads) == 24 - len(done)


def test_a_server_without_a_sign_of_life_is_left_before_the_request_is_late() -> None:
    with servers(lambda s, p: "hang", ok) as made:
        start = time.monotonic()
        samples, failed, _ = generate(made, health_timeout_s=0.5)
        assert_right(samples)
        assert "no sign of life for 0.5 s" in failed[0]
        assert time.monotonic() - start < 4  # the request itself would take 5 s


def test_a_late_answer_is_a_failure() -> None:
    with servers(lambda s, p: "hang", ok) as made:
        samples, failed, _ = generate(made, request_timeout_s=0.5)
        assert_right(samples)
        assert "no answer to /generate within 0.5 s" in failed[0]


def test_an_interrupted_sample_is_continued() -> None:
    def interrupts(server: _Server, payload: dict[str, Any]) -> str:
        return "abort" if payload["sampling_params"]["max_new_tokens"] > 2 else "ok"

    with servers(interrupts) as made:
        samples, failed, advanced = generate(made)
        assert_right(samples)
        assert not failed
        assert advanced == 24
        assert {sample.interruptions for sample in samples} == {2}


def test_a_server_that_interrupts_for_ever_is_left() -> None:
    def never(server: _Server, payload: dict[str, Any]) -> str:
        payload["sampling_params"]["max_new_tokens"] = 0
        return "abort"

    with servers(never, ok) as made:
        samples, failed, _ = generate(made, n=1)
        assert_right(samples)
        assert "interrupted more than 100 times" in failed[0]


def test_a_request_that_is_wrong_is_not_tried_elsewhere() -> None:
    with servers(lambda s, p: "400", ok) as made, pytest.raises(ServerError, match="HTTP 400") as caught:
        generate(made)
    assert caught.value.status == 400


def test_a_long_prompt_is_prefilled_once_before_its_samples() -> None:
    with servers(ok) as made:
        sample = samples_of([Request([7] * 300, [1, 2, 3])])
        GenerationClient(SGLangConfig()).run(sample, {0: made[0].api}, SAMPLING, [], lambda k: None)
        assert [p["sampling_params"]["max_new_tokens"] for p in made[0].payloads] == [0, 8, 8, 8]
