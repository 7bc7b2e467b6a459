"""Stop strings: a turn ends with the token that completes one of them in the turn's text.

The text is the decoded tokens of the turn without special tokens, as rewards receive it. Tokens are read one by one, so
that a turn ends at the same token whether it is still being sampled, or was sampled further and is cut afterwards.

A character may consist of several tokens, and a tokenizer may decode the first token of a text differently. So the text
is not joined from the texts of single tokens: the last tokens are decoded together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config.rollout import SamplingConfig
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # the decoded text of an incomplete or invalid sequence of bytes
_FIRST_LOOK = 64  # a turn of more tokens is decoded only in part: about the first half of its tokens is dropped
_MARGIN = 16  # a turn's last characters that are kept in addition to the longest stop string's length
# After earlier tokens are dropped, the first characters of the rest may decode differently, so a stop string that
# begins in these many characters is ignored.
_EDGE = 8


class StopStrings:
    """The stop strings of one `SamplingConfig`, with the tokenizer that decodes the text."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._strings, self._tokenizer = list(strings), tokenizer
        #: Minimum number of a turn's last characters whose tokens are kept when earlier ones are dropped.
        self.kept = max(map(len, strings)) + _MARGIN
        self._last = "".join({string[-1] for string in strings})
        # With white space or clean-up, a token without a string's last character may complete the string.
        self._always = any(c.isspace() for c in self._last) or bool(tokenizer.clean_up_tokenization_spaces)
        self._completing: dict[int, bool] = {}

    @classmethod
    def of(cls, sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase | None) -> StopStrings | None:
        """Return the stop strings of `sampling`; None if it has none."""
        if not sampling.stop:
            return None
        assert tokenizer is not None, "an engine that samples with stop strings has a tokenizer"
        return cls(sampling.stop, tokenizer)

    def end(self, tokens: Sequence[int], begun: int = 0) -> int | None:
        """Return the number of `tokens` after which a turn ends; None: they contain no stop string.

        Args:
            begun: number of tokens at the start that are known to contain no stop string.
        """
        text = TurnText(self, tokens[:begun])
        return next((begun + text.length for token in tokens[begun:] if text.add(token)), None)

    def before(self, text: str) -> str:
        """Return the part of a turn's text before the first stop string."""
        return text[: min(place if place >= 0 else len(text) for place in map(text.find, self._strings))]

    def are_in(self, text: str, start: int) -> bool:
        """Return whether a stop string begins in `text` at `start` or later."""
        return any(text.find(string, start) >= 0 for string in self._strings)

    def may_end_with(self, token: int) -> bool:
        """Return whether `token` may complete a stop string."""
        if self._always:
            return True
        if token not in self._completing:
            text = self.decode([token])
            self._completing[token] = any(c == _BROKEN or c in self._last for c in text)
        return self._completing[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def check_stop_strings(key: str, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the stop strings of the section `key`.

    Raises:
        ConfigError: a stop string contains a special token, which is never in the text.
    """
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for string in strings:
        for token, number in special.items():
            if token in string:
                raise ConfigError(
                    f"a stop string contains the special token {token!r}, which is never in a response's text",
                    where=f"{key}.stop",
                    found=string,
                    allowed="text without special tokens",
                    fix=f"add the token's id {number} to {key}.stop_token_ids instead",
                )


class TurnText:
    """The end of a turn's text, which grows token by token and is searched for stop strings.

    Args:
        begun: earlier tokens of the turn, which contain no stop string.

    Attributes:
        length: number of tokens added after `begun`.
    """

    def __init__(self, strings: StopStrings, begun: Sequence[int] = ()) -> None:
        self._strings = strings
        self._tokens: list[int] = []
        self._most, self._start = _FIRST_LOOK, 0
        for token in begun:
            self._append(token)
        self.length = 0

    def add(self, token: int) -> bool:
        """Add the next token; return whether the turn ends with it."""
        self.length += 1
        self._append(token)
        strings = self._strings
        return strings.may_end_with(token) and strings.are_in(strings.decode(self._tokens), self._start)

    def _append(self, token: int) -> None:
        if len(self._tokens) >= self._most:
            self._drop()
        self._tokens.append(token)

    def _drop(self) -> None:
        """Drop the first half of the tokens, so that each decoding stays short; only if the rest decodes to the same
        text without it.
        """
        text, half = self._strings.decode(self._tokens), len(self._tokens) // 2
        # up to four tokens may make one character, so one of four places is between characters
        for start in range(half, half + 4) if not text.endswith(_BROKEN) else ():
            rest = self._strings.decode(self._tokens[start:])
            if len(rest) >= self._strings.kept and text.endswith(rest):
                self._tokens, self._start = self._tokens[start:], _EDGE
                self._most = max(_FIRST_LOOK, 2 * len(self._tokens))
                return
        self._most += 1 + self._most // 16  # try again later; the text may end in the middle of a character
