"""Common parts of all launchers: the run folder, the environment of a worker, and `run_workers`.

run_workers(launcher, entry, config, run_dir)
  lock run_dir     one command at a time: megarl.artifacts.lock
  prepare run_dir: the configuration, log.txt, the name of the attempt; an earlier command's errors are removed
  start            local.start | torchrun.start | ray.start      -> Workers
  supervise        until all ranks end, one fails, one hangs, or a signal arrives
  stop             in any case no worker is left
  (again           from the newest checkpoint, where cluster.max_restarts allows it: megarl.launchers.attempts)
  close            run.json, report and MLflow of an unfinished run are completed
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from megarl.artifacts.lock import ATTEMPT, FolderLock
from megarl.artifacts.records import read_run, setting
from megarl.artifacts.run_folder import (
    CONFIG,
    SAVE_REQUEST,
    RunFolder,
    accept_config,
    discard_config,
    drop_start,
    repair,
    restore_config,
    write_next_config,
)
from megarl.dag.placement import ONLY_TEAM, TeamPlan
from megarl.launchers.output import OutputLog
from megarl.runtime.health import Old, RankFailure, read_beat, read_errors
from megarl.runtime.machine_beats import BY_MACHINE, watch_machines
from megarl.runtime.worker import WATCHED
from megarl.system.credentials import mask_argument
from megarl.system.errors import ConfigError, MegarlError, UserError, count, is_full, no_room
from megarl.system.leftovers import remove_leftovers
from megarl.system.machine import available_cores
from megarl.system.parents import as_parent
from megarl.system.processes import COMMAND, JOB_BEGAN, Stopped, has_nvidia_device, signals_raise, worker_name
from megarl.system.rendezvous import forget_token, ranks_text, write_token
from megarl.tracking.close import close_run, complete_trace

if TYPE_CHECKING:
    from megarl.config.model import ParallelConfig
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement
    from megarl.tracking.tracker import Status

Launcher = Literal["local", "torchrun", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "torchrun", "ray")
#: Number of processes from which on gloo opens connections only when they are used.
LAZY_FROM = 128
#: Code that `Workers.poll` returns for a rank that exited with 0 before its work was done; no system uses this code.
ENDED_EARLY = 256
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"

# By default glibc returns much freed memory to the kernel at once (at first every block above 128 kB), and the next
# allocation pays a page fault for each 4 kB of it again. A loop that grows a cache by concatenation (32 sequences, 16
# tensors of 8 x 64, 60 tokens; one core) took 0.54 CPU-s and 186,000 faults with glibc's defaults, and 0.21 CPU-s and
# 8,000 faults with these values. Blocks above the first value are few and long-lived (caches, logits): because they are
# returned when freed, the heap does not grow around them. glibc reads the variables when a process starts, so they must
# be in its environment, and it ignores a first value above 32 MB. Values of the user's own environment take precedence.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


_LEAST_ROOM = 1 << 20  # bytes that must be free on the disk: enough for logs, records and the report of a short run


@dataclasses.dataclass(frozen=True)
class Job:
    """The job that a launcher starts.

    Attributes:
        entry: the function that every rank runs, `pkg.mod:fn(config, run_dir)`.
        placement: the teams of a command whose roles may be in several; None: all workers are one team.
        old: errors that were in the run folder when this launcher began, if it is not on the first machine. They count
            as errors of an earlier command until the first machine's launcher has removed them. If workers of the first
            machine fail before this launcher begins, their errors are among them; the workers of this machine then wait
            for the failed workers until `cluster.start_timeout_s`.
        folder: watches `run_dir`; the run ends if this folder is lost.
        machine: number of this machine among the machines with a launcher of the command.
        lock: the lock of the run folder.
        attempt: name of the attempt; empty: the name that the first machine's launcher sets.
        began: unix time at which the job began, the same for all attempts.
    """

    entry: str
    config: RunConfig
    run_dir: Path
    log: OutputLog
    placement: Placement | None = None
    old: Old = frozenset()
    folder: RunFolder | None = None
    machine: int = 0
    lock: FolderLock | None = None
    attempt: str = ""
    began: str = dataclasses.field(default_factory=lambda: os.environ.get(JOB_BEGAN) or repr(time.time()))

    def check_folder(self, *, now: bool = True) -> None:
        """Raise an error if the run folder no longer exists; see `RunFolder.check`."""
        if self.folder is not None:
            self.folder.check(now=now)

    def errors(self) -> dict[int, RankFailure]:
        """Return the failures that ranks have recorded, by rank."""
        return read_errors(self.run_dir, self.old)

    @property
    def separate(self) -> bool:
        """Whether the run has several teams."""
        return self.placement is not None and self.placement.separate

    @property
    def teams(self) -> tuple[TeamPlan, ...]:
        """All teams; a single one unless several are configured."""
        if self.placement is not None:
            return self.placement.teams
        return (TeamPlan(ONLY_TEAM, (), self.config.cluster.nproc, 0, self.config.actor.parallel, ()),)

    def name(self, worker: int) -> str:
        """Return the name of a worker for messages; `worker` is its number among all teams' workers."""
        return name_in(self.placement, worker)

    def names(self, workers: Sequence[int]) -> str:
        """Return the names of several workers for messages; of many, the first sixteen."""
        if not self.separate:
            return ranks_text(workers)
        more = f" and {len(workers) - 16} more" if len(workers) > 16 else ""
        return ", ".join(map(self.name, workers[:16])) + more

    @property
    def config_path(self) -> Path:
        """The file with the resolved configuration that every worker reads, see `megarl.artifacts.run_folder`."""
        return self.run_dir / CONFIG

    @property
    def log_dir(self) -> Path:
        """The folder for output files of ranks that are not children of the launcher."""
        return self.run_dir / "logs"


