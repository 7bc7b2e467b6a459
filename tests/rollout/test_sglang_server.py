"""The real SGLang server: what it generates, who may talk to it, and what happens when it dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from megarl.config.rollout import SamplingConfig
from megarl.data.trajectory import Trajectory
from megarl.envs import Action, Environment, Step
from megarl.envs.host import Host
from megarl.rollout.engine import Completion, Request
from megarl.rollout.groups import Group, GroupGenerator
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet
from megarl.system.compat.sglang import shared_memory
from megarl.system.errors import ServerError
from tests.envs.playing import rules_of
from tests.models.tiny import save_tiny
from tests.rollout.forked import forked_servers
from tests.rollout.servers import VOCAB, engine, label, start

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900)]
EOS = [5, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "model"
    save_tiny(folder, "qwen3", vocab_size=VOCAB, max_position_embeddings=2048)
    # Like Qwen's: several end tokens, and settings that a user's requests would be sampled with.
    generation = {"eos_token_id": [3, 5, 17], "top_k": 1, "repetition_penalty": 9.0, "temperature": 0.01}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked_servers():
        yield


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    """Two servers, which are told to share the trainer's devices: nothing but their schedulers' life is other then."""
    with start(tmp_path_factory.mktemp("run"), model, servers=2, max_restarts=10, colocated=True) as servers:
        yield servers


@pytest.fixture
def both(fleet: Fleet) -> Fleet:
    """The two servers, both running and at version 0, whatever happened in another test."""
    fleet.wait_started()
    label(fleet, 0)
    assert len(fleet.current(0)) == 2
    return fleet


@pytest.fixture
def some(fleet: Fleet) -> Fleet:
    """At least one server at version 0; not every test needs the other."""
    if not fleet.current(0):
        fleet.wait_started()
        label(fleet, 0)
    return fleet


def requests(count: int = 6, n: int = 4) -> list[Request]:
    rng = torch.Generator().manual_seed(0)
    return [
        Request(torch.randint(10, VOCAB, (5 + i,), generator=rng).tolist(), [100 * i + k for k in range(n)])
        for i in range(count)
    ]


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in group] for group in groups]


def oracle(model: Path, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of `response` by transformers, under the full softmax at `temperature`."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(torch.tensor([prompt + response])).logits[0]
    scores = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, -1)
    return scores.gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1.3, "top_k": 20, "top_p": 0.9}, 1.3),
        ({"temperature": 0.0}, 1.0),
    ],
)
def test_logprobs_are_those_of_the_full_distribution(
    both: Fleet, model: Path, settings: dict[str, float], temperature: float
) -> None:
    asked = requests(3, 2)
    groups = engine(both).generate(asked, SamplingConfig(max_new_tokens=24, **settings), EOS)
    for request, group in zip(asked, groups, strict=True):
        for sample in group:
            expected = oracle(model, request.prompt_ids, sample.token_ids, temperature)
            # float32 on both sides, other kernels: the largest gap seen is 2e-6.
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)
            assert sample.versions == [[0, len(sample.token_ids)]]


def test_a_sample_is_a_function_of_its_seed(both: Fleet) -> None:
    sampling = SamplingConfig(max_new_tokens=16)
    everyone = tokens(engine(both).generate(requests(), sampling, EOS))
    alone = tokens(engine(both).generate(requests()[2:3], sampling, EOS))
    assert alone[0] == everyone[2]
    assert len({tuple(ids) for ids in everyone[2]}) == 4
    other = [Request(request.prompt_ids, [seed + 2**40 for seed in request.seeds]) for request in requests()]
    assert tokens(engine(both).generate(other, sampling, EOS)) != everyone


def test_a_sample_does_not_depend_on_requests_that_share_its_batch_and_filter_it(both: Fleet) -> None:
    """A health check is greedy, which is a filter."""
    api = both.servers[0].api

    def tokens_with(*others: dict[str, float]) -> list[int]:
        settings = [{"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7, **one} for one in ({}, *others)]
        payload = {"input_ids": [[20 + i] * 5 for i in range(len(settings))], "sampling_params": settings}
        answers = json.loads(api.call("/generate", payload, deadline_s=60, phase="test")["text"])
        return list(answers[0]["output_ids"])

    assert tokens_with({"temperature": 0.0}, {"top_k": 3}) == tokens_with()


def test_end_tokens_are_kept_and_only_the_given_ones_end(both: Fleet) -> None:
    groups = engine(both).generate(requests(8, 8), SamplingConfig(max_new_tokens=40, stop_token_ids=[11]), EOS)
    samples = [sample for group in groups for sample in group]
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert {sample.token_ids[-1] for sample in stopped} == {5, 9, 11}
    for sample in samples:
        assert not set(sample.token_ids[:-1]) & {5, 9, 11}
        assert len(sample.token_ids) == 40 or sample.finish_reason == "stop"
    # The server stops at 2 by config.json, at 3 and 17 by generation_config.json; none of them is an end token here.
    for number in (2, 3, 17):
        assert any(number in sample.token_ids[:-1] for sample in samples)


def test_end_tokens_can_be_ignored(both: Fleet) -> None:
    groups = engine(both).generate(requests(2, 4), SamplingConfig(max_new_tokens=30, ignore_eos=True), EOS)
    assert {len(sample.token_ids) for group in groups for sample in group} == {30}


def test_turns_find_what_came_before_in_the_cache_of_their_server(both: Fleet, model: Path) -> None:
    generation = engine(both).open(SamplingConfig(max_new_tokens=12), [], 4, 200)
    before = {i: [20 + i // 2] * 30 for i in range(4)}  # two pairs that begin alike
    for i, prompt in before.items():
        generation.submit(i, prompt, i, 12)
    cached: dict[int, list[int]] = {i: [] for i in before}
    while generation.any_busy(any(len(turns) < 3 for turns in cached.values())):
        for i, done in generation.wait().items():
            # float32 on both sides, other kernels, as above.
            expected = oracle(model, before[i], done.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=2e-5, rtol=0)
            # The last token that was drawn has never been fed, and neither has the answer.
            known = len(before[i]) - len([40, 41, 42]) - 1 if cached[i] else 0
            assert done.cached is not None
            assert done.cached >= known
            cached[i].append(done.cached)
            before[i] = [*before[i], *done.token_ids, 40, 41, 42]
            if len(cached[i]) < 3:
                generation.submit(i, before[i], 100 + len(before[i]), 12)
    generation.close()


def decoded(fleet: Fleet) -> list[int]:
    """How often each server has told that it decodes, which it does after every forty steps."""
    return [process.spec.log.read_text().count("Decode batch") for process in fleet._owned.values()]


def test_an_aborted_turn_keeps_what_the_server_has_drawn(both: Fleet, model: Path) -> None:
    made, before = engine(both), decoded(both)
    generation = made.open(SamplingConfig(max_new_tokens=1500, ignore_eos=True), [], 2, 2000)
    for i in range(2):  # one on each server
        generation.submit(i, [20 + i] * 5, i, 1500)
    assert generation.any_busy(True)
    assert generation.wait(lambda: all(now > then for now, then in zip(decoded(both), before, strict=True))) == {}
    for i in range(2):
        generation.abort(i)
    cut: dict[int, Completion] = {}
    while len(cut) < 2:
        assert generation.any_busy(True)
        cut |= generation.wait()
    generation.close()
    for i, done in cut.items():
        assert done.finish_reason == "abort"
        assert 0 < len(done.token_ids) < 1500
        kept = [20 + i] * 5, done.token_ids
        torch.testing.assert_close(torch.tensor(done.logprobs), oracle(model, *kept, 1.0), atol=5e-5, rtol=0)
    again = tokens(made.generate([Request([20] * 5, [0])], SamplingConfig(max_new_tokens=8, ignore_eos=True), EOS))
    assert again == [[cut[0].token_ids[:8]]]  # the same sample, and the server goes on


class Hints(Environment):
    """Says the same three tokens after every turn."""

    def step(self, action: Action) -> Step:
        return Step([7, 8, 10])


def test_episodes_that_are_interrupted_keep_log_probs_of_all_that_was_said_before(some: Fleet, model: Path) -> None:
    host, asked = Host(Hints, Hints.Settings()), requests(2, 2)
    sampling = SamplingConfig(max_new_tokens=200)
    groups = GroupGenerator(engine(some), sampling, EOS, 4, 700, rules_of(host, turns=2, tokens=600))
    groups.open()
    for number, request in enumerate(asked):
        groups.add(Group(number, request.prompt_ids, [partial(int.__add__, 1000 * seed) for seed in request.seeds]))
    found: dict[int, list[Trajectory]] = {}
    while groups.busy:
        found |= dict(groups.wait())
        groups.interrupt()
        groups.open()
    groups.close()
    host.close()
    episodes = [(asked[number].prompt_ids, one) for number, samples in found.items() for one in samples]
    for prompt, one in episodes:
        assert one.turn_rewards == [0.0] * one.turns
        for turn, (start_, end) in enumerate(zip(one.turn_starts, one.turn_ends, strict=True)):
            expected = oracle(model, [*prompt, *one.token_ids[:start_]], one.turn(turn), 1.0)
            torch.testing.assert_close(torch.tensor(one.logprobs[start_:end]), expected, atol=5e-5, rtol=0)
    assert sum(one.segments for _, one in episodes) > sum(one.turns for _, one in episodes), "none was interrupted"


def test_servers_listen_on_loopback_alone_and_want_their_key(both: Fleet) -> None:
    for number, process in both._owned.items():
        main = psutil.Process(process.pid)
        everyone = [main, *main.children(recursive=True)]
        listening = {c.laddr.ip for p in everyone for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        url, key = both.servers[number].api.url, both.servers[number].api.api_key
        for wrong in (None, "wrong"):
            for path in ("/generate", "/update_weight_version", "/abort_request"):
                with pytest.raises(ServerError, match="HTTP 401"):
                    ServerApi(url, wrong).call(path, {}, deadline_s=60, phase="test")
        assert key is not None
        assert key not in process.spec.log.read_text()


def test_samples_of_a_killed_server_finish_on_the_other(both: Fleet) -> None:
    sampling = SamplingConfig(max_new_tokens=32)
    undisturbed = tokens(engine(both).generate(requests(), sampling, EOS))
    finished, before = list[int](), both.servers[0].restarts

    def kill_once(samples: int) -> None:
        if not finished:
            os.killpg(both._owned[0].pid, signal.SIGKILL)
        finished.append(samples)

    groups = engine(both).generate(requests(), sampling, EOS, kill_once)
    assert tokens(groups) == undisturbed
    assert sum(finished) == 24
    assert both.servers[0].restarts == before + 1
    assert both.servers[1].state == "current"


def test_when_all_servers_die_the_rest_is_generated_after_restart_and_catch_up(both: Fleet) -> None:
    sampling = SamplingConfig(max_new_tokens=32)
    undisturbed = tokens(engine(both).generate(requests(), sampling, EOS))
    before = [server.restarts for server in both.servers]
    finished: list[int] = []

    def kill_all(samples: int) -> None:
        finished.append(samples)
        if len(finished) == 3:
            for process in both._owned.values():
                if process.pid is not None:
                    os.killpg(process.pid, signal.SIGKILL)

    # Few at a time: when the third one is over most have not begun, however late this process learns of it.
    groups = engine(both, max_concurrency=4).generate(requests(), sampling, EOS, kill_all)
    assert tokens(groups) == undisturbed
    assert sum(finished) == 24
    assert [server.restarts for server in both.servers] == [count + 1 for count in before]
    assert len(both.current(0)) == 2


def scheduler_of(fleet: Fleet, number: int) -> psutil.Process:
    """The process of a server that generates: of its children it has the most threads."""
    return max(psutil.Process(fleet._owned[number].pid).children(recursive=True), key=psutil.Process.num_threads)


@pytest.mark.campaign("servers")  # as test_sglang_replace.py does with stand-ins of servers
def test_a_server_whose_scheduler_hangs_is_replaced_while_the_other_one_draws(both: Fleet) -> None:
    """Turns come, a few each second, until another server has come in its place, with the weights of now."""
    pid, instance, before = both._owned[1].pid, both._owned[1].instance, both.servers[1].restarts
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(shared_memory(instance)) == 1
    made = engine(both, health_timeout_s=15, colocated=True)
    generation = made.open(SamplingConfig(max_new_tokens=16, ignore_eos=True), [], 2, 200)
    turns = dict.fromkeys(range(2), 0)
    for i in turns:
        generation.submit(i, [20 + i] * 5, 7, 16)
    scheduler = scheduler_of(both, 1)
    scheduler.suspend()
    drawn: dict[int, list[list[int]]] = {i: [] for i in turns}
    while generation.any_busy(both.servers[1].state != "current" or both.servers[1].restarts == before):
        for i, done in generation.wait().items():
            drawn[i].append(done.token_ids)
            generation.forget(i)
            generation.submit(i, [20 + i] * 5, 7, 16)
        time.sleep(0.3)
    generation.close()
    assert [len({tuple(ids) for ids in drawn[i]}) for i in turns] == [1, 1]  # the same sample, whoever generates it
    assert both.servers[1].restarts == before + 1
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert shared_memory(instance) == []
    sampling = SamplingConfig(max_new_tokens=16)
    undisturbed = tokens(made.generate(requests(), sampling, EOS))
    both.mark_failed(both.servers[0], "test")
    assert list(made.servers()) == [1]
    assert tokens(made.generate(requests(), sampling, EOS)) == undisturbed


def test_a_server_whose_scheduler_hangs_gives_no_sign_of_life(both: Fleet) -> None:
    """By which it is replaced: test_sglang_replace.py."""
    scheduler, api = scheduler_of(both, 1), both.servers[1].api
    scheduler.suspend()
    try:
        with pytest.raises(ServerError, match="within 3 s"):
            api.call("/health_generate", deadline_s=3, phase="test", method="GET")
    finally:
        scheduler.resume()
    api.call("/health_generate", deadline_s=60, phase="test", method="GET")


def test_a_server_at_work_says_that_it_lives_long_before_its_samples_are_over(both: Fleet) -> None:
    """Which is why long samples are not taken for a hang, though nothing comes of them for long."""
    api = both.servers[0].api
    settings = {"max_new_tokens": 1900, "ignore_eos": True}
    payload = {"input_ids": [[30 + i] * 100 for i in range(4)], "sampling_params": settings}
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(api.call, "/generate", payload, deadline_s=600, phase="test")
        for _ in range(2):
            api.call("/health_generate", deadline_s=60, phase="test", method="GET")
        assert not work.done()
        api.call("/abort_request", {"abort_all": True}, deadline_s=60, phase="test")


def test_a_server_that_cannot_start_is_an_error_that_shows_its_log(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ServerError, match="exit code") as caught:
        start(tmp_path, model, extra_args=["--no-such-argument"])
    assert "unrecognized arguments: --no-such-argument" in str(caught.value)
    assert str(tmp_path / "servers" / "server_0.log") in str(caught.value)
