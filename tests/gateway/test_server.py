"""The endpoint between clients that do anything and a policy that answers when the test lets it."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from megarl.envs.protocol import Action
from megarl.gateway.images import ImageReader
from megarl.gateway.refusals import Refusal
from megarl.gateway.server import Gateway, _delivering
from megarl.gateway.session import ChatSession, Window
from megarl.gateway.wire.anthropic import read_messages
from megarl.gateway.wire.responses import read_response
from tests.gateway.talking import file_of, picture, seeing

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
THOUGHTS = '<think>\nso\n</think>\n\nyes <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Episode:
    """A session whose policy answers each call with the next of `lines` once `answers` is set."""

    def __init__(self, gateway: Gateway, *lines: str) -> None:
        self.talk, images, _ = seeing()
        self.lines, window = list(lines) or ["yes"], Window(300, 300, 10_000)
        self.session = ChatSession(self.talk.form, window, ImageReader(images, window.whole))
        self.key = gateway.open(self.session)
        self.answers = asyncio.Event()
        self.answers.set()
        self.policy = asyncio.ensure_future(self._play())

    async def _play(self) -> None:
        while True:
            await self.session.arrival()
            for turn in await self.session.take():
                self.turn = turn
                await self.answers.wait()
                text = self.lines[min(turn.node.number, len(self.lines) - 1)]
                tokens = [*self.talk.ids(text), self.talk.end]
                self.session.reply(turn, Action(text, text, tokens, "stop", 0, [-0.5] * len(tokens)))

    @property
    def nodes(self) -> list[Any]:
        return self.session.record.nodes


@asynccontextmanager
async def served(*lines: str):
    gateway = Gateway()
    await gateway.start()
    episode = Episode(gateway, *lines)
    async with aiohttp.ClientSession(gateway.url, headers={"Authorization": f"Bearer {episode.key}"}) as client:
        yield gateway, episode, client
    episode.policy.cancel()
    await gateway.stop()


def run(work: Coroutine[Any, Any, None], limit_s: float = 60) -> None:
    asyncio.run(asyncio.wait_for(work, limit_s))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_request_that_is_sent_again_has_one_generation_and_an_equal_one_another():
    async def work() -> None:
        async with served() as (_, episode, client):
            episode.answers.clear()
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=HELLO))
            await until(lambda: episode.nodes)
            first.cancel()  # the client gives up, and tries again
            again = {"x-stainless-retry-count": "1"}
            second = asyncio.ensure_future(client.post("/v1/chat/completions", json=HELLO, headers=again))
            await asyncio.sleep(0.05)
            assert (len(episode.nodes), episode.nodes[0].delivered) == (1, False)
            episode.answers.set()
            replies = [(await (await second).json())["choices"]]
            third = await client.post("/v1/chat/completions", json=HELLO, headers=again)  # finished: it is replayed
            replies.append((await third.json())["choices"])
            assert (len(episode.nodes), episode.nodes[0].delivered) == (1, True)
            assert replies[0] == replies[1]
            await client.post("/v1/chat/completions", json=HELLO)
            assert [node.cause for node in episode.nodes] == ["", "sibling"]
            assert episode.session.numbers()["retries"] == 2

    run(work())


def test_requests_of_an_episode_that_hold_too_many_bytes_wait_until_others_end(monkeypatch):
    monkeypatch.setattr("megarl.gateway.session._MOST_HELD", 2 * len(json.dumps(HELLO)))

    async def work() -> None:
        async with served() as (gateway, episode, client):
            never = asyncio.Event()

            async def body(end: bytes):
                yield b'{"model": '
                await never.wait()
                yield end

            unfinished = asyncio.ensure_future(client.post("/v1/chat/completions", data=body(b"1}")))
            await until(lambda: episode.session._held)
            waits = asyncio.ensure_future(client.post("/v1/messages/count_tokens", json=HELLO))
            other = Episode(gateway)
            headers = {"Authorization": f"Bearer {other.key}"}
            reply = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert (reply.status, waits.done()) == (200, False)
            never.set()
            assert ((await unfinished).status, (await waits).status, episode.session._held) == (404, 200, 0)
            other.policy.cancel()

    run(work())


def test_a_client_that_leaves_gives_up_its_calls_in_flight_and_in_the_queue(monkeypatch):
    monkeypatch.setattr("megarl.gateway.session._ABANDONED_S", 0.05)

    async def work() -> None:
        async with served() as (_, episode, client):
            episode.answers.clear()
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=HELLO))
            await until(lambda: episode.nodes)
            queued = asyncio.ensure_future(client.post("/v1/chat/completions", json={**HELLO, "n": 2}))
            await until(lambda: len(episode.session._waiting) == 2)
            waits = asyncio.ensure_future(client.post("/v1/chat/completions", json=HELLO))
            await until(lambda: len(episode.session._waiting) == 3)
            assert not episode.turn.is_abandoned
            queued.cancel()
            first.cancel()
            await until(lambda: episode.turn.is_abandoned)
            episode.answers.set()
            assert (await waits).status == 200
            assert [node.delivered for node in episode.nodes] == [False, True]

    run(work())


def test_a_reply_that_arrived_stays_delivered_when_it_is_sent_again_in_vain():
    async def work() -> None:
        async with served() as (_, episode, client):
            await client.post("/v1/chat/completions", json=HELLO)
            replies = [SimpleNamespace(node=episode.nodes[0])]
            with pytest.raises(ConnectionError), _delivering(replies):
                raise ConnectionError
            assert episode.nodes[0].delivered

    run(work())


def test_the_reply_that_a_client_does_not_wait_for_is_not_trained_on_and_not_continued():
    async def work() -> None:
        async with served() as (_, episode, client):
            episode.answers.clear()
            call = asyncio.ensure_future(client.post("/v1/chat/completions", json={**HELLO, "stream": True}))
            await until(lambda: episode.nodes)
            call.cancel()
            await asyncio.sleep(0.05)
            episode.answers.set()
            await until(lambda: episode.nodes[0].reply is not None)
            assert episode.session.untrained() == (0,)
            more = [*HELLO["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
            await client.post("/v1/chat/completions", json={**HELLO, "messages": more})
            assert (episode.nodes[1].parent, episode.nodes[1].cause) == (None, "undelivered")

    run(work())


def test_sub_agents_may_be_left_out_of_training():
    async def work() -> None:
        async with served() as (_, episode, client):
            first = [{"role": "system", "content": "you are kind"}, *HELLO["messages"]]
            sub_agent = [{"role": "system", "content": "add"}, *HELLO["messages"]]
            shortened = [first[0], {"role": "user", "content": "so"}]
            for messages in (first, sub_agent, shortened, HELLO["messages"]):
                await client.post("/v1/chat/completions", json={**HELLO, "messages": messages})
            assert episode.session.untrained() == ()
            assert episode.session.untrained(main=True) == (1, 3)
            assert episode.session.untrained(last=True) == (0, 1, 2)

    run(work())


def test_a_stream_has_the_content_of_a_plain_response():
    async def work() -> None:
        async with served(THOUGHTS) as (_, _, client):
            body = {**HELLO, "tools": TOOLS}
            plain = (await (await client.post("/v1/chat/completions", json=body)).json())["choices"][0]
            events = await (await client.post("/v1/chat/completions", json={**body, "stream": True})).text()
            chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
            assert events.endswith("data: [DONE]\n\n")
            whole: dict[str, Any] = {"content": "", "reasoning_content": "", "arguments": ""}
            for chunk in chunks:
                delta = chunk["choices"][0]["delta"]
                for name in ("content", "reasoning_content"):
                    whole[name] += delta.get(name) or ""
                for call in delta.get("tool_calls", []):
                    whole["arguments"] += call["function"]["arguments"]
                    assert call["index"] == 0
            message = plain["message"]
            assert whole == {
                "content": message["content"],
                "reasoning_content": message["reasoning_content"],
                "arguments": message["tool_calls"][0]["function"]["arguments"],
            }
            assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"] == "tool_calls"

    run(work())


def test_no_client_can_take_the_connections_of_others(monkeypatch):
    """Room for two sessions of two connections each: idle ones make way, and a session cannot have a third."""
    monkeypatch.setattr("megarl.gateway.connections._EACH", 2)

    async def work() -> None:
        gateway = Gateway(most_sessions=2)
        await gateway.start()
        first, second, late = (Episode(gateway) for _ in range(3))
        opened = list[asyncio.StreamWriter]()

        async def opens(episode: Episode | None) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            opened.append(writer)
            if episode is None:
                return ""
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: {episode.key}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            return head.split()[1] + " ".join(line for line in head.splitlines() if "should-retry" in line)

        for _ in range(9):
            await opens(None)
        assert [await opens(first) for _ in range(3)] == ["200", "200", "429x-should-retry: true"]
        for _ in range(9):
            await opens(None)
        assert [await opens(second) for _ in range(2)] == ["200", "200"]
        assert await opens(late) == "503x-should-retry: true"
        gateway.end(first.key)
        assert await opens(late) == "200"
        for writer in opened:
            writer.close()
        for episode in (first, second, late):
            episode.policy.cancel()
        await gateway.stop()

    run(work())


BROKEN: list[tuple[str, Any, int]] = [
    ("chat/completions", b"{", 400),
    ("chat/completions", b"[" * 100_000, 400),
    ("chat/completions", b"\xff\xfe", 400),
    ("chat/completions", [], 400),
    ("chat/completions", {}, 404),
    ("chat/completions", {"model": "policy"}, 400),
    ("chat/completions", {"model": "policy", "messages": "hello"}, 400),
    ("chat/completions", {"model": "policy", "messages": [{"role": 3}]}, 400),
    ("chat/completions", {"model": "policy", "messages": [{"role": "user", "content": {"a": 1}}]}, 400),
    ("chat/completions", {"model": "policy", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ("chat/completions", {"model": "policy", "messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400),
    ("chat/completions", {**HELLO, "tools": [{"type": "function"}]}, 400),
    ("chat/completions", {**HELLO, "tool_choice": "required"}, 400),
    ("chat/completions", {**HELLO, "logit_bias": {"3": 5}}, 400),
    ("chat/completions", {**HELLO, "response_format": {"type": "json_object"}}, 400),
    *(
        (path, {**HELLO, "input": "hello", "prompt": None, **constraint}, 400)
        for path in ("chat/completions", "responses", "messages")
        for constraint in (
            *(
                {"guided_choice": ["a"]},
                {"regex": "a+"},
                {"ebnf": "root ::= 'a'"},
                {"structured_outputs": {"regex": "a"}},
            ),
            *(
                {"min_tokens": 3},
                {"bad_words": ["a"]},
                {"stop_token_ids": [5]},
                {"output_format": {"type": "json_schema"}},
            ),
        )
    ),
    ("responses", {"model": "policy", "input": "hello", "text": {"format": {"type": "json_object"}}}, 400),
    ("chat/completions", {**HELLO, "n": 0}, 400),
    ("chat/completions", {**HELLO, "n": 10**9}, 400),
    ("chat/completions", {**HELLO, "max_tokens": -1}, 400),
    ("chat/completions", {**HELLO, "stop": [3]}, 400),
    ("chat/completions", {**HELLO, "stream": "yes"}, 400),
    ("chat/completions", {**HELLO, "messages": [{"role": "assistant", "content": "a"}]}, 400),
    ("chat/completions", {**HELLO, "messages": [{"role": "user", "content": "a " * 700}]}, 400),
    ("completions", {"model": "policy", "prompt": [[1, 2]]}, 400),
    ("messages", {**HELLO, "messages": [{"role": "tool", "content": "a"}]}, 400),
    ("messages", {**HELLO, "messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400),
    *(
        ("messages", {**HELLO, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}, 400)
        for source in (None, {"type": "url", "url": "https://example.com/a.png"}, {"type": "base64", "data": "%"})
    ),
    ("responses", {"model": "policy", "input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400),
    ("messages", {**HELLO, "tool_choice": {"type": "tool", "name": "add"}}, 400),
    ("messages/count_tokens", {**HELLO, "messages": []}, 400),
    ("nothing", HELLO, 404),
]


def test_malformed_requests_are_refused_for_good_and_nothing_is_generated():
    async def work() -> None:
        async with served() as (gateway, episode, client):
            for path, body, status in BROKEN:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                response = await client.post(f"/v1/{path}", data=data)
                refusal = await response.json()
                assert (path, body, response.status) == (path, body, status)
                assert response.headers["x-should-retry"] == "false"
                assert refusal["error"]["message"]
            big = await client.post("/v1/chat/completions", data=b" " * (17 << 20))
            assert big.status == 413
            wrong = await client.post("/v1/chat/completions", json=HELLO, headers={"Authorization": "Bearer x"})
            assert wrong.status == 401
            assert (episode.nodes, episode.session.broken) == ([], "")
            good = await client.post("/v1/chat/completions", json=HELLO)
            assert good.status == 200
            gateway.end(episode.key)
            assert (await client.post("/v1/chat/completions", json=HELLO)).status == 410

    run(work())


@pytest.mark.parametrize("sessions", [50, pytest.param(200, marks=pytest.mark.campaign("agents"))])
def test_many_sessions_at_once_get_their_own_replies(sessions):
    async def work() -> None:
        async with served() as (gateway, _, client):
            episodes = [Episode(gateway, str(number)) for number in range(sessions)]

            async def ask(episode: Episode) -> str:
                headers = {"Authorization": f"Bearer {episode.key}"}
                response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
                return str((await response.json())["choices"][0]["message"]["content"])

            assert await asyncio.gather(*map(ask, episodes)) == [str(number) for number in range(sessions)]
            for episode in episodes:
                episode.policy.cancel()

    run(work())


@pytest.mark.campaign("agents")
def test_clients_that_die_at_any_moment_harm_no_other(monkeypatch):
    """200 sessions with five calls each, of which a third closes its connection early."""
    monkeypatch.setattr("megarl.gateway.session._ABANDONED_S", 0.05)

    async def work() -> None:
        async with served() as (gateway, _, client):
            episodes, rng = [Episode(gateway, str(number)) for number in range(200)], random.Random(0)

            async def ask(episode: Episode) -> str:
                headers = {"Authorization": f"Bearer {episode.key}"}
                stream = rng.random() < 0.3
                response = await client.post("/v1/chat/completions", json={**HELLO, "stream": stream}, headers=headers)
                text = await response.text()
                return "" if stream else str(json.loads(text)["choices"][0]["message"]["content"])

            async def use(number: int, episode: Episode) -> int:
                read = 0
                for _ in range(5):
                    call = asyncio.ensure_future(ask(episode))
                    dies = rng.random() < 1 / 3
                    if dies:
                        episode.answers.clear()
                    await asyncio.wait({call}, timeout=rng.random() * 0.05 if dies else None)
                    call.cancel()
                    await asyncio.wait({call})
                    episode.answers.set()
                    if not call.cancelled():
                        read += 1
                        assert call.result() in ("", str(number))
                return read

            read = await asyncio.gather(*(use(number, episode) for number, episode in enumerate(episodes)))
            await until(lambda: not any(episode.session._waiting for episode in episodes))
            for count, episode in zip(read, episodes, strict=True):
                assert episode.session.broken == ""
                assert not episode.policy.done()
                assert count <= sum(node.delivered for node in episode.nodes) <= 5
                episode.policy.cancel()
            assert 200 < sum(read) < 1000

    run(work(), 300)


IMAGE = base64.b64encode(file_of(picture(28, 28, 1))).decode()
URL = f"data:image/png;base64,{IMAGE}"
WHOLE: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **HELLO,
        "tools": TOOLS,
        "stop": ["a"],
        "n": 1,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
    },
    "completions": {"model": "policy", "prompt": "hello", "stop": "a", "logprobs": 1},
    "messages": {
        "model": "policy",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "a"}],
        "tools": [{"name": "add", "description": "b", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "3"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}},
                ],
            },
        ],
    },
    "responses": {
        "model": "policy",
        "instructions": "a",
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": URL},
                ],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
        ],
    },
}
VALUES = [
    None,
    True,
    0,
    -1,
    1e308,
    10**30,
    "",
    "a",
    "\ud800",
    "<|im_end|>",
    "<|image_pad|>",
    IMAGE[: len(IMAGE) // 8 * 4],
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [{}],
    [3],
]


def broken(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one part is another one, is missing, or has a key that nobody knows."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copied = value.copy()
    if rng.random() < 0.1:
        del copied[key]
    else:
        copied[key] = broken(value[key], rng)
    return copied


@pytest.mark.parametrize("requests", [60, pytest.param(4000, marks=pytest.mark.campaign("agents"))])
def test_no_request_makes_the_endpoint_fail(requests):
    async def work() -> None:
        async with served("yes", "no", "<tool_call>\n{}\n</tool_call>") as (_, episode, client):
            rng = random.Random(0)
            for number in range(requests):
                path = rng.choice(list(WHOLE))
                body = broken(WHOLE[path], rng) if number % 8 else WHOLE[path]
                body = {**body, "model": "policy"} if isinstance(body, dict) else body
                if isinstance(body, dict) and rng.random() < 0.3:
                    body = {**body, "stream": True}
                answer = asyncio.ensure_future(client.post(f"/v1/{path}", data=json.dumps(body).encode()))
                await asyncio.wait({answer, episode.policy}, return_when=asyncio.FIRST_COMPLETED)
                if episode.policy.done():
                    raise AssertionError((path, body)) from episode.policy.exception()
                response = answer.result()
                text = await response.text()
                assert (path, body, response.status < 500) == (path, body, True), text
                assert number % 8 or response.status in (200, 400), text  # 400: the calls or tokens are used up
            assert episode.session.broken == ""

    run(work(), 600)


@pytest.mark.parametrize(
    ("read", "body", "message"),
    [
        (read_response, {"input": "hello", "previous_response_id": "r1"}, "previous_response_id: .*stores no convers"),
        (read_response, {"input": [{"role": "system", "content": "a"}]}, "input: .*not a system message"),
        (
            read_messages,
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            r"content\[0\].type: found 'tool_result'; allowed: parts of this type in messages of the user",
        ),
        (read_messages, {"messages": [{"role": "user", "content": [3]}]}, r"messages\[0\].content: found \[3\]"),
    ],
)
def test_a_refusal_names_the_key_and_the_reason(read, body, message):
    with pytest.raises(Refusal, match=message):
        read(body)