def name_in(placement: Placement | None, worker: int) -> str:
    """Return the name of a worker for messages; `worker` is its number among all teams of the placement."""
    if placement is None or not placement.separate:
        return worker_name(worker, None, worker)
    team = placement.of_worker(worker)
    return worker_name(worker, team.name, worker - team.first)


class Workers(Protocol):
    """The running ranks of a job."""

    def poll(self) -> dict[int, int]:
        """Return the exit codes of ranks that ended by themselves; a negative code is a signal. 0 means that the rank's
        work is done; a rank that exited with 0 before that has `ENDED_EARLY`.
        """

    def ranks(self) -> list[int]:
        """Return the ranks that this launcher started and watches."""

    def cause(self, rank: int) -> str | None:
        """Return why a rank without a recorded error ended; None if the launcher has no information on it."""

    def stop(self) -> None:
        """End every running rank within seconds; may be called again."""


def code_of(run_dir: Path, rank: int, code: int) -> int:
    """Return the exit code to report for rank `rank`: `code`, but ENDED_EARLY for 0 if the rank's run is not over."""
    if code:
        return code
    beat = read_beat(run_dir, rank)
    return 0 if beat is not None and beat.over else ENDED_EARLY


def make_run_dir(
    config: RunConfig, run_dir: Path | None = None, job: str = "train", *, inside: Path | None = None
) -> Path:
    """Create the folder of a run: `run_dir` if the user names one (to continue it), else a new RUNS/<name>/<stamp>.

    Folders of eval and generate, which produce no model, end in `-eval` or `-generate`; with `inside`, the folder of
    the run whose model they use, they are created in it.
    """
    key = "--run-dir" if run_dir is not None else "tracking.dir" if inside is None else "RECIPE"
    another = {
        "--run-dir": "name another folder",
        "tracking.dir": "set tracking.dir to another folder",
        "RECIPE": "name another folder with --run-dir",
    }[key]
    parent = run_dir or inside or Path(config.tracking.dir) / re.sub(r"[^\w.+-]+", "-", config.name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent) as file:  # detects a full or read-only disk before the run starts
            file.write(bytes(_LEAST_ROOM))
    except (FileExistsError, NotADirectoryError) as error:
        obstacle = next(path for path in (parent, *parent.parents) if os.path.lexists(path))
        raise ConfigError(
            "this is a broken link, but a run needs a folder"
            if obstacle.is_symlink() and not obstacle.exists()
            else "this is a file, but a run needs a folder",
            where=key,
            found=str(obstacle),
            allowed="a folder, or a path that does not exist yet",
            fix=another if run_dir is None else f"{another}, or the folder of the file: {obstacle.parent}",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be written ({error.strerror or error})",
            where=key,
            found=str(parent),
            fix=f"free at least {_LEAST_ROOM >> 20} MB there, or {another}, on another disk"
            if is_full(error)
            else f"{another} that you may write to",
        ) from error
    if run_dir is not None:
        return run_dir.resolve()
    stamp = time.strftime("%Y%m%d-%H%M%S") + ("" if job in ("train", "sft") else f"-{job}")
    for attempt in range(1, 1000):
        candidate = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate.resolve()
    raise ConfigError(
        f"999 runs have started in the same second: the folders {stamp} to {stamp}-999 exist",
        where=key,
        found=str(parent),
        fix=f"{another}, or start fewer runs at the same time",
    )


