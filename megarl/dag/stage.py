"""The declaration of a stage: the batch fields it reads and writes, its kind of work, and its role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from megarl.data.fields import IMAGES, known

F = TypeVar("F", bound=Callable[..., Any])
#: Field names that follow from the run's configuration.
FromConfig = Callable[[Any], Sequence[str]]

#: The fields that the prompt loader puts on every batch that enters a graph; images where `data.image_key` names them.
LOADER_FIELDS = ("prompt_ids", "uid", "prompt_text", "answer", "data_source", "row", *IMAGES)


class Kind(Enum):
    """The kind of work that a stage does."""

    COMPUTE = "compute"
    MODEL_INFERENCE = "model_inference"
    MODEL_TRAIN = "model_train"


class Role(Enum):
    """The role that a stage belongs to. Nodes of one role share a model, if the role has one."""

    DEFAULT = "default"
    ACTOR = "actor"
    ADVANTAGE = "advantage"
    CRITIC = "critic"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    TEACHER = "teacher"
    REWARD_MODEL = "reward_model"
    REWARD = "reward"
    DYNAMIC_SAMPLING = "dynamic_sampling"


#: Name of an argument of a stage -> the role that it stands for.
ROLES = {
    "actor": Role.ACTOR,
    "critic": Role.CRITIC,
    "reference": Role.REFERENCE,
    "teacher": Role.TEACHER,
    "reward_model": Role.REWARD_MODEL,
    "rollout": Role.ROLLOUT,
    "scorer": Role.REWARD,
}


@dataclass(frozen=True)
class Contract:
    """The declared effect of a stage on a batch; see `stage`."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    kind: Kind = Kind.COMPUTE
    role: Role = Role.DEFAULT
    resamples: bool = False
    refills: bool = False
    needs: FromConfig | None = None
    gives: FromConfig | None = None

    @property
    def uses(self) -> tuple[str, ...]:
        """All fields whose value it may look at."""
        return (*self.reads, *self.optional, *self.consumes)

    @property
    def changes(self) -> tuple[str, ...]:
        """All fields that may be others after it."""
        return (*self.writes, *self.may_write, *self.consumes)


def stage(
    *,
    reads: Sequence[str],
    writes: Sequence[str],
    optional: Sequence[str] = (),
    may_write: Sequence[str] = (),
    consumes: Sequence[str] = (),
    kind: Kind = Kind.COMPUTE,
    role: Role = Role.DEFAULT,
    resamples: bool = False,
    refills: bool = False,
    needs: FromConfig | None = None,
    gives: FromConfig | None = None,
) -> Callable[[F], F]:
    """Declare what a stage callable does; the callable itself stays as it is.

    It is called as `fn(context, batch, **roles, **config)`: the roles are those that its signature names (`ROLES`), one
    with a default only if the run has it. Nothing else reaches the stage, and nothing else that it writes is taken: an
    undeclared read or write is an error.

    Args:
        reads: fields that it needs; those of megarl's own stages are in `megarl.data.fields`.
        writes: fields that it adds or replaces, always.
        optional: fields that it uses when an earlier stage writes them.
        may_write: fields that it adds or replaces in some steps only; later stages read them as `optional`.
        consumes: fields that it needs and that nobody sees after it (handles of work that it waits for).
        kind: kind of work.
        role: whose work it is.
        resamples: it may return other samples than it was given. It carries all their fields, read or not.
        refills: it is also given `more`: `more()` is the next prompts of the graph's entry, after all stages before it.
        needs: `needs(config)` are fields that it needs under these settings, in addition to `reads`.
        gives: `gives(config)` are fields that it writes under these settings, in addition to `writes`.

    >>> @stage(reads=["score"], writes=["advantages"], role=Role.ADVANTAGE)
    ... def advantage(context, batch): ...
    >>> contract_of(advantage).reads, contract_of(advantage).writes
    (('score',), ('advantages',))

    Raises:
        ValueError: a stage of megarl's own declares a field that `megarl.data.fields` does not have.
    """
    own, at_times = (tuple(reads), tuple(writes)), (tuple(optional), tuple(may_write), tuple(consumes))
    contract = Contract(*own, *at_times, kind, role, resamples, refills, needs, gives)

    def declare(func: F) -> F:
        _refuse_unknown(func, contract)
        func.__stage__ = contract  # type: ignore[attr-defined]
        return func

    return declare


def _refuse_unknown(func: Callable[..., Any], contract: Contract) -> None:
    unknown = [name for name in (*contract.uses, *contract.changes) if known(name) is None]
    if unknown and func.__module__.partition(".")[0] == __package__.partition(".")[0]:
        raise ValueError(f"{func.__module__}.{func.__qualname__}: no such field in megarl/data/fields.py: {unknown}")


def contract_of(func: Callable[..., Any]) -> Contract:
    """Return the declared contract of a callable; an empty one when nothing was declared."""
    return getattr(func, "__stage__", Contract())
