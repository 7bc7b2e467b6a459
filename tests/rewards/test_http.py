"""Rewards of HTTP servers: the protocols, retries, deadlines, and what is said where there is no score."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.config.data import RewardConfig
from megarl.rewards.judge import _append
from megarl.rewards.runner import RewardRunner
from megarl.system.errors import ConfigError, RewardError

Answer = Callable[[Any], Any]


class Served:
    """A server on loopback that keeps requests. `answer`: request's JSON -> the answer, or (status, text, headers)."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: {}
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.requests.append(request)
                served.paths.append(self.path)
                served.keys.append(self.headers["Authorization"])
                made = served.answer(request)
                status, text, headers = made if isinstance(made, tuple) else (200, json.dumps(made), {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self) -> None:
                served.keys.append(self.headers["Authorization"])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"[1.0]")

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("megarl.rewards.endpoint._FIRST_WAIT_S", 0.01)
    made = Served()
    yield made
    made.server.shutdown()
    made.server.server_close()


def samples(*responses: str) -> list[dict[str, Any]]:
    return [
        {"uid": str(i), "prompt": "1+1=", "response": text, "answer": "2", "messages": None, "row": {"level": i}}
        for i, text in enumerate(responses)
    ]


def scores(name: str, kwargs: dict[str, Any], given: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    with closing(RewardRunner(RewardConfig(name=name, kwargs=kwargs, **settings))) as runner:
        return runner.result(runner.submit(given))


def lengths(request: Any) -> Any:
    return {"scores": [{"overall": len(s["response"]), "level": s["row"]["level"]} for s in request["samples"]]}


def judged(score: Any, text: str = '{{"reason": "so", "score": {}}}') -> Any:
    return {"choices": [{"message": {"role": "assistant", "content": text.format(score)}}]}


# -- http ----------------------------------------------------------------------------------------------------------


def test_every_sample_gets_its_own_score_whatever_the_order_of_the_answers(served):
    def answer(request: Any) -> Any:
        time.sleep(0.05 * (len(request["samples"][0]["response"]) % 3))
        return lengths(request)

    served.answer = answer
    given = samples(*("x" * n for n in range(1, 8)))
    found = scores("http", {"url": served.url, "fields": ["response", "row"], "batch_size": 2}, given)
    assert found == [{"overall": float(n), "level": float(n - 1)} for n in range(1, 8)]
    assert sorted(len(request["samples"]) for request in served.requests) == [1, 2, 2, 2]
    assert set(served.requests[0]["samples"][0]) == {"response", "row"}


def test_a_reward_model_of_sglang_gets_prompt_response_and_end(served):
    served.answer = lambda request: [{"embedding": [float(len(text))], "meta_info": {}} for text in request["text"]]
    found = scores("http", {"url": served.url, "protocol": "sglang", "end": "<e>"}, samples("2", "12"))
    assert served.requests == [{"text": ["1+1=2<e>", "1+1=12<e>"]}]
    assert served.paths == ["/classify"]
    assert [one["overall"] for one in found] == [8.0, 9.0]


def test_a_server_that_is_busy_for_a_while_is_asked_again_with_the_key(served, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k1")
    busy = iter([(503, "loading", {}), (429, "slow down", {}), (200, "half an answ", {})])
    served.answer = lambda request: next(busy, [1.5])
    kwargs = {"url": served.url, "api_key_env": "MY_KEY"}
    assert scores("http", kwargs, samples("2")) == [{"overall": 1.5}]
    assert served.keys == ["Bearer k1"] * 4


@pytest.mark.parametrize(
    ("answer", "attempts", "words"),
    [
        ((404, "no such route", {}), 1, "after 1 attempt: status 404: no such route"),
        ((500, "out of memory", {}), 2, "after 2 attempts: status 500: out of memory"),
        (
            (500, "no chunk", {"Transfer-Encoding": "chunked"}),
            2,
            "status 500: its text did not arrive (IncompleteRead)",
        ),
        ((302, "", {"Location": "/b"}), 1, "status 302: it redirects to /b, and redirects are not followed"),
        ({"scores": [1.0, 2.0]}, 2, "ValueError: the server returned 2 scores for 1 samples"),
        ({"score": 1.0}, 2, "for 1 samples"),
    ],
)
def test_a_server_without_a_usable_answer_is_named_with_the_sample(served, monkeypatch, answer, attempts, words):
    monkeypatch.setenv("MY_KEY", "k1")
    served.answer = lambda request: answer
    with pytest.raises(RewardError) as error:
        scores("http", {"url": served.url, "retries": 1, "api_key_env": "MY_KEY"}, samples("2"))
    assert f"reward 'http': sample 0 of 1 failed: the server at {served.url} returned no score" in str(error.value)
    assert words in str(error.value)
    assert "response: '2'" in str(error.value)
    assert len(served.requests) == len(served.keys) == attempts


def test_a_score_that_is_no_number_names_its_sample(served):
    served.answer = lambda request: [1.0, None]
    with pytest.raises(RewardError, match="sample 1 of 2 failed: the function returned None, which is not a number"):
        scores("http", {"url": served.url}, samples("2", "3"))


def test_samples_without_a_score_get_that_of_on_error_and_the_others_their_own(served):
    served.answer = lambda request: (500, "no", {}) if request["samples"][0]["response"] == "bad" else [1.0]
    kwargs = {"url": served.url, "batch_size": 1, "retries": 0}
    found = scores("http", kwargs, samples("2", "bad", "3"), on_error=-1.0)
    assert [one["overall"] for one in found] == [1.0, -1.0, 1.0]


def test_the_deadline_of_a_batch_ends_all_attempts(served):
    over = threading.Event()
    served.answer = lambda request: over.wait() and None
    kwargs = {"url": served.url, "batch_size": 1, "concurrency": 1, "deadline_s": 2.0, "retries": 9}
    with pytest.raises(RewardError, match=r"returned no score after 1 attempt: (TimeoutError|timeout)"):
        scores("http", kwargs, samples("2", "3", "4"))
    over.set()
    assert len(served.requests) == 1


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9 returned no score after 1 attempt: URLError"):
        scores("http", {"url": "http://127.0.0.1:9", "retries": 0}, samples("2"))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"url": "localhost:8000"}, "reward.kwargs.url"),
        ({}, "reward.kwargs.url"),
        ({"url": "http://h", "protocoll": "json"}, "protocol"),
        ({"url": "http://[::1"}, "reward.kwargs.url"),
        ({"url": "http://me:s3cret@h"}, r"(?s)reward\.kwargs\.url(?!.*s3cret).*by reward\.kwargs\.api_key_env"),
        ({"url": "http://h?a=b", "protocol": "sglang"}, "query or fragment after the path"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_asked(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        scores("http", kwargs, samples("2"))


@pytest.mark.parametrize("workers", [1, 2])  # in a thread, and in processes
def test_a_field_that_is_not_there_ends_the_run_whatever_on_error_says(served, workers):
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.fields: samples have no field 'answr'"):
        scores("http", {"url": served.url, "fields": ["answr"]}, samples("2"), on_error=0.0, workers=workers)
    assert served.requests == []


def test_a_key_that_is_not_there_is_missed_before_the_first_sample(served):
    kwargs = {"url": served.url, "api_key_env": "MEGARL_NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.api_key_env"):
        RewardRunner(RewardConfig(name="http", kwargs=kwargs, on_error=0.0))


def test_an_address_may_have_a_query(served):
    served.answer = lambda request: [1.0]
    scores("http", {"url": f"{served.url}/score?version=2"}, samples("2"))
    assert served.paths == ["/score?version=2"]


# -- judge ---------------------------------------------------------------------------------------------------------


def test_a_judge_is_asked_about_the_response_by_a_schema_and_its_scale_becomes_0_to_1(served):
    served.answer = lambda request: judged(7 if "judge:\n2\n" in request["messages"][-1]["content"] else 0)
    kwargs = {"url": f"{served.url}/v1/", "model": "m", "system": "be fair"}
    found = scores(
        "judge", kwargs, [{**one, "messages": [{"role": "user", "content": "?"}]} for one in samples("2", "x")]
    )
    assert [one["overall"] for one in found] == [0.7, 0.0]
    assert set(served.paths) == {"/v1/chat/completions"}
    request = next(one for one in served.requests if "judge:\n2\n" in one["messages"][-1]["content"])
    assert request["messages"][0] == {"role": "system", "content": "be fair"}
    assert "user: ?" in request["messages"][1]["content"]
    assert "Reference answer:\n2" in request["messages"][1]["content"]
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]
    assert (request["model"], request["temperature"]) == ("m", 0.0)


def test_a_verdict_in_other_words_is_read_where_no_schema_is_asked_for(served):
    served.answer = lambda request: judged(4, 'I think {{"draft": 1}} ... so: {{"score": {}}}')
    kwargs = {"url": served.url, "model": "m", "structured": False, "low": 1, "high": 5, "prompt": "{{ row.level }}?"}
    assert scores("judge", kwargs, samples("2")) == [{"overall": 0.75}]
    assert "response_format" not in served.requests[0]
    assert served.requests[0]["messages"] == [{"role": "user", "content": "0?"}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (judged(11), "the judge's score 11 is not between 0 and 10"),
        (judged("", "no idea"), "no JSON object with a score: 'no idea'"),
        ({"error": "overloaded"}, "KeyError: 'choices'"),
    ],
)
def test_a_verdict_of_no_use_is_asked_for_again_and_then_named(served, answer, words):
    served.answer = lambda request: answer
    with pytest.raises(
        RewardError, match=r"reward 'judge': sample 0 of 1 failed: the server at .* returned no score"
    ) as error:
        scores("judge", {"url": served.url, "model": "m", "retries": 2}, samples("2"))
    assert words in str(error.value)
    assert len(served.requests) == 3


