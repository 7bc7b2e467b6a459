"""Policies with weights of their own: every node of the actor becomes a node for each of the policies' models.

    old_logp -> proposer_old_logp -> advantage -> [actor_train | proposer_actor_train]

A node of a model gets the rows of this model's policies, with the settings of the model in place of the actor's; its
metrics are named MODEL/actor/... . Rows of policies without a model of their own are those of the run's policy.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.config.training import ActorConfig, TrainingConfig
from megarl.dag.graph import TaskGraph
from megarl.dag.node import Node
from megarl.dag.stage import Contract, Kind, Role
from megarl.data.groups import ORDINAL, group_numbers, group_places
from megarl.data.policies import POLICY
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics

if TYPE_CHECKING:
    from megarl.config.rollout import SamplingConfig
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext

_ACTOR = Role.ACTOR.value


def policy_models(config: RunConfig) -> dict[str, list[str]]:
    """Return the names of the policies of each model; the run's policy, `actor`, comes first."""
    models: dict[str, list[str]] = {_ACTOR: []}
    for name, policy in config.policies.items():
        models.setdefault(policy.model or _ACTOR, []).append(name)
    return models


def by_model(graph: TaskGraph, config: RunConfig) -> TaskGraph:
    """Return the graph with a node for each model in place of every node that takes the actor.

    A model whose policies are not trained has no training node. With one model the graph is returned unchanged.

    Raises:
        ConfigError: a policy names a model that the recipe does not have.
    """
    for name, policy in config.policies.items():
        if policy.model is not None and policy.model not in config.models:
            raise ConfigError(
                "the recipe has no model of this name",
                where=f"policies.{name}.model",
                found=policy.model,
                allowed=[*config.models, "null"],
                fix=f"add the model: models={{{policy.model}: {{train: true}}}}",
            )
    models = policy_models(config)
    if len(models) == 1:
        return graph
    nodes: list[Node] = []
    made: dict[str, tuple[str, ...]] = {}  # ids of the nodes in place of each node
    for node in (graph[id] for id in graph.order()):
        after = tuple(dict.fromkeys(id for dep in node.deps for id in made[dep]))
        node, first = dataclasses.replace(node, deps=after), len(nodes)
        if _ACTOR not in node.needs_roles:
            nodes.append(node)
        for model, policies in models.items() if _ACTOR in node.needs_roles else ():
            trained = any(config.policies[policy].train for policy in policies)
            if trained or node.kind is not Kind.MODEL_TRAIN:
                nodes.append(_node_of(node, model, policies))
        made[node.id] = tuple(other.id for other in nodes[first:])
    return TaskGraph(graph.id, graph.description, nodes, graph.entry, map(Role, list(models)[1:]))


def _node_of(node: Node, model: str, policies: list[str]) -> Node:
    first, contract = model == _ACTOR, node.declared
    written = (*contract.writes, *contract.may_write)
    contract = dataclasses.replace(
        contract,
        role=Role(model) if node.role is Role.ACTOR else node.role,
        reads=tuple(dict.fromkeys((*contract.reads, "uid", POLICY, *(() if first else contract.writes)))),
        optional=tuple(dict.fromkeys((*contract.optional, ORDINAL, *(() if first else contract.may_write)))),
        models=() if first else (model,),
    )
    assert callable(node.func), "nodes of a graph are resolved"
    func = OfModel(node.func, contract, model, tuple(policies), written)
    id = node.id if first else f"{model}_{node.id}"
    return dataclasses.replace(node, id=id, func=func, contract=contract)


class OfModel:
    """A stage of the actor that runs on one of several models, for the rows of the policies that the model has."""

    def __init__(
        self,
        stage: Callable[..., Batch],
        contract: Contract,
        model: str,
        policies: tuple[str, ...],
        written: tuple[str, ...],
    ) -> None:
        self._stage, self._model, self._policies, self._written = stage, model, policies, written
        self.__stage__ = contract
        self.__module__, self.__qualname__ = stage.__module__, getattr(stage, "__qualname__", type(stage).__qualname__)
        parameters = inspect.signature(stage).parameters
        renamed = [p.replace(name=model) if p.name == _ACTOR else p for p in parameters.values()]
        self.__signature__ = inspect.Signature(renamed)

    def __call__(self, c: StepContext, samples: Batch, **given: Any) -> Batch:
        """Run the stage on the rows of the model's policies."""
        places = [place for place, policy in enumerate(samples[POLICY]) if policy in self._policies]
        given[_ACTOR] = given.pop(self._model)
        context = _context_of(c, self._model)
        rows = samples.select(places)
        if ORDINAL not in samples:  # mini-batches need each group's number among the groups of all policies
            numbers = _numbers(c, samples)
            rows.set(ORDINAL, [numbers[place] for place in places])
        made = self._stage(context, rows, **given)
        c.metrics.merge(context.metrics.renamed(self._metric))
        for name in self._written:
            if name in made:
                samples.set(name, _scattered(samples, name, made[name], places))
        return samples

    def _metric(self, name: str) -> str:
        """Return the name of a metric of the stage: MODEL/actor/... for metrics of the actor."""
        if self._model == _ACTOR or name.startswith("perf/"):
            return name
        of_engine = name.removeprefix(f"{self._model}/")
        return f"{self._model}/{name}" if of_engine == name else f"{self._model}/{_ACTOR}/{of_engine}"


def _numbers(c: StepContext, samples: Batch) -> list[int]:
    """Return for each row the number of its prompt group among all groups of the step, over all replicas."""
    groups, of_rows = group_places(samples["uid"]), [0] * len(samples)
    for number, places in zip(group_numbers(samples, groups, c.layout.dp_rank, c.layout.dp_size), groups, strict=True):
        for place in places:
            of_rows[place] = number
    return of_rows


def sampling_of(config: RunConfig, model: str) -> SamplingConfig:
    """Return how a model's turns are sampled in training: the keys of its policy, if it has only one, override
    `rollout.sampling`."""
    policies, common = policy_models(config).get(model, []), config.rollout.sampling
    return common if len(policies) != 1 else config.policies[policies[0]].sampling.after(common)


def _context_of(c: StepContext, model: str) -> StepContext:
    """Return the context of a stage that works with `model`, with metrics of its own."""
    if model == _ACTOR:
        return dataclasses.replace(c, metrics=Metrics())
    settings, common = c.config.models[model], c.config.rollout
    rollout = common.model_copy(update={"sampling": sampling_of(c.config, model)})
    shared = {name: getattr(settings, name) for name in TrainingConfig.model_fields}
    changed = {_ACTOR: ActorConfig(parallel=c.config.parallel_of(model), **shared), "rollout": rollout}
    return dataclasses.replace(c, metrics=Metrics(), config=c.config.model_copy(update=changed))


def _scattered(samples: Batch, name: str, own: Any, places: list[int]) -> Any:
    """Return a field of all samples with the values `own` at `places`; other samples keep their value, or get 0."""
    import torch

    from megarl.data.batch import Jagged

    assert isinstance(own, Jagged | torch.Tensor), f"a stage wrote the column {name}, which other rows would lack"
    if isinstance(own, Jagged):
        lengths = samples["response_ids"].lengths
        tokens = Jagged.from_lengths(torch.arange(int(lengths.sum())), lengths)
        if name in samples:
            values = samples[name].values.clone()
        else:
            values = own.values.new_zeros((len(tokens.values), *own.values.shape[1:]))
        values[tokens.select(places).values] = own.values
        return tokens.like(values)
    values = samples[name].clone() if name in samples else own.new_zeros((len(samples), *own.shape[1:]))
    values[places] = own
    return values
