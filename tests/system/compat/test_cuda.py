"""Driver, toolkit, runtime libraries and NCCL of interpreters, on folders that look like theirs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.system.compat import cuda
from megarl.system.compat.sglang import server_environment
from megarl.system.errors import ConfigError

ROOT = Path(__file__).parents[3]


def interpreter(folder: Path, nccl: str | None = None, *, answer: str = "") -> Path:
    """A virtual environment with this wheel of NCCL, whose python answers `answer`."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    if nccl is not None:
        info = packages / f"nvidia_nccl_cu13-{nccl}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {nccl}\n")
    return program(folder / "bin" / "python", f"echo '{answer}'")


def program(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"nccl": "2.29.7"}, {"nccl": "2.29.7"}),
        ({}, {"nccl": "2.30.7"}),  # a CPU build of torch
        ({"answer": "2.30.7"}, {"nccl": "2.30.7"}),
    ],
)
def test_equal_versions_of_nccl_pass_and_none_is_not_judged(tmp_path, ours, theirs):
    cuda.check_same_nccl(interpreter(tmp_path / "servers", **theirs), interpreter(tmp_path / "trainer", **ours))


def test_different_wheels_are_refused_with_the_older_one_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer 2\.29\.7, servers 2\.30\.7") as caught:
        cuda.check_same_nccl(interpreter(tmp_path / "b", "2.30.7"), interpreter(tmp_path / "a", "2.29.7"))
    assert "in the trainer's interpreter: pip install --no-deps nvidia-nccl-cu13==2.30.7" in caught.value.fix


def test_nccl_of_an_image_is_asked_of_its_torch(tmp_path):
    servers = interpreter(tmp_path / "b", "2.30.7")
    with pytest.raises(ConfigError, match=r"trainer 2\.28\.9, servers 2\.30\.7") as caught:
        cuda.check_same_nccl(servers, interpreter(tmp_path / "a", answer="2.28.9"))
    assert "the trainer's interpreter has the older NCCL in its image" in caught.value.fix


def test_torch_answers_with_the_library_that_it_has_loaded(capsys):
    """Asked in this process; a CPU build of torch has none."""
    exec(cuda._ASK_NCCL, {})
    environment = Path(torch.__file__).parents[4]  # tools/megatron_env.py: not always this interpreter's
    wheel = cuda.nccl_wheel(environment / "bin/python")
    assert capsys.readouterr().out.strip() == (wheel.version if wheel else "")


def test_both_interpreters_get_one_version(tmp_path, monkeypatch):
    """An interpreter without a wheel, as of a CPU build of torch, gets none."""
    tool = runpy.run_path(str(ROOT / "tools" / "sglang_env.py"))
    pythons = [interpreter(tmp_path / "trainer", "2.29.7"), interpreter(tmp_path / "servers", tool["NCCL"])]
    pythons.append(interpreter(tmp_path / "cpu"))
    installed = []
    monkeypatch.setattr(tool["installer"], "install", lambda *arguments: installed.append(arguments))
    tool["agree_on_nccl"](*pythons)
    assert installed == [(tmp_path / "trainer" / "bin" / "python", "--no-deps", f"nvidia-nccl-cu13=={tool['NCCL']}")]


@pytest.mark.parametrize(
    ("driver", "major", "refused"), [("575.57.08", 13, True), ("580.65.06", 13, False), ("535.183.01", 12, False)]
)
def test_a_driver_must_be_new_enough_for_its_cuda(tmp_path, driver, major, refused):
    assert cuda.driver_version(tmp_path) is None
    assert cuda.driver_problem(major, tmp_path) is None
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    kind = "NVIDIA UNIX Open Kernel Module for x86_64" if major == 13 else "NVIDIA UNIX x86_64 Kernel Module"
    file.write_text(f"NVRM version: {kind}  {driver}  Release Build\nGCC version:  gcc version 12.3.0\n")
    assert cuda.driver_version(tmp_path) == driver
    problem = cuda.driver_problem(major, tmp_path)
    assert (problem is not None) is refused
    assert problem is None or "580 or newer" in str(problem)


