"""The stand-in for the buffer's client does what the client does, as far as a test can tell."""

from __future__ import annotations

import inspect

from megarl.disaggregated.buffer.client import BufferClient
from tests.disaggregated.buffer.served import FarClient


def calls(client: type) -> dict[str, list[tuple[str, object, object]]]:
    """What may be called, by name: names, kinds and defaults of its parameters."""
    names = [name for name in vars(client) if not name.startswith("_")]
    signatures = {name: inspect.signature(getattr(client, name)) for name in names}
    return {name: [(p.name, p.kind, p.default) for p in s.parameters.values()] for name, s in signatures.items()}


def test_a_worker_may_call_the_stand_in_as_it_calls_the_client():
    assert calls(FarClient) == calls(BufferClient)
