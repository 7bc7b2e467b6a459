"""The offload schedule: one table of the parts on the device in each phase, and the one object that moves them.

    phase           actor                    critic              other models         colocated servers
    load            parameters               .                   .                    .
    start_servers   parameters               .                   .                    .
    resume          parameters, optimizer    the same            .                    .
    restore ROLE    parameters, and those and the optimizer of the role               (weights)
    publish         parameters               .                   .                    weights
    probe           parameters *             .                   .                    weights, cache
    generate        parameters *             .                   .                    weights, cache
    catch_up        parameters               .                   .                    (weights, cache)
    score ROLE      parameters               parameters if it is the role             (weights)
    update ROLE     all if it is the role, else as in `load`     .                    .
    checkpoint      parameters, optimizer    the same            .                    (weights)
    export ROLE     parameters               parameters if it is the role             (weights)

The table lists the parts that a phase needs, of a further model (`models`) as of the critic; parts in brackets stay as
they are, on the device or not. (*): not with colocated servers, whose cache then has the room: they generate with
weights of their own. For servers on their own devices `start_servers` and `publish` are not entered. All
other parts are offloaded where the recipe allows it, each by itself: `actor.engine.offload` for the actor and the
frozen models, `critic.engine.offload` and `models.NAME.engine.offload` for these, and always for servers that share the
trainer's devices. The table is plain data, which the dry run's estimate of memory also reads
(`megarl.planning.memory`).

Offloaded server weights are dropped: the next `publish` brings the new ones, and generating before it is an error. With
`sync.adapters: separate` they wait in host memory, and the next `publish` brings adapters only. The embedded engine
allocates its cache when generation begins and frees it at the end, so that nothing has to be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from megarl.system import tracing

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"
"""Parts of a model. `PARTS` is the order in which they return to the device; they leave in the reverse order."""
PARTS = (PARAMETERS, OPTIMIZER, GRADIENTS)
WEIGHTS, CACHE = "weights", "kv_cache"
"""Parts of a server."""

ACTOR, CRITIC, REFERENCE, TEACHER, REWARD_MODEL = "actor", "critic", "reference", "teacher", "reward_model"
SERVERS = "servers"
MODELS = (ACTOR, CRITIC, REFERENCE, TEACHER, REWARD_MODEL)
ROLE = "role"
"""Placeholder in the table for the model for which the phase is entered."""

_STARTS, _PUBLISHES = "start_servers", "publish"
_GENERATES = ("probe", "generate")
"""Phases that use published server weights. In other phases of the table server weights stay as they are."""
MOVES, MEETING = "residency", "meet"
"""Names in timings and traces: the phase that counts all moves, and inside it the wait for all ranks."""

Parts = tuple[str, ...]
PHASES: Mapping[str, Mapping[str, Parts]] = {
    "load": {},
    "start_servers": {},
    "resume": {ACTOR: (PARAMETERS, OPTIMIZER), CRITIC: (PARAMETERS, OPTIMIZER)},
    "restore": {ROLE: (PARAMETERS, OPTIMIZER), SERVERS: (WEIGHTS,)},
    "publish": {SERVERS: (WEIGHTS,)},
    "probe": {SERVERS: (WEIGHTS, CACHE)},
    "generate": {SERVERS: (WEIGHTS, CACHE)},
    "catch_up": {SERVERS: (WEIGHTS, CACHE)},
    "score": {ROLE: (PARAMETERS,), SERVERS: (WEIGHTS,)},
    "update": {ROLE: PARTS},
    "checkpoint": {ACTOR: (PARAMETERS, OPTIMIZER), CRITIC: (PARAMETERS, OPTIMIZER), SERVERS: (WEIGHTS,)},
    "export": {ROLE: (PARAMETERS,), SERVERS: (WEIGHTS,)},
}
_ALWAYS: Mapping[str, Parts] = {ACTOR: (PARAMETERS,)}
"""Parts that every other phase needs: embedded generation and every weight update read the actor's parameters."""


def needed(
    phase: str, role: str | None = None, further: Collection[str] = (), *, colocated: bool = False
) -> dict[str, Parts]:
    """Return which parts (parameters, optimizer, ...) of each model and of the servers a phase needs on the device.

    Args:
        role: the model for which the phase is entered; None for phases that need no role.
        further: names of the models in the recipe's section `models`.
        colocated: whether servers on the trainer's devices generate.

    Raises:
        ValueError: an unknown phase or role, or a phase that needs a role has none.
    """
    if phase not in PHASES:
        raise ValueError(f"the offload schedule has no phase {phase!r}; allowed: {', '.join(PHASES)}")
    row = PHASES[phase]
    if (ROLE in row) != (role is not None) or (role is not None and role not in (*MODELS, *further)):
        allowed = f"one of {', '.join((*MODELS, *further))}" if ROLE in row else "none"
        raise ValueError(f"phase {phase!r} was entered for the role {role!r}; allowed: {allowed}")
    needs = {} if colocated and phase in _GENERATES else dict(_ALWAYS)
    for holder, parts in row.items():
        name = role if holder == ROLE and role is not None else holder
        needs[name] = tuple(dict.fromkeys((*needs.get(name, ()), *parts)))
    if CRITIC in row:
        needs |= dict.fromkeys(further, row[CRITIC])
    return needs


