"""`python drive.py LAUNCHER ENTRY RUN_DIR [NPROC [TIMEOUT_S [SERVERS]]]`: the launching process of the tests.

NPROC of a run with several teams is the number of workers of each: 2+1. SERVERS: SGLang servers of the run's own.
RESTARTS in the environment is `cluster.max_restarts`, TEAM_RESTARTS `placement.restarts`; both are 0 without.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megarl.config.model import ParallelConfig
from megarl.config.run import ClusterConfig, RunConfig
from megarl.dag.placement import Placement, TeamPlan
from megarl.dag.stage import Role
from megarl.launchers.common import run_workers
from megarl.system.errors import UserError
from tests.ray_forks.launcher import accept


def main(
    launcher: str, entry: str, run_dir: str, nproc: str = "2", timeout_s: str = "200", servers: str | None = None
) -> int:
    sizes = [int(size) for size in nproc.split("+")]
    restarts = int(os.environ.get("RESTARTS", "0"))
    cluster = ClusterConfig(nproc=sum(sizes), timeout_s=float(timeout_s), start_timeout_s=200, max_restarts=restarts)
    rollout: Any = {} if servers is None else {"engine": "sglang", "sglang": {"servers": int(servers)}}
    budget: Any = {"restarts": int(os.environ.get("TEAM_RESTARTS", "0"))}
    config = RunConfig(name="drive", cluster=cluster, rollout=rollout, placement=budget)
    try:
        return run_workers(launcher, f"entries:{entry}", config, Path(run_dir), teams(*sizes))
    except UserError as error:
        print("stopped:", error, file=sys.stderr)
        return error.exit_code


def teams(*sizes: int) -> Placement:
    """Teams of these sizes, which walk nothing."""
    roles = [(Role.ACTOR, Role.ROLLOUT), (Role.REFERENCE,), (Role.CRITIC,)][: len(sizes)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return Placement(
        tuple(
            TeamPlan(held[0].value, held, size, first, ParallelConfig(), ())
            for held, size, first in zip(roles, sizes, firsts, strict=True)
        )
    )


if __name__ == "__main__":
    accept()
    sys.exit(main(*sys.argv[1:]))
