"""Starts workers as Ray actors, one per device, in one placement group.

    driver: connect or start Ray -> reserve devices -> actors -> number them team by team, node by node
            -> rank 0 of every team picks its address, and the buffer between teams starts
            -> every actor runs megarl.runtime.worker.run, the function the other launchers start as a process
    later:  a team that may restart (megarl.launchers.restarts) -> killed -> actors in the same bundles

Run folders must be on a file system that all nodes share. RAY_ADDRESS selects an existing cluster. Without it, and for
the local launcher, Ray is started on this machine for the length of the run, bound to the loopback device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.lock import ATTEMPT
from megarl.dag.stage import Role
from megarl.dag.staleness import StalenessSettings
from megarl.disaggregated.buffer.size import LEAST, object_store_bytes, refuse_too_large
from megarl.launchers.bundles import Reservation, apart, chooses_gpus, lends, reserve, whole
from megarl.launchers.common import (
    Job,
    layout_environment,
    own_command,
    own_environment,
    process_environment,
    warn_of_removed_settings,
)
from megarl.launchers.output import Follower
from megarl.launchers.ray_folder import INNER, make_ray_folder
from megarl.launchers.ray_health import ClusterRay, OwnRay, check_reachable, lost_text, within
from megarl.launchers.seats import Place, assign_seats_by_team, ranks_of
from megarl.launchers.supervise import signal_rank
from megarl.runtime.machine_beats import machines_of
from megarl.system.credentials import PASSWORD, USER
from megarl.system.errors import WorkerError
from megarl.system.machine import available_cores
from megarl.system.parents import PARENTS, end_with_parents
from megarl.system.processes import BUFFER, CAUGHT, FINISHED, JOB_BEGAN, RESTARTS, TEAM, WORKER, shared_memory_free

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from megarl.config.run import RunConfig
    from megarl.dag.placement import TeamPlan

_AUTH_MODE = "RAY_AUTH_MODE"
# despite its name also used on Linux: whether nodes may be on several machines
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_PROBE_S = 5.0  # seconds to open a connection to a cluster
#: Settings of a Ray that is started for a run. The machine is meant for its workers, which Ray would give a low
#: priority. Ray would also start a process per core in advance, which our actors cannot use, because each has its own
#: environment.
OWN_RAY = {"worker_niceness": 0, "prestart_worker_first_driver": False}
#: Further settings, unless objects may be spilled: a full object store then neither moves objects to disk nor creates
#: new ones there. Without the second setting Ray uses files for objects that do not fit, unless the disk is too full.
NO_SPILLING = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
_TRACKERS = ("WANDB_", "TRACKIO_")
#: Environment variables that actors get from this process, in which `check_hub` may have set HF_HUB_OFFLINE.
_HANDED_ON = ("PYTHONPATH", "HF_HUB_OFFLINE")


def own_place() -> Place:
    """Return the node's address and this process's GPUs: numbers, or UUIDs if the node was started with them."""
    import ray

    return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]


class Actor:
    """The process of one device. Methods run one after the other on the process's main thread."""

    def place(self) -> Place:
        """Return the address of this process's node and the GPUs that Ray gave this process."""
        return own_place()

    def listen(self, host: str) -> int:
        """Listen for the team's ranks on a port of `host`, as rank 0 of the team; return the port."""
        from megarl.system.rendezvous import LISTENER, listen

        listener = listen(host)
        port = int(listener.getsockname()[1])
        os.environ[LISTENER] = str(listener.detach())
        return port

    def run(self, entry: str, config_path: str, log_dir: str, environment: dict[str, str]) -> int:
        """Run one worker; return its exit code."""
        import faulthandler
        import sys

        from megarl.runtime import worker
        from megarl.runtime.worker import leave_to_launcher

        os.environ.update(environment)
        worker.redirect_output(Path(log_dir))
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        sys.path.append(os.getcwd())
        if PARENTS in environment:
            end_with_parents()
        with leave_to_launcher(Path(config_path).parent):
            return worker.run(entry, Path(config_path))


def start(job: Job, *, own: bool = False) -> RayWorkers:
    """Reserve the devices, start the actors, and start their work. `own` starts a Ray on this machine even if
    RAY_ADDRESS is set. Raise UnavailableError or WorkerError if the cluster lacks devices or memory, or is too slow.
    """
    workers = RayWorkers(job, own)
    if not own:  # with `own`, the local launcher calls this and has already warned
        warn_of_removed_settings(job)
    try:
        workers.launch()
    except BaseException:
        workers.stop()
        raise
    return workers


