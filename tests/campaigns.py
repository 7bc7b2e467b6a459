"""Campaigns: repetitions, seeds and kill matrices of what the suite shows once; `make campaign-NAME` runs one.

    @pytest.mark.campaign("servers")

marks a test, or with `pytest.param(..., marks=...)` one of its cases. Plain runs leave it out.

    @pytest.fixture(scope="module")
    def found(request):
        return compute(chosen(request, "model"))     # what a module computes at once is for those of its cases that run

    agents      the gateway: more sessions, and other
                clients and engines
    connectors  environments of other packages
    durability  more ways to lose a relay of weights      lora        adapters beside full training
    exports     under transformers 4                      memory      engines of real size, a Ray that spills
    families    every architecture, drawn configurations  servers     more cases with real SGLang servers
    faults      every kind of fault                       slurm       jobs of a real Slurm
    install     newest and oldest versions that setup.py  smollm2     a real chat model
                allows, and missing packages              teams       placements and layouts
    kernels     the compiler's other levels, processors   trl         TRL's own losses
    kills       one process at a drawn moment, and whole  tutorials   whole runs of docs/tutorials.md
                runs at more places than the suite has    vla-7b      published sizes of a robot policy
                                                                      and of its video encoder
    libero      runs in the real simulators               vlm-3b      a published size, one step
    shards      drawn layouts, published models
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

CAMPAIGNS = (
    *("agents", "connectors", "durability", "exports", "families", "faults", "install", "kernels", "kills"),
    *("libero", "lora", "memory", "servers", "shards", "slurm", "smollm2", "teams", "trl", "tutorials"),
    *("vla-7b", "vlm-3b"),
)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", choices=CAMPAIGNS, help="run the tests of this campaign, and no others")


def leave_out(metafunc: pytest.Metafunc) -> None:
    """Drop cases of campaigns before pytest makes tests of them, in a run of no campaign: 6,000 of 17,000.

    Where all cases of a test are of a campaign, one is left for `choose` to leave out.
    """
    if metafunc.config.getoption("campaign"):
        return
    where, cases = metafunc.definition.nodeid, metafunc._calls
    of_all = _campaigns(where, metafunc.definition.iter_markers("campaign"))
    of_none = [] if of_all else [case for case in cases if not _campaigns(where, case.marks)]
    cases[:] = of_none or cases[:1]


def _campaigns(where: str, marks: Iterable[pytest.Mark]) -> set[str]:
    """Return the campaigns that these marks name; pytest.UsageError: a mark names none, so its test would never run."""
    names = set()
    for mark in marks:
        if mark.name == "campaign":
            if len(mark.args) != 1 or mark.args[0] not in CAMPAIGNS:
                raise pytest.UsageError(f"{where}: campaign{mark.args} is none of {', '.join(CAMPAIGNS)}")
            names.add(mark.args[0])
    return names


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the campaign that is asked for or, where none is, those of no campaign.

    Raises:
        pytest.UsageError: a mark names no campaign; such a test would never run.
    """
    wanted = config.getoption("campaign")
    kept, left = [], []
    for item in items:
        names = _campaigns(item.nodeid, item.iter_markers("campaign"))
        (kept if (wanted in names if wanted else not names) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def chosen(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values of these parameters in the tests of a fixture's module that run: each once, in their order.

    Of several names: tuples.
    """
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    values = [tuple(case[name] for name in names) for case in cases if case.keys() >= set(names)]
    kept = [value for number, value in enumerate(values) if value not in values[:number]]
    return kept if len(names) > 1 else [value for (value,) in kept]


def split(name: str, values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Return values of one parameter of which only those of `kept` run outside the campaign `name`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.campaign(name)) for value in values]
