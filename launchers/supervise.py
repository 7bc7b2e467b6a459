"""Supervises a job's ranks: finds the first failure and reports it in one message with its place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import time

from megarl.artifacts.records import read_run
from megarl.launchers.common import ENDED_EARLY, Job, Workers
from megarl.launchers.restarts import Restarts
from megarl.runtime.health import RankFailure, Watch, read_beat, where_text
from megarl.runtime.machine_beats import machines_of
from megarl.system.errors import WorkerError
from megarl.system.processes import oom_kills, signal_name

POLL_S = 0.1
SETTLE_S = 1.0  # seconds to wait for the errors of other ranks after the first rank has failed
LOST_S = 5.0  # seconds to wait instead while all failed ranks have only lost a peer, whose death may be reported later
LINGER_S = 15.0  # seconds in which a rank that has reported its error may end before it is killed
STACKS_S = 0.5  # seconds for hung ranks to write their stacks into the log
_LINE = 400  # maximum characters of a message in one line
_SOURCE_PATH = re.compile(r"\[[\w./-]*/(?=[\w.]+:\d+\])")  # build path of a library in an error message
_NATIVE_STACK = "Exception raised from "  # torch puts the C++ stack after the message

OUT_OF_MEMORY_FIX = (
    "use less memory: smaller actor.engine.micro_batch_tokens, rollout.max_running or data.batch_size, "
    "actor.engine.recompute=full, actor.engine.offload=true, or more tensor/pipeline parallelism"
)


@dataclasses.dataclass(frozen=True)
class End:
    """How an attempt ended.

    Attributes:
        exit_code: exit code of the command.
        why: the failed rank, its machine, the error and its place, in one line; empty when no rank failed.
        repeats: whether the error would occur again, see `MegarlError`.
        place: type, phase and step of an error that a rank raised itself; None without one.
    """

    exit_code: int
    why: str = ""
    repeats: bool = False
    place: tuple[str, str, int] | None = None


def supervise(workers: Workers, job: Job) -> End:
    """Wait until all ranks have ended, or one has failed or hung; log and return the outcome. A team whose process died
    or hangs may be restarted before that (`megarl.launchers.restarts`). Raise UserError if the run folder no longer
    exists.
    """
    cluster = job.config.cluster
    watch = Watch(job.run_dir, workers.ranks(), cluster.timeout_s, cluster.start_timeout_s, job.names)
    try:
        return _until_the_end(workers, job, watch, Restarts(workers, job, watch))
    except WorkerError as error:
        job.log.say(f"megarl: {error}")
        return End(error.exit_code, str(error))


def _until_the_end(workers: Workers, job: Job, watch: Watch, restarts: Restarts) -> End:
    """Wait for the end of the attempt, restart teams, and return the outcome. Raise WorkerError if polling or
    restarting workers fails."""
    ranks, oom_before = workers.ranks(), oom_kills()
    while True:
        ended = workers.poll()
        job.check_folder(now=any(ended.values()) or len(ended) == len(ranks))
        failure = None
        if any(ended.values()):
            ended = _settle(workers, job)
            failure = first_failure(workers, job, ended, oom_kills() > oom_before)
        elif len(ended) == len(ranks) or (job.separate and _ends_others(ended, job)):
            return End(0)
        elif (errors := job.errors().values()) and time.time() - min(error.time for error in errors) > LINGER_S:
            failure = first_failure(workers, job, ended, oom_killed=False)
        if failure is not None:
            end = _end_of(failure, job)
            if restarts.after_death(failure, end.why, ended):
                oom_before = oom_kills()
                continue
            _report(failure, workers, job, ended, restarts.spent(failure.rank))
            return end
        trouble = watch.check(rank for rank in ranks if rank not in ended)
        if trouble is not None:
            for rank in ranks:
                signal_rank(job, rank, signal.SIGUSR1)  # faulthandler writes the Python stacks to the log
            time.sleep(STACKS_S)
            if restarts.after_hang(watch.stuck, trouble):
                continue
            lines = [*restarts.spent(*watch.stuck[:1]), *_others(workers, job, ended)]
            log = f"  log:     {job.run_dir / 'log.txt'} (with the stack of every rank)"
            job.log.say("\n".join([f"megarl: {trouble}", *lines, log]))
            return End(1, trouble)
        time.sleep(POLL_S)


def _ends_others(ended: dict[int, int], job: Job) -> bool:
    """Return whether the actor's team ended the run before its last step, so that other teams would wait for ever.

    Its status then is `stopped`, when it was saved in time (`trainer.save_by_s`), or `finished` by a metric.
    """
    if not {*range(job.teams[0].devices)} <= ended.keys():
        return False
    status, beat = read_run(job.run_dir, tell=False).get("status"), read_beat(job.run_dir, 0)
    early = job.config.trainer.early_stop is not None and beat is not None and beat.step < job.config.trainer.steps
    return status == "stopped" or (status == "finished" and early)


def _settle(workers: Workers, job: Job) -> dict[int, int]:
    """Return the exit codes, after giving other ranks time to report their errors."""
    start = time.monotonic()
    while len(ended := workers.poll()) < len(workers.ranks()):
        waited = time.monotonic() - start
        cause_known = not first_failure(workers, job, ended, oom_killed=False).peer_lost
        if waited > (SETTLE_S if cause_known else LOST_S):
            break
        time.sleep(POLL_S)
    return ended


def first_failure(workers: Workers, job: Job, ended: dict[int, int], oom_killed: bool) -> RankFailure:
    """Return the root cause: a rank that got SIGKILL, else the earliest error that is not just the loss of a peer.
    Other signals follow from such errors: a communication library ends its process with SIGABRT when a peer is lost.
    """
    errors = job.errors()
    abrupt = [
        _abrupt_end(rank, code, workers, job, oom_killed) for rank, code in ended.items() if code and rank not in errors
    ]
    killed = [failure for failure in abrupt if ended[failure.rank] == -signal.SIGKILL]
    own = [failure for failure in errors.values() if not failure.peer_lost]
    by_time = sorted(own, key=lambda f: f.time) + abrupt + sorted(errors.values(), key=lambda f: f.time)
    return (killed + by_time)[0]


def _abrupt_end(rank: int, code: int, workers: Workers, job: Job, oom_killed: bool) -> RankFailure:
    """Describe a rank that ended without an error record, from its exit code and its last heartbeat."""
    beat = read_beat(job.run_dir, rank)
    message = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else _ended(code)
    message = workers.cause(rank) or message
    if code == -signal.SIGKILL and oom_killed:
        message += ": killed by the kernel, out of memory"
    return RankFailure(
        rank=rank,
        phase=beat.phase if beat else "start",
        step=beat.step if beat else 0,
        type="",
        message=message,
        traceback="",
        time=time.time(),
        exit_code=1,
    )


def _end_of(failure: RankFailure, job: Job) -> End:
    beat = read_beat(job.run_dir, failure.rank)
    who = job.name(failure.rank) + (f" on {beat.host}" if beat is not None else "")
    where = f"in phase {failure.phase} at step {failure.step}"
    if not failure.type:
        return End(failure.exit_code, f"{who} {failure.message} {where}")
    why = f"{who} failed {where}: {failure.type}: {_one_line(failure.message)}"
    its_own = not (failure.peer_lost or failure.out_of_memory)
    place = (failure.type, failure.phase, failure.step) if its_own else None
    return End(failure.exit_code, why, failure.repeats or failure.user_error, place)


def _ended(code: int) -> str:
    """Describe the exit code of a rank that recorded no error."""
    if code == ENDED_EARLY:
        return "ended with exit code 0 before its work was done (something in it calls os._exit?)"
    return f"ended with exit code {code}"


def _report(failure: RankFailure, workers: Workers, job: Job, ended: dict[int, int], more: list[str]) -> None:
    for rank, other in job.errors().items():
        if rank != failure.rank:
            job.log.record(job.name(rank), other.traceback)
    who, where = job.name(failure.rank), f"in phase {failure.phase} at step {failure.step}"
    if failure.user_error:
        lines = [f"megarl: {who} stopped {where}:", failure.message]
    elif not failure.type:
        lines = [f"megarl: {who} {failure.message} {where}"]
    else:
        if failure.explained:
            job.log.record(who, failure.traceback)
        lines = [] if failure.explained else [failure.traceback.rstrip()]
        lines.append(f"megarl: {who} failed {where}: {failure.type}: {failure.message}")
    if failure.out_of_memory and "fix:" not in failure.message:
        lines.append(f"  fix:     {OUT_OF_MEMORY_FIX}")
    if not failure.user_error:
        lines += more
        lines += _others(workers, job, ended, failure)
    lines.append(f"  log:     {job.run_dir / 'log.txt'}")
    job.log.say("\n".join(lines))


def _others(workers: Workers, job: Job, ended: dict[int, int], failure: RankFailure | None = None) -> list[str]:
    """Return a line with phase and step for each of the first 16 ranks other than the one in `failure`."""
    now, lines, errors = time.time(), [], job.errors()
    ranks = [rank for rank in workers.ranks() if failure is None or rank != failure.rank]
    for rank in ranks[:16]:
        beat = read_beat(job.run_dir, rank)
        text = where_text(beat)
        if rank in errors:
            error = errors[rank]
            same = failure is not None and (error.type, error.message) == (failure.type, failure.message)
            reason = "the same error" if same else f"{error.type}: {_one_line(error.message)}"
            text = f"in phase {error.phase} at step {error.step}: {reason}"
        elif rank in ended:
            text += f", {_ended(ended[rank])}"
        elif beat is not None:
            text += f" for {max(0.0, now - beat.time):.1f} s"
        lines.append(f"  {job.name(rank)}: {text}")
    return lines + ([f"  ... and {len(ranks) - 16} more"] if len(ranks) > 16 else [])


def _one_line(message: str) -> str:
    """Return a message as one line. A long message is cut to its beginning and its end, which has the cause; log.txt
    has the whole message.
    """
    line = " ".join(_SOURCE_PATH.sub("[", message.partition(_NATIVE_STACK)[0]).split())
    if len(line) <= _LINE:
        return line
    return f"{line[: _LINE // 2].rstrip()} ... {line[-_LINE // 2 :].lstrip()}"


def signal_rank(job: Job, rank: int, number: int) -> None:
    """Send a signal to a rank's process if it runs on this machine."""
    beat, machines = read_beat(job.run_dir, rank), machines_of(job.run_dir)
    # another machine may have the same host name
    here = machines.is_here(rank) if machines is not None else beat is not None and beat.host == socket.gethostname()
    if beat is not None and here:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, number)
