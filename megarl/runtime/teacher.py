"""The frozen teacher of on-policy distillation: a model of its own shape, in the processes and layout of the actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.node import Role
from megarl.errors import ConfigError
from megarl.phase import phase
from megarl.runtime.setup import build_engine

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.runtime.controller import Controller


def add_teacher(c: Controller, graph: TaskGraph) -> None:
    """Give the controller a teacher when a node of the graph works for one.

    Raises:
        ConfigError: its vocabulary has another size than the policy's, so token ids mean other things.
    """
    from megarl.models.config import load_hf_config
    from megarl.models.weights import load_weights

    if all(node.role is not Role.TEACHER for node in graph):
        return
    path = c.config.teacher.path
    assert path is not None, "config.checks asks for it"
    with phase("load_teacher"):
        hf_config = load_hf_config(c.config.model.model_copy(update={"path": path, "hf_config": None}), "teacher.path")
        if hf_config.vocab_size != c.hf_config.vocab_size:
            raise ConfigError(
                "teacher and policy have different vocabularies, and distillation compares token by token",
                where="teacher.path",
                found=f"{hf_config.vocab_size} tokens",
                allowed=f"{c.hf_config.vocab_size} tokens",
                fix="choose a teacher with the policy's tokenizer",
            )
        c.teacher = build_engine(
            c.config, hf_config, c.layout, lambda chunks: load_weights(chunks, path), trainable=False, name="teacher"
        )
        if c.config.actor.engine.offload:
            c.teacher.offload()
