"""One node of a task graph: what runs, after what, in which role."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.dag.stage import contract_of
from megarl.errors import UserError
from megarl.imports import import_callable


class NodeType(Enum):
    """What kind of work a node does."""

    COMPUTE = "compute"
    DATA_LOAD = "data_load"
    ENV_INTERACT = "env_interact"
    MODEL_INFERENCE = "model_inference"
    MODEL_TRAIN = "model_train"
    PUT_TO_BUFFER = "put_to_buffer"
    GET_FROM_BUFFER = "get_from_buffer"
    BARRIER_SYNC = "barrier_sync"
    CUSTOM = "custom"


class Role(Enum):
    """Whose work a node is. Nodes of one role and agent group share a model."""

    DEFAULT = "default"
    ACTOR = "actor"
    ADVANTAGE = "advantage"
    CRITIC = "critic"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    TEACHER = "teacher"
    REWARD = "reward"
    DYNAMIC_SAMPLING = "dynamic_sampling"


class Status(Enum):
    """Where a node stands in one walk of the graph."""

    PENDING = "pending"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"


#: Roles whose nodes may return other samples than they were given.
RESAMPLING_ROLES = (Role.ROLLOUT, Role.DYNAMIC_SAMPLING)


@dataclass(frozen=True)
class Node:
    """One task.

    Attributes:
        id: name, unique in its graph; also the name of its phase in traces and errors.
        func: called as `func(worker, batch, **config)`, returns a batch. A callable, or "pkg.mod:Class.method",
            "pkg.mod:fn" or "pkg.mod.fn".
        deps: ids of the nodes whose outputs it gets, merged.
        type: kind of work.
        role: whose work it is.
        reads: batch fields it needs; None: what the callable declares with `@stage`.
        writes: batch fields it adds; None: what the callable declares with `@stage`.
        only_forward: its model is never trained by it (no optimizer needed on its account).
        agent_group: number of the agent it works for; agents do not share models.
        retry_limit: how often it is tried again after an exception. For local work (rewards, environments): a node
            that talks to other ranks cannot be retried by one rank alone.
        filter: `filter(worker, batch) -> positions or bool mask` of the samples to keep, applied to the node's input;
            a callable or its import path.
        config: further keyword arguments of `func`.
    """

    id: str
    func: Callable[..., Any] | str
    deps: tuple[str, ...] = ()
    type: NodeType = NodeType.COMPUTE
    role: Role = Role.DEFAULT
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    only_forward: bool = False
    agent_group: int = 0
    retry_limit: int = 0
    filter: Callable[..., Any] | str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def resolved(self) -> Node:
        """This node with `func` and `filter` imported and `reads`, `writes` filled in.

        Raises:
            UserError: a path that does not import, a negative retry limit, `config` keys that `func` does not take,
                or a training node that says `only_forward`.
        """
        where = f"node {self.id!r}"
        func = import_callable(self.func, where=f"{where}, func")
        chosen = self.filter and import_callable(self.filter, where=f"{where}, filter")
        if self.retry_limit < 0:
            raise UserError("retry_limit is negative", where=where, found=self.retry_limit, allowed="0 or more")
        if self.only_forward and self.type is NodeType.MODEL_TRAIN:
            raise UserError(
                "a node of type MODEL_TRAIN cannot be only_forward", where=where, fix="use MODEL_INFERENCE, or drop it"
            )
        _check_call(func, self.config, where)
        contract = contract_of(func)
        return Node(
            **{
                **vars(self),
                "func": func,
                "filter": chosen,
                "deps": tuple(self.deps),
                "reads": contract.reads if self.reads is None else tuple(self.reads),
                "writes": contract.writes if self.writes is None else tuple(self.writes),
            }
        )

    @property
    def func_name(self) -> str:
        """Import path of `func`, for messages and drawings."""
        if isinstance(self.func, str):
            return self.func
        return f"{self.func.__module__}:{getattr(self.func, '__qualname__', type(self.func).__qualname__)}"

    @property
    def model(self) -> tuple[str, int] | None:
        """Key of the model the node works on, (role, agent group); None for roles without one."""
        has_model = self.role in (Role.ACTOR, Role.CRITIC, Role.ROLLOUT, Role.REFERENCE, Role.TEACHER)
        return (self.role.value, self.agent_group) if has_model else None


def _check_call(func: Callable[..., Any], config: Mapping[str, Any], where: str) -> None:
    """`func(worker, batch, **config)` must fit the signature; builtins without one are taken at their word."""
    try:
        signature = inspect.signature(func)
    except ValueError:
        return
    try:
        signature.bind(None, None, **config)
    except TypeError as error:
        raise UserError(
            f"func cannot be called as func(worker, batch{''.join(f', {k}=...' for k in config)}): {error}",
            where=where,
            found=f"{getattr(func, '__qualname__', func)}{signature}",
            fix="take (worker, batch) and the keys of the node's config",
        ) from error
