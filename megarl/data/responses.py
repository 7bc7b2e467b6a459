"""The tokens of responses to learn: those of the whole conversation, from its prompt on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megarl.data.continuation import continued
from megarl.data.conversations import Turn
from megarl.data.render import tokenize
from megarl.data.rows import Row


class Response(NamedTuple):
    """The tokens of an example.

    Attributes:
        prompt: those before the assistant's first turn.
        ids: those after it, up to the last end token.
        learnt: of each of these, whether the loss counts it.
    """

    prompt: list[int]
    ids: list[int]
    learnt: list[bool]


def response_tokens(
    tokenizer: Any,
    conversations: Sequence[Sequence[Turn]],
    rows: Sequence[Row],
    end: int,
    known: Mapping[str, list[int]],
    *,
    special: bool,
) -> list[Response]:
    """Return the tokens of conversations, of which each turn continues what is before it.

    Args:
        rows: those of the conversations, for errors.
        end: token to learn after a turn that has no end token.
        known: tokens of texts, as of most prompts, that need not be tokenised again.
        special: the tokenizer adds its begin token; there is no chat template that writes it.

    Raises:
        DataError: as `tokenize`.
    """
    every = [(turn, row) for turns, row in zip(conversations, rows, strict=True) for turn in turns]
    new = {turn.before: row for turn, row in every if turn.before not in known}
    before = {
        **known,
        **dict(zip(new, tokenize(tokenizer, list(new), list(new.values()), special=special), strict=True)),
    }
    texts, of_turns = [turn.before + turn.text for turn, _ in every], [row for _, row in every]
    whole = tokenize(tokenizer, texts, of_turns, special=special)
    parts = iter([(before[turn.before], tokens) for (turn, _), tokens in zip(every, whole, strict=True)])
    return [_response(tokenizer, [(turn, *next(parts)) for turn in turns], end) for turns in conversations]


def _response(tokenizer: Any, turns: Sequence[tuple[Turn, list[int], list[int]]], end: int) -> Response:
    """Return the tokens of a conversation from its turns, each with the tokens before it, and with its own after
    these."""
    ids, learnt = list[int](), list[bool]()
    for number, (turn, before, whole) in enumerate(turns):
        between = before[1:] if number else []  # the end token of the turn before is there
        said = [*continued(tokenizer, before, whole, turn.text), *([] if turn.ended else [end])]
        ids += [*between, *said]
        learnt += [False] * len(between) + [turn.learnt] * len(said)
    return Response(turns[0][1], ids, learnt)
