"""SGLang as megarl uses it: the interpreter, the version, and the environment that a server needs.

The servers run in their own interpreter, because SGLang pins its own torch and transformers. Nothing of SGLang is
imported here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.system.compat.cuda import gpu_uuids, own_toolkit, runtime_libraries, toolkit_home
from megarl.system.errors import ConfigError

# A server allocates a buffer for every bucket that it receives by broadcast. On one heap with huge pages the buffers of
# all buckets reuse the same memory; otherwise each is mapped, zeroed and returned, with 92,000 page faults for 400 MB.
CPU_MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"hugetlb": 1, "arena_max": 1, "mmap_threshold": 1 << 30, "trim_threshold": 2 << 30}.items()
)
COMPLETE = ".complete"  # file in an environment's folder that marks a finished installation
TESTED, SERIES = "0.5.23", "0.5.2"
_FOLDER = Path(__file__).with_name("sglang_server")
LOADERS = _FOLDER / "loaders"
# functions that a server calls with whole tensors, and with changed elements
LOADER, PATCH_LOADER = "megarl_loader.load", "megarl_loader.patch"
# functions with which a server describes its parameters to the trainer, and receives an update from shard to shard
DESCRIBE_LOADER, SHARD_LOADER = "megarl_shards.describe", "megarl_shards.receive"
ALL_LOADERS = (LOADER, PATCH_LOADER, DESCRIBE_LOADER, SHARD_LOADER)
STAND_INS = (_FOLDER / "stand_ins/cpu", _FOLDER / "stand_ins/text")
SHARED_MEMORY = Path("/dev/shm")
_KEY = "rollout.sglang.python"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KINDS = {"cuda": "GPUs", "cpu": "CPUs"}
_ANSWER_S = 60  # seconds for an interpreter to answer; a first start on a network disk takes seconds
# Variables for the trainer's workers (of torch.distributed or Ray) or for its interpreter, which a server must not see.
# This includes allocator and stream settings: expandable segments cannot be mapped by another process or paused by
# SGLang's memory saver, and one connection to the device keeps a server's kernels in one queue.
_TRAINER_ONLY = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "RAY_AUTH_TOKEN"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
)
_TRAINER_PREFIXES = ("PYTHON", "TORCHELASTIC_", "MEGARL_")


def environments_folder() -> Path:
    """Return the folder in which `make sglang-env` creates environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megarl" / "sglang"


def install_fix(cuda: bool | None = None) -> str:
    """Describe how to get an interpreter for servers. `cuda` is the kind of machine; None: this machine's kind."""
    command = "make sglang-env SGLANG_KIND=cuda" if cuda else "make sglang-env"
    return f"run `{command}`, or name an interpreter that has sglang {TESTED}"


def find_python(configured: str | None, *, cuda: bool | None) -> Path:
    """Return the servers' interpreter: the configured one, or that of the newest environment for this kind of machine
    (`cuda` None: any kind). Raise ConfigError if there is none, or if it is for the other kind of machine.
    """
    kinds = ("cuda", "cpu") if cuda is None else ("cuda",) if cuda else ("cpu",)
    if configured is not None:
        python = Path(configured).expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            problem = "this is not an interpreter" if python.exists() else "this interpreter does not exist"
            raise ConfigError(problem, where=_KEY, found=configured, fix=install_fix(cuda))
        stamp = python.absolute().parents[1] / COMPLETE  # exists in environments that `make sglang-env` made
        if stamp.is_file() and (kind := json.loads(stamp.read_text())["kind"]) not in kinds:
            raise ConfigError(
                f"this interpreter's sglang is for {_KINDS[kind]}, but the servers of this run need one for "
                f"{_KINDS[kinds[0]]}",
                where=_KEY,
                found=configured,
                fix=f"leave the key out to use an environment of the right kind, or {install_fix(cuda)}",
            )
        return python
    stamps = sorted(environments_folder().glob(f"*/{COMPLETE}"), key=lambda stamp: stamp.stat().st_mtime)
    for stamp in reversed(stamps):
        if json.loads(stamp.read_text())["kind"] in kinds:
            return stamp.parent / "bin" / "python"
    raise ConfigError(
        f"servers need their own interpreter, and {environments_folder()} has none for {' or '.join(kinds)}",
        where=_KEY,
        fix=install_fix(cuda),
    )


