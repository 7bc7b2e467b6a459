"""Requests that get no reply, and why."""

from __future__ import annotations

#: The code of messages that leave no room for a reply, by which harnesses know that they must shorten them.
OVERFLOW = "context_length_exceeded"


class Refusal(Exception):
    """A request that gets no reply.

    Attributes:
        status: HTTP status; below 500 and other than 429 the client must not send the request again.
        kind, code: the error's `type` and `code` in OpenAI's form.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request", kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.message, self.code, self.kind = status, message, code, kind


def too_long(tokens: int) -> Refusal:
    """Return the refusal of messages that leave no room for a reply; `tokens`: maximum tokens of a sequence."""
    return Refusal(
        400,
        f"prompt is too long: this model's maximum context length is {tokens} tokens, and the messages leave no room "
        "for a reply. Please reduce the length of the messages.",
        OVERFLOW,
    )
