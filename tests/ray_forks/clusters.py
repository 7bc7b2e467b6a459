"""Ray for tests: workers forked from a process that has done their imports, and no program that no test asks.

    with cluster({"num_cpus": 1}, {"num_cpus": 1}): ...      # RAY_ADDRESS is that of a Ray of two nodes
    with offered(): ...                                       # launchers that are started here may fork theirs
    with own(): ray.init(...)                                 # a Ray of this process

A worker takes 2 CPU-seconds to import Ray and PyTorch, and 5 with Megatron; forked, it imports only Ray, in 0.3, since
Ray reads its settings from the environment then. The agent of a node, which is there for a dashboard, is one that does
nothing (agent.py). All else is as always, but that workers are children of that process and not of the node manager,
and that /proc tells that one's environment of them. On a machine with a GPU, which a fork does not survive, Ray starts
its own files.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megarl.system.compat.ray_session import for_one_run
from megarl.system.processes import has_nvidia_device
from tests.forker import forker
from tests.ray_forks.forked_worker import IMPORTS, fork_worker
from tests.ray_forks.launcher import FORKER, WORKER_PATHS, choose_agent, choose_programs


@contextlib.contextmanager
def cluster(head: Mapping[str, Any], *nodes: Mapping[str, Any], **environment: str) -> Iterator[Any]:
    """Start a Ray of several nodes on this machine, the one of RAY_ADDRESS; yields its `ray.cluster_utils.Cluster`.

    Args:
        head: settings of the first node, as of `ray start`, beside those of all.
        nodes: those of the others.
        environment: variables that its processes get.
    """
    from ray._private import services
    from ray.cluster_utils import Cluster

    of_all: dict[str, Any] = {"object_store_memory": 128 << 20, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    with offered(), pytest.MonkeyPatch.context() as patch:
        if not has_nvidia_device():
            of_all |= WORKER_PATHS
            patch.setattr(services, "start_ray_process", services.start_ray_process)  # restored at the end
            choose_agent()
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        with for_one_run():
            started = Cluster(initialize_head=True, head_node_args=of_all | dict(head))
            for node in nodes:
                started.add_node(**of_all | dict(node))
        patch.setenv("RAY_ADDRESS", started.address)
        try:
            yield started
        finally:
            started.shutdown()
            signal.signal(signal.SIGTERM, handler)  # in place of Ray's


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Within the block launchers that this process starts may fork the workers of their Ray."""
    with pytest.MonkeyPatch.context() as patch:
        if not has_nvidia_device():
            patch.setenv(FORKER, forker(fork_worker, *IMPORTS))
        yield


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Within the block a Ray that this process starts forks its workers, and has the programs of a run's Ray."""
    with offered(), for_one_run(), pytest.MonkeyPatch.context() as patch:
        if FORKER in os.environ:
            from ray._private import services
            from ray._private.parameter import RayParams

            for owner, name in ((RayParams, "update_if_absent"), (services, "start_ray_process")):
                patch.setattr(owner, name, getattr(owner, name))  # restored at the end
            choose_programs()
        yield
