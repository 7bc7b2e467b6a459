"""The engines with which policies that have weights of their own generate, and the links that bring their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.stage import Role
from megarl.rollout.family import ModelLinks
from megarl.runtime.policies import policy_models, sampling_of

if TYPE_CHECKING:
    from megarl.rollout.engine import RolloutEngine
    from megarl.rollout.family import WeightLink
    from megarl.runtime.rank_state import RankState

_ACTOR = Role.ACTOR.value


def open_policies(c: RankState) -> None:
    """Have each policy generate with its model; call it once the run's policy can generate. Collective over a team.

    A model that another team than the rollout's trains is a copy here, to which that team sends its weights.
    """
    models = policy_models(c.config)
    if len(models) == 1:
        return
    others = [name for name in models if name != _ACTOR]
    if not c.team.holds(Role.ROLLOUT):
        from megarl.rollout.embedded.links import SentWeights

        here = {name: c.models[name].chunks for name in others if name in c.models}
        c.link = ModelLinks([c.link, *(SentWeights(c, Role(name), chunks) for name, chunks in here.items())])
        return
    from megarl.rollout.policies import PolicyEngines

    opened = {name: _engine_of(c, name) for name in others}
    engines = {_ACTOR: c.rollout.engine, **{name: engine for name, (engine, _) in opened.items()}}
    of_policy = {policy: model for model, policies in models.items() for policy in policies}
    sampling = {model: sampling_of(c.config, model) for model in engines}
    c.rollout.engine = PolicyEngines(engines, of_policy)
    c.rollout.training_engine = PolicyEngines(engines, of_policy, sampling)
    c.link = ModelLinks([c.link, *(link for _, link in opened.values())])


def _engine_of(c: RankState, name: str) -> tuple[RolloutEngine, WeightLink]:
    """Return the engine of a further model in the team that generates, and the link by which its weights arrive."""
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.embedded.links import ReceivedWeights, SharedWeights
    from megarl.runtime.role_models import build_copy

    apart = name not in c.models
    chunks = build_copy(c, name) if apart else c.models[name].chunks
    engine = EmbeddedEngine(chunks, c.config.rollout, c.layout, c.tokenizer)
    return engine, ReceivedWeights(c, engine, Role(name)) if apart else SharedWeights(engine)
