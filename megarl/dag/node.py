"""One node of a task graph: a stage with a name and settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.dag.stage import BUILT_IN, ROLES, Contract, Kind, Role, contract_of, role_named
from megarl.system.errors import ConfigError, UserError, close_matches
from megarl.system.imports import import_callable

_WITH_MODEL = (Role.ACTOR, Role.CRITIC, Role.ROLLOUT, Role.REFERENCE, Role.TEACHER, Role.REWARD_MODEL)
_TRAINED = tuple(role.value for role in _WITH_MODEL if role is not Role.ROLLOUT)


def has_model(role: Role) -> bool:
    """Return whether nodes of this role work with a model."""
    return role in _WITH_MODEL or role.is_further


@dataclass(frozen=True)
class Node:
    """One node of a graph, as the recipe lists it or after `resolved`.

    Attributes:
        func: called as `func(context, batch, **roles, **config)`, returns a batch. A callable, or
            "pkg.mod:Class.method", "pkg.mod:fn" or "pkg.mod.fn".
    """

    id: str  # unique name in the graph, also used for its phase in traces and errors
    func: Callable[..., Any] | str
    deps: tuple[str, ...] = ()  # ids of nodes that must run before this one, in addition to those that fields imply
    config: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of `func`
    contract: Contract | None = None  # the node's reads and writes; None: as declared by the callable's `@stage`
    retry: int = 0  # how often a step may call `func` again after an error of its contract's `retries_on`
    needs_roles: tuple[str, ...] = ()  # names of the roles that the function of a resolved node needs
    may_take: tuple[str, ...] = ()  # names of the roles that the function takes if the run has them

    def resolved(self, settings: Any = None) -> Node:
        """Return this node with `func` imported and its contract complete.

        Args:
            settings: the run's configuration, for stages whose fields depend on it.
        """
        where = f"node {self.id!r}"
        func = import_callable(self.func, where=f"{where}, func")
        contract = contract_of(func) if self.contract is None else self.contract
        given = {**({"more": None} if contract.refills else {}), **self.config}
        needed, possible = _roles(func, given, contract.further, where)
        _check_call(func, {**given, **dict.fromkeys(needed)}, where)
        if needed and contract.role is Role.DEFAULT:
            raise UserError(
                f"this stage uses the {' and the '.join(needed)}, but does not declare its role",
                where=where,
                allowed=[role.name for role in BUILT_IN if role is not Role.DEFAULT],
                fix=f"declare @stage(..., role={role_named(needed[0])!r})",
            )
        if contract.kind is Kind.MODEL_TRAIN:
            _check_trains(contract, (*needed, *possible), where)
        if self.retry:
            _check_retry(self.retry, contract, where)
        contract = _settled(contract, settings, where)
        return dataclasses.replace(self, func=func, contract=contract, needs_roles=needed, may_take=possible)

    @property
    def declared(self) -> Contract:
        """The node's contract: which fields and roles it reads and writes. A node has it once its graph is built."""
        assert self.contract is not None, "nodes of a graph are resolved"
        return self.contract

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that the node needs, including those that it consumes."""
        return (*self.declared.reads, *self.declared.consumes)

    @property
    def writes(self) -> tuple[str, ...]:
        """Fields that the node always writes."""
        return self.declared.writes

    @property
    def kind(self) -> Kind:
        """The kind of work that the node does."""
        return self.declared.kind

    @property
    def role(self) -> Role:
        """The role to which the node belongs."""
        return self.declared.role

    @property
    def func_name(self) -> str:
        """Import path of `func`, for messages and drawings."""
        if isinstance(self.func, str):
            return self.func
        return f"{self.func.__module__}:{getattr(self.func, '__qualname__', type(self.func).__qualname__)}"

    @property
    def model(self) -> str | None:
        """Name of the model of its role; None for roles without a model."""
        return self.role.value if has_model(self.role) else None

    @property
    def models(self) -> list[str]:
        """Names of all models that the node uses."""
        roles = [self.role, *(role_named(name) for name in self.needs_roles)]
        return list(dict.fromkeys(role.value for role in roles if has_model(role)))

    @property
    def trains(self) -> str | None:
        """Name of the model that the node trains, if any."""
        return self.model if self.kind is Kind.MODEL_TRAIN else None


def _settled(contract: Contract, settings: Any, where: str) -> Contract:
    """Return `contract` with the fields added that depend on the run's configuration (`needs`, `gives`)."""
    if contract.needs is None and contract.gives is None:
        return contract
    if settings is None:
        raise UserError(
            "the fields of this stage depend on the run's configuration, but the pipeline was made without one",
            where=where,
            fix="make the pipeline with Pipeline(id, description, config)",
        )
    more = () if contract.needs is None else tuple(contract.needs(settings))
    made = () if contract.gives is None else tuple(contract.gives(settings))
    return dataclasses.replace(
        contract,
        reads=tuple(dict.fromkeys((*contract.reads, *more))),
        optional=tuple(name for name in contract.optional if name not in more),
        writes=tuple(dict.fromkeys((*contract.writes, *made))),
        needs=None,
        gives=None,
    )


