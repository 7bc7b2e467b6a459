"""The tokens of text that follows other text: of a response after its prompt, or of an answer after a turn.

The prompt keeps its tokens. The response gets the tokens that its text has inside the whole text:
    "4+8=" | "12"     4 + 8 = | 1 2      not ▁ 1 2, the tokens from tokenizers that put a space before every text
Where one token of the whole text spans prompt and response ("\\n" | "\\n2", with one token for two line breaks), the
response is tokenised separately, without that space, so that the prompt's tokens stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Texts that are single tokens in most tokenizers and after which no space is added.
_ANCHORS = ("\n", "0", "a", "=")
#: Text without special tokens, which shows the tokens that a tokenizer adds to every text.
_ANY = "a"


def to_continue(tokenizer: Any, texts: Sequence[list[int]]) -> list[list[int]]:
    """Remove the end token that some tokenizers add to every text, and the second begin token of texts that had one
    already, as prompts made elsewhere often do.

    Args:
        texts: tokens of each text as the tokenizer returns them.
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
        prompt: tokens of the text that precedes `text`.
        whole: tokens of both texts together.
    """
    if list(whole[: len(prompt)]) == list(prompt):
        return list(whole[len(prompt) :])
    return inside(tokenizer, text)


def inside(tokenizer: Any, text: str, *anchors: str) -> list[int]:
    """Return the tokens of `text` in the middle of a text, without the space that some tokenizers put before every
    text.

    Args:
        anchors: texts after which `text` is tokenised; they are tried before `_ANCHORS`.
    """
    for anchor in (*anchors, *_ANCHORS):
        before, whole = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (anchor, anchor + text))
        if whole[: len(before)] == before:
            return list(whole[len(before) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