def test_what_was_judged_before_is_not_asked_again(served, tmp_path):
    served.answer = lambda request: judged(5)
    kwargs = {"url": served.url, "model": "m", "cache": str(tmp_path / "cache")}
    assert scores("judge", kwargs, samples("2", "3", "2")) == [{"overall": 0.5}] * 3
    assert len(served.requests) == 2
    assert scores("judge", kwargs, samples("3", "2")) == [{"overall": 0.5}] * 2
    assert len(served.requests) == 2
    for asked, other in enumerate([{"model": "another"}, {"high": 20}, {"low": -5}, {"url": f"{served.url}/v1"}], 3):
        scores("judge", {**kwargs, "structured": False, **other}, samples("2"))
        assert len(served.requests) == asked
    for kept in tmp_path.rglob("*.json"):
        kept.write_text('{"score": 11}')
    assert scores("judge", kwargs, samples("2")) == [{"overall": 0.5}]


def test_verdicts_that_cannot_be_kept_count_and_the_log_says_so_once(served, tmp_path, caplog):
    served.answer = lambda request: judged(5)
    (tmp_path / "cache").touch()
    kwargs = {"url": served.url, "model": "m", "cache": str(tmp_path / "cache")}
    assert scores("judge", kwargs, samples("2", "3")) == [{"overall": 0.5}] * 2
    assert len(served.requests) == 2
    assert [one.getMessage() for one in caplog.records] == [
        f"reward.kwargs.cache: cannot save verdicts of the judge in {tmp_path}/cache: Not a directory"
    ]
    with pytest.raises(RewardError, match=r"the file .*cache/calls, which counts the judge's calls, cannot be written"):
        scores("judge", {**kwargs, "budget": 9}, samples("2"))
    assert len(served.requests) == 2