def _roles(
    func: Callable[..., Any], given: Mapping[str, Any], further: Sequence[str], where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the roles that `func` requires, and of the roles that it accepts if the run has them.

    Args:
        further: names of the further models that the stage declares.
    """
    try:
        arguments = list(inspect.signature(func).parameters.values())[2:]
    except ValueError:
        return (), ()
    named = [a for a in arguments if a.kind in (a.KEYWORD_ONLY, a.POSITIONAL_OR_KEYWORD) and a.name not in given]
    needed = tuple(a.name for a in named if a.default is a.empty)
    known = [*ROLES, *further]
    unknown = next((name for name in needed if name not in known), None)
    if unknown is not None:
        near = close_matches(unknown, known)
        raise UserError(
            f"the stage takes {unknown!r}, which is neither a role nor a key of the node's config",
            where=where,
            found=", ".join(inspect.signature(func).parameters),
            allowed=known,
            fix=f"did you mean {near[0]!r}?"
            if near
            else f"give the node the config {{{unknown!r}: ...}}, or the argument a default; a further model of the "
            f"recipe is declared by @stage(..., models=[{unknown!r}])",
        )
    return needed, tuple(a.name for a in named if a.name in known and a.default is not a.empty)


def _check_trains(contract: Contract, named: tuple[str, ...], where: str) -> None:
    """Check that a stage of kind MODEL_TRAIN has its role's model as an argument, because the graph orders the nodes
    that use a model by their arguments."""
    role, trained = contract.role, (*_TRAINED, *contract.further)
    models = [name for name in trained if name in named]
    if role.value in models:
        return
    fix = (
        f"declare @stage(..., role={role_named(models[0])!r})"
        if models
        else f"take the model: def ...(c, batch, *, {role.value if role.value in trained else 'actor'})"
    )
    raise UserError(
        f"this stage trains (kind MODEL_TRAIN, role {role.name}), but does not take the role's model as an argument",
        where=where,
        found=", ".join(named) or "no role",
        allowed=trained,
        fix=fix,
    )


def _check_retry(retry: int, contract: Contract, where: str) -> None:
    """Check that a stage which is called again declares after which errors, and communicates with no other rank."""
    if retry < 0 or not contract.retries_on:
        raise UserError(
            "the node has a retry, but its stage lists no error after which it may be called again"
            if retry > 0
            else "a retry counts calls, so it cannot be negative",
            where=where,
            found=f"retry: {retry}",
            allowed="a stage with @stage(..., retries_on=[ConnectionError, ...]), and an integer >= 0",
            fix="declare the errors, or remove retry",
        )
    if contract.kind is not Kind.COMPUTE or contract.refills or contract.consumes:
        raise UserError(
            "one rank cannot call this stage again while the others wait: it works with a model, takes further "
            "prompts, or consumes fields",
            where=where,
            found=f"kind {contract.kind.name}, consumes {', '.join(contract.consumes) or 'nothing'}",
            allowed="a stage of kind COMPUTE that consumes nothing and has no `refills`",
            fix="remove retry, or put what may fail into a stage of its own",
        )


def _check_call(func: Callable[..., Any], config: Mapping[str, Any], where: str) -> None:
    """Check that `func(context, batch, **config)` fits the signature; builtins without a signature are not checked."""
    try:
        signature = inspect.signature(func)
    except ValueError:
        return
    try:
        signature.bind(None, None, **config)
    except TypeError as error:
        raise UserError(
            f"the stage cannot be called as func(context, batch{''.join(f', {k}=...' for k in config)}): {error}",
            where=where,
            found=f"{getattr(func, '__qualname__', func)}{signature}",
            fix="make the stage take context, batch and the keys of the node's config",
        ) from error


def team_of(node: Node, owner: Mapping[Role, str]) -> str:
    """Return the team that runs `node`; rewards run in the team that generates samples."""
    named = [role for role in (node.role, *map(role_named, node.needs_roles)) if role in owner]
    scores = "scorer" in node.needs_roles
    if node.role in owner:
        home = owner[node.role]
    elif node.role is Role.REWARD or scores:
        home = owner[Role.ROLLOUT]
    else:
        home = owner[named[0]] if named else owner[Role.ACTOR]
    if any(owner[role] != home for role in named) or (scores and home != owner[Role.ROLLOUT]):
        roles = list(dict.fromkeys(role.value for role in named)) or [node.role.value]
        raise ConfigError(
            f"node {node.id!r} needs the {' and the '.join(roles)}"
            + (" and the scorer, which is in the rollout's team" if scores else "")
            + ", which must be in one team",
            where="placement.teams",
            found=", ".join(f"{role} in {owner[Role(role)]}" for role in roles if Role(role) in owner),
            fix="put these roles into one team",
        )
    return home
