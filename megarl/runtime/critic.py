"""The value model of PPO: a value head in place of the vocabulary, and an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.runtime.roles import CriticRole
from megarl.tracing import phase

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel
    from megarl.runtime.rank_state import RankState


def make_critic(c: RankState, start: str | None, checkpoint: str | None) -> CriticRole:
    """Make the critic of this run. Collective over its team.

    It starts from `critic.path`, else from the actor as it is where RL starts: from the one beside it, or in another
    team from the model at `start`. A resumed run then reads it from its `checkpoint`.
    """
    from megarl.device import DTYPES
    from megarl.models.hf import check_trainable
    from megarl.runtime.frozen_models import record_base
    from megarl.runtime.setup import read_other_config, sequence_layout_of
    from megarl.training.engine import MegatronEngine

    config, source = c.config.critic, c.config.critic.path
    with phase("load_critic"), c.offload.phase("load"):
        hf_config = c.hf_config
        if source is not None:
            hf_config = read_other_config(c, source, "critic.path")
            check_trainable(hf_config, source)
        engine = MegatronEngine(
            hf_config,
            c.config.parallel_of("critic"),
            config.engine,
            config.optim,
            dtype=DTYPES[c.config.model.dtype],
            layout=c.layout,
            total_steps=c.config.updates(config),
            weights=lambda chunks: _begin(c, chunks, source or start),
            name="critic",
            seed=c.config.trainer.seed,
            value_head=True,
            sequences=sequence_layout_of(c.config, hf_config),
            lora=c.config.model.lora,
            freeze=c.config.model.freeze,
        )
        record_base(c, "critic", checkpoint)
        return CriticRole(engine, c.context, offloads=config.engine.offload)


def _begin(c: RankState, chunks: list[PolicyModel], source: str | None) -> None:
    from megarl.models.weights import init_random, load_weights

    if source is not None:
        load_weights(chunks, source)
    elif c.team.leads:
        copy_trunk(c.actor.chunks, chunks)
    else:  # all of it comes from the checkpoint
        init_random(chunks, chunks[0].hf_config, c.config.model.init_seed)


@torch.no_grad()
def copy_trunk(policy: Sequence[PolicyModel], critic: Sequence[PolicyModel]) -> None:
    """Everything but the head from a policy to a critic of the same layout; the value head becomes zero."""
    for source, target in zip(policy, critic, strict=True):
        weights = source.weights()
        for name, parameter in target.weights().items():
            if name.startswith("output_layer."):
                parameter.zero_()
            else:
                parameter.copy_(weights[name])
