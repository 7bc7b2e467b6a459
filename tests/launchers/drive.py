"""`python drive.py LAUNCHER ENTRY RUN_DIR [NPROC] [TIMEOUT_S]`: the launching process of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.config.run import ClusterConfig, RunConfig
from megarl.launchers.common import run_workers


def main(launcher: str, entry: str, run_dir: str, nproc: str = "2", timeout_s: str = "60") -> int:
    cluster = ClusterConfig(nproc=int(nproc), timeout_s=float(timeout_s), start_timeout_s=60)
    return run_workers(launcher, f"entries:{entry}", RunConfig(name="drive", cluster=cluster), Path(run_dir))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
