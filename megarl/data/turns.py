"""Tokenise observations between the policy's turns.

A turn keeps the tokens that the policy sampled. The text after it is tokenised once and appended:

    prompt | turn 0 ... <end> | \\n<start>tool ... <end>\\n<start>assistant\\n | turn 1 ... <end>
                              '-------------- following ----------------------'

The text is tokenised as text after an end token, so that the tokens equal those of the whole conversation.

The delimiters of chat messages come from the template: it renders a conversation with a placeholder as the policy's
turn, and the text after the placeholder is the text to append.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from megarl.data.continuation import inside, to_continue
from megarl.system.errors import ConfigError, DataError

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]
#: Placeholder of the assistant's turn in a conversation that the template renders.
MARK = "megarl-turn-7f3a"
_TALK: Messages = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": MARK},
    {"role": "user", "content": "y"},
]


def after_turn(render: Render) -> str | None:
    """Return the chat template's text between the assistant's turn and its next one; None unless the template writes
    the turn once and unchanged."""
    text = render(_TALK)
    return text.rpartition(MARK)[2] if text.count(MARK) == 1 else None


class Turns:
    """The tokeniser of observations.

    Args:
        render: messages -> text up to where the assistant's turn begins; None: no chat template is used.
        stop_ids: tokens that end a turn; the first is the tokenizer's end token.

    Attributes:
        end: the token that the template writes after a turn; without a template the first of `stop_ids`.
    """

    def __init__(self, tokenizer: Any, render: Render | None, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._render, self._stops = tokenizer, render, set(stop_ids)
        self._size = len(tokenizer)
        self.end = stop_ids[0]
        if render is not None:
            self._check()
        self._end_text = str(tokenizer.decode([self.end]))

    def first(self, observation: str | Messages | list[int]) -> list[int]:
        """Return the tokens of an episode's first observation."""
        if _are_messages(observation):
            return self._ids(self._rendered(observation))
        if not isinstance(observation, str):
            return self._plain(observation)
        if self._render is not None:
            return self._ids(observation)
        # the tokenizer adds its begin token if it has one, as for prompts of the data
        ids = self._tokenizer(observation)["input_ids"]
        return self._known(to_continue(self._tokenizer, [ids])[0], observation)

    def following(self, observation: str | Messages | list[int], *, ended: bool) -> list[int]:
        """Return the tokens from the end of a turn to the start of the next one.

        Args:
            ended: whether the turn's last token is one of `stop_ids`; then the template's end token is left out.
        """
        if not _are_messages(observation):
            return self._plain(observation)
        return self.after(self._tail(observation), ended=ended)

    def after(self, tail: str, *, ended: bool) -> list[int]:
        """Return the tokens of `tail`, the chat template's text between a turn and the next one; `ended` as in
        `following`.
        """
        ids = self._after(tail) if ended else self._ids(tail)
        return ids[1:] if ended and ids and ids[0] in self._stops else ids

    def whole(self, text: str) -> list[int]:
        """Return the tokens of a whole text of the chat template."""
        return self._ids(text)

    def bodies(self, observation: str | Messages | list[int], ids: Sequence[int], *, ended: bool) -> list[list[int]]:
        """Return where the observation's own text is in `ids`, the tokens that `following` returned for it: [start,
        stop] of each run of tokens. The rest are delimiters of the chat template. Return an empty list if the text
        cannot be found in `ids`.
        """
        if not _are_messages(observation):
            return [[0, len(ids)]]
        tail = self._tail(observation)
        for text in (tail, tail.lstrip()):
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            left_out = len(encoded["input_ids"]) - len(ids)
            if left_out in (0, 1) and encoded["input_ids"][left_out:] == list(ids):
                stripped, spans = len(tail) - len(text), encoded["offset_mapping"][left_out:]
                return [
                    [tokens[0], tokens[-1] + 1]
                    for first, last in self._places(observation, tail)
                    if (tokens := [t for t, (x, y) in enumerate(spans) if first <= x + stripped < y + stripped <= last])
                ]
        return []

    def _places(self, observation: Messages, tail: str) -> list[tuple[int, int]]:
        """Return (first character, end) of the content of each message of `observation` in `tail`, the text that the
        template writes for them. The list ends before a message whose content the template changes.
        """
        marks = [f"{MARK[::-1]}-{number}" for number in range(len(observation))]
        rest = self._tail([{**message, "content": mark} for message, mark in zip(observation, marks, strict=True)])
        places, end = [], 0
        for message, mark in zip(observation, marks, strict=True):
            delimiter, _, rest = rest.partition(mark)
            content = str(message.get("content") or "")
            start = end + len(delimiter)
            if not tail.startswith(content, start):
                content = content.strip()  # many templates strip the text of a message
            if tail[end:start] != delimiter or not tail.startswith(content, start):
                break
            end = start + len(content)
            places.append((start, end))
        return places

    def is_ended(self, turn: Sequence[int]) -> bool:
        """Return whether the turn's last token is one of `stop_ids`; a stop string may end a turn at any token."""
        return turn[-1] in self._stops

    def _tail(self, observation: Messages) -> str:
        """Return the text that the template writes from the end of a policy turn to the start of the next one, with the
        messages of `observation`."""
        talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *observation]
        return self._rendered(talk).rpartition(MARK)[2]

    def _after(self, tail: str) -> list[int]:
        """Tokenise the template's text after a turn, without white space that it may write before the end token."""
        ids = self._ids(tail)
        # Llama 2's template writes a space before the end token, and a line break may be the end token itself.
        return ids if ids and ids[0] in self._stops else self._ids(tail.lstrip())

    def _plain(self, observation: Any) -> list[int]:
        if isinstance(observation, str):
            return self._known(inside(self._tokenizer, observation, self._end_text), observation)
        ids = [int(token) for token in observation]
        if strange := [token for token in ids if not 0 <= token < self._size]:
            raise DataError(
                "the environment returned a token id that the tokenizer does not have",
                found=strange[0],
                allowed=f"0 to {self._size - 1}",
                fix="return text, or token ids of this model's tokenizer, from the environment",
            )
        return ids

    def _ids(self, text: str) -> list[int]:
        return self._known(self._tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def _known(self, ids: list[int], text: str) -> list[int]:
        """Return `ids`, after a check that the tokenizer has a token for every character of `text`."""
        unknown = self._tokenizer.unk_token_id
        if unknown is None or unknown not in ids:
            return ids
        rest = text.replace(self._tokenizer.unk_token, "")  # the text itself may contain the name of the unknown token
        strange = next((c for c in rest if unknown in self._tokenizer(c, add_special_tokens=False)["input_ids"]), None)
        if strange is None:
            return ids
        raise DataError(
            f"the tokenizer has no token for {strange!r}, which the environment returned",
            found=text[:200],
            fix="add it to the tokenizer (model.tokenizer 'chars:...'), or return other text from the environment",
        )

    def _rendered(self, messages: Messages) -> str:
        if self._render is None:
            raise ConfigError(
                "the environment returned chat messages, but no chat template is used to turn them into tokens",
                where="data.chat_template",
                found="no chat template is used",
                fix="set data.chat_template=true or data.override_chat_template, or return text from the environment",
            )
        return self._render(messages)

    def _check(self) -> None:
        tail = after_turn(self._rendered)
        ids = [] if tail is None else self._after(tail)
        if not ids or ids[0] not in self._stops:
            raise ConfigError(
                "the chat template changes the assistant's turn, or writes no end token after it",
                where="data.override_chat_template",
                found=self._rendered(_TALK),
                allowed="a template that writes the assistant's content unchanged, and an end token right after it",
                fix="add the token that ends a turn to rollout.sampling.stop_token_ids, or set another template",
            )
        self.end = ids[0]


def _are_messages(observation: str | Messages | list[int]) -> TypeGuard[Messages]:
    return isinstance(observation, list) and bool(observation) and isinstance(observation[0], dict)
