"""The frozen reference policy: made once at the start of RL, the same again after every resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.node import Role
from megarl.phase import phase
from megarl.runtime.setup import build_engine

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.runtime.controller import Controller

FOLDER = "reference"


def add_reference(c: Controller, graph: TaskGraph, *, fresh: bool) -> None:
    """Give the controller a reference when a node of the graph works for one.

    Its weights are `reference.path`, else the actor's at the start of RL. Those are kept in the run folder, because a
    resumed run starts from a later actor.
    """
    from megarl.models.weights import export_weights, load_weights

    if all(node.role is not Role.REFERENCE for node in graph):
        return
    with phase("load_reference"):
        source = c.config.reference.path
        if source is None:
            source = str(c.run_dir / FOLDER)
            if fresh:
                export_weights(c.actor.chunks, source, c.hf_config, c.tokenizer)
        c.reference = build_engine(
            c.config,
            c.hf_config,
            c.layout,
            lambda chunks: load_weights(chunks, source),
            trainable=False,
            name="reference",
        )
