"""Imports what nearly every rank of a test needs, once, in the process that ranks are forked from: no thread starts.

Most such processes are themselves forked from one that has imported tests.preload_torch.
"""

import gc
import importlib

gc.disable()  # looking for garbage among what modules make takes a sixth of the time

from megarl.system.compat import megatron  # noqa: E402
from tests import huge_pages  # noqa: E402

megatron.install()
for name in (
    *("megarl.models.policy", "megarl.training.engine", "megarl.sync.updater", "megarl.sync.relay"),
    # Commands (tests/forked.py) and what their workers import while they run.
    *("megarl.cli", "megarl.checks.recipe", "megarl.checks.rows", "megarl.launchers.local", "megarl.runtime.worker"),
    *("megarl.recipes.build", "megarl.disaggregated.loop", "megarl.runtime.inference", "megarl.tracking.tracker"),
    *("megarl.recipes.entry", "megarl.config.load", "psutil", "numpy.random"),
    *("megarl.checks.dry_run", "megarl.launchers.attempts", "megarl.launchers.torchrun", "megarl.launchers.slurm_job"),
    *("megarl.recipes.components", "megarl.robots.checks.recipe", "megarl.robots.setup", "PIL.PngImagePlugin"),
    *("megarl.recipes.arithmetic", "megarl.training.checkpoint", "megarl.runtime.samples", "megarl.dag.guard"),
    *("megarl.algorithms.objective", "megarl.algorithms.correction", "megarl.robots.films", "megarl.tracking.report"),
    *("megarl.algorithms.aggregation", "megarl.dag.retry", "megarl.kernels.cpu_check", "megarl.robots.planning"),
    *("megarl.models.weights.receive", "megarl.rollout.embedded.inbox", "megarl.rollout.embedded.links"),
    *("megarl.rollout.embedded.receiver", "megarl.checks.before_start", "megarl.checks.hub", "megarl.launchers.ray"),
    *("megarl.robots.task", "encodings.idna"),
    # What modules of tests import.
    *("tests.dist", "tests.forked", "tests.training.cases", "tests.runtime.harness"),
    *("tests.preload_torch", "tests.disaggregated.buffer.served"),
):
    importlib.import_module(name)

# Ranks would go through all of it in every collection, and copy the pages that it lies in: a fifth of a tiny run.
gc.collect()
gc.freeze()
gc.enable()
huge_pages.collapse()
