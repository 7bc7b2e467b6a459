"""The frozen teacher of on-policy distillation: a model of its own shape, in the processes and layout of the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import ConfigError
from megarl.runtime.frozen import record_frozen
from megarl.runtime.roles import TeacherRole
from megarl.runtime.setup import build_engine, check_embeddings
from megarl.tracing import phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.model import ModelConfig
    from megarl.runtime.controller import Controller
    from megarl.runtime.start import RunStart


def make_teacher(c: Controller, start: RunStart) -> TeacherRole:
    """The teacher of this run. Collective over its team.

    Raises:
        ConfigError: token ids of the policy mean other things to the teacher, or nothing; or as `record_frozen`.
    """
    from megarl.models.config import load_hf_config
    from megarl.models.weights import load_weights

    path = c.config.teacher.path
    assert path is not None, "the checks ask for it"
    record_frozen(c, "teacher", "teacher.path", path, start.source)
    with phase("load_teacher"), c.offload.phase("load"):
        hf_config = load_hf_config(c.config.model.model_copy(update={"path": path, "hf_config": None}), "teacher.path")
        check_same_tokens(c.tokenizer, _tokenizer(c.config.model, path), path)
        check_embeddings(hf_config, c.hf_config, "teacher.path")
        engine = build_engine(
            c.config, hf_config, c.layout, lambda chunks: load_weights(chunks, path), trainable=False, name="teacher"
        )
        return TeacherRole(engine, c.context, offloads=c.config.actor.engine.offload)


def check_same_tokens(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a teacher to which an id of the policy's tokenizer is another token; it may know more tokens.

    Raises:
        ConfigError: names the first tokens that differ. `path` is where the teacher came from.
    """
    theirs = teacher.get_vocab()
    other = {token: number for token, number in policy.get_vocab().items() if theirs.get(token) != number}
    if other:
        few = ", ".join(f"{token!r} is {number} and {theirs.get(token)}" for token, number in list(other.items())[:3])
        raise ConfigError(
            "teacher and policy have different vocabularies, and distillation compares token by token: "
            f"{len(other)} tokens have other ids (policy and teacher: {few})",
            where="teacher.path",
            found=path,
            allowed="a model whose tokenizer gives every token of the policy's the same id",
            fix="choose a teacher of the policy's family",
        )


def _tokenizer(model: ModelConfig, path: str) -> PreTrainedTokenizerBase:
    from megarl.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(model.model_copy(update={"path": path, "tokenizer": None}))
    except ConfigError as error:
        raise ConfigError(error.what, where="teacher.path", found=path, fix=error.fix) from error
