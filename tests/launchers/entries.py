"""Entry functions that the launcher tests run inside real workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megarl.artifacts.run_folder import SAVE_REQUEST
from megarl.config.run import RunConfig
from megarl.disaggregated.buffer.client import BufferClient
from megarl.rollout.sglang.gpus import SERVER_GPUS, TRAINER_GPUS
from megarl.system.errors import UserError
from megarl.system.processes import BUFFER, TEAM, WORKER, worker_number
from megarl.system.rendezvous import join
from megarl.system.tracing import beat, phase, set_step

HERE_FOR_LONG_S = 600.0  # far beyond every deadline of the tests


def _wait_for_ever() -> None:
    time.sleep(HERE_FOR_LONG_S)


def _listening() -> list[str]:
    """Addresses that this process and its parent, a launcher's agent or the launcher, listen on."""
    here = psutil.Process()
    return [
        connection.laddr.ip
        for process in (here, here.parent())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def lose_the_folder(config: RunConfig, run_dir: Path) -> None:
    """Somebody deletes the run folder, and a rank writes on."""
    shutil.rmtree(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True)
    _wait_for_ever()


def lose_the_folder_at_the_end(config: RunConfig, run_dir: Path) -> None:
    """The same, when nothing is left to do."""
    shutil.rmtree(run_dir)


def write_environment(config: RunConfig, run_dir: Path) -> None:
    """Every rank adds its number to a sum over gloo and leaves what it was given."""
    import torch
    import torch.distributed as dist

    join("gloo", config.cluster.timeout_s, run_dir)
    total = torch.tensor([int(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MALLOC_TRIM_THRESHOLD_", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE")
    names += ("PYTHONSAFEPATH",)
    seen = {name: os.environ.get(name) for name in names}
    seen |= {"sum": int(total), "threads": torch.get_num_threads(), "name": config.name}
    seen["safe_path"] = sys.flags.safe_path
    (run_dir / f"seen_{seen['RANK']}.json").write_text(json.dumps(seen))
    print(f"hello from {seen['RANK']}")
    others = dist.new_group()  # more of gloo's sockets
    dist.barrier(others)
    (run_dir / f"listens_{seen['RANK']}.json").write_text(json.dumps(_listening()))
    dist.barrier(others)
    dist.destroy_process_group()


def meet_in_teams(config: RunConfig, run_dir: Path) -> None:
    """Every worker adds its number over all teams to a sum of its team, and leaves what it and others were given."""
    import ray
    import torch
    import torch.distributed as dist

    join("gloo", config.cluster.timeout_s, run_dir)
    number = worker_number()
    total = torch.tensor([number])
    dist.all_reduce(total)
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        TEAM,
        WORKER,
    )
    seen = {name: os.environ.get(name) for name in names}
    seen |= {"sum": int(total), "size": dist.get_world_size(), "ray": ray.get_runtime_context().gcs_address}
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    seen["ray folder"] = {"mode": oct(session.parents[1].stat().st_mode), "session": session.name}
    seen["listens"] = [address.removeprefix("::ffff:") for address in _listening()]
    mail = BufferClient.connect(os.environ[BUFFER], os.environ[TEAM], int(os.environ["RANK"]), config.cluster.timeout_s)
    mail.post(f"from {number}", json.dumps(seen))
    seen["heard"] = [json.loads(mail.read(f"from {other}"))[WORKER] for other in range(config.cluster.nproc)]
    (run_dir / f"seen_{number}.json").write_text(json.dumps(seen))
    print(f"hello from {number}")
    dist.destroy_process_group()


def _reference_fails(config: RunConfig, run_dir: Path, fail: Callable[[], None]) -> None:
    """The reference fails while the actor's first rank waits for it, and the other one for that."""
    import torch.distributed as dist

    join("gloo", config.cluster.timeout_s, run_dir)
    mail = BufferClient.connect(os.environ[BUFFER], os.environ[TEAM], int(os.environ["RANK"]), config.cluster.timeout_s)
    set_step(4)
    if os.environ[TEAM] == "actor":
        with phase("train"):
            mail.post(f"{os.environ['RANK']} waits", "")
            if os.environ["RANK"] == "0":
                mail.read("scores")
            dist.barrier()
    for rank in range(2):
        mail.read(f"{rank} waits")
    with phase("score"):
        fail()


def reference_raises(config: RunConfig, run_dir: Path) -> None:
    """An exception in one team."""

    def fail() -> None:
        raise RuntimeError("loss is NaN")

    _reference_fails(config, run_dir, fail)


def reference_is_killed(config: RunConfig, run_dir: Path) -> None:
    """A signal ends one team."""
    _reference_fails(config, run_dir, lambda: os.kill(os.getpid(), signal.SIGKILL))


def tell_gpus(config: RunConfig, run_dir: Path) -> None:
    """Leave which GPUs this worker sees, which ones its servers have, and how many Ray would give to somebody else."""
    import ray

    seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", SERVER_GPUS, TRAINER_GPUS)}
    seen["free"] = ray.available_resources().get("GPU", 0)
    (run_dir / f"seen_{worker_number()}.json").write_text(json.dumps(seen))


def rank_1_raises(config: RunConfig, run_dir: Path) -> None:
    """Rank 1 raises in a phase; rank 0 waits for it."""
    set_step(7)
    with phase("train"), phase("forward"):
        if os.environ["RANK"] == "1":
            while not (run_dir / "rank_0_waits").exists():
                time.sleep(0.05)
            raise RuntimeError("loss is NaN")
        (run_dir / "rank_0_waits").touch()
        _wait_for_ever()


def rank_1_raises_after_it_has_met(config: RunConfig, run_dir: Path) -> None:
    """Both."""
    write_environment(config, run_dir)
    rank_1_raises(config, run_dir)


def rank_1_is_killed(config: RunConfig, run_dir: Path) -> None:
    """Rank 1 is killed while rank 0 waits for it in a collective, so rank 0 fails too, with a lost connection."""
    import torch
    import torch.distributed as dist

    join("gloo", config.cluster.timeout_s, run_dir)
    dist.barrier()
    set_step(3)
    with phase("rollout"), phase("decode"):
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def rank_1_leaves(config: RunConfig, run_dir: Path) -> None:
    """Rank 1 ends with exit code 0 while rank 0 works; then rank 0 waits for it."""
    import torch.distributed as dist

    join("gloo", config.cluster.timeout_s, run_dir)
    dist.barrier()
    set_step(3)
    with phase("rollout"), phase("decode"):
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            os._exit(0)
        time.sleep(2.0)  # torchrun's agent ends all at the first failure, and its launcher looks only now and then
        dist.barrier()


def all_leave(config: RunConfig, run_dir: Path) -> None:
    """Every rank ends with exit code 0 in the middle of its work."""
    with phase("rollout"):
        os._exit(0)


def rank_1_is_killed_once(config: RunConfig, run_dir: Path) -> None:
    """A worker is killed while the others wait for it, and lives when it is started again."""
    set_step(3)
    killed = run_dir / "killed"
    with phase("rollout"):
        if not killed.exists():
            if worker_number() == 1:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            _wait_for_ever()
    print(f"worker {worker_number()} lives")


def ray_loses_its_control_store(config: RunConfig, run_dir: Path) -> None:
    """While its workers work, in the first attempt."""
    _ray_loses("gcs_server", run_dir)


def ray_loses_its_node_manager(config: RunConfig, run_dir: Path) -> None:
    """While its workers work, in the first attempt."""
    _ray_loses("raylet", run_dir)


def _ray_loses(part: str, run_dir: Path) -> None:
    """A process of the Ray that the launcher has started is killed, and the workers live when they start again."""
    lost = run_dir / "lost"
    with phase("rollout"):
        if not lost.exists():
            if worker_number() == 0:
                lost.touch()
                launcher = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).parent()
                assert launcher is not None
                next(child for child in launcher.children() if child.name() == part).kill()
            _wait_for_ever()
    print(f"worker {worker_number()} lives")


def wait_until_lost(config: RunConfig, run_dir: Path) -> None:
    """As `wait`, unless the run has lost a machine before."""
    if (run_dir / "lost").exists():
        print(f"worker {worker_number()} lives")
    else:
        wait(config, run_dir)


def rank_1_hangs(config: RunConfig, run_dir: Path) -> None:
    """Rank 1 waits for nothing; rank 0 waits for rank 1. Both come there at about the same time."""
    (run_dir / f"here_{os.environ['RANK']}").touch()
    while len(list(run_dir.glob("here_*"))) < 2:
        beat()
        time.sleep(0.05)
    with phase("sync" if os.environ["RANK"] == "0" else "reward"):
        _wait_for_ever()


def user_error(config: RunConfig, run_dir: Path) -> None:
    """A mistake of the user that only shows inside a worker."""
    raise UserError("no such column", where="train.jsonl:1", found="promt", allowed=["prompt", "answer"])


def out_of_memory(config: RunConfig, run_dir: Path) -> None:
    """A really failing allocation, below a limit on the address space of rank 1."""
    import resource

    import torch

    with phase("train"):
        if os.environ["RANK"] != "1":
            _wait_for_ever()
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        torch.empty(128 << 30, dtype=torch.uint8)


def train(config: RunConfig, run_dir: Path) -> None:
    """Steps without an end, of which rank 0 saves one when it is asked to."""
    for step in range(1, 1_000_000):
        set_step(step)
        with phase("step"):
            time.sleep(0.05)
        if os.environ["RANK"] == "0" and (run_dir / SAVE_REQUEST).exists():
            with phase("checkpoint"):
                folder = run_dir / "checkpoints" / f"step_{step}"
                folder.mkdir(parents=True)
                (folder / "meta.json").touch()
                (run_dir / SAVE_REQUEST).unlink()
        if step == 3:
            (run_dir / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))


def wait(config: RunConfig, run_dir: Path) -> None:
    """Leave the process id and wait to be stopped."""
    (run_dir / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    _wait_for_ever()
