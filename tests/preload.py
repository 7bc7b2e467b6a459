"""Imports what nearly every rank of a test needs, once, in the process that ranks are forked from: no thread starts."""

import importlib

from megarl.compat import megatron

megatron.install()
for name in ("megarl.models.policy", "megarl.training.engine", "megarl.sync.updater"):
    importlib.import_module(name)
