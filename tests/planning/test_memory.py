"""Memory of the embedded engine, by what it copies."""

from __future__ import annotations

import pytest

from megarl.dag.placement import together
from megarl.dag.stage import Role
from megarl.planning.memory import device_memory
from megarl.planning.shards import known_sizes, parameter_bytes
from tests.planning.planned import read


@pytest.mark.parametrize(
    ("tied", "pp", "copied"),
    [("true", 1, 1.0), ("false", 1, 0.5), ("true", 2, 1.0), ("false", 2, 1.0)],
)
def test_the_head_is_copied_for_decoding_and_the_embedding_is_not(tied, pp, copied):
    """A model that is little but vocabulary: a tied one has it once, and decodes with a copy of all of it."""
    size = ["vocab_size=100000", "num_hidden_layers=2", "intermediate_size=16", f"tie_word_embeddings={tied}"]
    settings = [*(f"model.hf_config.{each}" for each in size), f"actor.parallel.pp={pp}", "rollout.dtype=bf16"]
    config, _, sizes = read("grpo_quickstart", *settings)
    team = together(config).teams[0]
    memory = device_memory(config, sizes, team, gpu=False)
    [generation] = [moment for moment in memory.moments if moment.name == "generation"]
    [copy] = [term.bytes for term in generation.terms if term.what == "weights as generation reads them"]
    whole = parameter_bytes(known_sizes(sizes, Role.ROLLOUT), team.parallel, "bf16")
    assert copy == pytest.approx(copied * whole, rel=0.05)
