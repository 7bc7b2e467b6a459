"""Calls a stage again that failed with an error which may pass, such as that of a busy service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.dag.node import Node
from megarl.system.device import RandomStates

T = TypeVar("T")
_LONGEST_PAUSE = 30.0  # seconds


def call_again(node: Node, context: Any, call: Callable[[], T]) -> T:
    """Return the result of `call`, which is repeated up to `node.retry` times after an error of its `retries_on`.

    Every attempt begins with the same random states and the same metrics. Before attempt k + 1 there is a pause of
    2 ** (k - 1) seconds, at most 30. The step's metric `retries/NODE` counts the repetitions.

    Raises:
        Exception: the error of the last attempt, or any other error at once.
    """
    metrics = context.metrics.to_json()
    states = RandomStates.now()
    for failed in range(node.retry):
        try:
            output = call()
        except node.declared.retries_on as error:
            pause = min(2.0**failed, _LONGEST_PAUSE)
            failure = f"attempt {failed + 1} of {node.retry + 1} failed: {type(error).__name__}: {error}"
            print(f"node {node.id!r}: {failure}; the next one begins in {pause:g} s", flush=True)
            time.sleep(pause)
            context.metrics.go_back_to(metrics)
            states.restore()
        else:
            context.metrics.sum(f"retries/{node.id}", failed)
            return output
    output = call()
    context.metrics.sum(f"retries/{node.id}", node.retry)
    return output