def leaves(parts: Collection[str], offloads: Collection[str]) -> frozenset[str]:
    """Return which of a model's `parts` leave the device if `offloads` are allowed to. Parameters leave only if all
    other parts do, because other parts may share the parameters' storage."""
    leaving = frozenset(parts).intersection(offloads)
    return leaving if leaving == frozenset(parts) else leaving - {PARAMETERS}


class Holder(Protocol):
    """An object whose parts (parameters, optimizer state, ...) can be on the device or off it."""

    def hold(self, *parts: str) -> None:
        """Move `parts` to the device, and all other parts off it."""
        ...


class Model(Holder, Protocol):
    """A model as a `Holder`: it lists its parts, and its calls affect only this process."""

    @property
    def parts(self) -> frozenset[str]:
        """All parts of the model."""
        ...

    @property
    def held(self) -> frozenset[str]:
        """The parts of the model that are on the device."""
        ...


class OffloadSchedule:
    """Moves models and servers on and off the device for each phase. Every rank must enter the same phases.

    Parts are moved when a phase begins. At the end of a nested phase the parts of the outer phase are restored;
    after the outermost phase nothing is moved until the next phase begins. After an error in a phase nothing is moved
    either, because other ranks may not join a collective; the next phase starts from the parts that are there.

    Args:
        meet: waits for all ranks; called after models were offloaded and before servers take their place. A server on
            several devices must not allocate memory on a device whose rank has not freed its memory yet.
    """

    def __init__(self, meet: Callable[[], None] = lambda: None) -> None:
        self._meet = meet
        self._models: dict[str, Model] = {}
        self._staying: dict[str, frozenset[str]] = {}  # parts of each model that are never offloaded
        self._further: set[str] = set()
        self._servers: Holder | None = None
        # parts that servers were last asked to hold on the device; None: not asked yet
        self._granted: frozenset[str] | None = None
        self._published = False
        self._open: list[tuple[str, dict[str, Parts]]] = []

    def add(self, name: str, model: Model, *, offloads: Collection[str], further: bool = False) -> None:
        """Register a model if any of its parts may leave the device, and move them as the current phase needs.

        Args:
            offloads: the parts that may leave the device; empty: none.
            further: whether the model is one of the recipe's section `models`.
        """
        if further:
            self._further.add(name)
        elif name not in MODELS:
            raise ValueError(f"the offload schedule has no role {name!r}; allowed: {', '.join(MODELS)}")
        leaving = leaves(model.parts, offloads) if offloads else frozenset()
        if not leaving:
            return
        self._models[name], self._staying[name] = model, frozenset(PARTS) - leaving
        if self._open:
            self._settle()

    def add_servers(self, servers: Holder) -> None:
        """Register servers that share the trainer's devices. They hold no usable weights before the first `publish`."""
        self._servers, self._granted = servers, None
        if self._open:
            self._settle()

    @contextmanager
    def phase(self, name: str, role: str | None = None) -> Iterator[None]:
        """Enter a phase; some phases need a model's `role`. In the block, the parts that the phase needs are on the
        device, and others are offloaded if allowed. Raise RuntimeError if it generates with servers without weights.
        """
        wanted = needed(name, role, self._further, colocated=self._servers is not None)
        if self._servers is not None and name in _GENERATES and not self._published:
            raise RuntimeError(
                f"phase {name!r} needs the servers' weights, which were dropped: enter phase `publish` first"
            )
        self._open.append((name, wanted))
        try:
            self._settle()
            yield
        except BaseException:
            self._open.pop()
            raise
        self._open.pop()
        self._published |= name == _PUBLISHES
        if self._open:
            self._settle()

    @property
    def resident(self) -> dict[str, frozenset[str]]:
        """For each model that may be offloaded, which of its parts are on the device."""
        return {name: model.held for name, model in self._models.items()}

    def _settle(self) -> None:
        """Move models and servers on and off the device as the innermost open phase requires; all ranks offload before
        any rank loads."""
        name, wanted = self._open[-1]
        parts = {
            role: model.parts & self._staying[role].union(wanted.get(role, ())) for role, model in self._models.items()
        }
        servers = frozenset(wanted.get(SERVERS, ()))
        if name not in (_PUBLISHES, *_GENERATES):
            servers &= self._granted or frozenset()
        settled = self._servers is None or servers == self._granted
        if settled and name != _STARTS and all(parts[role] == model.held for role, model in self._models.items()):
            return
        with tracing.phase(MOVES):
            for role, model in self._models.items():
                model.hold(*(parts[role] & model.held))
            if name == _STARTS or (not settled and servers - (self._granted or frozenset())):
                with tracing.phase(MEETING):
                    self._meet()
            # `hold` takes the servers' weights and cache off the device unless `servers` names them; a restarted server
            # has both there.
            if self._servers is not None and not settled:
                self._servers.hold(*sorted(servers))
                self._granted = servers
                self._published &= WEIGHTS in servers
            for role, model in self._models.items():
                model.hold(*parts[role])
