"""Write responses to train on as text: the assistant's turns, as the chat template writes the whole conversation.

The template is called once for all messages. Its text is cut where the assistant's answers begin (the end of a prompt)
and after the end token that the template writes:
    <start>user 1+1<end><start>assistant | 2<end> | <end><start>user 2+2<end><start>assistant | 4<end>
    before                                 text     before                                     text
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, takewhile
from typing import NamedTuple

from megarl.data.messages import ASSISTANT, Message, extra_keys, is_learnt, without_weight
from megarl.data.rows import Row
from megarl.data.templates import ChatTemplate
from megarl.data.turns import MARK
from megarl.system.errors import ConfigError, DataError

_OPEN, _CLOSE = "<think>", "</think>"
_MARKED: Message = {"role": ASSISTANT, "content": MARK}
_QUESTION: Message = {"role": "user", "content": "x"}


class Turn(NamedTuple):
    """A turn of the assistant."""

    before: str  # text from the previous turn's end token (included), or from the start, to where the assistant begins
    text: str  # the assistant's text, with the end token if the template writes one
    ended: bool  # whether `text` ends with an end token; if not, one is appended to the turn's tokens
    learnt: bool = True  # whether the turn counts in the loss


class Conversations:
    """Writes responses as text.

    Args:
        chat: the chat template; None: prompts and responses are plain text.
        ends: texts of the tokens that end a turn.
        special: texts of the tokenizer's special tokens; a template that ends turns with one not in `ends` is an error.

    Attributes:
        without_reasoning: rows whose prompt opens `<think>` and whose response has no reasoning.
        shortened: rows from whose turns the template removes reasoning, as Qwen3's does in all but the last turn.
    """

    def __init__(self, chat: ChatTemplate | None, ends: Sequence[str], special: Sequence[str] = ()) -> None:
        self._chat, self._ends = chat, [end for end in dict.fromkeys(ends) if end]
        self._special = [token for token in dict.fromkeys(special) if token]
        # Number of characters, such as a space, that the template writes between a prompt and the answer, by whether
        # the turn is the last one; None: a rendered answer does not begin as the generation prompt ends.
        self._inserted: dict[bool, int | None] = {}
        self.without_reasoning = list[Row]()
        self.shortened = list[Row]()

    def turns(self, prompt: str, given: str | list[Message], talk: Sequence[Message], row: Row) -> list[Turn]:
        """Return the turns of a response.

        Args:
            prompt: text of the prompt as the model sees it.
            given: messages of the prompt, or its text if no chat template is used.
            talk: messages of the response.
        """
        talk = [self._without_end(message, row) if message["role"] == ASSISTANT else message for message in talk]
        if self._chat is not None and not isinstance(given, str) and (len(talk) > 1 or self._writes_turns):
            turns = self._written(self._chat, prompt, [*given, *without_weight(talk)], len(given), row)
        else:
            turns = [self._plain(prompt, given, talk, row)]
        answers = [message for message in talk if message["role"] == ASSISTANT]
        turns = [turn._replace(learnt=is_learnt(message)) for turn, message in zip(turns, answers, strict=True)]
        reasoning, close, _ = turns[-1].text.partition(_CLOSE)
        has_reasoning = close and reasoning.replace(_OPEN, "").strip()
        if turns[-1].learnt and _is_opened(prompt) and not has_reasoning:
            self.without_reasoning.append(row)
        if any(turn.learnt and _is_shortened(message, turn.text) for message, turn in zip(answers, turns, strict=True)):
            self.shortened.append(row)
        return turns

    @cached_property
    def _writes_turns(self) -> bool:
        """Whether the template writes the assistant's turns; some templates accept a single question only."""
        assert self._chat is not None
        try:
            return self._chat.write([_QUESTION, _MARKED], Row({}, "an example", 0), prompt=False).count(MARK) == 1
        except DataError:
            return False

    def _without_end(self, message: Message, row: Row) -> Message:
        """Return the message without an end token at its end, since the template adds one.

        Raises:
            DataError: nothing else is in the message, or it contains another end token.
        """
        content = message["content"]
        end = next((end for end in self._ends if content.endswith(end)), "")
        message = {**message, "content": content.removesuffix(end)}
        if not message["content"] and not extra_keys(message):
            if end:
                raise DataError("the response consists of an end token only", where=row.where, fix="remove the row")
            raise DataError("the response is empty", where=row.where, found=content, fix=row.column_fix)
        text = json.dumps(message, ensure_ascii=False)
        inside = next((end for end in self._ends if end in text), None)
        if inside is not None:
            raise DataError(
                "the response contains an end token before its end, where the model would stop",
                where=row.where,
                found=f"{inside} in {content[:200]!r}",
                fix="write a conversation as messages, or remove the end token from the text",
            )
        return message

    def _plain(self, prompt: str, given: str | list[Message], talk: Sequence[Message], row: Row) -> Turn:
        """Return the response as one turn after the prompt's text, where no chat template writes answers."""
        message, keys = talk[0], extra_keys(talk[0])
        if self._chat is None and (keys or len(talk) > 1):
            kind = (
                f"a message of the response has {', '.join(map(repr, keys))}" if keys else "the response has messages"
            )
            raise DataError(
                f"{kind}, and no chat template is used",
                where=row.where,
                fix="set data.chat_template: true, or write the response as text",
            )
        if keys and self._chat is not None and not isinstance(given, str):
            self._chat.conversation([*given, *without_weight([message])], len(given), row)
        return Turn(prompt, _continued(prompt, message["content"]), ended=False)

    def _written(self, chat: ChatTemplate, prompt: str, messages: list[Message], first: int, row: Row) -> list[Turn]:
        """Return the turns from message `first` on, as the template writes them."""
        text = chat.conversation(messages, first, row)
        starts, shown = list[tuple[int, str]](), prompt
        for place in range(first, len(messages)):
            if messages[place]["role"] != ASSISTANT:
                continue
            if place > first:
                shown = chat.write(messages[:place], row)
            starts.append(
                (len(shown), "") if text.startswith(shown) else self._start(chat, messages, place, text, shown, row)
            )
        turns, stops = self._cut(text, starts, row)
        places = [place for place in range(first, len(messages)) if messages[place]["role"] == ASSISTANT]
        for place, turn, stop in zip(places, turns, stops, strict=True):
            self._refuse_run_on(chat, messages[: place + 1], turn, text[:stop], row)
        content = messages[-1]["content"]
        # DeepSeek-R1's template removes the reasoning even from the last turn, so take that turn from the message.
        if _CLOSE in content and _CLOSE not in turns[-1].text and shown.startswith(text[: starts[-1][0]]):
            before = turns[-1].before + shown[starts[-1][0] :]
            turns[-1] = Turn(before, _continued(shown, content), ended=False)
        return turns

    def _start(
        self, chat: ChatTemplate, messages: list[Message], place: int, text: str, prompt: str, row: Row
    ) -> tuple[int, str]:
        """Find an answer, message number `place`, in the text of a conversation that does not contain the answer's
        prompt exactly, because the prompt's `<think>` or the reasoning of earlier turns is missing.

        Returns:
            The answer's position in the text, and the prompt to put in its place where the template writes prompts
            differently there, else empty text.
        """
        is_last = place == len(messages) - 1
        if is_last not in self._inserted:
            question = chat.write([_QUESTION], row)
            talk = [_QUESTION, _MARKED, *([] if is_last else [_QUESTION])]
            example = chat.write(talk, row, prompt=False).partition(MARK)[0]
            differs = not (example.startswith(question) or question.startswith(example))
            self._inserted[is_last] = None if differs else max(0, len(example) - len(question))
        marked = chat.write([*messages[:place], _MARKED, *messages[place + 1 :]], row, prompt=False)
        before, inserted = marked.partition(MARK)[0], self._inserted[is_last]
        if before == marked:
            raise _not_continued(text, marked, row)
        if inserted is None:
            return len(before), prompt
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(before[: len(before) - inserted], text, strict=False))
        return sum(1 for _ in alike), ""

    def _refuse_run_on(self, chat: ChatTemplate, messages: list[Message], turn: Turn, text: str, row: Row) -> None:
        """Raise an error if the turn of the last message also contains the next message.

        This happens if the template ends turns with a special token that is not in `ends`. `text` is the conversation
        up to the turn's end.
        """
        content = json.dumps(messages[-1], ensure_ascii=False)
        end = next((end for end in self._ends if turn.ended and turn.text.endswith(end)), "")
        inner = turn.text.removesuffix(end)
        if not any(token in inner and token not in content for token in self._special):
            return
        alone = chat.write(messages, row, prompt=False)
        if len(alone) < len(text) and text.startswith(alone):
            raise self._no_end(inner)

    def _no_end(self, text: str) -> ConfigError:
        return ConfigError(
            "the chat template does not end a turn of the assistant with an end token",
            where="data.override_chat_template",
            found=text,
            allowed=self._ends,
            fix="add the token that ends a turn to rollout.sampling.stop_token_ids, or name another template",
        )

    def _cut(self, text: str, starts: Sequence[tuple[int, str]], row: Row) -> tuple[list[Turn], list[int]]:
        """Cut a conversation into turns that begin at `starts`, each up to its end token; return them and their ends.

        `starts` has (position, prompt); a prompt that is not empty replaces the text before the position.
        """
        turns, ends, done, end = list[Turn](), list[int](), 0, ""
        for (start, prompt), (limit, _) in pairwise([*starts, (len(text), "")]):
            if prompt and not prompt.startswith(text[:done]):
                raise _not_continued(text, prompt, row)
            before = end + (prompt or text[:start])[done:]
            stops = [(text.find(token, start, limit), token) for token in self._ends]
            stop, end = min((candidate for candidate in stops if candidate[0] >= 0), default=(limit, ""))
            if not end and limit < len(text):
                raise self._no_end(text[start:limit])
            done = stop + len(end)
            ends.append(done)
            turns.append(Turn(before, text[start:done] if end else text[start:].rstrip(), bool(end)))
        return turns, ends


def _not_continued(text: str, prompt: str, row: Row) -> DataError:
    return DataError(
        "the chat template does not write this message as a continuation of the prompt",
        where=row.where,
        found=text[-200:],
        allowed=f"text after {prompt[-80:]!r}",
        fix="write the response as text, as the model would write it",
    )


def _is_opened(prompt: str) -> bool:
    return prompt.rstrip().endswith(_OPEN)


def _continued(prompt: str, content: str) -> str:
    """Remove `<think>` from the content where the prompt has opened it already."""
    if not (_is_opened(prompt) and content.lstrip().startswith(_OPEN)):
        return content
    opened = content.lstrip().removeprefix(_OPEN)
    return opened.lstrip("\n") if prompt.endswith("\n") else opened


def _is_shortened(message: Message, text: str) -> bool:
    """Return whether the turn's text lacks reasoning, or the text of another key, that the message has."""
    keys = [message[key].strip() for key in extra_keys(message) if isinstance(message[key], str)]
    return (_CLOSE in message["content"] and _CLOSE not in text) or any(value not in text for value in keys)
