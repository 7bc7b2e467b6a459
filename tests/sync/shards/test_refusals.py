"""What a run is told where trainer ranks cannot send directly to server ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megarl.sync.transports.shards import refuse_shards
from megarl.system.errors import ConfigError


@pytest.mark.parametrize(
    ("colocated", "spread", "transport"), [(False, "", "auto"), (True, "", "auto"), (True, "two machines", "disk")]
)
def test_the_proposed_transport_is_another_one(colocated, spread, transport):
    receivers = SimpleNamespace(takes_no_shards="", colocated=colocated, spread=spread)
    with pytest.raises(ConfigError) as refused:
        refuse_shards(receivers, adapters=True)
    assert refused.value.fix == f"set sync.transport={transport}"
