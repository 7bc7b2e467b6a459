"""The tokens of text that continues other text: of a response after its prompt, and of an answer after a turn.

A prompt's tokens stay what the model is given, and a response has those that its text has in the whole text:

    "4+8=" | "12"     4 + 8 = | 1 2      and not ▁ 1 2, as tokenizers that put a blank before every text have it

Where a token of the whole text reaches from the prompt into the response ("\\n" | "\\n2" as one token of two line
breaks), the response is tokenised by itself, without the tokenizer's blank: the prompt is not changed by what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Texts with a token of their own in most tokenizers, which no blank follows.
_ANCHORS = ("\n", "0", "a", "=")
#: Text without special tokens, for what a tokenizer adds to every text.
_ANY = "a"


def to_continue(tokenizer: Any, texts: Sequence[list[int]]) -> list[list[int]]:
    """Return the tokens of texts that go on: without the end token that some tokenizers add to every text, and with the
    begin token once where the text had it already, as prompts made elsewhere often do.

    Args:
        texts: tokens of each text, with what the tokenizer adds by itself.
    """
    plain, whole = (tokenizer(_ANY, add_special_tokens=special)["input_ids"] for special in (False, True))
    starts = (n for n in range(len(whole)) if plain and whole[n : n + len(plain)] == plain)
    added = next((len(whole) - start - len(plain) for start in starts), 0)
    begin = tokenizer.bos_token_id
    doubled = None if begin is None else [begin, begin]
    return [tokens[1 if tokens[:2] == doubled else 0 : len(tokens) - added] for tokens in texts]


def continued(tokenizer: Any, prompt: Sequence[int], whole: Sequence[int], text: str) -> list[int]:
    """Return the tokens of `text` after `prompt`.

    Args:
        prompt: tokens of the text before it.
        whole: tokens of both texts together.
    """
    if list(whole[: len(prompt)]) == list(prompt):
        return list(whole[len(prompt) :])
    return inside(tokenizer, text)


def inside(tokenizer: Any, text: str, *anchors: str) -> list[int]:
    """Return the tokens of `text` in the middle of a text, without the blank that some tokenizers put before one.

    Args:
        anchors: texts to tokenise it after, before those that are tried otherwise.
    """
    for anchor in (*anchors, *_ANCHORS):
        before, whole = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (anchor, anchor + text))
        if whole[: len(before)] == before:
            return list(whole[len(before) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
