"""Tokenise responses to train on, with the tokens that they have in the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megarl.data.continuation import continued
from megarl.data.conversations import Turn
from megarl.data.render import tokenize
from megarl.data.rows import Row


class Response(NamedTuple):
    """The tokens of a supervised example."""

    prompt: list[int]  # token ids before the assistant's first turn
    ids: list[int]  # token ids from the assistant's first turn to the last end token
    learnt: list[bool]  # for each token of `ids`, whether it counts in the loss


def response_tokens(
    tokenizer: Any,
    conversations: Sequence[Sequence[Turn]],
    rows: Sequence[Row],
    end: int,
    known: Mapping[str, list[int]],
    *,
    special: bool,
) -> list[Response]:
    """Tokenise conversations, given as the assistant's turns, each with the text before it.

    Args:
        rows: the row of each conversation, for error messages.
        end: the token that is added after a turn without an end token.
        known: text -> token ids for texts that are tokenised already, such as most prompts.
        special: whether the tokenizer adds its begin token, because no chat template writes it.
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
    """Join the turns of a conversation; each has the tokens before it, and the tokens of that text plus the turn."""
    ids, learnt = list[int](), list[bool]()
    for number, (turn, before, whole) in enumerate(turns):
        between = before[1:] if number else []  # `before` starts with the previous turn's end token, which `ids` has
        tokens = [*continued(tokenizer, before, whole, turn.text), *([] if turn.ended else [end])]
        ids += [*between, *tokens]
        learnt += [False] * len(between) + [turn.learnt] * len(tokens)
    return Response(turns[0][1], ids, learnt)
