"""Which tests a plain run has, and which a campaign."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.campaigns import CAMPAIGNS, choose

ROOT = Path(__file__).parents[1]


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
    with pytest.raises(pytest.UsageError, match=r"kills: campaign.'severs'.* is none of durability, kernels, servers"):
        choose(SimpleNamespace(getoption=lambda _: None), [item("kills", "severs")])


@pytest.mark.parametrize("name", [name for name in CAMPAIGNS if (ROOT / name).is_dir()])
def test_pytest_takes_the_name_of_a_campaign_for_no_folder(name: str) -> None:
    (found,) = re.findall(r"^campaign-%:.*\n\t\$\(BIN\)/pytest (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    arguments = found.replace("$*", name).split()

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "--collect-only", "tests/test_campaigns.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ended.stderr
