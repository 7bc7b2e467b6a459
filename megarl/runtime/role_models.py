"""Builds the models of all roles but the actor: reference, teacher, critic, reward model and further models.

    reference      the weights that RL starts from, or the actor without its adapters; frozen
    teacher        for on-policy distillation: a frozen model of any size, in the processes and layout of the actor
    critic         for PPO: a value head instead of the output layer, and an optimizer of its own
    reward model   a sequence classifier; frozen
    further        models of the section `models`, for stages of the user: trained or frozen

megarl/runtime/frozen_models.py records and checks the files that they read.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from megarl.architectures.tensors import EMBEDDINGS, HEAD
from megarl.config.data import BY_MODEL
from megarl.dag.messages import RunStart
from megarl.data.tokenizer import load_tokenizer
from megarl.models.config import load_hf_config
from megarl.models.hf import check_trainable, checkpoint_names, encoder_of, wiring_of
from megarl.models.weights import init_random, load_weights
from megarl.models.weights.files import CheckpointReader
from megarl.runtime.frozen_models import SHARED_BASE, Frozen, now_at, record_base, record_frozen
from megarl.runtime.roles import BaseReferenceRole, CriticRole, FurtherRole, ReferenceRole, RewardModelRole, TeacherRole
from megarl.runtime.setup import build_engine, build_frozen, check_embeddings, read_other_config
from megarl.system.errors import ConfigError
from megarl.system.offload_schedule import CRITIC, PARAMETERS, REWARD_MODEL
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.config.model import ModelConfig
    from megarl.models.policy import PolicyModel
    from megarl.runtime.rank_state import RankState
    from megarl.training.engine import Weights

_REWARD_MODEL_PATH = "reward_model.path"


def make_reference(c: RankState, start: RunStart) -> ReferenceRole:
    """Build the reference from the weights that `keep_reference` has kept. Collective over its team.

    Raises:
        ConfigError: the files differ from those recorded in the checkpoint, or between machines.
    """
    if start.reference_key == SHARED_BASE:
        c.frozen["reference"] = asdict(Frozen(SHARED_BASE, "", {}))
        return BaseReferenceRole(c.actor.engine, c.context)
    source = now_at(c.run_dir, start.reference or "")
    record_frozen(c, "reference", start.reference_key, source, start.source)
    with phase("load_reference"), c.offload.phase("load"):
        engine = build_frozen(c, read_other_config(c, source, "reference.path"), source, "reference")
        return ReferenceRole(engine, c.context, offloads=c.config.actor.engine.offloaded)


def make_teacher(c: RankState, start: RunStart) -> TeacherRole:
    """Build the run's teachers. Collective over their team.

    Raises:
        ConfigError: a token id of the policy means another token to a teacher; or as `record_frozen`.
    """
    settings, offloads = c.config.teacher, c.config.actor.engine.offloaded
    engines = {}
    for name, (key, path) in zip(settings.models or [""], settings.paths.items(), strict=True):
        record_frozen(c, f"teacher_{name}" if name else "teacher", key, path, start.source)
        with phase("load_teacher"), c.offload.phase("load"):
            hf_config = read_other_config(c, path, key)
            check_same_tokens(c.tokenizer, load_tokenizer_of(c.config.model, path, key), path, key)
            engines[name] = build_frozen(c, hf_config, path, "teacher")
            if PARAMETERS in offloads and len(engines) < len(settings.paths):
                engines[name].hold()  # offload this teacher to make room for the next one
    return TeacherRole(engines, c.context, offloads=offloads)


def read_other_head(c: RankState, start: RunStart, field: str) -> tuple[Tensor | None, float | None]:
    """Read this rank's shard of the output embedding of the models with hidden states in `field`, split like the
    actor's; None if it has no shard. Those of several teachers are side by side, as their states are.

    Returns:
        The shard, and the cap of the logits.

    Raises:
        ConfigError: teachers have different caps.
    """
    engine = c.actor.engine
    chunk = engine.chunks[-1]
    if not chunk.post_process:
        return None, None
    if field == "teacher_hidden":
        paths = c.config.teacher.paths
    elif start.reference_key == SHARED_BASE:
        return chunk.lm_head_weight.detach().clone(), chunk.logit_cap  # adapters do not change the head
    else:
        paths = {"reference.path": now_at(c.run_dir, start.reference or "")}
    heads, caps = [], {}
    for key, path in paths.items():
        hf_config = read_other_config(c, path, key)
        caps[key] = wiring_of(hf_config).logit_cap
        name = checkpoint_names(hf_config)(EMBEDDINGS if hf_config.tie_word_embeddings else HEAD)
        reader = CheckpointReader(path, vision=encoder_of(hf_config) is not None)
        heads.append(reader.read(name, (chunk.vocab_range, (0, hf_config.hidden_size))))
    if len(set(caps.values())) > 1:
        raise ConfigError(
            "teachers of one run have different caps of logits, and their heads are computed as one",
            where=", ".join(caps),
            found=list(caps.values()),
            allowed="teachers with the same final_logit_softcapping",
            fix="choose teachers of one architecture, or distil from their most likely tokens",
        )
    return torch.cat(heads, 1).to(device=engine.device, dtype=engine.dtype), next(iter(caps.values()))


def make_critic(c: RankState, start: str | None, checkpoint: str | None) -> CriticRole:
    """Build the run's critic. Collective over its team.

    The critic starts from `critic.path`, else from the actor at the start of RL; in another team than the actor's it
    reads these weights from `start`. A resumed run then loads the critic from `checkpoint`.
    """
    source = c.config.critic.path
    with phase("load_critic"), c.offload.phase("load"):
        hf_config = c.hf_config
        if source is not None:
            hf_config = read_other_config(c, source, "critic.path")
            check_trainable(hf_config, source)
        weights = partial(_begin, c, source or start)
        engine = build_engine(c.config, hf_config, c.layout, weights, trainable=True, name=CRITIC)
        record_base(c, CRITIC, checkpoint)
        return CriticRole(engine, c.context, offloads=c.config.critic.engine.offloaded)


def build_copy(c: RankState, name: str) -> list[PolicyModel]:
    """Build a frozen copy of the further model `models.NAME` in the team that generates; its weights arrive from the
    model's team. Collective."""
    path, key = c.config.models[name].path, f"models.{name}.path"
    hf_config = c.hf_config if path is None else read_other_config(c, path, key)
    with phase(f"load_{name}"), c.offload.phase("load"):
        return build_engine(c.config, hf_config, c.layout, lambda _: None, trainable=False, name="rollout").chunks


