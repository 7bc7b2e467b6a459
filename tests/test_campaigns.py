"""Which tests a plain run has, and which a campaign."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.campaigns import choose


def item(name: str, *campaigns: str) -> SimpleNamespace:
    marks = [pytest.mark.campaign(campaign).mark for campaign in campaigns]
    return SimpleNamespace(nodeid=name, iter_markers=lambda _: iter(marks))


@pytest.mark.parametrize(
    ("wanted", "kept"), [(None, ["property"]), ("servers", ["kills", "both"]), ("durability", ["both"])]
)
def test_a_campaign_has_its_own_tests_and_a_plain_run_those_of_none(wanted: str | None, kept: list[str]) -> None:
    items = [item("property"), item("kills", "servers"), item("both", "servers", "durability")]
    everything, told = list(items), []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))

    choose(SimpleNamespace(getoption=lambda _: wanted, hook=hook), items)

    assert [chosen.nodeid for chosen in items] == kept
    assert told == [one for one in everything if one not in items]


def test_a_campaign_that_does_not_exist_is_an_error() -> None:
    names = "agents, connectors, durability, exports, families, faults, install, kernels, kills, libero, lora, memory"
    with pytest.raises(pytest.UsageError, match=rf"kills: campaign.'severs'.* is none of {names}"):
        choose(SimpleNamespace(getoption=lambda _: None), [item("kills", "severs")])
