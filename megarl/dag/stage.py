"""The declaration of a stage: the batch fields that it reads and writes, its kind of work, and its role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from megarl.data.fields import IMAGES, known

F = TypeVar("F", bound=Callable[..., Any])
#: Returns field names for a run's configuration.
FromConfig = Callable[[Any], Sequence[str]]

#: Fields that the prompt loader sets on every batch; images only if `data.image_key` is set.
LOADER_FIELDS = ("prompt_ids", "uid", "prompt_text", "answer", "data_source", "row", *IMAGES)


class Kind(Enum):
    """The kind of work of a stage."""

    COMPUTE = "compute"
    MODEL_INFERENCE = "model_inference"
    MODEL_TRAIN = "model_train"


class Role:
    """The role of a stage. Nodes of one role share a model, if the role has one.

    `Role.ACTOR` and the like are built in; `Role("judge")` is the further model `models.judge` of the recipe. Two roles
    of one value are the same object.
    """

    __slots__ = ("value",)
    value: str
    _made: ClassVar[dict[str, Role]] = {}
    DEFAULT: ClassVar[Role]
    ACTOR: ClassVar[Role]
    ADVANTAGE: ClassVar[Role]
    CRITIC: ClassVar[Role]
    ROLLOUT: ClassVar[Role]
    REFERENCE: ClassVar[Role]
    TEACHER: ClassVar[Role]
    REWARD_MODEL: ClassVar[Role]
    REWARD: ClassVar[Role]
    DYNAMIC_SAMPLING: ClassVar[Role]

    def __new__(cls, value: str) -> Role:
        """Return the role of this value."""
        if value not in cls._made:
            cls._made[value] = role = super().__new__(cls)
            role.value = value
        return cls._made[value]

    def __reduce__(self) -> tuple[type[Role], tuple[str]]:
        return Role, (self.value,)

    def __repr__(self) -> str:
        return f"Role({self.value!r})" if self.is_further else f"Role.{self.name}"

    @property
    def name(self) -> str:
        """The constant's name of a built-in role, such as ACTOR."""
        return self.value.upper()

    @property
    def is_further(self) -> bool:
        """Whether this is a further model of the recipe (`models`), and not a built-in role."""
        return self not in BUILT_IN


#: The roles that every recipe may use.
BUILT_IN = tuple(
    Role(value)
    for value in (
        *("default", "actor", "advantage", "critic", "rollout", "reference", "teacher", "reward_model", "reward"),
        "dynamic_sampling",
    )
)
for _role in BUILT_IN:
    setattr(Role, _role.name, _role)

#: Argument name of a stage -> the role that is passed. A further model has its own name.
ROLES = {
    "actor": Role.ACTOR,
    "critic": Role.CRITIC,
    "reference": Role.REFERENCE,
    "teacher": Role.TEACHER,
    "reward_model": Role.REWARD_MODEL,
    "rollout": Role.ROLLOUT,
    "scorer": Role.REWARD,
}


def role_named(argument: str) -> Role:
    """Return the role that a stage takes by this argument."""
    return ROLES.get(argument) or Role(argument)


@dataclass(frozen=True)
class Contract:
    """The declared effects of a stage on a batch; see `stage`."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    kind: Kind = Kind.COMPUTE
    role: Role = Role.DEFAULT
    resamples: bool = False
    refills: bool = False
    retries_on: tuple[type[Exception], ...] = ()
    needs: FromConfig | None = None
    gives: FromConfig | None = None
    models: tuple[str, ...] = ()

    @property
    def further(self) -> tuple[str, ...]:
        """Names of the further models that the stage may take as arguments."""
        return tuple(dict.fromkeys((*([self.role.value] if self.role.is_further else []), *self.models)))

    @property
    def uses(self) -> tuple[str, ...]:
        """All fields that the stage may read."""
        return (*self.reads, *self.optional, *self.consumes)

    @property
    def changes(self) -> tuple[str, ...]:
        """All fields that the stage may change."""
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
    retries_on: Sequence[type[Exception]] = (),
    needs: FromConfig | None = None,
    gives: FromConfig | None = None,
    models: Sequence[str] = (),
) -> Callable[[F], F]:
    """Declare what a stage function does; the function itself is not changed.

    It is called as `fn(context, batch, **roles, **config)`. It gets the roles that its signature names (`ROLES`); a
    role with a default is only passed if the run has it. An undeclared read or write of a field is an error.

    Args:
        reads: fields that it needs; megarl's own fields are listed in `megarl.data.fields`.
        writes: fields that it always adds or replaces.
        optional: fields that it uses if an earlier stage writes them.
        may_write: fields that it adds or replaces in some steps only; later stages read them as `optional`.
        consumes: fields that it needs and that later stages cannot read, such as handles of pending work.
        kind: kind of work that it does.
        role: role to which it belongs; `Role("judge")` is the further model `models.judge` of the recipe.
        resamples: it may return different samples; all their fields are kept, whether it reads them or not.
        refills: it also gets `more`: `more()` returns the next prompts, processed by all stages before it.
        retries_on: errors after which a node with `retry` calls it again, such as those of a busy service. Other ranks
            do not call it again, so it must not communicate with them.
        needs: `needs(config)` returns further fields that it needs under these settings.
        gives: `gives(config)` returns further fields that it writes under these settings.
        models: further models that it takes as arguments, in addition to its role's.

    >>> @stage(reads=["score"], writes=["advantages"], role=Role.ADVANTAGE)
    ... def advantage(context, batch): ...
    >>> contract_of(advantage).reads, contract_of(advantage).writes
    (('score',), ('advantages',))

    Raises:
        ValueError: a stage of megarl declares a field that `megarl.data.fields` does not list.
    """
    always, sometimes = (tuple(reads), tuple(writes)), (tuple(optional), tuple(may_write), tuple(consumes))
    contract = Contract(
        *always, *sometimes, kind, role, resamples, refills, tuple(retries_on), needs, gives, tuple(models)
    )

    def declare(func: F) -> F:
        unknown = [name for name in (*contract.uses, *contract.changes) if known(name) is None]
        if unknown and func.__module__.partition(".")[0] == __package__.partition(".")[0]:
            where = f"{func.__module__}.{func.__qualname__}"
            raise ValueError(f"{where} declares fields that are missing in megarl/data/fields.py: {unknown}")
        func.__stage__ = contract  # type: ignore[attr-defined]
        return func

    return declare


def contract_of(func: Callable[..., Any]) -> Contract:
    """Return the declared contract of a callable; an empty one if nothing is declared."""
    return getattr(func, "__stage__", Contract())
