"""Workers are shared out in whole replicas, all of them, and in proportion to the work."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import place
from megarl.dag.shares import share_out, whole_replicas
from megarl.dag.stage import Contract, Role
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError

TEAM = st.tuples(st.integers(1, 6), st.floats(0.1, 100), st.sampled_from([0, 1, 4, 12]))


def some_way(devices: int, sizes: list[int], batches: list[int]) -> bool:
    """By trying all numbers of replicas."""
    replicas = [[n for n in range(1, devices + 1) if batch == 0 or batch % n == 0] for batch in batches]
    return any(
        sum(n * size for n, size in zip(numbers, sizes, strict=True)) == devices
        for numbers in itertools.product(*replicas)
    )


@given(st.integers(1, 20), st.lists(TEAM, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_shares_are_whole_replicas_and_add_up_wherever_that_is_possible(devices, teams):
    sizes, weights, batches = map(list, zip(*teams, strict=True))
    shares = whole_replicas(devices, sizes, weights, batches)
    assert (shares is not None) == some_way(devices, sizes, batches)
    if shares is not None:
        assert sum(shares) == devices
        for share, size, batch in zip(shares, sizes, batches, strict=True):
            assert share >= size
            assert share % size == 0
            assert batch % (share // size) == 0


@given(st.integers(4, 64), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_shares_follow_the_weights(devices, weights):
    """Within one worker per team, where a minimum of one does not take more."""
    shares = whole_replicas(devices, [1] * len(weights), weights, [0] * len(weights))
    for share, weight in zip(shares, weights, strict=True):
        assert share == 1 or abs(share - devices * weight / sum(weights)) <= len(weights)


MODEL = """{model_type: qwen3, hidden_size: 64, num_hidden_layers: %d, num_attention_heads: 4, num_key_value_heads: 2,
            head_dim: 16, intermediate_size: 128, vocab_size: 32, max_position_embeddings: 256}"""


def small(*overrides: str) -> RunConfig:
    """PPO with KL in the reward, of a small model."""
    model = f"model={{path: null, hf_config: {MODEL % 4}, tokenizer: 'chars:0123456789+='}}"
    batches = ["sft.steps=0", "data.batch_size=120", "actor.mini_batch_size=120", "critic.mini_batch_size=120"]
    overrides = (model, "algorithm.kl.use=reward", *batches, *overrides)
    return load_config("ppo_quickstart", overrides, components=COMPONENTS)


def shares_of(*overrides: str) -> dict[str, int]:
    config = small(*overrides)
    return {team.name: team.devices for team in place(build_task_graph(config), config).teams}


def test_even_shares_do_not_look_at_models():
    found = shares_of("placement.auto=even", "cluster.nproc=9", "reference.path=org/unknown")
    assert found == {"actor": 3, "critic": 3, "reference": 3}


def test_param_aware_shares_count_what_each_model_does():
    """Passes: the actor generates (1), scores (1) and learns (3); the critic scores, learns; the reference scores."""
    assert shares_of("placement.auto=param_aware", "cluster.nproc=10") == {"actor": 5, "critic": 4, "reference": 1}
    # Two epochs on the same samples: 8 of the actor, 4 of the critic, 1 of the reference.
    twice = shares_of("placement.auto=param_aware", "cluster.nproc=13", "actor.ppo_epochs=2")
    assert twice == {"actor": 8, "critic": 4, "reference": 1}
    servers = shares_of("placement.auto=param_aware", "cluster.nproc=9", "rollout.engine=sglang")
    assert servers == {"actor": 4, "critic": 4, "reference": 1}, "the servers' devices generate"


def test_param_aware_shares_count_parameters(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(yaml.safe_load(MODEL % 1)))
    found = shares_of("placement.auto=param_aware", "cluster.nproc=16", f"critic.path={folder}")
    assert found["critic"] < 4 < found["actor"]


def test_what_learns_gets_a_number_of_replicas_that_divides_its_batches():
    """By equal shares each would have 3: the actor's mini-batches of 10 go to 1, 2 or 5 replicas."""
    found = shares_of("placement.auto=even", "cluster.nproc=9", "actor.mini_batch_size=10")
    assert found == {"actor": 2, "critic": 4, "reference": 3}


def test_sizes_that_are_not_known_are_asked_for_by_name():
    with pytest.raises(ConfigError, match=r"reference\.path: (?s:.*)placement\.auto=even"):
        shares_of("placement.auto=param_aware", "cluster.nproc=9", "reference.path=org/unknown")


def test_workers_that_cannot_be_shared_out_name_the_layouts():
    layouts = ("actor.parallel.tp=2", "critic.parallel.tp=4", "reference.parallel.tp=2", "cluster.nproc=9")
    with pytest.raises(ConfigError, match=r"actor 2, critic 4, reference 2(?s:.*)cluster\.nproc=8"):
        shares_of("placement.auto=even", *layouts)
    with pytest.raises(ConfigError, match=r"the run has 7(?s:.*)at least 8"):
        shares_of("placement.auto=even", *layouts[:3], "cluster.nproc=7")


def test_a_team_whose_model_no_node_computes_with_has_its_share():
    def look(context, batch, *, actor): ...

    p = Pipeline("case").add(look, "draw", contract=Contract(role=Role.ACTOR, writes=("x",)))
    graph = p.add(look, "look", contract=Contract(role=Role.TEACHER, reads=("x",))).build()
    held = share_out(small("placement.auto=param_aware", "cluster.nproc=4"), graph, (Role.ACTOR, Role.TEACHER))
    assert {name: devices for name, (_, devices) in held.items()} == {"actor": 2, "teacher": 2}
