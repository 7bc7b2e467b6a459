"""Campaigns: repetitions, seeds and kill matrices of what the suite shows once; `make campaign-NAME` runs one.

    @pytest.mark.campaign("servers")

marks a test, or with `pytest.param(..., marks=...)` one of its cases. Plain runs leave it out.

    durability  more ways to lose a relay of weights      lora        adapters beside full training
    exports     under transformers 4                      memory      engines of real size
    families    every architecture, drawn configurations  servers     more cases with real SGLang servers
    faults      every kind of fault                       slurm       jobs of a real Slurm
    install     newest and oldest versions that setup.py  smollm2     a real chat model
                allows                                    teams       placements and layouts
    kernels     the compiler's other levels, processors   trl         TRL's own losses
    kills       one process at a drawn moment, and whole  tutorials   whole runs of docs/tutorials.md
                runs at more places than the suite has
    libero      runs in the real simulators
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
