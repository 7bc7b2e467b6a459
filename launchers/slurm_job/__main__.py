"""The entry of `megarl.launchers.slurm_job`; `python3 -m slurm_job RUN_DIR guard` is the guard."""

import sys
from pathlib import Path

from .driver import SlurmJob
from .guard import guard

run_dir = Path(sys.argv[1])
sys.exit(guard(run_dir) if sys.argv[2:] == ["guard"] else SlurmJob(run_dir).run())
