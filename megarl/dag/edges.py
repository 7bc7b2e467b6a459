"""The edges of the task graph, derived from the declarations of a pipeline's nodes, in reading order.

The order in which a recipe lists its nodes gives every field a history, like a sequence of assignments. Edges keep the
parts of this order that matter:

1. Data. A node comes after the last earlier node that writes a field that it reads. Optional reads count if there is
   such a node; a field of the graph's entry needs none. A required field must not come from a node that writes it in
   some steps only, or after a node that consumes it.

       reward (writes score), advantage (reads score)           reward -> advantage

2. Samples. A node that resamples comes after all earlier nodes, and all later nodes come after it, so that all fields
   belong to its samples.

       reward, dynamic_sampling (resamples), old_logp            reward -> dynamic_sampling -> old_logp

3. Rewriting. A node that writes a field again comes after the last node that wrote or consumed it, and after all
   earlier readers of that value. So every node reads the value that it would read in the listed order, and an optional
   read finds no value if no earlier node writes one.

       reward (writes token_rewards), overlong (rewrites it), advantage (reads it)   reward -> overlong -> advantage
       kl_in_reward (reads response_mask), filter (rewrites it)                      kl_in_reward -> filter

4. Models. A node that trains a model comes after the earlier nodes that use this model, and before the later ones.

       old_logp (actor), actor_train (trains the actor)          old_logp -> actor_train

Dependencies that a recipe names are added to these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.dag.node import Node
from megarl.dag.stage import Role
from megarl.system.errors import UserError, close_matches


class MissingFieldError(UserError):
    """A node reads `field`, which no earlier node writes; `role` is the node's role."""

    role: Role
    field: str


@dataclass
class _Value:
    """The value of a field at one place in the list of nodes: its writer (None: the graph's entry) and its readers so
    far.

    `available` is False if no node wrote it, if a node consumed it, or if it is written in some steps only.
    """

    writer: str | None
    available: bool
    readers: list[str] = field(default_factory=list)

    def after(self) -> list[str]:
        """Return the nodes that must run before a node that overwrites this field: its readers and its writer."""
        return [*self.readers, *([] if self.writer is None else [self.writer])]


class _History:
    """The effects of a graph's nodes up to the current one on fields, samples and models.

    Attributes:
        resampler: the last node that resamples, which made the current samples.
    """

    def __init__(self, entry: Iterable[str]) -> None:
        self._values = {name: _Value(None, available=True) for name in entry}
        self.resampler: str | None = None
        self._since: list[str] = []  # nodes since the last one that resampled
        self._trained: dict[str, str] = {}  # last node that trained each model
        self._users: dict[str, list[str]] = {}  # nodes that have used each model since it was last trained

    @property
    def available(self) -> list[str]:
        """Fields that the next node may read as required."""
        return [name for name, value in self._values.items() if value.available]

    def _value(self, name: str) -> _Value:
        return self._values.setdefault(name, _Value(None, available=False))

    def waits(self, node: Node) -> list[str]:
        """Return the nodes on which `node`, the next node in the list, depends directly."""
        contract, before = node.declared, list(node.deps)
        if self.resampler is not None:
            before.append(self.resampler)
        if contract.resamples:
            before += self._since
        for name in contract.uses:
            writer = self._value(name).writer
            before += [] if writer is None else [writer]
        for name in contract.changes:
            before += self._value(name).after()
        before += [self._trained[model] for model in node.models if model in self._trained]
        before += [] if node.trains is None else self._users.get(node.trains, [])
        return before

    def sources(self, node: Node) -> dict[str, str]:
        """Return the writer of each field that `node`, the next in the list, uses, except fields from the graph's
        entry.

        A node that resamples keeps all fields, whether it reads them or not, so it uses them all.
        """
        names = self._values if node.declared.resamples else node.declared.uses
        writers = {name: self._value(name).writer for name in names}
        return {name: writer for name, writer in writers.items() if writer is not None}

    def add(self, node: Node) -> None:
        """Add `node` to the list, and record its effects."""
        contract = node.declared
        for name in contract.uses:
            self._value(name).readers.append(node.id)
        for name in contract.may_write:
            self._values[name] = _Value(node.id, self._value(name).available)
        for name in contract.consumes:
            self._values[name] = _Value(node.id, available=False)
        for name in contract.writes:
            self._values[name] = _Value(node.id, available=True)
        self._since.append(node.id)
        if contract.resamples:
            # Nodes may have tried to read a field that neither the entry nor a node has set: samples do not carry it.
            carried = {name: v for name, v in self._values.items() if v.available or v.writer is not None}
            self._values = {name: _Value(node.id, value.available) for name, value in carried.items()}
            self.resampler, self._since = node.id, []
        for model in node.models:
            if model != node.trains:
                self._users.setdefault(model, []).append(node.id)
        if node.trains is not None:
            self._trained[node.trains], self._users[node.trains] = node.id, []


