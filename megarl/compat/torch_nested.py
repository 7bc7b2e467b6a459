"""torch 2.13's `nested_tensor_from_jagged` calls a function that warns about being called, once per process.

The warning is about tracing, which nothing here does, and a user can do nothing about it, so it is not shown.
"""

from __future__ import annotations

import logging

LOGGER = "torch.fx._symbolic_trace"
_STARTS_WITH = "is_fx_tracing will return true"


def _keep(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_STARTS_WITH)


def install() -> None:
    """Drop that one message; others of the same logger stay. Idempotent."""
    logging.getLogger(LOGGER).addFilter(_keep)
