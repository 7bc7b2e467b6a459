"""Stepping over the tokens of an answer."""

from __future__ import annotations

from megarl.rewards.mathematics.tokens import Token
from megarl.rewards.mathematics.tree import UnreadError


class TokenReader:
    """Steps over the tokens of an answer from left to right; what reads expressions and answers is built on it.

    Args:
        tokens: all of them.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0  # open |, inside of the innermost bracket
        self.in_set = False  # directly inside of \{ \}, where | separates

    def peek(self, ahead: int = 0) -> Token | None:
        """The next token, or None at the end."""
        position = self.at + ahead
        return self.tokens[position] if position < len(self.tokens) else None

    def next_is(self, *texts: str, ahead: int = 0) -> bool:
        """Whether the next token is one of these commands or marks."""
        token = self.peek(ahead)
        return token is not None and token.kind in ("mark", "command") and token.text in texts

    def take(self, *texts: str) -> bool:
        """Step over the next token if it is one of these."""
        found = self.next_is(*texts)
        self.at += found
        return found

    def expect(self, *texts: str) -> None:
        """Step over the next token, which must be one of these."""
        if not self.take(*texts):
            raise UnreadError(f"not {texts} at token {self.at}")

    def at_modulus(self) -> bool:
        """Whether `(mod` follows."""
        if self.next_is("\\mod", "\\bmod", ahead=1):
            return True
        following = [self.peek(ahead) for ahead in (1, 2, 3)]
        return "".join(token.text for token in following if token is not None) == "mod"

    def skip_braces(self) -> None:
        """Step over `{...}`."""
        depth = 0
        while (token := self.peek()) is not None:
            self.at += 1
            if token.kind == "mark":
                depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return
        raise UnreadError("a brace without its other")
