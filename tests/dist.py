"""Run a function in several real processes that talk over gloo, and get back what each rank returned.

    results = run_distributed(my_case, 2, 120, {"tp": 2})      # my_case(arg) runs on both ranks

`fn` must be a module-level function; it runs after torch.distributed is initialised. It returns JSON-able data, or a
(nested dict of) tensors together with it. Many layouts in one process group: call `fresh_parallel(...)` or
`fresh_layout(...)` before each; a process has one layout at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megarl.system.processes import has_nvidia_device
from tests import fork_servers

if TYPE_CHECKING:
    from megarl.config.model import ParallelConfig
    from megarl.system.comm import WorkerGroup
    from megarl.training.parallel import Layout

_layouts: list[Layout] = []  # of this process; at most one
_ROOT = Path(__file__).parents[1]

_NEVER_MET = "the ranks have not met"
"""What a rank says that fails before there is a process group: a program that is none of ours, such as srun, was given
the port that was reserved, or gloo lost a connection while many processes started."""


def run_distributed(fn: Callable[..., Any], world_size: int, timeout: float = 240.0, *args: Any) -> list[Any]:
    """Results of `fn(*args)` of every rank, in rank order.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or the ranks that did not end in `timeout` s.
    """
    return _run(fn, world_size, timeout, args, "tests.preload")


def run_pretending(fn: Callable[..., Any], world_size: int, timeout: float = 240.0, *args: Any) -> list[Any]:
    """The same in processes with a pretended GPU each (tests/pretend_cuda.py)."""
    if has_nvidia_device():
        pytest.skip("this machine has a GPU: nothing to pretend")
    return _run(fn, world_size, timeout, args, "tests.preload_pretending")


def run_pretending_with_te(fn: Callable[..., Any], world_size: int, timeout: float = 240.0, *args: Any) -> list[Any]:
    """The same in processes that have a pretended GPU each and the double of Transformer Engine (tests/te_double)."""
    if has_nvidia_device():
        pytest.skip("this machine has a GPU: nothing to pretend")
    return _run_with_te(fn, world_size, timeout, args, "tests.preload_pretending_with_te")


def run_with_te(fn: Callable[..., Any], world_size: int, timeout: float = 240.0, *args: Any) -> list[Any]:
    """The same in processes that have the double of Transformer Engine, on CPUs."""
    return _run_with_te(fn, world_size, timeout, args, "tests.preload_te")


def _run_with_te(fn: Callable[..., Any], world_size: int, timeout: float, args: tuple, preload: str) -> list[Any]:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("this interpreter has Transformer Engine: no double beside it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "path", [str(_ROOT / "tests" / "te_double"), *sys.path]
        )  # ranks get the path of this process
        return _run(fn, world_size, timeout, args, preload)


def _run(fn: Callable[..., Any], world_size: int, timeout: float, args: tuple, preload: str) -> list[Any]:
    try:
        return _run_once(fn, world_size, timeout, args, preload)
    except AssertionError as error:
        if _NEVER_MET not in str(error):
            raise
    return _run_once(fn, world_size, timeout, args, preload)


def _run_once(fn: Callable[..., Any], world_size: int, timeout: float, args: tuple, preload: str) -> list[Any]:
    environment = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    by_value = pickle.dumps(args)  # multiprocessing would hand over a descriptor per tensor, and has too few
    with tempfile.TemporaryDirectory() as folder, _reserved_port() as port:
        environment["MASTER_PORT"] = str(port)
        names = (fn.__module__, fn.__qualname__, _import_root(fn.__module__))
        ranks: list[Any] = []
        try:
            for rank in range(world_size):
                task = (names, rank, world_size, environment, folder, timeout, by_value)
                ranks.append(start(rank, _rank_main, task, preload))
            wait_for_ranks(ranks, Path(folder), time.monotonic() + timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join(5)
        return [_read(Path(folder), rank) for rank in range(world_size)]


def start(rank: int, target: Callable[..., None], args: tuple, preload: str) -> multiprocessing.process.BaseProcess:
    """A process that calls `target`, forked from one that has imported what takes five seconds in each of them."""
    if has_nvidia_device():  # what looks for GPUs leaves the driver in a state that a fork does not survive
        process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
        process.start()
        return process
    servers = fork_servers.servers(preload)
    server = servers[rank % len(servers)]
    task = (os.getpriority(os.PRIO_PROCESS, 0), target, args)
    process = multiprocessing.get_context("forkserver").Process(target=_begin, args=task, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
        process.start()
    return process


def _begin(priority: int, target: Callable[..., None], args: tuple) -> None:
    """Call `target` with the priority of the process that started this one, which is not always the server's."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    target(*args)


def world() -> WorkerGroup:
    """All ranks of this process's torch world; made for only this process where there is none."""
    from megarl.system.comm import single_world

    return single_world("gloo", 120.0)