def run_workers(launcher: str, entry: str, config: RunConfig, run_dir: Path, placement: Placement | None = None) -> int:
    """Run `entry` (`pkg.mod:fn(config, run_dir)`) on every rank and return the exit code of the command: 0, 1, 2 (user
    error), 128 + signal. Raise UserError for a layout that the launcher cannot start, or a run folder that another run
    uses.
    """
    from megarl.launchers import local, ray, torchrun
    from megarl.launchers.attempts import Attempts

    starts: dict[str, Callable[[Job], Workers]] = {"local": local.start, "torchrun": torchrun.start, "ray": ray.start}
    if launcher not in starts:
        raise ConfigError("unknown launcher", where="--launcher", found=launcher, allowed=LAUNCHERS)
    with contextlib.ExitStack() as open_files:
        lock = open_files.enter_context(_lock(launcher, config, run_dir))
        log = open_files.enter_context(contextlib.closing(_open_log(config, run_dir, lock, placement)))
        folder = open_files.enter_context(contextlib.closing(RunFolder(run_dir)))
        job = Job(
            entry, with_date(config, run_dir), run_dir, log, placement, folder=folder, machine=lock.machine, lock=lock
        )
        if config.cluster.nnodes > 1:
            watch_machines(run_dir)
        attempts = Attempts(starts[launcher], job)
        ended: Status = "failed"
        with signals_raise() as signals:
            try:
                with signals.raised():
                    code = attempts.run()
                ended = "failed" if code else "finished"
                return code
            except Stopped as stopped:
                ended = "stopped"
                with contextlib.suppress(Stopped), signals.raised():  # a second signal stops at once
                    attempts.save_first(stopped.number)
                signals.ignore()
                log.say(f"megarl: stopped by {signal.Signals(stopped.number).name}")
                return 128 + stopped.number
            except UserError:
                raise
            except MegarlError as error:
                log.say(f"megarl: {error}")
                return error.exit_code
            except Exception as error:
                folder.check()
                if is_full(error):
                    raise no_room(run_dir) from error
                log.say(
                    f"{traceback.format_exc()}megarl: {launcher} launcher failed: {error}; see {run_dir / 'log.txt'}"
                )
                return 1
            finally:
                signals.ignore()
                attempts.stop()
                # another command may use the folder by now
                if lock.machine == 0 and lock.is_ours() and not folder.is_gone():
                    _leave_folder(job, ended, attempts.started)
                with contextlib.suppress(OSError):
                    remove_leftovers()  # files of workers that had to be killed


