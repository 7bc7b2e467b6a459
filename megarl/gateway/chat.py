"""Between a request's messages and tokens: the prompt of a call, and the message in what the model answered.

A call that continues a node is not rendered again. Its prompt is the node's tokens and a bridge, the template's text
from the end of the assistant's turn to the beginning of the next one:

    node's tokens ... <tool_call>...</tool_call><end> | \\n<start>tool ... <end>\\n<start>assistant\\n
                                                      '------------------ bridge ------------------'

The bridge is what the template writes after a placeholder in an example conversation, whose assistant made the same
calls, because some templates look up the name of the function that a result belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megarl.data.observations import separate_images
from megarl.data.rows import Row
from megarl.data.templates import ChatTemplate
from megarl.data.turns import MARK, Turns
from megarl.envs.tools.parsers import PARSERS, Call, system_text
from megarl.gateway.messages import ASSISTANT, SYSTEM, USER, ChatMessage, ToolCall, fold_systems
from megarl.gateway.record import CallNode, Place, Prefix, Record
from megarl.system.errors import DataError, count

if TYPE_CHECKING:
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.image_set import ImageSet

Announce = Literal["template", "system", "none"]
_BEGIN, _END = "<think>", "</think>"


@dataclass(frozen=True)
class Prompt:
    """The prompt of a call.

    Attributes:
        node: the node that the prompt continues; None: `token_ids` are the whole prompt.
        token_ids: the prompt's tokens after those of the node.
        place: the call's place in the record, with the messages after those of the node, and the cause of a branch.
        images: the images of `token_ids`, by their places in them; None: there are none.
    """

    node: CallNode | None
    token_ids: list[int]
    place: Place
    prefix: Prefix
    images: ImageSet | None = None


class ChatForm:
    """A model's chat template, tokens and form of tool calls, as the gateway uses them.

    Args:
        template: writes messages; None: the model has no chat template, so only plain text can be completed.
        turns: tokenises what follows a turn.
        parser: how the model writes a call.
        announce: how prompts present the tools of a request.
        history: `template`: a call begins a branch if the chat template changes an earlier turn, such as by leaving out
            old thoughts; `exact`: it continues with the tokens as they were sampled.
        images: how the model sees images; None: messages have none.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        turns: Turns,
        parser: str = "qwen",
        announce: Announce = "template",
        history: Literal["template", "exact"] = "template",
        images: ImagePrompts | None = None,
    ) -> None:
        self._template, self._turns, self._parser = template, turns, parser
        self._announce, self._history, self._images = announce, history, images

    def prompt(
        self, record: Record, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], policy: str = ""
    ) -> Prompt:
        """Return the prompt of a call of a policy.

        Raises:
            DataError: the chat template fails on the messages, or writes other images than they have; or the
                tokenizer lacks a token.
        """
        digest = tools_digest(tools)
        place = record.place(messages, digest, policy)
        node = place.node
        # What the client left out of earlier replies is put back, so that the same text is rendered as before.
        whole = [*record.said(node), *place.rest]
        closed = self._render(whole, tools, prompt=False)
        prefix = Prefix(len(closed), _digest(closed))
        if node is not None:
            bridge = self._bridge(node, place.rest, tools)
            if bridge is None:
                place = Place(None, tuple(messages), "bridge")
            elif self._history == "template" and self._is_edited(record, node, closed):
                place = Place(None, tuple(messages), "template")
            else:
                ids, images = self._placed(bridge, place.rest)
                return Prompt(node, ids, place, prefix, images)
            closed = self._render(messages, tools, prompt=False)
            prefix = Prefix(len(closed), _digest(closed))
        ids, images = self._placed(self._turns.whole(self._render(messages, tools)), messages)
        return Prompt(None, ids, place, prefix, images)

    def plain_prompt(self, text: str) -> Prompt:
        """Return the prompt of a plain text, without a chat template. It never continues an earlier call."""
        message = ChatMessage(USER, text)
        text, _ = separate_images(text, self._images)
        return Prompt(None, self._turns.first(text), Place(None, (message,), "plain"), Prefix(0, b""))

    def has_image_token(self, turn: Sequence[int]) -> bool:
        """Return whether the token of an image is in a turn."""
        return self._images is not None and self._images.token in turn

    def read(self, text: str, raw: str, number: int, *, tools: bool) -> ChatMessage:
        """Return the assistant's message in a finished turn.

        Args:
            text: the turn without special tokens.
            raw: the turn with special tokens, from which tool calls are read.
            number: number of the generation, for the ids of tool calls.
            tools: whether the request listed tools; otherwise no tool calls are read.
        """
        reasoning, content = _separate(text)
        message = ChatMessage(ASSISTANT, content, reasoning)
        calls = PARSERS[self._parser](raw) if tools else []
        made = [_sent(call, f"call_{number}_{place}") for place, call in enumerate(calls)]
        if not made or None in made:  # a broken call stays text, and nothing of the turn is a call
            return message
        before = "" if self._parser == "llama3" else content.partition("<tool_call>")[0].strip()
        return replace(message, content=before, calls=tuple(call for call in made if call is not None))

    def _is_edited(self, record: Record, node: CallNode, text: str) -> bool:
        """Return whether the template now writes the conversation up to `node` differently than for the node's call.

        Args:
            text: the template's text of the whole conversation.
        """
        before = node.prefix
        if _digest(text[: before.length]) != before.digest:
            return True
        reasoning = "" if node.reply is None else node.reply.reasoning.strip()
        return bool(reasoning) and reasoning not in text[before.length :]

    def _bridge(self, node: CallNode, rest: Sequence[ChatMessage], tools: list[dict[str, Any]]) -> list[int] | None:
        """Return the tokens from the end of a node to the next turn; None if the template cannot be cut there."""
        calls = () if node.reply is None else node.reply.calls
        ended = self._turns.is_ended(node.token_ids)
        for turn in dict.fromkeys((ChatMessage(ASSISTANT, MARK, calls=calls), ChatMessage(ASSISTANT, MARK))):
            tail = self._tail(turn, rest, tools)
            if tail is not None:
                return self._turns.after(tail, ended=ended)
        return None

    def _tail(self, turn: ChatMessage, rest: Sequence[ChatMessage], tools: list[dict[str, Any]]) -> str | None:
        """Return the template's text after the assistant's `turn`, whose content is a placeholder; None if the
        template does not write the turn in this way."""
        example = [ChatMessage(USER, "x"), turn]
        try:
            alone, whole = self._render(example, tools, prompt=False), self._render([*example, *rest], tools)
            plain = self._render([*example[:1], ChatMessage(ASSISTANT, MARK)], tools, prompt=False)
        except DataError:
            return None
        end, written, following = (text.rpartition(MARK) for text in (plain, alone, whole))
        if any(text.count(MARK) != 1 for text in (plain, alone, whole)):
            return None
        if not following[2].startswith(written[2]) or not written[2].endswith(end[2]):
            return None
        return end[2] + following[2][len(written[2]) :]

    def _render(self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], *, prompt: bool = True) -> str:
        if self._template is None:
            raise DataError(
                "the model has no chat template, so it cannot answer chat messages",
                fix="set data.override_chat_template, or call /v1/completions with a text",
            )
        listed = tools if self._announce == "template" else []
        if listed and not self._template.writes_tools:
            raise DataError(
                "the request lists tools, but the chat template does not write them",
                where="env.announce",
                found="template",
                fix="set env.announce: system, or none where the model knows them",
            )
        if tools and self._announce == "system":
            given = [message.content for message in messages[:1] if message.role == SYSTEM]
            text = "\n\n".join([*given, system_text(self._parser, tools)]).strip()
            messages = [ChatMessage(SYSTEM, text), *messages[len(given) :]]
        if self._announce != "template":
            messages = [self._with_written_calls(message) for message in messages]
        row = Row({"tools": listed} if listed else {}, "a request", 0)
        try:
            return self._template.write(self._for_template(messages), row, prompt=prompt)
        except DataError:
            folded = fold_systems(messages)
            if folded == list(messages):
                raise
            return self._template.write(self._for_template(folded), row, prompt=prompt)

    def _for_template(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages as the chat template takes them, with the model's text of an image in place of each image,
        and without this text in what clients and the policy wrote."""
        given = [message.for_template() for message in messages]
        if self._images is None:
            return given
        written: list[dict[str, Any]]
        written, _ = separate_images(given, self._images)
        return written

    def _placed(self, ids: list[int], messages: Sequence[ChatMessage]) -> tuple[list[int], ImageSet | None]:
        """Return the tokens of `messages` with as many image tokens as their images have features, and the images.

        Args:
            ids: tokens with one image token for each image.
        """
        if self._images is None:
            return ids, None
        images = [image.pixels for message in messages for image in message.images if image.pixels is not None]
        if (tokens := ids.count(self._images.token)) != len(images):
            raise DataError(
                "the chat template does not write each image of the messages once",
                found=f"{count(tokens, 'image token')} for {count(len(images), 'image')}",
                fix=f"remove the text {self._images.token_text!r} from the descriptions of tools, or the images from "
                "messages that the template leaves out",
            )
        return self._images.placed(ids, images)

    def _with_written_calls(self, message: ChatMessage) -> ChatMessage:
        """Return a message with its tool calls written into its text, for chat templates that cannot write them."""
        if not message.calls:
            return message
        key = "parameters" if self._parser == "llama3" else "arguments"
        texts = [json.dumps({"name": call.name, key: call.parsed}, ensure_ascii=False) for call in message.calls]
        tagged = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
        written = "; ".join(texts) if self._parser == "llama3" else "\n".join(tagged)
        return replace(message, content="\n".join(filter(None, [message.content, written])), calls=())


def tools_digest(tools: list[dict[str, Any]]) -> str:
    """Return a digest of a request's tools; the order of keys does not count."""
    return hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).hexdigest() if tools else ""


def _separate(text: str) -> tuple[str, str]:
    """Return the thoughts and the rest of a turn's text. The prompt may have opened the thoughts."""
    before, end, after = text.partition(_END)
    if end:
        return before.partition(_BEGIN)[2].strip("\n") if _BEGIN in before else before.strip("\n"), after.lstrip("\n")
    if text.lstrip().startswith(_BEGIN):  # a limit cut the turn within its thoughts
        return text.lstrip().removeprefix(_BEGIN).strip("\n"), ""
    return "", text


def _sent(call: Call, id: str) -> ToolCall | None:
    """Return a tool call in the form that clients receive; None: it is malformed, or JSON cannot express it."""
    if call.error:
        return None
    try:
        return ToolCall(id, call.name, json.dumps(call.arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