def _begin(c: RankState, source: str | None, chunks: list[PolicyModel]) -> None:
    """Initialize a critic from the model at `source`, else from the actor; randomly if a checkpoint replaces it."""
    if source is not None:
        load_weights(chunks, source)
    elif c.team.leads:
        copy_trunk(c.actor.chunks, chunks)
    else:
        init_random(chunks, chunks[0].hf_config, c.config.model.init_seed)


@torch.no_grad()
def copy_trunk(policy: Sequence[PolicyModel], critic: Sequence[PolicyModel]) -> None:
    """Copy all weights but the head from a policy to a critic of the same layout; set the value head to zero."""
    for source, target in zip(policy, critic, strict=True):
        weights = source.weights()
        for name, parameter in target.weights().items():
            if name.startswith("output_layer."):
                parameter.zero_()
            else:
                parameter.copy_(weights[name])


def make_further(c: RankState, name: str, start: RunStart) -> FurtherRole:
    """Build the further model `models.NAME`. Collective over its team.

    A model that is trained starts from its `path`, else from the actor at the start of RL; a resumed run then loads it
    from the checkpoint. The files of a frozen model are recorded in checkpoints.

    Raises:
        ConfigError: a token id of the policy means another token to the model; or as `record_frozen`.
    """
    settings, key = c.config.models[name], f"models.{name}.path"
    if settings.path is not None and not settings.train:
        record_frozen(c, name, key, settings.path, start.source)
    with phase(f"load_{name}"), c.offload.phase("load"):
        hf_config, source = c.hf_config, settings.path
        weights: Weights = partial(_begin_as_actor, c, start.initial)
        if source is not None:
            check_same_tokens(c.tokenizer, load_tokenizer_of(c.config.model, source, key), source, key)
            hf_config = read_other_config(c, source, key)
            weights = lambda chunks: load_weights(chunks, source)  # noqa: E731
            if settings.train:
                check_trainable(hf_config, source)
        engine = build_engine(c.config, hf_config, c.layout, weights, trainable=settings.train, name=name)
        return FurtherRole(name, engine, c.context, offloads=settings.engine.offloaded)


def _begin_as_actor(c: RankState, initial: str | None, chunks: list[PolicyModel]) -> None:
    """Give a further model the weights with which the actor begins.

    They are copied from the actor, or in another team than the actor's read from `initial`. Without `initial` they
    are random, since a checkpoint replaces them.
    """
    if c.team.leads:
        copy_weights(c.actor.chunks, chunks)
    elif initial is not None:
        load_weights(chunks, initial)
    else:
        init_random(chunks, chunks[0].hf_config, c.config.model.init_seed)