def _open_log(config: RunConfig, run_dir: Path, lock: FolderLock, placement: Placement | None) -> OutputLog:
    """Open the log of a run. Refuse a folder that cannot be resumed."""
    if lock.machine == 0:
        repair(run_dir)
    log = OutputLog(run_dir / "log.txt", functools.partial(name_in, placement), split=config.tracking.console == "json")
    for note in lock.notes:
        log.say(note)
    with contextlib.suppress(OSError):
        if gone := remove_leftovers():
            log.record("launcher", f"removed files of killed processes: {', '.join(map(str, gone))}")
    return log


def _leave_folder(job: Job, ended: Status, started: bool) -> None:
    """Complete the records of a run that has ended, and remove the files that only workers need."""
    from megarl.config.load import dump_config

    if ended == "finished":
        accept_config(job.run_dir)
    clear(job.run_dir)
    if started and ended != "finished":
        close_run(job.run_dir, ended)
    if started and job.separate:
        complete_trace(job.run_dir)
    restore_config(job.run_dir, dump_config(job.config))


def prepare(job: Job) -> Job:
    """Begin an attempt: write the files that workers read at their start. Only the first machine's launcher writes
    them. Raise FolderTaken if another command is using the folder.
    """
    from megarl.config.load import dump_config

    if job.machine:
        return job
    attempt = "" if job.lock is None else job.lock.begin_attempt()
    write_next_config(job.run_dir, dump_config(job.config))
    write_token(job.run_dir)
    return dataclasses.replace(job, attempt=attempt)


def clear(run_dir: Path) -> None:
    """Clean up the run folder after an attempt whose workers have ended; keep the files of a run that has begun."""
    forget_token(run_dir)
    (run_dir / SAVE_REQUEST).unlink(missing_ok=True)
    discard_config(run_dir)
    drop_start(run_dir)