@dataclass(frozen=True)
class Inputs:
    """Where a node of the task graph gets its inputs from."""

    waits: list[str]  # nodes on which this node depends directly, in the listed order
    # the writer of each field that the node uses, except fields of the entry and fields that no node wrote
    sources: dict[str, str]
    samples: str | None  # the last earlier node that resamples, whose samples it gets; None: those of the graph's input


def derive(nodes: Sequence[Node], entry: Iterable[str], where: str) -> dict[str, Inputs]:
    """Return the inputs of every node, by its id.

    Args:
        nodes: resolved nodes in reading order.
        entry: fields of the graph's input batch.
    """
    place = {node.id: number for number, node in enumerate(nodes)}
    history, inputs = _History(entry), dict[str, Inputs]()
    for node in nodes:
        _check_deps(node, place, where)
        for name in node.reads:
            if name not in history.available:
                raise _missing(node, name, nodes, history, where)
        waits = sorted(set(history.waits(node)), key=place.__getitem__)
        inputs[node.id] = Inputs(waits, history.sources(node), history.resampler)
        history.add(node)
    return inputs


def _missing(node: Node, name: str, nodes: Sequence[Node], history: _History, where: str) -> MissingFieldError:
    """Return the error that `node` reads `name`, which is not available at its place in the list."""
    number = [other.id for other in nodes].index(node.id)
    before, later = nodes[:number], nodes[number + 1 :]
    writer = next((other.id for other in later if name in other.declared.writes), None)
    perhaps = next((other.id for other in before if name in other.declared.may_write), None)
    near = close_matches(name, history.available)
    consumer = next((other.id for other in before if name in other.declared.consumes), None)
    lack = "no node before it writes" + (" in every step" if perhaps is not None else "")
    if consumer is not None:
        lack = "a node before it has consumed"
    if writer is not None:
        hint = f"{writer!r} writes it but is listed after {node.id!r}; list it first"
    elif consumer is not None:
        hint = f"{consumer!r} has consumed it; list {node.id!r} before that"
    elif perhaps is not None:
        hint = f"{perhaps!r} writes it in some steps only; read it as `optional`, or list a node that always writes it"
    else:
        hint = f"did you mean {near[0]!r}?" if near else "no node writes it; add a node that does"
    error = MissingFieldError(
        f"node {node.id!r} reads {name!r}, which {lack}",
        where=where,
        found=f"nodes before it: {', '.join(other.id for other in before) or 'none'}",
        allowed=f"fields available there: {', '.join(sorted(history.available)) or 'none'}",
        fix=hint,
    )
    error.role, error.field = node.role, name
    return error


def _check_deps(node: Node, known: Iterable[str], where: str) -> None:
    for dep in node.deps:
        if dep not in known:
            near = close_matches(dep, known)
            raise UserError(
                f"node {node.id!r} depends on {dep!r}, which does not exist",
                where=where,
                allowed=known,
                fix=f"did you mean {near[0]!r}?" if near else "add the node, or drop the dependency",
            )
