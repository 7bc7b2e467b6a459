"""Records operators and kernels of chosen steps with torch's profiler, or marks them for nsys: `trainer.profile`.

Both show the phases of the run (`megarl.system.tracing.phase`) as ranges around the operators.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.artifacts.profiles import profile_file
from megarl.system.device import has_cuda
from megarl.system.errors import ConfigError
from megarl.system.tracing import phase, show_phases

if TYPE_CHECKING:
    from megarl.config.run import ProfileConfig

log = logging.getLogger(__name__)


class StepProfiler:
    """Records the chosen steps of this worker.

    Args:
        settings: `trainer.profile`; None: no step is recorded.
        worker: number of this worker in the run.

    Raises:
        ConfigError: this worker is to mark steps for nsys, and has no GPU.
    """

    def __init__(self, settings: ProfileConfig | None, run_dir: Path, worker: int) -> None:
        chosen = settings is not None and worker in settings.ranks
        self._steps = set(settings.steps) if settings is not None and chosen else set[int]()
        self._run_dir, self._worker, self._step = run_dir, worker, 0
        self._recording: _Torch | _Nsys | None = None
        self._kind: type[_Torch | _Nsys] = _Torch
        if settings is not None and chosen and settings.tool == "nsys":
            self._kind = _Nsys
            _check_nsys()

    def start(self, step: int) -> None:
        """Begin to record if `step` is a chosen one."""
        self._step = step
        if step in self._steps and self._recording is None:
            self._recording = self._kind()
            show_phases(self._recording)

    def end(self) -> None:
        """End the recording of the current step, and write its file."""
        if self._recording is None or (self._recording.spans_steps and self._step + 1 in self._steps):
            return
        show_phases(None)
        with phase("profile"):
            recording, self._recording = self._recording, None
            recording.end(profile_file(self._run_dir, self._step, self._worker))

    def close(self) -> None:
        """Drop a recording whose step did not end."""
        if self._recording is not None:
            show_phases(None)
            self._recording.stop()
            self._recording = None


class _Torch:
    """One step in torch's profiler: operators on the processor, and kernels on the GPU if there is one."""

    spans_steps = False

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda() else [])]
        self._profile = profile(activities=activities)
        self._open: list[Any] = []
        self._profile.start()

    def push(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(f"phase: {name}"))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """End the recording."""
        self._profile.stop()

    def end(self, file: Path) -> None:
        """End the recording and write it to `file`. A full or failing disk loses it with a warning."""
        self.stop()
        try:
            file.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(file))
        except OSError as error:
            log.warning("trainer.profile: the step's trace could not be written: %s", error)


class _Nsys:
    """A range of CUDA's profiler interface, which `nsys profile --capture-range=cudaProfilerApi` waits for."""

    spans_steps = True  # nsys writes one report for each range

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(f"phase: {name}")

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def stop(self) -> None:
        """Close the range after the work of the GPU."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def end(self, file: Path) -> None:
        """Close the range; nsys writes the report, so `file` is not used."""
        self.stop()


def _check_nsys() -> None:
    """Raise ConfigError without a GPU; warn if nsys does not seem to watch this process."""
    if not has_cuda():
        raise ConfigError(
            "nsys records GPUs only, and this worker has none",
            where="trainer.profile.tool",
            found="nsys",
            allowed="torch",
            fix="set trainer.profile.tool=torch, which also records on CPUs",
        )
    try:
        watched = "ToolsInjection" in Path("/proc/self/maps").read_text()
    except OSError:
        watched = True
    if not watched and not any(name.startswith("NSYS_") for name in os.environ):
        log.warning(
            "trainer.profile: nsys does not seem to watch this worker, so nothing is recorded; start the run with "
            "`nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat "
            "megarl train ...`"
        )
