"""The client against servers that answer by rule (tests/rollout/fake_servers.py)."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.engine import Request
from megarl.rollout.sglang import client
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch, _most_requests
from megarl.rollout.sglang.samples import ServedSample
from megarl.system.errors import ServerError
from tests.rollout.answers import PROMPTS, token
from tests.rollout.fake_servers import FakeServer, finish, ok, samples_of, servers

SAMPLING = SamplingConfig(max_new_tokens=8)


def generate(made: list[FakeServer], n: int = 4, **config: Any) -> tuple[list[ServedSample], dict[int, str], int]:
    samples = samples_of([Request(prompt, [100 * i + k for k in range(n)]) for i, prompt in enumerate(PROMPTS)])
    advanced: list[int] = []
    apis = {i: server.api for i, server in enumerate(made)}
    failures = finish(samples, apis, SAMPLING, SGLangConfig(**config), advanced.append)
    return samples, {failure.number: failure.why for failure in failures}, sum(advanced)


def assert_right(samples: list[ServedSample]) -> None:
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
    def dies(server: FakeServer, payload: dict[str, Any]) -> str:
        return "die" if len(server.payloads) > 5 else "ok"

    with servers(dies, ok) as made:
        samples, failed, advanced = generate(made)
        assert_right(samples)
        assert list(failed) == [0]
        assert advanced == 24


@pytest.mark.parametrize("verdict", ["500", "503", "307"])
def test_a_server_with_an_error_of_its_own_is_left(verdict: str) -> None:
    with servers(lambda s, p: verdict, ok) as made:
        samples, failed, _ = generate(made)
        assert_right(samples)
        assert f"HTTP {verdict}" in failed[0]


def test_when_no_server_is_left_finished_samples_are_kept() -> None:
    def dies(server: FakeServer, payload: dict[str, Any]) -> str:
        return "die" if len(server.payloads) > 7 else "ok"

    with servers(dies) as made:
        samples, failed, advanced = generate(made, max_concurrency=2)
        done = [sample for sample in samples if sample.finish_reason is not None]
        assert list(failed) == [0]
        assert len(done) == advanced
        assert 5 <= len(done) <= 7  # the last two may be cancelled while they are answered
        assert_right(done)
    with servers(ok) as made:  # the same samples go on elsewhere
        assert finish(samples, {0: made[0].api}, SAMPLING) == []
        assert_right(samples)
        assert len(made[0].payloads) == 24 - len(done)


def test_a_server_without_a_sign_of_life_is_left_before_the_request_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Dispatch._watch

    async def watch_first(self: Dispatch, number: int, server: ServerApi) -> None:
        if number == 0:  # nobody knows how soon the other one can answer here
            await watch(self, number, server)

    monkeypatch.setattr(Dispatch, "_watch", watch_first)
    with servers(lambda s, p: "hang", ok) as made:
        samples, failed, _ = generate(made, health_timeout_s=0.5)
        assert_right(samples)
        assert (
            "no sign of life from its scheduler (/health_generate) for 0.5 s" in failed[0]
        )  # a request that is late has another message


@pytest.mark.parametrize(("has_gpu", "urls"), [(True, []), (False, ["http://elsewhere:1"])])
def test_a_server_that_compiles_has_the_time_of_a_start_until_its_first_sample(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, urls: list[str]
) -> None:
    monkeypatch.setattr(client, "has_nvidia_device", lambda: has_gpu)  # of the trainer's machine
    monkeypatch.setattr(client, "_WARM", set())
    patience = {"health_timeout_s": 0.2, "start_timeout_s": 0.6, "urls": urls}
    with servers(lambda s, p: "hang") as made:
        _, failed, _ = generate(made, **patience)
        assert "for 0.6 s (rollout.sglang.start_timeout_s)" in failed[0]
    with servers(ok) as made:
        generate(made)
        assert made[0].api.url in client._WARM
    with servers(lambda s, p: "hang") as made:
        client._WARM.add(made[0].api.url)
        _, failed, _ = generate(made, **patience)
        assert "for 0.2 s (rollout.sglang.health_timeout_s)" in failed[0]


def test_a_late_answer_says_nothing_about_its_server() -> None:
    waits = iter([True, True])

    def late_twice(server: FakeServer, payload: dict[str, Any]) -> str:
        return "hang" if next(waits, False) else "ok"

    with servers(late_twice) as made:
        samples, failed, _ = generate(made, request_timeout_s=0.5)
        assert_right(samples)
        assert not failed
        assert sum(sample.late for sample in samples) == 2


def test_a_sample_that_is_always_late_ends_the_run_with_the_key_to_raise() -> None:
    with (
        servers(lambda s, p: "hang") as made,
        pytest.raises(ServerError, match=r"3 requests .* within rollout\.sglang"),
    ):
        generate(made, request_timeout_s=0.2)


def test_without_a_bound_samples_in_flight_are_those_that_descriptors_suffice_for(monkeypatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
    with servers(ok, ok) as made:
        assert_right(generate(made)[0])
        assert max(server.most for server in made) <= 2
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert _most_requests(3) >= 1 << 20


def test_an_interrupted_sample_is_continued() -> None:
    def interrupts(server: FakeServer, payload: dict[str, Any]) -> str:
        return "abort" if payload["sampling_params"]["max_new_tokens"] > 2 else "ok"

    with servers(interrupts) as made:
        samples, failed, advanced = generate(made)
        assert_right(samples)
        assert not failed
        assert advanced == 24
        assert {sample.interruptions for sample in samples} == {2}


def test_a_server_that_interrupts_for_ever_is_left() -> None:
    def never(server: FakeServer, payload: dict[str, Any]) -> str:
        payload["sampling_params"]["max_new_tokens"] = 0
        return "abort"

    with servers(never, ok) as made:
        samples, failed, _ = generate(made, n=1)
        assert_right(samples)
        assert "interrupted a sample more than 100 times" in failed[0]


def test_a_request_that_is_wrong_is_not_tried_elsewhere() -> None:
    with servers(lambda s, p: "400", ok) as made, pytest.raises(ServerError, match="HTTP 400") as caught:
        generate(made)
    assert caught.value.status == 400


def test_a_long_prompt_is_prefilled_once_before_its_samples() -> None:
    with servers(ok) as made:
        sample = samples_of([Request([7] * 300, [1, 2, 3])])
        finish(sample, {0: made[0].api}, SAMPLING)
        assert [p["sampling_params"]["max_new_tokens"] for p in made[0].payloads] == [0, 8, 8, 8]


def test_a_server_that_another_run_has_updated_is_left() -> None:
    with servers(lambda s, p: "foreign", ok) as made:
        samples, failed, _ = generate(made)
        assert_right(samples)
        assert "'999@another' of another run" in failed[0]
        assert {version for sample in samples for version in sample.versions} == {1}
