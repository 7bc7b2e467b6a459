"""Steps that are recorded: a file of torch's profiler with operators and phases, or ranges for nsys."""

import gzip
import json

import pytest
import torch

from megarl.artifacts.profiles import profile_files
from megarl.config.run import ProfileConfig
from megarl.runtime import profiler
from megarl.runtime.profiler import StepProfiler
from megarl.system.errors import ConfigError
from megarl.system.tracing import drain, phase


def walk(recorder: StepProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        recorder.start(step)
        with phase("step"), phase("multiply"):
            torch.ones(step, 2) @ torch.ones(2, step)
        recorder.end()
    drain()


def test_a_file_of_a_chosen_step_has_its_operators_in_the_phases_of_the_run(tmp_path):
    walk(StepProfiler(ProfileConfig(steps=[2, 10], ranks=[1]), tmp_path, worker=0), 3)
    assert profile_files(tmp_path) == [], "another worker records"
    walk(StepProfiler(ProfileConfig(steps=[10, 2], ranks=[1]), tmp_path, worker=1), 11)
    assert [path.name for path in profile_files(tmp_path)] == ["step_2_rank_1.json.gz", "step_10_rank_1.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / profile_files(tmp_path)[0]).read_bytes()))["traceEvents"]
    spans = {name: [e for e in events if e.get("name") == name] for name in ("phase: multiply", "aten::mm")}
    [around], [product] = spans.values()
    assert around["ts"] <= product["ts"] <= product["ts"] + product["dur"] <= around["ts"] + around["dur"]


def test_a_step_that_fails_leaves_no_file_and_no_profiler(tmp_path):
    recorder = StepProfiler(ProfileConfig(steps=[1]), tmp_path, worker=0)
    recorder.start(1)
    recorder.close()
    assert profile_files(tmp_path) == []
    walk(StepProfiler(ProfileConfig(steps=[1]), tmp_path, worker=0), 1)
    assert len(profile_files(tmp_path)) == 1


def test_nsys_gets_one_range_for_steps_in_a_row(tmp_path, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(profiler, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module, name in ((torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop")):
        monkeypatch.setattr(module, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    walk(StepProfiler(ProfileConfig(steps=[2, 3, 5], tool="nsys"), tmp_path, worker=0), 6)
    step = ["phase: step", "phase: multiply", "pop", "pop"]
    assert calls == ["start", *step, *step, "stop", "start", *step, "stop"]
    assert "nsys does not seem to watch this worker" in caplog.text


def test_nsys_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.profile.tool: nsys records GPUs only"):
        StepProfiler(ProfileConfig(tool="nsys"), tmp_path, worker=0)
