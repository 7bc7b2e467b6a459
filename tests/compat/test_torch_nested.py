"""The filter on torch's warning about its own call: needed, and no wider than needed."""

import logging

import pytest
import torch
from torch.fx import _symbolic_trace

from megarl.compat import torch_nested


@pytest.fixture
def records():
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(str(record.msg))
    logger = logging.getLogger(torch_nested.LOGGER)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    torch_nested.install()


def make_nested() -> None:
    _symbolic_trace.is_fx_tracing_warning.cache_clear()
    torch.nested.nested_tensor_from_jagged(torch.zeros(1), offsets=torch.tensor([0, 1]))


def test_the_filter_is_still_needed(records):
    logging.getLogger(torch_nested.LOGGER).removeFilter(torch_nested._keep)
    make_nested()
    assert records, "torch no longer warns: delete megarl/compat/torch_nested.py"


def test_only_that_message_is_dropped(records):
    torch_nested.install()
    make_nested()
    logging.getLogger(torch_nested.LOGGER).warning("something else")
    assert records == ["something else"]
