"""Which tests a plain run has, and which a campaign."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.campaigns import choose, leave_out


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


@pytest.mark.parametrize(
    ("wanted", "of_all", "left"),
    [
        (None, [], ["first", "third"]),
        (None, ["kills"], ["first"]),  # which `choose` leaves out
        ("kills", [], ["first", "second", "third"]),
    ],
)
def test_cases_of_campaigns_become_no_tests_of_a_plain_run(wanted: str | None, of_all: list[str], left: list[str]):
    cases = [item(name, *names) for name, *names in (["first"], ["second", "kills"], ["third"])]
    for case in cases:
        case.marks = list(case.iter_markers("campaign"))
    config = SimpleNamespace(getoption=lambda _: wanted)

    leave_out(SimpleNamespace(config=config, definition=item("test", *of_all), _calls=cases))

    assert [case.nodeid for case in cases] == left


def test_a_campaign_that_does_not_exist_is_an_error() -> None:
    names = "agents, connectors, durability, exports, families, faults, install, kernels, kills, libero, lora, memory"
    config = SimpleNamespace(getoption=lambda _: None)
    with pytest.raises(pytest.UsageError, match=rf"kills: campaign.'severs'.* is none of {names}"):
        choose(config, [item("kills", "severs")])
    with pytest.raises(pytest.UsageError, match=rf"kills: campaign.'severs'.* is none of {names}"):
        leave_out(SimpleNamespace(config=config, definition=item("kills", "severs"), _calls=[]))
