"""Copies of what a team gives, in a process of their own: they outlive the processes of a team that may begin again.

    giver: bytes -> object store -> keep -> a copy in the object store, owned by the keeper -> the store's calls
    it dies; its next process finds what is still needed in `held`, and goes on as if it had given it

Ray frees what the dead own, whoever still needs it. So samples whose weights are gone would be gone, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.data.wire import Block

#: A payload: the object that is its block, and its samples in it, from and to.
Piece = tuple[Any, int, int]


def keeper_name(store: str, host: str) -> str:
    """Name of the keeper of a store on the machine with this address."""
    return f"{store}-keeper-{host}"


class SampleKeeper:
    """The process, a Ray actor. What it keeps is named by team, rank and number of the call that gave it."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], dict[int, list[Piece]]] = {}
        self._left: dict[tuple[str, int], tuple[int, dict[str, bytes]]] = {}

    def keep(
        self, team: str, rank: int, serial: int, pieces: Sequence[tuple[int, int, int]], *blocks: Block
    ) -> list[Piece]:
        """Copy `blocks`; each piece is the number of one of them, and samples in it."""
        from megarl.store.objects import put_object

        refs = [put_object(block) for block in blocks]
        made = [(refs[number], start, stop) for number, start, stop in pieces]
        self._held.setdefault((team, rank), {})[serial] = made
        return made

    def held(self, team: str, rank: int) -> dict[int, list[Piece]]:
        """All that this worker's processes have given and not released, by the numbers of calls."""
        return self._held.get((team, rank), {})

    def leave(self, team: str, rank: int, number: int, files: Mapping[str, bytes]) -> None:
        """Keep these files for this worker's next process, in place of those of before."""
        self._left[team, rank] = (number, dict(files))

    def left(self, team: str, rank: int, number: int) -> dict[str, bytes]:
        """Those that were left last, if under this number; else none."""
        known, files = self._left.get((team, rank), (number, {}))
        return files if known == number else {}

    def release(self, team: str, rank: int, serials: Iterable[int]) -> None:
        """Nobody needs what these calls gave."""
        for serial in serials:
            self._held.get((team, rank), {}).pop(serial, None)


def start_keepers(store: str, hosts: Iterable[str], environment: Mapping[str, str] | None = None) -> list[Any]:
    """A keeper on each of these machines; Ray is initialised. They end with the process that starts them.

    Args:
        store: its name.
        hosts: addresses of Ray's nodes.
        environment: variables of their processes.

    Returns:
        The handles, which the caller keeps.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from megarl.store.actor import NAMESPACE

    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    make = ray.remote(max_restarts=0, max_task_retries=0)(SampleKeeper)
    return [
        make.options(
            name=keeper_name(store, host),
            namespace=NAMESPACE,
            num_cpus=0,
            runtime_env={"env_vars": dict(environment or {})},
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[host], soft=False),
        ).remote()
        for host in sorted({*hosts})
    ]
