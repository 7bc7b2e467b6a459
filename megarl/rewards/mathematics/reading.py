"""Base reader that steps over the tokens of an answer."""

from __future__ import annotations

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.tokens import Token
from megarl.rewards.mathematics.tree import UnreadError


class TokenReader:
    """Steps over the tokens of an answer from left to right; the readers of expressions extend it.

    Args:
        tokens: all tokens of the answer.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0  # 1 if the innermost open bracket is | or \|, otherwise 0
        self.in_set = False  # whether the reader is directly inside \{ \}, where | means "such that"

    def peek(self, ahead: int = 0) -> Token | None:
        """Return the next token of the answer, or the one `ahead` tokens after it; None past the end."""
        position = self.at + ahead
        return self.tokens[position] if position < len(self.tokens) else None

    def step(self) -> Token:
        """Return the next token, which must exist, and step over it."""
        token = self.tokens[self.at]
        self.at += 1
        return token

    def next_is(self, *texts: str, ahead: int = 0) -> bool:
        """Return whether a mark or command in `texts` follows, `ahead` tokens after the next token."""
        token = self.peek(ahead)
        return token is not None and token.kind in ("mark", "command") and token.text in texts

    def take(self, *texts: str) -> bool:
        """Step over the next token if it is one of `texts`; return whether it was."""
        is_next = self.next_is(*texts)
        self.at += is_next
        return is_next

    def expect(self, *texts: str) -> None:
        """Step over the next token, which must be one of `texts`."""
        if not self.take(*texts):
            raise UnreadError(f"token {self.at} must be one of {texts}")

    def at_modulus(self) -> bool:
        r"""Return whether the modulus of a congruence begins here, as in `x = 2 (mod 5)` or `\pmod`."""
        if self.next_is("\\mod", "\\bmod", ahead=1):
            return True
        following = [self.peek(ahead) for ahead in (1, 2, 3)]
        return "".join(token.text for token in following if token is not None) == "mod"

    def skip_braces(self) -> None:
        """Step over the braces that begin here and everything in them."""
        depth = 0
        while (token := self.peek()) is not None:
            self.at += 1
            if token.kind == "mark":
                depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return
        raise UnreadError("an opening brace has no closing brace")

    def digits(self, ahead: int) -> tuple[str, int]:
        """Return the digits `ahead` tokens from here, with or without braces, and how many tokens ahead they end; empty
        text if there are none."""
        braced = self.next_is("{", ahead=ahead)
        token = self.peek(ahead + braced)
        if token is None or token.kind != "number" or not token.text.isdigit():
            return "", ahead
        if braced:
            return (token.text, ahead + 3) if self.next_is("}", ahead=ahead + 2) else ("", ahead)
        return token.text, ahead + 1

    def multiplies(self, name: str) -> bool:
        """Return whether the bracket after h, H or P is a factor (a height times a sum, `P(1+r)^t`) and not an
        argument."""
        if name not in ("h", "H", "P") or not self.next_is("("):
            return False
        depth, at, sum_ = 0, 0, False
        while (token := self.peek(at)) is not None:
            depth += (token.text == "(") - (token.text == ")")
            sum_ = sum_ or (depth == 1 and token.text in ("+", "-") and at > 1)
            if depth == 0:
                break
            at += 1
        powered = self.next_is("^", ahead=at + 1)
        return sum_ and (powered if name == "P" else not self.next_is("=", ahead=at + 1))

    def numeral_follows(self) -> bool:
        """Return whether the next token is a number in words, after a hyphen or not."""
        token = self.peek(1 if self.next_is("-") else 0)
        return token is not None and token.kind == "word" and token.text.lower() in words.NUMERALS