@torch.no_grad()
def copy_weights(source: Sequence[PolicyModel], target: Sequence[PolicyModel]) -> None:
    """Copy all weights from a model to another one of the same architecture and layout."""
    for from_chunk, to_chunk in zip(source, target, strict=True):
        weights = from_chunk.weights()
        for name, parameter in to_chunk.weights().items():
            parameter.copy_(weights[name])


def make_reward_model(c: RankState, checkpoint: str | None) -> RewardModelRole:
    """Build the run's reward model. Collective over its team.

    Args:
        checkpoint: the checkpoint to resume from; None: the run starts.

    Raises:
        ConfigError: the model does not have exactly one score, its vocabulary differs from the policy's (form
            `tokens`), it has no chat template (form `chat`), or as `record_frozen`.
    """
    settings = c.config.reward_model
    path = settings.path
    assert path is not None, "checks require reward_model.path"
    record_frozen(c, BY_MODEL, _REWARD_MODEL_PATH, path, checkpoint)
    with phase("load_reward_model"), c.offload.phase("load"):
        settings_of_model = c.config.model.model_copy(update={"path": path, "hf_config": None})
        hf_config = load_hf_config(settings_of_model, _REWARD_MODEL_PATH)
        _check_head(hf_config, path)
        tokenizer = load_tokenizer_of(c.config.model, path, _REWARD_MODEL_PATH)
        if settings.form == "tokens":
            _check_tokens(c.tokenizer, tokenizer, path)
            check_embeddings(hf_config, c.hf_config, _REWARD_MODEL_PATH)
        elif settings.form == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                "the reward model's tokenizer has no chat template",
                where="reward_model.form",
                found="chat",
                fix="set reward_model.form=text",
            )
        engine = build_frozen(c, hf_config, path, REWARD_MODEL)
        return RewardModelRole(engine, c.context, tokenizer, offloads=c.config.actor.engine.offloaded)


def _check_head(hf_config: PretrainedConfig, path: str) -> None:
    """Reject a model without exactly one score; a missing head would be loaded as zeros."""
    classifies = any("SequenceClassification" in name for name in hf_config.architectures or ())
    if classifies and hf_config.num_labels == 1 and "score.weight" in CheckpointReader(path):
        return
    raise ConfigError(
        "this model is not a sequence classifier with one score",
        where=_REWARD_MODEL_PATH,
        found=f"{path}: {', '.join(hf_config.architectures or ())}, {hf_config.num_labels} labels",
        allowed="a ...ForSequenceClassification with one label, and score.weight in its files",
        fix="name a reward model, such as the result of algorithm.pipeline=reward_model",
    )


# -- tokenizers of models other than the policy ------------------------------------------------------------------------


def _check_tokens(policy: PreTrainedTokenizerBase, reward_model: PreTrainedTokenizerBase, path: str) -> None:
    if difference := differing_tokens(policy, reward_model):
        raise ConfigError(
            f"reward model and policy have different vocabularies, so tokens would be misread: {difference}",
            where="reward_model.form",
            found=f"tokens, with {path}",
            allowed="text or chat, for a model with a tokenizer of its own",
            fix="set reward_model.form=chat if it has a chat template, else text",
        )


def check_same_tokens(
    policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, path: str, key: str = "teacher.path"
) -> None:
    """Check that each token of the policy has the same id in another model; that model may have additional tokens.

    Args:
        other: the tokenizer of the other model, such as a teacher.
        path: its folder or hub name.
        key: recipe key that names it.

    Raises:
        ConfigError: shows the first tokens that differ.
    """
    if difference := differing_tokens(policy, other):
        raise ConfigError(
            f"this model and the policy have different vocabularies, but both must read the same tokens: {difference}",
            where=key,
            found=path,
            allowed="a model whose tokenizer gives each of the policy's tokens the same id",
            fix="choose a model of the policy's family",
        )


def differing_tokens(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
    """Describe the policy's tokens that have another id or no id in the tokenizer `other`; empty: all ids agree."""
    theirs = other.get_vocab()
    moved = {token: number for token, number in policy.get_vocab().items() if theirs.get(token) != number}
    if not moved:
        return ""
    few = ", ".join(f"{token!r} is {number} and {theirs.get(token)}" for token, number in list(moved.items())[:3])
    return f"{len(moved)} tokens have other ids (policy and this model: {few})"


def load_tokenizer_of(model: ModelConfig, path: str, key: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model other than the policy; the recipe key `key` sets its `path`."""
    try:
        return load_tokenizer(model.model_copy(update={"path": path, "tokenizer": None}))
    except ConfigError as error:
        raise ConfigError(error.what, where=key, found=path, fix=error.fix) from error
