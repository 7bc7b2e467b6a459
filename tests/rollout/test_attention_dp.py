"""Attention that is data parallel inside a server: which group of ranks generates a sample."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.engine import Replica, SglangEngine
from megarl.rollout.sglang.router import AttentionGroups
from megarl.rollout.sglang.samples import ServedSample
from megarl.system.errors import ConfigError
from megarl.system.processes import address_of
from tests.rollout.fake_servers import finish, ok, servers

HOST = "rollout.sglang.host"


def test_a_prompt_stays_with_its_group_and_prompts_are_spread() -> None:
    groups = AttentionGroups(4, first=2)
    taken = {prompt: {groups.take(0, prompt) for _ in range(8)} for prompt in range(8)}

    assert [len(each) for each in taken.values()] == [1] * 8
    assert [taken[prompt].pop() for prompt in range(4)] == [2, 3, 0, 1]
    groups.forget(1)
    assert groups.take(0, 99) == 3  # the group that has one prompt only


def test_a_server_with_one_group_is_told_none() -> None:
    assert AttentionGroups(1).take(0, 5) is None


def test_requests_name_the_group_of_their_prompt() -> None:
    samples = [ServedSample(prompt, [prompt] * 300, seed) for prompt in range(4) for seed in range(3)]
    groups = defaultdict(set)
    with servers(ok) as made:
        config = SGLangConfig(tp_size=2, attention_dp=2)
        assert finish(samples, {0: made[0].api}, SamplingConfig(max_new_tokens=4), config) == []
        for payload in made[0].payloads:
            groups[payload["input_ids"][0]].add(payload["routed_dp_rank"])

    assert [len(each) for each in groups.values()] == [1] * 4  # also of the request that prefills the prompt
    assert Counter(each.pop() for each in groups.values()) == {0: 2, 1: 2}


def test_replicas_that_share_a_server_begin_with_other_groups() -> None:
    config = SGLangConfig(tp_size=8, attention_dp=8)
    fleet: Any = SimpleNamespace(servers=[None, None])

    first = [SglangEngine(config, fleet, Replica(index, 8), None, "run").first_group for index in range(8)]

    assert first == [0, 0, 2, 2, 4, 4, 6, 6]  # the replicas 0, 2, 4 and 6 share server 0


def test_a_name_in_place_of_an_address_is_resolved_before_servers_get_it() -> None:
    """Servers with attention groups accept messages only from addresses."""
    assert (address_of("localhost", HOST), address_of("10.0.0.1", HOST)) == ("127.0.0.1", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"(?s)rollout.sglang.host: no address belongs to this name.*nowhere.invalid"):
        address_of("nowhere.invalid", HOST)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0x0", "::0", "::ffff:0.0.0.0", "every.interface"])
def test_servers_do_not_listen_on_every_interface(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: "0.0.0.0")  # glibc resolves 0 and 0x0 to it as well
    with pytest.raises(
        ConfigError, match=r"(?s)rollout.sglang.host: no part of a run may listen on every interface.*null"
    ):
        address_of(host, HOST)


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_an_invalid_name_is_an_error_of_its_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.sglang.host: no address belongs to this name"):
        address_of(host, HOST)
