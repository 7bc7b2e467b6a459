"""The one program every rank runs, whichever launcher started it.

    python -m megarl.runtime.worker --entry pkg.mod:fn --config RUN_DIR/config.yaml

RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment, so
`torchrun ... -m megarl.runtime.worker --entry ... --config ...` works without any launcher of ours. In a run with
several teams they describe the team's world; `megarl.system.processes` names the variables of the whole run.

Batch systems and containers may send a signal to every process of a job at once (`scancel`, systemd, `kill -- -GROUP`).
A worker with a launcher does not end then, but requests a checkpoint. The launcher lets the step finish and be saved
(launchers/interrupt.py), and ends its workers by other signals.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, ModuleType

from megarl.artifacts.lock import ATTEMPT, FolderLock, FolderTaken, join_attempt, refuse_if_taken
from megarl.artifacts.run_folder import SAVE_REQUEST, discard_config, held, next_config
from megarl.runtime.health import Heartbeat, report
from megarl.system.errors import UserError
from megarl.system.imports import import_callable
from megarl.system.processes import die_with_parents, own_worker_name, raise_descriptor_limit, worker_number
from megarl.system.rendezvous import refuse_bad_numbers
from megarl.system.tracing import beat, current, phase

WATCHED = "MEGARL_WATCHED"  # set by megarl's launchers, which read errors/ and print what went wrong
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(entry: str, config_path: Path) -> int:
    """Load the configuration, call the entry function, and return the exit code; a failure is written to errors/.

    Without a megarl launcher the first worker locks the run folder and begins the attempt.
    """
    run_dir, worker = config_path.parent, worker_number()
    try:
        with contextlib.ExitStack() as until_the_end:
            if WATCHED not in os.environ and worker == 0:
                lock = until_the_end.enter_context(FolderLock(run_dir))
                os.environ[ATTEMPT] = lock.begin_attempt()
                until_the_end.callback(os.environ.pop, ATTEMPT)
            refuse_if_taken(run_dir)
            until_the_end.enter_context(_imports_beat())
            return _run(entry, config_path, run_dir, worker)
    except (FolderTaken, UserError) as error:
        print(f"megarl: {error}", file=sys.stderr)
        return error.exit_code


def _run(entry: str, config_path: Path, run_dir: Path, worker: int) -> int:
    heartbeat = Heartbeat(run_dir, worker)
    raise_descriptor_limit()  # gloo holds a socket per rank and group
    telling = contextlib.ExitStack()
    try:
        with phase("start"):
            from megarl.config.load import hide_credentials, load_config

            if WATCHED not in os.environ and worker == 0:
                discard_config(run_dir)  # a start whose launcher was killed may have left this file
            path = next_config(run_dir) if WATCHED in os.environ else config_path
            config = hide_credentials(load_config(path))
            if worker == 0 and config.tracking.console != "quiet":
                telling.enter_context(print_long_waits())
            if config.cluster.threads is not None:  # OpenMP reads the variable when torch is imported, below
                os.environ["OMP_NUM_THREADS"] = str(config.cluster.threads)
            function = import_callable(entry, where="--entry", component=False)
        with held(run_dir) as folder:
            function(config, run_dir)
            folder.check()
    except BaseException as error:
        failure = report(run_dir, error, worker)
        if WATCHED not in os.environ:
            print(failure.message if failure.user_error else failure.traceback, file=sys.stderr)
        return failure.exit_code
    finally:
        telling.close()
    heartbeat.finish()
    return 0


#: Texts for phases on the console, if the phase's name is not clear by itself.
_WAITS = {
    "idle": "importing PyTorch and Megatron",
    "start": "importing the recipe's entry",
    "join": "waiting for all workers",
    "load_data": "reading tokenizer and data",
    "load_model": "importing the model's libraries, building it and reading its weights",
    "load_critic": "building the critic",
    "load_reference": "reading the reference",
    "load_teacher": "reading the teacher",
    "load_reward_model": "reading the reward model",
    "resume": "reading the checkpoint",
    "start_servers": "starting SGLang servers",
    "await_servers": "waiting for SGLang servers",
    "rollout": "generating",
    "actor_train": "updating the actor",
    "reduce_metrics": "waiting for the metrics of all workers",
    "export": "writing the model",
    "record": "completing the record, the report and uploads to trackers",
    "finish": "finishing",
}
_TRAINING = ("step", "sft")


@contextlib.contextmanager
def print_long_waits(silent_s: float = 4.0, every_s: float = 5.0) -> Iterator[None]:
    """Print the current phase if it takes long, except in training steps after the first one.

    Args:
        silent_s: seconds in one phase after which the phase is printed.
        every_s: seconds until the phase is printed again; the interval is six times as long once the phase has taken
            six times `every_s`.
    """
    done = threading.Event()

    def run() -> None:
        path, since, told, trained = current(), time.monotonic(), 0.0, False
        while not done.wait(min(silent_s, 1.0) / 4):
            now, here = time.monotonic(), current()
            if here != path:
                trained |= path.startswith(_TRAINING) and not here.startswith(_TRAINING)
                path, since, told = here, now, 0.0
            seconds = now - since
            again = now - told >= (every_s if seconds < 6 * every_s else 6 * every_s)
            if seconds >= silent_s and again and not (trained and path.startswith((*_TRAINING, "idle"))):
                told, name = now, path.rpartition("/")[2]
                print(f"... {_WAITS.get(name, name.replace('_', ' '))}, {seconds:.0f} s", flush=True)

    threading.Thread(target=run, name="tell-waits", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class _Beats(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None, but send a heartbeat if the main thread imports; other threads must not hide that it hangs."""
        if threading.current_thread() is threading.main_thread():
            beat()


