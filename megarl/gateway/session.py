"""One episode at the gateway: the calls of its program wait here until the policy has answered them.

    handler of a request                  the episode's environment
    --------------------                  -------------------------
    call(request) -> waits                take() -> the calls that wait, with their prompts -> turns of the policy
                  <- the reply            reply(turn, action)

The calls of one episode that wait at the same time are a round: they are generated side by side and answered together.
A call that arrives while a round is generated waits for the next one. Episodes do not wait for each other. Calls have
numbers in the order of their arrival.
Everything here runs in one thread, the environments' event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.envs.protocol import Action
from megarl.gateway.chat import ChatForm, Prompt, tools_digest
from megarl.gateway.images import ImageReader
from megarl.gateway.messages import ASSISTANT, ChatMessage, systems_of
from megarl.gateway.record import CallNode, Record
from megarl.gateway.refusals import OVERFLOW, Refusal, too_long
from megarl.system.errors import DataError

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet

_MOST_WAITING = 64  # calls of an episode that wait at the same time
_MOST_KEPT = 64  # replies that are kept for clients that send a request again
_MOST_HELD = 64 << 20  # bytes of an episode's requests that are read or wait at the same time
_ABANDONED_S = 2.0  # seconds that a client has to send a request again before its generation is aborted


@dataclass(frozen=True)
class ChatRequest:
    """A request for a reply, whatever API it arrived by.

    Attributes:
        messages: the conversation; empty for a plain text.
        text: the plain text to continue; None: a conversation.
        room: maximum tokens of the reply; None: no limit of its own.
        stop: strings that end the reply, and are not part of it.
        policy: name of the policy that is to reply; empty: the run has one.
    """

    messages: Sequence[ChatMessage] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    room: int | None = None
    stop: tuple[str, ...] = ()
    policy: str = ""


@dataclass
class ChatReply:
    """A finished generation, as the client is sent it.

    Attributes:
        stop: the stop string that ended it; empty: none did.
    """

    node: CallNode
    message: ChatMessage
    prompt_tokens: int
    stop: str = ""


@dataclass
class PendingCall:
    """A request that waits for the policy."""

    request: ChatRequest
    done: asyncio.Future[ChatReply]


@dataclass
class _Answering:
    """The answer to a request, and how many clients wait for it."""

    task: asyncio.Task[Any]
    waiting: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether answering the request was cancelled or raised an error."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def abandon(self) -> None:
        """Cancel the answer if no client waits for it."""
        if not self.waiting:
            self.task.cancel()


@dataclass(frozen=True)
class PendingTurn:
    """A client's call whose reply the policy is about to generate.

    Attributes:
        call: the client's call.
        node: the call's node in the episode's tree of calls.
        token_ids: the part of the prompt's tokens that follows the tokens of the node's parent.
        room: maximum tokens of the reply.
        images: the images in `token_ids`, with their positions; None: there are none.
    """

    call: PendingCall
    node: CallNode
    token_ids: list[int]
    room: int
    images: ImageSet | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether no client waits for the reply any more."""
        return self.call.done.cancelled()


@dataclass(frozen=True)
class Window:
    """How long the sequences of an episode may be.

    Attributes:
        prompt, tokens: maximum tokens of a prompt, and after it. A longer prompt takes from the tokens after it.
        calls: maximum number of calls.
    """

    prompt: int
    tokens: int
    calls: int

    @property
    def whole(self) -> int:
        """Maximum tokens of a sequence."""
        return self.prompt + self.tokens

    def room(self, record: Record, prompt: Prompt) -> int:
        """Return how many tokens may follow a prompt; it may be negative."""
        path = record.path(prompt.node)
        begin = len(path[0].prompt_ids) if path else len(prompt.token_ids)
        total = len(record.tokens(prompt.node)) + len(prompt.token_ids)
        return self.tokens - (total - min(begin, self.prompt))


