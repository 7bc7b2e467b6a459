"""A client and a model in plain Python, over the record and the chat form of the gateway."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL.Image import Image, fromarray

from megarl.config.data import DataConfig
from megarl.config.model import ModelConfig
from megarl.data.image_prompts import ImagePrompts
from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.turns import Turns
from megarl.gateway.chat import ChatForm, Prompt, tools_digest
from megarl.gateway.messages import ChatMessage
from megarl.gateway.record import CallNode, Record
from megarl.models.hf import encoder_of, image_settings, load_hf_config
from tests.data.templates import FAMILIES, tokenizer_of
from tests.models.vlm_tiny import config_of

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


class Talk:
    """One episode with a model of a family; `say` is a call that the model answers with a text."""

    def __init__(self, family: str = "qwen3", *, tokens: tuple[str, ...] = (), **form: Any) -> None:
        self.family = FAMILIES[family]
        special = () if self.family.end == "</s>" else (self.family.end,)
        self.tokenizer = tokenizer_of(self.family.kind, (*special, *self.family.special, *tokens))
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


VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def seeing(kind: str = "qwen2_5_vl", **text: Any) -> tuple[Talk, ImagePrompts, dict[str, Any]]:
    """A talk with images, of at most three in a call and 16 features each; how they are read; and the model's config.

    Args:
        kind: of the vision-language model.
        text: keys of its decoder.
    """
    talk = Talk("qwen3", tokens=VISION)
    begin, image, end = talk.tokenizer.convert_tokens_to_ids(list(VISION))
    raw = config_of(kind, vocab_size=600, **text)
    raw |= {"vision_start_token_id": begin, "image_token_id": image, "vision_end_token_id": end, "video_token_id": 590}
    hf = load_hf_config(ModelConfig(hf_config=raw, vision=True))
    data = DataConfig(train_files=["x"], image_key="images", limit_images=3, min_pixels=28**2, max_pixels=16 * 28**2)
    images = ImagePrompts.of(data, encoder_of(hf), image_settings(hf), talk.tokenizer)
    assert images is not None
    talk.form = ChatForm(talk.template, talk.turns, images=images, history="exact")
    return talk, images, raw


def picture(width: int, height: int, seed: int) -> Image:
    """An image of random pixels."""
    return fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image, form: str = "PNG") -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()