@contextlib.contextmanager
def _imports_beat() -> Iterator[None]:
    """Send a heartbeat at every import: libraries may take minutes to load from a slow file system."""
    finder = _Beats()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def redirect_output(log_dir: Path) -> None:
    """Redirect stdout and stderr of this process, including native code, to log_dir/rank_K.txt for worker K."""
    log_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(log_dir / f"rank_{worker_number()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def main(argv: list[str] | None = None) -> int:
    """Run one rank in this process (the command of worker processes)."""
    parser = argparse.ArgumentParser(prog="python -m megarl.runtime.worker", description="Run one rank.")
    parser.add_argument("--entry", required=True, help="function to run, pkg.mod:fn(config, run_dir)")
    parser.add_argument("--config", required=True, type=Path, help="resolved config.yaml in the run folder")
    parser.add_argument("--log-dir", type=Path, help="write output to LOG_DIR/rank_K.txt instead of the console")
    arguments = parser.parse_args(argv)
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        parser.error(f"{', '.join(missing)} not set: start this through `megarl train` or torchrun")
    try:
        refuse_bad_numbers()
    except UserError as error:
        parser.error(str(error))
    die_with_parents()
    if WATCHED in os.environ:
        join_attempt(arguments.config.resolve().parent)
    if arguments.log_dir is not None:
        redirect_output(arguments.log_dir)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a launcher sends this signal before it ends a hung rank
    sys.path.append(os.getcwd())  # user modules in the current folder; last, so that they hide no package
    watched = WATCHED in os.environ
    with leave_to_launcher(arguments.config.resolve().parent) if watched else contextlib.nullcontext():
        return run(arguments.entry, arguments.config.resolve())


_LEFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def leave_to_launcher(run_dir: Path) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP request a checkpoint of the run in `run_dir` instead of ending this process.

    After the block they are ignored: Ray sends SIGTERM to finished actors, which may still be reporting their result.
    Child processes keep the default handlers.
    """
    working = True

    def ask(number: int, frame: FrameType | None) -> None:
        if not working:
            return
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # the launcher also writes the request if it got the signal
            (run_dir / SAVE_REQUEST).touch()
            os.write(2, f"{own_worker_name()}: {name}: requests a checkpoint; the launcher ends the run\n".encode())

    for number in _LEFT:
        # SIGTERM and SIGHUP stay ignored if they were ignored before, such as SIGHUP by nohup.
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, ask)
            signal.siginterrupt(number, False)  # the kernel restarts libraries' system calls where it can
    os.register_at_fork(after_in_child=_restore_signals)
    try:
        yield
    finally:
        working = False


def _restore_signals() -> None:
    for number in _LEFT:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once: threads of communication libraries may wait for ranks that are gone, or abort when the interpreter
    # ends.
    os._exit(exit_code)