def toolkit(folder: Path, release: str) -> Path:
    program(folder / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.88'")
    (folder / "lib64").mkdir()
    (folder / "lib64/libcudart.so").touch()
    return folder


def test_the_toolkit_is_the_one_that_sglang_finds(tmp_path):
    named, found = toolkit(tmp_path / "named", "13.0"), toolkit(tmp_path / "found", "13.0")
    path = {"PATH": str(found / "bin")}
    assert cuda.toolkit_home({"CUDA_HOME": str(named), "CUDA_PATH": "/other", **path}) == named
    assert cuda.toolkit_home({"CUDA_PATH": str(named), **path}) == named
    assert cuda.toolkit_home(path) == found
    assert cuda.toolkit_home({"PATH": ""}) == Path("/usr/local/cuda")  # there or not


def test_a_toolkit_without_use_is_named_with_what_is_missing(tmp_path):
    good, old, script = (toolkit(tmp_path / name, "12.8" if name == "old" else "13.1") for name in ("a", "old", "c"))
    (script / "lib64/libcudart.so").unlink()
    host = program(tmp_path / "host/bin/c++", "")

    def told(home: Path, path: Path = host.parent) -> str:
        return str(cuda.toolkit_problem({"CUDA_HOME": str(home), "PATH": str(path)}) or "")

    assert told(good) == ""
    assert "the CUDA compiler was not found" in told(tmp_path)
    assert "set CUDA_HOME" in told(tmp_path)
    assert "of CUDA 12.8" in told(old)
    assert "lib64/libcudart.so" in told(script)
    assert "the C++ compiler was not found" in told(good, tmp_path)


def test_wheels_are_laid_out_as_a_toolkit_for_machines_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "_SYSTEM", tmp_path / "nowhere")
    python = interpreter(tmp_path / "servers")
    wheels = tmp_path / "servers/lib/python3.11/site-packages/nvidia/cu13"
    program(wheels / "bin/nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    for name in ("lib/libcudart.so.13", "lib/libcudart_static.a", "include/cuda.h", "nvvm/bin/cicc"):
        (wheels / name).parent.mkdir(parents=True, exist_ok=True)
        (wheels / name).touch()
    host = program(tmp_path / "host/bin/c++", "")

    def start(path: Path, **given: str) -> dict[str, str]:
        base = {"PATH": str(path), **given}
        return server_environment(base, python=python, api_key="", instance="", cuda=True)

    assert "CUDA_HOME" not in start(host.parent)
    runpy.run_path(str(ROOT / "tools" / "sglang_env.py"))["lay_out_toolkit"](python)
    env = start(host.parent)
    home = Path(env["CUDA_HOME"])
    assert cuda.toolkit_problem(env) is None
    for name in ("lib64/libcudart.so", "lib64/libcudart.so.13", "include/cuda.h", "nvvm/bin/cicc"):
        assert (home / name).exists(), name
    other = toolkit(tmp_path / "other", "13.1")
    assert start(host.parent, CUDA_HOME=str(other))["CUDA_HOME"] == str(other)
    assert "CUDA_HOME" not in start(other / "bin")  # SGLang finds it itself


def test_a_preloaded_library_finds_the_cuda_runtime_of_the_servers_wheels(tmp_path):
    """As torch_memory_saver, which names `libcudart.so.13` and no folder: without it the server's process has none."""
    python = interpreter(tmp_path / "servers")
    runtime = tmp_path / "servers/lib/python3.11/site-packages/nvidia/cu13/lib/libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    build = ["g++", "-shared", "-fPIC", "-x", "c++", "-"]
    code = 'extern "C" int cudaGetDevice() { return 5; }'
    subprocess.run([*build, "-Wl,-soname,libcudart.so.13", "-o", runtime], input=code, text=True, check=True)
    saver = tmp_path / "saver.so"
    code = 'extern "C" int cudaGetDevice(); extern "C" int saved() { return cudaGetDevice(); }'
    subprocess.run([*build, "-x", "none", runtime, "-o", saver], input=code, text=True, check=True)

    def start(use_cuda: bool) -> str:
        base = {"LD_PRELOAD": str(saver), "LD_LIBRARY_PATH": "/elsewhere"}
        env = server_environment(base, python=python, api_key="", instance="", cuda=use_cuda)
        call = [sys.executable, "-c", "import ctypes; print(ctypes.CDLL(None).saved())"]
        return subprocess.run(call, env=env, capture_output=True, text=True, check=False).stdout.strip()

    assert start(False) != "5"  # nothing, or a runtime of the system
    assert start(True) == "5"


def test_a_server_calls_the_programs_of_its_own_interpreter(tmp_path):
    """SGLang calls `ninja` by its name when it compiles."""
    python = interpreter(tmp_path)
    env = server_environment({"PATH": "/usr/bin"}, python=python, api_key="", instance="", cuda=True)
    assert env["PATH"].split(os.pathsep) == [str(python.parent), "/usr/bin"]
    assert "LD_LIBRARY_PATH" not in env  # its torch brings its own runtime, or the system has it