def with_date(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the recipe with `data.date`, the date for chat templates. If the recipe does not set it, it is the date of
    the run in this folder or of the resumed run, which may continue on another day, or else today.
    """
    resume, date = config.trainer.resume, config.data.date
    if date is None and resume != "never":
        run = read_run(run_dir if resume == "auto" else Path(resume).absolute().parent.parent, tell=False)
        date, started = setting(run, "data", "date"), run.get("started")
        if not isinstance(date, str):  # a run of an earlier version records only its start
            date = None if started is None else datetime.date.fromtimestamp(started).isoformat()
    date = date or datetime.date.today().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"date": date})})


def process_of(run_dir: Path) -> object:
    """Return the process that wrote the run's record; None without a record. When it changes, the run has begun."""
    return read_run(run_dir, tell=False).get("process")  # no warning: the run's next start reports a damaged record


def machine_number(launcher: str, machines: int) -> int:
    """Return this machine's number among the machines that have a launcher, from NODE_RANK (0 when unset). Only
    torchrun on several machines has more than one launcher; with other launchers NODE_RANK has another meaning, and the
    number is 0. Raise ConfigError if the number is not below `machines`.
    """
    if launcher != "torchrun" or machines == 1:
        return 0
    number = os.environ.get("NODE_RANK", "0")
    if not number.isdecimal() or int(number) >= machines:
        raise ConfigError(
            "this is not the number of a machine of the run",
            where="NODE_RANK",
            found=number,
            allowed=f"0 to {machines - 1}, with cluster.nnodes = {machines}",
            fix="set a different number on every machine, and 0 on the machine of MASTER_ADDR",
        )
    return int(number)


def _lock(launcher: str, config: RunConfig, run_dir: Path) -> FolderLock:
    machines = config.cluster.nnodes
    together = launcher == "torchrun" and machines > 1
    meets = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if together else ""
    return FolderLock(run_dir, machine_number(launcher, machines), machines, meets)


def layout_environment(layout: ParallelConfig) -> dict[str, str]:
    """Return the environment variables of a worker that depend on its team's layout; CUDA reads them at its start."""
    if layout.tp == 1:
        return {}
    # Megatron overlaps collectives with matrix products, and needs the GPU to start kernels in the order of their
    # launches. A single connection to the GPU keeps this order.
    return {_CONNECTIONS: os.environ.get(_CONNECTIONS, "1")}


def own_environment(job: Job) -> dict[str, str]:
    """Return the environment variables that identify a process's attempt, its command, and its launcher, whose end also
    ends the process.
    """
    return as_parent() | own_command() | {ATTEMPT: job.attempt}


def own_command() -> dict[str, str]:
    """Return the environment variable with this process's command line, for the tags of trackers."""
    return {COMMAND: shlex.join([Path(sys.argv[0]).name, *map(mask_argument, sys.argv[1:])])}


def process_environment(config: RunConfig, workers_here: int) -> dict[str, str]:
    """Return the environment variables that every worker process must have from its start, since libraries read them
    when they are loaded.
    """
    threads = config.cluster.threads or max(1, available_cores() // workers_here)
    chosen = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # spinning threads would slow down the other workers of a small machine
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # the repository's kernels/ must not hide the package of that name on PyPI
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.cluster.keep_freed_memory and not has_nvidia_device():
        chosen |= KEEP_FREED_MEMORY
    if config.cluster.nproc >= LAZY_FROM:
        # process groups open connections at their first use: many never carry CPU tensors
        chosen["TORCH_GLOO_LAZY_INIT"] = "1"
    if config.cluster.nnodes == 1:
        # host names of laptops and containers often resolve to unreachable addresses
        chosen["GLOO_SOCKET_IFNAME"] = "lo"
        servers = config.rollout.servers
        # External servers on other machines may join the trainer's nccl group, which then needs another interface.
        if servers is None or not servers.urls:
            chosen["NCCL_SOCKET_IFNAME"] = "lo"
    chosen |= config.rollout.nccl_environment
    if sys.stdout.isatty():  # this terminal shows the output of rank 0: let it draw progress bars
        chosen |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    environment = {WATCHED: "1"} | ({BY_MACHINE: "1"} if config.cluster.nnodes > 1 else {})
    environment |= {name: os.environ.get(name, value) for name, value in chosen.items()}
    if config.cluster.threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment | _allocator_environment(config)


def _allocator_environment(config: RunConfig) -> dict[str, str]:
    """Return the user's variables for torch's allocator that workers get without `expandable_segments`, by name; empty
    unless servers share the trainer's GPUs.

    Such servers map the trainer's buffers, and memory in expandable segments can be mapped only by a process that may
    trace (ptrace) the process that allocated it.
    """
    changed = {}
    for name in {*_ALLOCATOR} & os.environ.keys() if config.rollout.colocated else ():
        settings = os.environ[name].split(",")
        remaining = [part for part in settings if not part.strip().startswith(_EXPANDABLE)]
        if remaining != settings:
            changed[name] = ",".join(remaining)
    return changed


def warn_of_removed_settings(job: Job) -> None:
    """Warn of each variable from which `expandable_segments` is removed for the workers."""
    for name in sorted(_allocator_environment(job.config)):
        job.log.say(
            f"megarl: warning: {name}: workers start without {_EXPANDABLE}, because servers with "
            "rollout.sglang.colocated=true map the trainer's memory, and such segments cannot be mapped"
        )


def warn_of_few_cores(job: Job, environment: Mapping[str, str], workers_here: int) -> None:
    """Warn if the workers of a machine without GPUs have more threads than the machine has cores."""
    # the user may have set a list, for nested parallel regions
    outer = environment["OMP_NUM_THREADS"].partition(",")[0]
    threads, cores = int(outer) if outer.isdecimal() else 1, available_cores()
    if threads * workers_here > cores and not has_nvidia_device():
        job.log.say(
            f"megarl: warning: cluster.{'nproc' if threads == 1 else 'threads'}: {count(workers_here, 'process')} of "
            f"{count(threads, 'thread')} share {count(cores, 'core')}, "
            "which is many times slower than one thread per core"
        )
