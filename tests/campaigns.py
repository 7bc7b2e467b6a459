"""Campaigns: repetitions, seeds and kill matrices of what the suite shows once; `make campaign-NAME` runs one.

    @pytest.mark.campaign("servers")

marks a test, or with `pytest.param(..., marks=...)` one of its cases. Plain runs leave it out.

    exports     under transformers 4                      install     newest and oldest versions that setup.py allows
    families    every architecture, drawn configurations  memory      engines of real size
    faults      every kind of fault                       smollm2     a real chat model
    kills       one process at a drawn moment, and whole  teams       placements and layouts
                runs at more places than the suite has    trl         TRL's own losses
    libero      runs in the real simulators               tutorials   whole runs of docs/tutorials.md
    lora        adapters beside full training
"""

from __future__ import annotations

import pytest

CAMPAIGNS = (
    *("durability", "exports", "families", "faults", "install", "kernels", "kills"),
    *("libero", "lora", "memory", "servers", "slurm", "smollm2", "teams", "trl", "tutorials"),
)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", choices=CAMPAIGNS, help="run the tests of this campaign, and no others")


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the campaign that is asked for or, where none is, those of no campaign.

    Raises:
        pytest.UsageError: a mark names no campaign; such a test would never run.
    """
    wanted = config.getoption("campaign")
    kept, left = [], []
    for item in items:
        marks = list(item.iter_markers("campaign"))
        for mark in marks:
            if len(mark.args) != 1 or mark.args[0] not in CAMPAIGNS:
                raise pytest.UsageError(f"{item.nodeid}: campaign{mark.args} is none of {', '.join(CAMPAIGNS)}")
        names = {mark.args[0] for mark in marks}
        (kept if (wanted in names if wanted else not names) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
