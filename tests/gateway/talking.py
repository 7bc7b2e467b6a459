"""A client and a model in plain Python, over the record and the chat form of the gateway."""

from __future__ import annotations

from typing import Any

from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.turns import Turns
from megarl.gateway.chat import ChatForm, Prompt, tools_digest
from megarl.gateway.messages import ChatMessage
from megarl.gateway.record import CallNode, Record
from tests.data.templates import FAMILIES, tokenizer_of

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


class Talk:
    """One episode with a model of a family; `say` is a call that the model answers with a text."""

    def __init__(self, family: str = "qwen3", **form: Any) -> None:
        self.family = FAMILIES[family]
        special = () if self.family.end == "</s>" else (self.family.end,)
        self.tokenizer = tokenizer_of(self.family.kind, (*special, *self.family.special))
        text = "{%- if tools %}{{ tools | tojson }}{% endif %}" + self.family.template
        self.template = chat_renderer(self.tokenizer, text, more=self.family.settings)
        self.end = self.tokenizer.convert_tokens_to_ids(self.family.end)
        render = lambda messages: self.template.write(messages, Row({}, "here", 0))  # noqa: E731
        self.turns = Turns(self.tokenizer, render, [self.end])
        self.form = ChatForm(self.template, self.turns, **form)
        self.record = Record()
        self.read: list[list[int]] = []  # what the engine was given for each node

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def begin(self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None = None) -> CallNode:
        """Attach a call; the model has not answered it yet."""
        prompt: Prompt = self.form.prompt(self.record, messages, tools or [])
        self.read.append([*self.record.tokens(prompt.node), *prompt.token_ids])
        digest = tools_digest(tools or [])
        return self.record.add(prompt.node, prompt.place, digest, prompt.token_ids, prompt.prefix)

    def answer(
        self, node: CallNode, text: str, *, finish: str = "stop", tools: bool = False, delivered: bool = True
    ) -> CallNode:
        node.token_ids = [*self.ids(text), *([self.end] if finish == "stop" else [])]
        node.reply, node.finish = self.form.read(text, text, node.number, tools=tools), finish
        node.deliveries = int(delivered)
        return node

    def say(
        self, messages: list[ChatMessage], text: str, tools: list[dict[str, Any]] | None = None, **how: Any
    ) -> CallNode:
        return self.answer(self.begin(messages, tools), text, tools=bool(tools), **how)

    def text(self, node: CallNode) -> str:
        """The text of a node's whole path."""
        return str(self.tokenizer.decode(self.record.tokens(node)))
