"""The servers' interpreter, their environment, and what runs inside it in addition to SGLang."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.launchers.common import process_environment
from megarl.system.compat import sglang
from megarl.system.compat.cuda import site_folders
from megarl.system.errors import ConfigError

FOLDER = Path(sglang.__file__).with_name("sglang_server")


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.parent.name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_environment(name: str, kind: str, *, complete: bool = True, age: float = 0) -> Path:
    folder = sglang.environments_folder() / name
    folder.mkdir(parents=True)
    if complete:
        (folder / sglang.COMPLETE).write_text(json.dumps({"kind": kind, "sglang": "0.5.23"}))
        os.utime(folder / sglang.COMPLETE, (1000 - age, 1000 - age))
    return folder / "bin" / "python"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_newest_complete_environment_of_the_right_kind_is_taken(cache: Path) -> None:
    make_environment("a", "cpu", age=5)
    newest = make_environment("b", "cpu")
    make_environment("c", "cpu", complete=False)
    cuda = make_environment("d", "cuda", age=9)
    assert sglang.find_python(None, cuda=False) == newest
    assert sglang.find_python(None, cuda=True) == cuda
    assert sglang.find_python(sys.executable, cuda=True) == Path(sys.executable)


def test_an_interrupted_installation_does_not_count(cache: Path) -> None:
    make_environment("c", "cpu", complete=False)
    with pytest.raises(ConfigError, match="make sglang-env"):
        sglang.find_python(None, cuda=False)


def test_an_interpreter_without_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match="sglang is not installed in this interpreter"):
        sglang.sglang_version(Path(sys.executable))


def test_the_environment_has_nothing_of_the_trainer_and_the_key_nowhere_else() -> None:
    base = {"PATH": "/bin", "RANK": "1", "MASTER_PORT": "1", "PYTHONPATH": "/x", "TORCHELASTIC_RUN_ID": "1"}
    base |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env = sglang.server_environment(
        base, python=Path(sys.executable), api_key="secret", instance="a", cuda=False, tp_size=2
    )
    assert not set(env) & (set(base) - {"PATH"})
    assert [name for name, value in env.items() if "secret" in value] == ["MEGARL_SERVER_KEY"]
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    on_gpu = sglang.server_environment(
        base, python=Path(sys.executable), api_key="secret", instance="a", cuda=True, gpus=["2", "3"]
    )
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu
    assert "secret" not in " ".join(sglang.server_command(Path("python"), ["--port", "1"]))


def test_health_checks_of_a_colocated_server_do_not_generate() -> None:
    def environment(colocated: bool) -> dict[str, str]:
        return sglang.server_environment(
            {}, python=Path(sys.executable), api_key="secret", instance="a", cuda=True, colocated=colocated
        )

    switch = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    assert dict(environment(True).items() - environment(False).items()) == switch


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32 with seed 0 of whole 4-byte blocks, as its author describes it."""

    def rotl(x: int, r: int) -> int:
        return (x << r | x >> (32 - r)) & 0xFFFFFFFF

    h = 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        h = (rotl(h ^ (rotl(k, 15) * 0x1B873593 & 0xFFFFFFFF), 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.fixture(scope="module")
def stand_in() -> ModuleType:
    """The stand-in for sgl_kernel; a process can load it once, because it defines an operator."""
    return load(FOLDER / "stand_ins/cpu/sgl_kernel/__init__.py")


def test_the_hash_of_seeded_sampling_is_murmur3(stand_in: ModuleType) -> None:
    seeds, positions, columns = [0, 7, 2**40 + 3, 2**63 - 1], [0, 1, 5, 100000], [0, 1, 150000]
    got = stand_in.murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    ).tolist()
    for row, seed, position in zip(got, seeds, positions, strict=True):
        blocks = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        assert row == [murmur3(blocks + column.to_bytes(4, "little")) for column in columns]
    assert murmur3(b"test") == 0xBA6BD213  # a published value


def test_any_other_kernel_says_what_it_needs(stand_in: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.silu_and_mul needs CUDA"):
        stand_in.silu_and_mul(1)


SERVER = """
import logging, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
logging.info("arguments %s", sys.argv[1:])
import torchvision.transforms.functional as f; f.InterpolationMode.BICUBIC
time.sleep(600)
"""
HOOKS = """
class HookRegistry:
    _hooks, _patched = {}, set()
    register = apply_hooks = staticmethod(lambda *arguments: None)
class HookType:
    AFTER = AROUND = None
"""
LOST_HOOK = """
import sys, types
class HookRegistry:
    _hooks, _patched = {}, set()
    register = classmethod(lambda cls, target, *rest: cls._hooks.setdefault(target, rest))
    apply_hooks = classmethod(lambda cls: cls._patched.update([t for t in cls._hooks if not t.endswith("_disk")]))
name = "sglang.srt.plugins.hook_registry"
for end in range(1, 5):
    part = ".".join(name.split(".")[:end])
    sys.modules[part] = types.ModuleType(part)
sys.modules[name].__dict__.update(HookRegistry=HookRegistry, HookType=types.SimpleNamespace(AROUND=1, AFTER=2))
sys.path.insert(0, sys.argv[1])
import serve
HookRegistry.apply_hooks()
"""
PARENT = """
import os, subprocess, sys, threading
def start():
    env = os.environ | {"MEGARL_SERVER_PARENT": str(os.getpid())}
    print(subprocess.Popen([sys.executable, *sys.argv[1:]], env=env, start_new_session=True).pid, flush=True)
thread = threading.Thread(target=start)
thread.start(); thread.join()
sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_the_server_gets_its_key_unseen_and_ends_with_a_parent_that_started_it_from_a_thread(tmp_path: Path) -> None:
    plugins = tmp_path / "sglang" / "srt" / "plugins"
    plugins.mkdir(parents=True)
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    (plugins / "hook_registry.py").write_text(HOOKS)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "MEGARL_SERVER_KEY": "secret", "MEGARL_SERVER_PDEATHSIG": "0"}
    command = [sys.executable, "-c", PARENT, str(FOLDER / "serve.py"), "--port", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "INFO:root:arguments ['--port', '1', '--api-key=***']\n"
        assert "secret" not in " ".join(server.cmdline())
        parent.kill()
        server.wait(60)


def test_a_server_that_lacks_the_place_of_a_hook_does_not_start() -> None:
    done = subprocess.run([sys.executable, "-c", LOST_HOOK, str(FOLDER)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "SchedulerWeightUpdaterManager.update_weights_from_disk; install" in done.stderr
    assert "RuntimeError: megarl cannot work with this version of SGLang, which lacks" in done.stderr


def test_servers_get_numbers_for_the_uuids_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "gpu_uuids", lambda: ["GPU-aa11", "GPU-bb22", "GPU-bb33", "GPU-cc44"])

    def environment(base: dict[str, str], gpus: list[str] | None = None) -> dict[str, str]:
        made = sglang.server_environment(
            base, python=Path(sys.executable), api_key="", instance="a", cuda=True, tp_size=2, gpus=gpus
        )
        return {name: made[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in made}

    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environment({}, ["GPU-cc44", "GPU-aa"]) == {"CUDA_VISIBLE_DEVICES": "3,0"} | by_bus
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-bb33, GPU-bb22"}
    assert environment(visible) == {"CUDA_VISIBLE_DEVICES": "2,1"} | by_bus
    for kept in (["0", "1"], ["GPU-bb", "GPU-aa11"], ["GPU-dd", "GPU-aa11"], ["MIG-1", "GPU-aa11"]):
        assert environment(visible, kept) == {"CUDA_VISIBLE_DEVICES": ",".join(kept)}


#: What SGLang sets for its own kernels only: a group with the trainer works whatever each side has there.
ONE_SIDED = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "queues of a process on its device",
    "CUDA_VISIBLE_DEVICES": "which devices a process has",
    "NCCL_ALGO": "of all-reduces; groups with the trainer broadcast",
    "NCCL_MIN_NCHANNELS": "negotiated by the ranks of a group",
    "NCCL_MAX_NCHANNELS": "negotiated by the ranks of a group",
    "NCCL_GRAPH_MIXING_SUPPORT": "of captured graphs, which have no group with the trainer",
    "NCCL_GRAPH_REGISTER": "of captured graphs",
    "NCCL_MNNVL_ENABLE": "servers on several machines, whose NVLink the trainer's NCCL uses by itself",
}


def installed_sglang() -> Path:
    try:
        python = sglang.find_python(None, cuda=None)
    except ConfigError as error:
        pytest.skip(f"no SGLang here, run `make sglang-env`: {error.what}")
    return next(folder for folder in site_folders(python) if (folder / "sglang").is_dir()) / "sglang/srt"


def test_every_variable_of_nccl_and_cuda_that_sglang_sets_is_known() -> None:
    folder = installed_sglang()
    files = [folder / "entrypoints/engine.py", folder / "server_args.py", *folder.glob("arg_groups/*.py")]
    written = r"""os\.environ(?:\.setdefault\(|\[)"((?:NCCL|CUDA)_\w+)"(?:\] =|,)"""
    names = {name for file in files for name in re.findall(written, file.read_text())}
    assert "NCCL_CUMEM_ENABLE" in names
    assert names <= {*SGLangConfig().nccl_environment(), *ONE_SIDED}


@pytest.mark.parametrize("switches", [(), ("--enable-symm-mem",), ("--enable-nccl-nvls",)])
@pytest.mark.parametrize("machines", [1, 2])
def test_servers_and_trainer_have_one_value_of_what_groups_of_both_depend_on(
    switches: tuple[str, ...], machines: int
) -> None:
    """Runs what the installed SGLang does to its environment before it starts its schedulers."""
    tree = ast.parse((installed_sglang() / "entrypoints/engine.py").read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_set_envs_and_config")
    last = next(at for at, part in enumerate(function.body) if "CUDA_DEVICE_MAX_CONNECTIONS" in ast.unparse(part))
    function.body, function.args.args[0].annotation = function.body[: last + 1], None
    config = RunConfig.model_validate(
        {"name": "x", "rollout": {"engine": "sglang", "sglang": {"extra_args": list(switches), "servers": 1}}}
    )
    trainer = process_environment(config, 1)
    wanted = {name: trainer[name] for name in config.rollout.nccl_environment}
    environment = sglang.server_environment(trainer, python=Path(sys.executable), api_key="", instance="a", cuda=True)
    settings = defaultdict(int, nnodes=machines) | {name[2:].replace("-", "_"): 1 for name in switches}
    never = SimpleNamespace(get=lambda: None)
    scope = {
        "os": SimpleNamespace(environ=environment),
        "resolving_view": lambda _: type("View", (), {"__getattr__": lambda _, name: settings[name]})(),
        "envs": SimpleNamespace(SGLANG_ENABLE_KV_SHARD_ZERO_SM_GATHER=never, SGLANG_MOONCAKE_CUSTOM_MEM_POOL=never),
        "is_mnnvl_fabric_device": lambda: True,
    }
    exec(compile(ast.unparse(function) + "\n_set_envs_and_config(None)", "engine.py", "exec"), scope)
    assert {name: environment[name] for name in wanted} == wanted
    assert {name for name in environment if name.startswith(("NCCL_", "CUDA_"))} <= {*wanted, *trainer, *ONE_SIDED}


def test_runs_without_servers_leave_nccl_as_it_is() -> None:
    assert "NCCL_CUMEM_ENABLE" not in process_environment(RunConfig.model_validate({"name": "x"}), 1)