def test_calls_that_are_counted_at_the_same_time_stay_within_the_budget(tmp_path, monkeypatch):
    counted, fstat = threading.Barrier(8), os.fstat
    with ThreadPoolExecutor(8, "counts") as pool:

        def together(file: int) -> os.stat_result:
            found = fstat(file)
            if threading.current_thread().name.startswith("counts"):
                counted.wait(120)
            return found

        monkeypatch.setattr("os.fstat", together)
        assert sum(pool.map(lambda _: _append(tmp_path / "calls", 3), range(8))) == 3


def test_a_spent_budget_is_said_and_holds_for_further_runs(served, tmp_path):
    served.answer = lambda request: judged(10)
    kwargs = {"url": served.url, "model": "m", "cache": str(tmp_path), "budget": 2, "concurrency": 1}
    found = scores("judge", kwargs, samples("1", "2", "3"), on_error=0.25)
    assert [one["overall"] for one in found] == [1.0, 1.0, 0.25]
    with pytest.raises(RewardError, match=r"budget of 2 calls is used up(?s:.*)raise its setting `budget`"):
        scores("judge", kwargs, samples("3"))
    assert len(served.requests) == 2
    assert scores("judge", kwargs, samples("2")) == [{"overall": 1.0}]  # it is known


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"budget": 3}, "set reward.kwargs.cache"),
        ({"low": 5.0, "high": 5.0}, "reward.kwargs.high"),
        ({"prompt": "{{ response"}, "reward.kwargs.prompt"),
        ({"url": "http://h/v1?a=b"}, "query or fragment after the path"),
    ],
)
def test_settings_of_a_judge_that_do_not_fit_are_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        scores("judge", {"url": "http://h", "model": "m", **more}, samples("2"))


def test_a_prompt_that_reads_what_samples_do_not_have_ends_the_run(served):
    kwargs = {"url": served.url, "model": "m", "prompt": "{{ questoin }}"}
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.prompt: (?s:.*)'questoin' is undefined"):
        scores("judge", kwargs, samples("2"), on_error=0.0)