class RayWorkers:
    """The actors of one run and the placement group that holds their devices."""

    def __init__(self, job: Job, own: bool = False) -> None:
        self._job, self._address = job, None if own else os.environ.get("RAY_ADDRESS") or None
        self._actors: list[Any] = []
        self._bundles: list[int] = []  # index of each actor's bundle
        self._results: dict[int, Any] = {}
        self._ended: dict[int, int] = {}
        self._causes: dict[int, str] = {}
        self._group: Any = None
        self._reservation: Reservation
        self._apart: list[str] = []  # names of teams that share no node with other teams
        self._places: list[Place] = []
        self._server_places: list[Place] = []
        self._buffer: Any = None
        self._buffer_end: Any = None  # a pending call that fails when the buffer's process dies
        self._entered = False
        self._ray: OwnRay | ClusterRay | None = None
        self._buffer_name = f"buffer-{secrets.token_hex(8)}"  # a unique name, since the cluster may run other jobs
        machines = machines_of(job.run_dir)
        size_of = None if machines is None else machines.log_size
        self._follower = Follower(job.log_dir, range(job.config.cluster.nproc), job.log, size_of)
        self._limit_s = job.config.cluster.start_timeout_s
        self._deadline = time.monotonic() + self._limit_s

    def launch(self) -> None:
        """Start Ray and the actors, and send every actor the work of its rank."""
        job = self._job
        size = object_store_bytes(job.config, job.placement)
        if self._address is None:
            size = self._within_shared_memory(size)
        if self._address is not None:
            check_reachable(self._address, min(_PROBE_S, self._seconds_left()))
        self._entered = True
        with _signals_kept():
            folder = _connect(self._address, job.config, size, self._seconds_left())
        import ray  # imported only now: at its import Ray reads the settings of `_restrict_clients`

        self._ray = ClusterRay(ray.get_runtime_context().gcs_address) if folder is None else OwnRay(folder)
        self._reserve()
        try:
            self._number()
            if job.separate:
                self._start_buffer()
            for team in job.teams:
                self._run(team)
        except ray.exceptions.GetTimeoutError as error:
            limit = f"cluster.start_timeout_s = {self._limit_s:g} s"
            raise WorkerError(
                f"processes that Ray started did not reply within {limit}; raise this key if the machines are slow or "
                "busy"
            ) from error

    def _within_shared_memory(self, wanted: int) -> int:
        """Return `wanted` bytes, or fewer if shared memory is smaller: Ray refuses a larger size, or silently uses slow
        files.
        """
        free = shared_memory_free()
        if (problem := refuse_too_large(self._job.config, self._job.placement, free)) is not None:
            raise problem
        if free is None or wanted <= max(free, LEAST):
            return wanted
        self._job.log.say(
            f"megarl: warning: the samples between teams may need {wanted / 1e9:.1f} GB of shared memory, but "
            f"/dev/shm has {free / 1e9:.1f} GB: what does not fit goes through files (placement.spill)"
        )
        return max(free, LEAST)

    def _reserve(self) -> None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        reservation = self._reservation = reserve(self._job.config, self._job.teams, nodes)
        self._apart = apart(self._job.config, nodes)
        self._group = ray.util.placement_group(reservation.bundles, strategy=reservation.strategy)
        if not self._group.wait(self._seconds_left()):
            raise WorkerError(
                f"Ray did not reserve {len(reservation.bundles)} bundles such as {reservation.bundles[0]} within "
                f"cluster.start_timeout_s = {self._limit_s:g} s; available are {ray.available_resources()}. End jobs "
                "that use the rest, or raise this key to wait longer"
            )
        self._bundles = list(reservation.places)
        self._actors = [self._new_actor(bundle) for bundle in self._bundles]

    def _new_actor(self, bundle: int) -> Any:
        import ray

        cluster, worker = self._job.config.cluster, self._reservation.worker
        environment = process_environment(self._job.config, cluster.nproc // cluster.nnodes) | _missing_variables()
        environment[JOB_BEGAN] = self._job.began
        make = ray.remote(max_restarts=0, max_task_retries=0)(Actor).options(
            num_cpus=worker["CPU"],
            num_gpus=worker.get("GPU", 0),
            runtime_env={"env_vars": environment},
            scheduling_strategy=self._in_bundle(bundle),
        )
        return make.remote()

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def _number(self) -> None:
        """Assign the actors to the teams' workers (`megarl.launchers.seats`), and find the GPUs that servers can use: a
        short Ray task in each bundle of the placement group returns those of its GPUs that no actor uses.
        """
        import ray

        places = ray.get([actor.place.remote() for actor in self._actors], timeout=self._seconds_left())
        units = {team.name: whole(self._job.config, team) for team in self._job.teams}
        order = assign_seats_by_team(places, self._job.teams, units, self._apart)
        self._actors = [self._actors[i] for i in order]
        self._bundles = [self._bundles[i] for i in order]
        self._places = [places[i] for i in order]
        if self._reservation.servers:
            task = ray.remote(num_cpus=0, num_gpus=self._reservation.servers, max_retries=0)(own_place)
            environment = {"env_vars": _missing_variables()}
            bundles = map(self._in_bundle, range(len(self._reservation.bundles)))
            calls = [task.options(scheduling_strategy=b, runtime_env=environment).remote() for b in bundles]
            self._server_places = ray.get(calls, timeout=self._seconds_left())

    def _start_buffer(self) -> None:
        from megarl.disaggregated.buffer.actor import start_buffer

        job = self._job
        assert job.placement is not None, "only a run with several teams has a buffer"
        groups, share = job.config.data.batch_size, job.config.placement.share
        environment = {"OMP_NUM_THREADS": "1"} | _missing_variables()
        flow = None if job.config.async_.in_order else StalenessSettings.of(job.config)
        self._buffer = start_buffer(self._buffer_name, job.placement, groups, share, environment, flow)
        self._buffer_end = self._buffer.end.remote()

    def _run(self, team: TeamPlan, more: Mapping[str, str] | None = None) -> None:
        """Start the workers of one team, with its rendezvous address; `more` adds environment variables."""
        import ray

        job, first = self._job, team.first
        one_machine = len({host for host, _ in self._places}) == 1
        master = "127.0.0.1" if one_machine else self._places[first][0]
        port = ray.get(self._actors[first].listen.remote(master), timeout=self._seconds_left())
        shared = layout_environment(team.parallel) | {"MASTER_ADDR": master, "MASTER_PORT": str(port), **(more or {})}
        # Secrets are not passed in the actors' runtime_env, which Ray shows to everybody.
        secrets = [name for name in os.environ if name in (USER, PASSWORD) or name.startswith(_TRACKERS)]
        shared |= own_command() | {name: os.environ[name] for name in secrets}
        shared |= own_environment(job) if self._address is None else {ATTEMPT: job.attempt}
        environments = ranks_of(team, self._places, lends=lends(job.config, team), servers=self._left_to_servers(team))
        for number, of_worker in enumerate(environments, first):
            environment = shared | of_worker
            if job.separate:
                environment |= {TEAM: team.name, WORKER: str(number), BUFFER: self._buffer_name}
            paths = str(job.config_path), str(job.log_dir)
            self._results[number] = self._actors[number].run.remote(job.entry, *paths, environment)

    def end_team(self, team: TeamPlan) -> None:
        """Kill a team's workers and wait until they are gone; raise WorkerError if they are not gone in time."""
        import ray

        self._deadline = time.monotonic() + self._limit_s
        ranks = range(team.first, team.first + team.devices)
        for rank in ranks:
            if rank not in self._ended:
                signal_rank(self._job, rank, signal.SIGKILL)  # a hanging process may not react to Ray
            ray.kill(self._actors[rank])
        results = [self._results[rank] for rank in ranks]
        if ray.wait(results, num_returns=len(results), timeout=self._seconds_left())[1]:
            raise self._no_restart(team, "its processes do not end")

    def restart_team(self, team: TeamPlan, number: int) -> int | None:
        """Start all workers of a team that has ended, for the `number`-th time; return the last finished step, None
        before the first. Raise WorkerError if they do not start in time.
        """
        import ray

        ranks = range(team.first, team.first + team.devices)
        self._deadline = time.monotonic() + self._limit_s
        try:
            call = self._buffer.restart_team.remote(team.name, number, self._limit_s)
            finished: int | None = ray.get(call, timeout=self._seconds_left())
            for rank in ranks:
                self._actors[rank] = self._new_actor(self._bundles[rank])
            places = ray.get([self._actors[rank].place.remote() for rank in ranks], timeout=self._seconds_left())
            self._reassign_places(ranks, places)
            for rank in ranks:
                self._ended.pop(rank, None)
                self._causes.pop(rank, None)
            self._run(team, {RESTARTS: str(number), FINISHED: str(finished or 0)})
        except ray.exceptions.RayError as error:
            raise self._no_restart(team, str(error)) from error
        return finished

    def _reassign_places(self, ranks: range, places: list[Place]) -> None:
        """Give new actors of a team's workers (their numbers are `ranks`) the places of their predecessors, or other
        places on the same machine if Ray has assigned the GPUs differently.
        """
        actors, left = [self._actors[rank] for rank in ranks], list(range(len(places)))
        for rank in ranks:
            host, gpus = self._places[rank]
            chosen = min(left, key=lambda i: (places[i][0] != host, places[i][1] != gpus))
            left.remove(chosen)
            self._actors[rank], self._places[rank] = actors[chosen], places[chosen]

    def _no_restart(self, team: TeamPlan, why: str) -> WorkerError:
        limit = f"cluster.start_timeout_s = {self._limit_s:g} s"
        return WorkerError(f"team {team.name!r} did not start again within {limit}: {why}")

    def _left_to_servers(self, team: TeamPlan) -> list[Place] | None:
        """Return the GPUs for this team's servers; None: it has no servers, or Ray does not assign GPUs."""
        config = self._job.config
        if Role.ROLLOUT not in team.roles or not chooses_gpus(config) or "GPU" not in self._reservation.worker:
            return None
        lent = self._places[team.first : team.first + team.devices] if lends(config, team) else []
        return [*lent, *self._server_places]

    def _seconds_left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def ranks(self) -> list[int]:
        """Return all ranks."""
        return list(range(self._job.config.cluster.nproc))

    def poll(self) -> dict[int, int]:
        """Return the exit codes of the ranks whose actor has returned or died; the code of a dead actor is -SIGKILL,
        since Ray does not report the signal. Raise WorkerError if a part of Ray, or the buffer between teams, has died.
        """
        import ray

        if self._ray is not None and (lost := self._ray.lost()) is not None:
            raise WorkerError(lost)
        if self._buffer_end is not None and ray.wait([self._buffer_end], timeout=0)[0]:
            raise WorkerError(lost_text("the buffer between teams (a Ray actor)", "has died"))
        waiting = {result: rank for rank, result in self._results.items() if rank not in self._ended}
        done = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0] if waiting else []
        for result in done:
            rank = waiting[result]
            try:
                self._ended[rank] = ray.get(result)
            except ray.exceptions.RayError as error:
                self._ended[rank] = -signal.SIGKILL
                text = " ".join(str(error).split())
                killed = "SIGKILL" in text or "OOM" in text or "connection error" in text.lower()
                by = "killed by a signal, by the out-of-memory killer, or crashed"
                self._causes[rank] = f"died ({by})" if killed else f"died: {text[:300]}"
        return dict(self._ended)

    def cause(self, rank: int) -> str | None:
        """Return how the actor of a rank died, from Ray's message; None if it did not die."""
        return self._causes.get(rank)

    def stop(self) -> None:
        """Kill the actors, release their devices, and leave Ray; a Ray that this launcher started ends."""
        import ray

        if self._entered and ray.is_initialized():
            lost = self._ray is not None and self._ray.lost() is not None
            for rank in self._results:
                if rank not in self._ended:
                    signal_rank(self._job, rank, signal.SIGKILL)
            if self._ray is not None and lost:
                self._ray.leave()
            else:
                self._give_back()
                ray.shutdown()
                if self._ray is not None:
                    self._ray.forget()
        self._follower.close()

    def _give_back(self) -> None:
        import ray

        for actor in [*self._actors, *([self._buffer] if self._buffer is not None else [])]:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def _missing_variables() -> dict[str, str]:
    """Return the variables that processes of an already running cluster lack."""
    return {name: os.environ[name] for name in _HANDED_ON if name in os.environ}


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's signal handlers: Ray's would end the launcher before it has ended the run."""
    before = {number: signal.getsignal(number) for number in CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _connect(address: str | None, config: RunConfig, store_bytes: int, limit_s: float) -> Path | None:
    """Connect to the cluster at `address` and return None, or start one here for the run and return its folder."""
    text = "starting Ray" if address is None else f"joining Ray at {address}"
    print(text, file=config.tracking.messages, flush=True)
    if address is None:
        _restrict_clients()
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is not None:
        late = (
            f"Ray at RAY_ADDRESS={address} was not ready within cluster.start_timeout_s = {limit_s:g} s; check that "
            "Ray runs there and can be reached from this machine, or raise cluster.start_timeout_s"
        )
        within(limit_s, lambda: ray.init(address=address, **quiet), late)
        return None
    from megarl.system.compat.ray_session import for_one_run

    folder = make_ray_folder()
    with for_one_run():
        # must run in the main thread: processes that Ray starts here end with the thread that started them
        ray.init(
            address="local",
            num_cpus=max(config.cluster.nproc, available_cores()),  # there may be more CPU workers than cores
            include_dashboard=False,
            object_store_memory=store_bytes,
            _system_config=OWN_RAY | ({} if config.placement.spill else NO_SPILLING),
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / INNER),
            **quiet,
        )
    return folder


def _restrict_clients() -> None:
    """Make a Ray of our own listen only on loopback, and accept only clients with a random token of this run.

    Ray reads both settings when it is imported. Without the first it takes 127.0.0.1 for "some address of this machine"
    and listens on every interface; without the second it uses the token in the user's home, which all clusters of the
    user share.
    """
    os.environ[_CLUSTERS] = "0"
    if os.environ.get(_AUTH_MODE, "token") == "token":
        os.environ |= {_AUTH_MODE: "token", "RAY_AUTH_TOKEN": _own_token()}


@functools.cache
def _own_token() -> str:
    """Return the token for every Ray that this process starts. Ray reads it only once."""
    return secrets.token_hex(32)
