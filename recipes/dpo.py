"""DPO: the policy prefers chosen responses to rejected ones, by log-ratios to a frozen reference. Nothing is generated.

pairs of the data -> ref_logp -> dpo_train

`preference.loss` chooses among its relatives (megarl/algorithms/preference.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.pipeline import Pipeline
from megarl.errors import ConfigError
from megarl.runtime.stages import logprob, preference

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.graph import TaskGraph


def build_graph(config: RunConfig) -> TaskGraph:
    """Return the task graph of one training step.

    Raises:
        ConfigError: the recipe has no section `preference`.
    """
    if config.preference is None:
        raise ConfigError(
            "this pipeline learns from pairs of responses, and the recipe does not say how",
            where="preference",
            found="null",
            allowed="a section with any of its keys",
            fix="add `preference: {loss: sigmoid, beta: 0.1}` to the recipe",
        )
    p = Pipeline("dpo", "direct preference optimisation", config)
    p.add(logprob.ref_logp)
    p.add(preference.dpo_train)
    return p.build(preference.PAIR_FIELDS)