class ChatSession:
    """The calls of one episode.

    Attributes:
        record: what was generated.
        over: why no further call is answered; empty: calls are answered.
        overflowed: the last call was refused, because its messages were too long.
        broken: an error of the gateway itself, with which the episode fails; empty: none.
        counts: numbers for metrics.
    """

    def __init__(self, form: ChatForm, window: Window, images: ImageReader | None = None) -> None:
        self._images, self._reads = images or ImageReader(None, window.whole), asyncio.Lock()
        self.record, self.over, self.broken, self.counts = Record(), "", "", dict[str, float]()
        self._form, self._window, self.overflowed = form, window, False
        self._waiting: deque[PendingCall] = deque()
        self._arrived = asyncio.Event()
        self._kept: dict[str, _Answering] = {}
        self._held, self._released = 0, asyncio.Event()  # bytes of the requests in memory

    @contextlib.asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[None]:
        """Count the `size` bytes of a request in this block, which begins once the session has room for them.

        A client cannot fill the trainer's memory with requests that it never completes, or that wait.
        """
        while self._held and self._held + size > _MOST_HELD:
            self._released.clear()
            await self._released.wait()
        self._held += size
        try:
            yield
        finally:
            self._held -= size
            self._released.set()

    async def call(self, request: ChatRequest) -> ChatReply:
        """Return the policy's reply to a request.

        Raises:
            Refusal: the request cannot be answered.
        """
        if self.over:
            raise self._refusal_after_end()
        if len(self._waiting) >= _MOST_WAITING:
            problem = f"{_MOST_WAITING} calls of this session are unanswered: wait for a reply before the next call"
            raise Refusal(429, problem, "rate_limit", "rate_limit_error")
        if request.messages and request.messages[-1].role == ASSISTANT:
            raise Refusal(400, "the last message is the assistant's, and replies cannot be continued: remove it")
        self._images.check(request.messages)
        call = PendingCall(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        return await call.done

    async def once(self, key: str, again: bool, answer: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `answer` returns, or with `again` what it returned for an earlier request with the same key.

        An answer for which no client waits is cancelled after a while.

        Args:
            key: names the request.
            again: whether the client says that it sends the request again.
        """
        answering = self._kept.get(key) if again else None
        if answering is None or answering.has_failed:
            task = asyncio.ensure_future(answer())
            # reads the error, which asyncio would otherwise log if the client has gone
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            answering = _Answering(task)
            self._kept.pop(key, None)
            self._kept[key] = answering
            for old in list(self._kept)[:-_MOST_KEPT]:
                del self._kept[old]
        else:
            self._count("retries")
        answering.waiting += 1
        try:
            return await asyncio.shield(answering.task)
        finally:
            answering.waiting -= 1
            if not answering.task.done():
                asyncio.get_running_loop().call_later(_ABANDONED_S, answering.abandon)

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt."""
        self._images.check(request.messages)
        messages = await self._read(request.messages)
        try:
            prompt = self._form.prompt(self.record, messages, request.tools, request.policy)
        except DataError as error:
            raise Refusal(400, str(error)) from error
        return len(self.record.tokens(prompt.node)) + len(prompt.token_ids)

    async def _read(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return the messages with the pixels of their images. The requests of a session are read one after another, so
        that no session occupies all threads."""
        async with self._reads:
            return await self._images.read(messages)

    async def arrival(self) -> None:
        """Wait until a client's call is ready for `take`."""
        await self._arrived.wait()

    async def take(self) -> list[PendingTurn]:
        """Remove all waiting calls, and return those that the policy can answer, in the order of their arrival.

        Calls whose client has gone are left out, and invalid calls are refused. The returned calls are independent:
        none continues the conversation of another.
        """
        turns: list[PendingTurn] = []
        while self._waiting:
            call = self._waiting.popleft()
            if call.done.done():  # its client has gone
                continue
            with self._refused(call):
                messages = await self._read(call.request.messages)
                if self.over:  # the session ended while the images were read
                    raise self._refusal_after_end()
                if not call.done.done():
                    call.request = replace(call.request, messages=messages)
                    turns.append(self._begin(call))
        self._arrived.clear()
        return turns

    def reply(self, turn: PendingTurn, action: Action) -> None:
        """Give the policy's turn to the client that waits for it."""
        call, node, request = turn.call, turn.node, turn.call.request
        text, stop = _before(action.text, request.stop)
        node.token_ids, node.logprobs, node.finish = action.token_ids, action.logprobs, action.finish_reason
        node.has_image_token = self._form.has_image_token(action.token_ids)
        raw = _before(action.raw, request.stop)[0]
        node.reply = self._form.read(text, raw, node.number, tools=bool(request.tools))
        if node.finish == "abort":
            self._refuse(call, self._refusal_after_end())
        elif not call.done.done():
            path = len(self.record.tokens(node)) - len(node.token_ids)
            call.done.set_result(ChatReply(node, node.reply, path, stop))

    def close(self, reason: str) -> None:
        """Refuse the calls that wait for a reply, and all later ones.

        Args:
            reason: why, for the refusals.
        """
        self.over = self.over or reason
        while self._waiting:
            self._refuse(self._waiting.popleft(), self._refusal_after_end())

    def untrained(self, *, main: bool = False, last: bool = False, frozen: Collection[str] = ()) -> tuple[int, ...]:
        """Return the numbers of the nodes that are not trained on: no client has received their reply, or they are of
        the `frozen` policies.

        With `main` also those of sequences with other system messages than the episode's first call has, and with
        `last` those that the last call does not continue.
        """
        nodes, record = self.record.nodes, self.record
        lost = {node.number for node in nodes if not node.delivered or node.policy in frozen}
        if main:
            lost |= {node.number for node in nodes if not self._is_main(node)}
        if last and nodes:
            lost |= {node.number for node in nodes} - {node.number for node in record.path(nodes[-1])}
        return tuple(sorted(lost))

    def answer(self) -> int | None:
        """Return the number of the last call whose reply a client has received and whose conversation has the system
        messages of the episode's first call; None: there is no such call."""
        return max((node.number for node in self.record.nodes if node.delivered and self._is_main(node)), default=None)

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the episode's metrics."""
        causes = [node.cause for node in self.record.nodes if node.cause]
        branches = {f"branches/{cause}": float(causes.count(cause)) for cause in causes}
        lost = {"undelivered": float(sum(not node.delivered for node in self.record.nodes))}
        return {"calls": float(len(self.record.nodes)), **branches, **lost, **self.counts}

    def _is_main(self, node: CallNode) -> bool:
        first = self.record.nodes[0]
        return systems_of(self.record.path(node)[0].messages) == systems_of(first.messages)

    def _begin(self, call: PendingCall) -> PendingTurn:
        request, record = call.request, self.record
        if len(record.nodes) >= self._window.calls:
            self._count("refused_calls")
            self.close(f"the episode has made {self._window.calls} calls, the most that it may make")
            raise Refusal(400, self.over, "episode_limit")
        try:
            if request.text is None:
                prompt = self._form.prompt(record, request.messages, request.tools, request.policy)
            else:
                prompt = self._form.plain_prompt(request.text)
        except DataError as error:
            raise Refusal(400, str(error)) from error
        room = self._window.room(record, prompt)
        if room < 1:
            raise too_long(self._window.whole)
        self.overflowed = False
        digest = tools_digest(request.tools)
        node = record.add(prompt.node, prompt.place, digest, prompt.token_ids, prompt.prefix, request.policy)
        return PendingTurn(call, node, prompt.token_ids, min(room, request.room or room), prompt.images)

    @contextlib.contextmanager
    def _refused(self, call: PendingCall) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            if refusal.code == OVERFLOW:
                self._count("overflows")
                self.overflowed = True
            self._refuse(call, refusal)

    def _refuse(self, call: PendingCall, refusal: Refusal) -> None:
        if not call.done.done():
            call.done.set_exception(refusal)

    def _refusal_after_end(self) -> Refusal:
        return Refusal(410, f"the episode is over: {self.over or 'its time is up'}", "episode_over")

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + 1


def _before(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop string in it, and that string; without one the text and an empty string."""
    places = [(text.find(stop), stop) for stop in stops if stop in text]
    if not places:
        return text, ""
    place, stop = min(places)
    return text[:place], stop