@functools.lru_cache
def sglang_version(python: Path, *, cuda: bool | None = None) -> str:
    """Return the version of sglang in the servers' interpreter. Raise ConfigError if sglang is missing, or the
    weight updates were not tested with its release series.
    """
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        command = [str(python), "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"it did not reply within {_ANSWER_S} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        raise ConfigError(
            f"this interpreter does not run: {why}", where=_KEY, found=str(python), fix=install_fix(cuda)
        ) from error
    version = done.stdout.strip()
    if not version.startswith(SERIES):
        raise ConfigError(
            "this version of sglang is not supported" if version else "sglang is not installed in this interpreter",
            where=_KEY,
            found=f"sglang {version} in {python}" if version else str(python),
            allowed=f"sglang {SERIES}x",
            fix=install_fix(cuda),
        )
    return version


def server_command(python: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command line of one server; `arguments` are those of `sglang.launch_server`, without the API key."""
    return [str(python), str(_FOLDER / "serve.py"), *arguments]


def cpu_arguments() -> list[str]:
    """Return the arguments that a server needs on a CPU."""
    return ["--device", "cpu", "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--sleep-on-idle"]


def shared_memory(instance: str) -> list[Path]:
    """Return the files in shared memory of the server `instance`; SGLang itself never removes them."""
    return [file for kind in ("sglang_loads", "sgl_shm") for file in SHARED_MEMORY.glob(f"{kind}_{instance}_*")]


def server_environment(
    base: Mapping[str, str],
    *,
    python: Path,
    api_key: str,
    instance: str,
    cuda: bool,
    tp_size: int = 1,
    gpus: Sequence[str] | None = None,
    colocated: bool = False,
    temporary: Path | None = None,
) -> dict[str, str]:
    """Return the environment variables of a server that this process starts.

    Args:
        base: environment to start from; the trainer's own variables are removed.
        python: the servers' interpreter. Its programs (ninja) come first on PATH. On GPUs its CUDA runtime comes first
            on the library path, because the memory saver of colocated servers needs it before torch is loaded.
        api_key: the server's API key, passed in the environment so that no process list shows it.
        instance: name of the server's shared memory, unique to the server.
        cuda: whether the server runs on GPUs.
        tp_size: number of ranks of the server; on a CPU each gets its own core.
        gpus: GPUs that the server may use; None: the GPUs that this process sees.
        colocated: whether the server's memory is released between calls, after which no health check may generate.
        temporary: folder for the server's sockets, which it never removes; None: the system's temporary folder.
    """
    trainers = {name for name in base if name in _TRAINER_ONLY or name.startswith(_TRAINER_PREFIXES)}
    env = {name: value for name, value in base.items() if name not in trainers}
    env |= {
        "MEGARL_SERVER_KEY": api_key,
        "MEGARL_SERVER_INSTANCE": instance,
        "MEGARL_SERVER_PARENT": str(os.getpid()),
        "MEGARL_SERVER_PDEATHSIG": str(int(threading.current_thread() is threading.main_thread())),
        "PATH": _in_front([python.absolute().parent], env.get("PATH") or os.defpath),
        "PYTHONUNBUFFERED": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature, as in Completion
    }
    env |= {} if temporary is None else {"TMPDIR": str(temporary)}
    if gpus is not None:
        env[_VISIBLE] = ",".join(gpus)
    if colocated:
        env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if cuda:  # the CUDA runtime of the servers' wheels, and their compiler if no other exists
        home, libraries = toolkit_home(env, python), runtime_libraries(python)
        env |= {"CUDA_HOME": str(home)} if home == own_toolkit(python) else {}
        env |= {"LD_LIBRARY_PATH": _in_front(libraries, env.get("LD_LIBRARY_PATH"))} if libraries else {}
    else:
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            # Spinning threads make a server tens of times slower as soon as another process uses one of its cores.
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "GLIBC_TUNABLES": CPU_MALLOC,
            # On a CPU, servers serve short runs: compiling one small function takes longer than all their generation.
            "TORCHDYNAMO_DISABLE": "1",
        }
        if tp_size > 1:
            cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(tp_size))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    return env | numbered(env)


def numbered(env: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with numbers of GPUs in place of their UUIDs, and the variable for this numbering,
    because SGLang reads numbers. Return an empty dict, so that the value is kept, if it does not consist of UUIDs of
    whole GPUs that the driver lists.
    """
    names = [name.strip() for name in env.get(_VISIBLE, "").split(",") if name.strip()]
    if not names or not all(name.startswith("GPU-") for name in names):
        return {}
    uuids = gpu_uuids()
    numbers = [[number for number, uuid in enumerate(uuids) if uuid.startswith(name)] for name in names]
    if any(len(matches) != 1 for matches in numbers):  # CUDA accepts the beginning of a UUID if it fits one GPU
        return {}
    # The driver numbers GPUs in bus order, and CUDA does so with this variable.
    return {_VISIBLE: ",".join(str(number) for (number,) in numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _in_front(folders: Sequence[Path], path: str | None) -> str:
    """Return the search path `path` with `folders` at its front."""
    return os.pathsep.join([*map(str, folders), *([path] if path else [])])
