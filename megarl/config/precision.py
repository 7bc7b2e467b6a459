"""The precision that `model.dtype: auto` resolves to."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.config.run import RunConfig
from megarl.config.yamlio import read_yaml
from megarl.system.errors import UserError
from megarl.system.machine import bf16_products, visible_gpus
from megarl.system.processes import has_nvidia_device


def with_precision(config: RunConfig, run_dir: Path | None) -> tuple[RunConfig, str]:
    """Return the recipe with `model.dtype: auto` resolved, perhaps as in `run_dir`, and a line with the reason."""
    dtype, reason = _recorded(config, run_dir) or _of_this_machine(config)
    line = f"model.dtype=auto: {dtype}, because {reason}"
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}), line


def _recorded(config: RunConfig, run_dir: Path | None) -> tuple[str, str] | None:
    """Return the precision of the run that is continued and a text about its source; None for a new run."""
    resume = config.trainer.resume
    if resume == "never":
        return None
    folder = run_dir if resume == "auto" else Path(resume).parent.parent
    if folder is None:
        return None
    try:
        dtype = read_yaml(folder / "config.yaml").data["model"]["dtype"]
    except (OSError, UserError, LookupError, TypeError):
        return None  # the checks of the run folder report the error
    return (dtype, f"the run in {folder} has it") if dtype in ("fp32", "bf16") else None


def _of_this_machine(config: RunConfig) -> tuple[str, str]:
    if config.cluster.device_memory_gb is not None:
        return "bf16", "the recipe is for GPUs"
    if has_nvidia_device() and visible_gpus(os.environ) != []:
        return "bf16", "this machine has GPUs"
    flag = bf16_products()
    return ("fp32", "the processor has no bf16 instructions") if flag is None else ("bf16", f"the processor has {flag}")