def join_team(teams: Mapping[str, Sequence[int]], ports: Mapping[str, int], run_dir: Path) -> str:
    """Leave the harness's group for the world of this rank's team, which meets at its port; the team's name."""
    import torch.distributed as dist

    from megarl.system.rendezvous import join

    rank = dist.get_rank()
    dist.destroy_process_group()  # that of the harness: a team is a world of its own
    team = next(name for name, ranks in teams.items() if rank in ranks)
    own = {"RANK": teams[team].index(rank), "WORLD_SIZE": len(teams[team]), "MASTER_PORT": ports[team]}
    os.environ.update({key: str(value) for key, value in own.items()})
    join("gloo", 120, run_dir)
    return team


def fresh_layout(parallel: ParallelConfig) -> Layout:
    """Another layout for the processes that are already there; the one before, with its engines, ends. Collective."""
    from megarl.training.parallel import init_parallel

    no_parallel()
    _layouts.append(init_parallel(parallel, world()))
    return _layouts[0]


def layout_for(parallel: ParallelConfig) -> Layout:
    """The layout of this process where it is the one asked for, else a fresh one."""
    return _layouts[0] if _layouts and _layouts[0].parallel == parallel else fresh_layout(parallel)


def fresh_parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, etp: int | None = None):
    """`fresh_layout` of these sizes, ready for models that are not built by an engine."""
    from megarl.config.model import ParallelConfig

    layout = fresh_layout(ParallelConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp))
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return layout


def no_parallel() -> None:
    """End the layout of this process, if any, so that the code under test can make its own. Collective."""
    while _layouts:
        _layouts.pop().close()


def current_layout() -> Layout:
    """The layout that the test made last."""
    return _layouts[0]


def single_process() -> Layout:
    """The layout of a single process, for tests of code that only runs under torch.distributed; made once."""
    from megarl.config.model import ParallelConfig

    if not _layouts:
        fresh_parallel()
    return layout_for(ParallelConfig())


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the ranks live; the first of them listens on it.

    Both sockets say SO_REUSEADDR, and this one does not listen.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _import_root(module: str) -> str:
    """Folder that makes `module` importable in a new process."""
    path = Path(sys.modules[module].__file__).resolve()
    return str(path.parents[module.count(".")])


def wait_for_ranks(ranks: list, folder: Path, deadline: float) -> None:
    """Until every rank has ended; AssertionError with the first traceback when one fails, however many end at once."""
    while any(p.is_alive() for p in ranks):
        _raise_first_error(ranks, folder)
        if any(p.exitcode not in (None, 0) for p in ranks):
            time.sleep(0.5)  # a traceback that is just being written
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"still running at the deadline: {[i for i, p in enumerate(ranks) if p.is_alive()]}")
        time.sleep(0.05)
    _raise_first_error(ranks, folder)
    if any(p.exitcode for p in ranks):
        raise AssertionError(f"exit codes without a traceback: {[p.exitcode for p in ranks]}")


def _raise_first_error(ranks: list, folder: Path) -> None:
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime)
    if errors:
        codes = [p.exitcode for p in ranks]  # a rank that was killed has no traceback, and may be why another has one
        told = "\n".join(f"rank {error.stem} failed:\n{error.read_text()}" for error in errors)  # the first one first
        raise AssertionError(f"{told}\nexit codes: {codes}")


def _rank_main(
    names: tuple, rank: int, world_size: int, environment: dict, folder: str, timeout: float, args: bytes
) -> None:
    os.environ.clear()  # that of the process it is forked from
    os.environ.update(environment, **fork_servers.OPENMP, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    met = True
    try:
        module, function, root = names
        if root not in sys.path:
            sys.path.insert(0, root)
        target = importlib.import_module(module)
        for part in function.split("."):
            target = getattr(target, part)
        met = False
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=min(timeout, 120))
        )
        dist.barrier()  # a rank that leaves this group at once takes its store with it, which others still connect by
        met = True
        _write(Path(folder), rank, target(*pickle.loads(args)))
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a communication thread can abort the interpreter's teardown; workers end in the same way
    except BaseException:
        path = Path(folder) / f"{rank}.error.tmp"
        path.write_text(traceback.format_exc() if met else f"{_NEVER_MET}\n{traceback.format_exc()}")
        path.rename(path.with_suffix(""))
        os._exit(1)


def _write(folder: Path, rank: int, result: Any) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    (folder / f"{rank}.json").write_text(json.dumps(_strip(result, tensors)))
    save_file(tensors, folder / f"{rank}.safetensors")


def _strip(value: Any, tensors: dict[str, Any]) -> Any:
    """`value` with each tensor replaced by a reference into `tensors`."""
    import torch

    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().clone().contiguous()
        return {"__tensor__": name}
    if isinstance(value, dict):
        return {key: _strip(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strip(item, tensors) for item in value]
    return value


def _read(folder: Path, rank: int) -> Any:
    from safetensors.torch import load_file

    tensors = load_file(folder / f"{rank}.safetensors")

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                tensors[value["__tensor__"]]
                if "__tensor__" in value
                else {key: restore(item) for key, item in value.items()}
            )
        return [restore(item) for item in value] if isinstance(value, list) else value

    return restore(json.loads((folder / f"{rank}.json").read_text()))
