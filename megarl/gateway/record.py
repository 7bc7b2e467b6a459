"""The record of an episode's calls: a forest, in which a call that extends an earlier one is its child.

    call 0: system, user                        node 0
    call 1: system, user, reply 0, tool         node 1, child of 0: its prompt is the tokens of node 0 and a bridge
    call 2: system, user, reply 0, tool         node 2, child of 0: the same question again is another sample
    call 3: system', user                       node 3, a root: a sub-agent, or a history that was compacted

Node k is the k-th generation of the episode. A node holds what is new in it; the tokens that the engine read for a node
and generated are those of its path end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.gateway.messages import ASSISTANT, ChatMessage, are_replayed


@dataclass
class CallNode:
    """One generation.

    Attributes:
        number: position among the episode's generations.
        parent: number of the node that this one continues; None: this node is a root.
        messages: messages of the request after those of the path.
        tools: a digest of the request's tools.
        prompt_ids: tokens between the parent's last token and the first sampled one.
        prefix: a digest of the template's text for all messages of the request.
        cause: why the node is a root or a sibling; empty: it continues a leaf, or is the first node.
        reply: the message that was sent to the client; None: the node is being generated.
        token_ids, logprobs: sampled tokens, end token included.
        finish: `stop`, `length` or `abort`.
        deliveries: how often a client has received the reply.
        policy: name of the policy that generates; empty: the run has only one policy.
        has_image_token: whether the token of an image was sampled. The model would look for an image there, so no call
            continues the node.
    """

    number: int
    parent: int | None
    messages: tuple[ChatMessage, ...]
    tools: str
    prompt_ids: list[int]
    prefix: Prefix
    cause: str = ""
    reply: ChatMessage | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    deliveries: int = 0
    policy: str = ""
    has_image_token: bool = False

    @property
    def delivered(self) -> bool:
        """Whether a client has received the reply."""
        return self.deliveries > 0

    @property
    def is_open(self) -> bool:
        """Whether a later call may continue this one: the client received the whole reply, no limit cut it, and the
        reply has no token of an image."""
        return self.reply is not None and self.delivered and self.finish == "stop" and not self.has_image_token

    @property
    def why_closed(self) -> str:
        """Why no later call may continue this one, so that it begins a branch."""
        if self.has_image_token:
            return "image_token"
        return "cut" if self.finish == "length" else "undelivered"


@dataclass(frozen=True)
class Prefix:
    """The beginning of a longer text: its length and digest."""

    length: int
    digest: bytes


@dataclass(frozen=True)
class Place:
    """Where a call belongs in the record.

    Attributes:
        node: the node whose path the messages repeat; None: no node.
        rest: the messages after that path.
        cause: why no node can be continued, or why the call is a sibling; empty: it continues a leaf, or is the first.
    """

    node: CallNode | None
    rest: tuple[ChatMessage, ...]
    cause: str


class Record:
    """The tree of all calls that the clients of one episode made to the policy, with its replies."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self._children: dict[int | None, list[int]] = {}

    def place(self, messages: Sequence[ChatMessage], tools: str, policy: str = "") -> Place:
        """Return where a call with these messages belongs: after the policy's deepest node whose path they repeat.

        Among equally deep nodes one that may be continued comes first, then the latest. The call becomes a new root if
        no node fits, if the node must not be continued, or if an assistant's message follows the repeated path.
        """
        node, used = self._deepest(messages, tools, policy)
        rest = tuple(messages[used:])
        if node is None:
            return Place(None, rest, self._cause_of_root(rest, tools, policy))
        if not node.is_open:
            return Place(None, tuple(messages), node.why_closed)
        if any(message.role == ASSISTANT for message in rest):
            return Place(None, tuple(messages), "history")
        return Place(node, rest, "sibling" if self._children.get(node.number) else "")

    def add(
        self,
        parent: CallNode | None,
        place: Place,
        tools: str,
        prompt_ids: list[int],
        prefix: Prefix,
        policy: str = "",
    ) -> CallNode:
        """Add the node of a generation that begins."""
        messages, number = place.rest, len(self.nodes)
        above = None if parent is None else parent.number
        node = CallNode(number, above, messages, tools, prompt_ids, prefix, place.cause, policy=policy)
        self.nodes.append(node)
        self._children.setdefault(above, []).append(number)
        return node

    def path(self, node: CallNode | None) -> list[CallNode]:
        """Return the nodes from a root to `node`."""
        nodes: list[CallNode] = []
        while node is not None:
            nodes.append(node)
            node = None if node.parent is None else self.nodes[node.parent]
        return nodes[::-1]

    def tokens(self, node: CallNode | None) -> list[int]:
        """Return all tokens of a path: what the engine read for its last node, and what it generated."""
        return [token for part in self.path(node) for token in (*part.prompt_ids, *part.token_ids)]

    def said(self, node: CallNode | None) -> list[ChatMessage]:
        """Return all messages from a root to `node`: those of the requests, and the replies as first sent to the
        client, thoughts included."""
        messages: list[ChatMessage] = []
        for part in self.path(node):
            messages += [*part.messages, *([] if part.reply is None else [part.reply])]
        return messages

    def leaves(self) -> list[CallNode]:
        """Return the calls that no later call continues."""
        return [node for node in self.nodes if not self._children.get(node.number)]

    def roots(self, policy: str) -> list[CallNode]:
        """Return the first nodes of a policy's conversations."""
        return [node for node in self.nodes if node.parent is None and node.policy == policy]

    def _deepest(self, messages: Sequence[ChatMessage], tools: str, policy: str) -> tuple[CallNode | None, int]:
        best: tuple[int, bool, int, CallNode | None, int] = (0, False, -1, None, 0)
        waiting: list[tuple[int | None, int, int]] = [(None, 0, 0)]
        while waiting:
            above, used, depth = waiting.pop()
            rest = messages[used:]
            for node in (self.nodes[number] for number in self._children.get(above, ())):
                if (node.tools, node.policy) != (tools, policy) or node.reply is None:
                    continue
                if not are_replayed((*node.messages, node.reply), rest):
                    continue
                end = used + len(node.messages) + 1
                best = max(best, (depth + 1, node.is_open, node.number, node, end), key=lambda entry: entry[:3])
                waiting.append((node.number, end, depth + 1))
        return best[3], best[4]

    def _cause_of_root(self, messages: Sequence[ChatMessage], tools: str, policy: str) -> str:
        roots = self.roots(policy)
        if not roots:
            return ""
        same = [node for node in roots if are_replayed(node.messages, messages)]
        if any(node.tools == tools for node in same):
            return "sibling" if any(len(node.messages) == len(messages) for node in same) else "history"
        return "tools" if same else "root"
