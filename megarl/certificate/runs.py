"""Runs of the command line that sections start and read: the quickstart with other settings."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.artifacts.facts import raw_config
from megarl.artifacts.jsonl import read_jsonl
from megarl.benchmarks.program import run_program
from megarl.config.load import find_recipe, load_config
from megarl.config.model import ModelConfig
from megarl.launchers.common import run_workers
from megarl.system.machine import visible_gpus
from megarl.system.processes import nvidia_devices, write_atomically

RECIPE = "grpo_quickstart"
#: Settings of a run that only trains and logs metrics: no cold start, validation or export; a reward whose scores
#: differ between samples, so that there is a gradient.
PLAIN = (
    *("sft.steps=0", "validation.before_train=false", "validation.every=0", "trainer.export_hf=false"),
    *("trainer.save_every=0", "tracking.mlflow=false", "tracking.report=false"),
    "reward={name: 'megarl.benchmarks.case:digit_share', kwargs: {}}",
)

_SHOWN = 300  # characters from the end of an output that names no error


def gpu_count() -> int:
    """Return the number of GPUs that this process may use, without loading the driver."""
    visible = visible_gpus(os.environ)
    return nvidia_devices() if visible is None else min(len(visible), nvidia_devices())


def sizes_of(model: str) -> dict[str, Any]:
    """Return a value of `model.hf_config`: the sizes of the hub model `model` with the quickstart's special tokens."""
    known = raw_config(ModelConfig(path=model))
    assert known is not None, "the model must be a known one"
    return {**known[0], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def command(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command of a training run."""
    return [sys.executable, "-m", "megarl", "train", RECIPE, *overrides, "--run-dir", str(run_dir)]


def train(run_dir: Path, overrides: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Run the command until it ends; return the metrics lines of its training steps. Raise WorkerError, with its last
    output, if it failed or did not end in time.
    """
    output, _ = run_program(command(run_dir, overrides), limit_s=limit_s, merged=True)
    (run_dir / "output.txt").write_text(output)
    return steps_in(run_dir)


def reason_of(error: BaseException) -> str:
    """Return the last megarl error in a failed run's output with its indented lines, or else the end of the output."""
    lines = str(error).splitlines()
    begins = [
        at for at, line in enumerate(lines) if line.startswith("megarl: ") and not line.startswith("megarl: warning: ")
    ]
    if not begins:
        return str(error)[-_SHOWN:]
    below = itertools.takewhile(lambda line: line.startswith(" "), lines[begins[-1] + 1 :])
    return "; ".join(line.strip() for line in (lines[begins[-1]], *below))


def steps_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of the training steps so far."""
    file = run_dir / "metrics.jsonl"
    return [line for line in read_jsonl(file) if line["stage"] == "train"] if file.is_file() else []


def in_workers(entry: str, overrides: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    """Run `entry`, a `module:function` of (recipe, run folder), in workers; return the results that each worker wrote.
    Raise RuntimeError if a worker failed.
    """
    run_dir.mkdir()
    config = load_config(find_recipe(RECIPE), list(overrides))
    code = run_workers("local", entry, config, run_dir)
    if code != 0:
        raise RuntimeError(f"workers ended with exit code {code}; their output and that of their servers: {run_dir}")
    return [json.loads(_numbers(run_dir, rank).read_text()) for rank in range(config.cluster.nproc)]


def write_numbers(run_dir: Path, rank: int, found: object) -> None:
    """Write the results of this worker, which `in_workers` returns."""
    write_atomically(_numbers(run_dir, rank), json.dumps(found))


def _numbers(run_dir: Path, rank: int) -> Path:
    return run_dir / f"numbers_{rank}.json"


def killed(run_dir: Path, overrides: Sequence[str], when: Callable[[], int | None], limit_s: float) -> int:
    """Run the command, and send SIGKILL to the process that `when` returns, once it returns one; return the exit code.
    Raise TimeoutError if there was no such process, or the command did not end afterwards.
    """
    end = time.monotonic() + limit_s
    with (run_dir.parent / f"{run_dir.name}.txt").open("wb") as log:
        process = subprocess.Popen(command(run_dir, overrides), stdout=log, stderr=subprocess.STDOUT)
        try:
            while (victim := when()) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise TimeoutError(
                        f"the command did not start the process that this test kills; the command's output: "
                        f"{Path(log.name).read_text()[-2000:]}"
                    )
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)
            return process.wait(max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the command still runs long after its process {victim} was killed") from None
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def planned(overrides: Sequence[str], hardware: str | None) -> dict[str, float]:
    """Return the planner's numbers for the run, by name. Raise WorkerError if the run cannot be planned."""
    chosen = [] if hardware is None else ["--hardware", hardware]
    output, _ = run_program(
        [sys.executable, "-m", "megarl", "plan", RECIPE, *overrides, *chosen, "--json"], limit_s=300
    )
    return {number["name"]: number["value"] for number in json.loads(output)["numbers"]}
