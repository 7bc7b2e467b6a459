"""Replicas that exchange samples by tokens: after which node, of what, and that training stays what it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.placement import place
from megarl.data.batch import Batch, Jagged
from megarl.data.groups import ORDINAL
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS
from megarl.runtime.exchange import TokenExchange, record_tokens
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics
from tests.runtime import harness

PLACED = "cluster.nproc=2", "placement.teams={train: {roles: [ROLES], devices: 1}, other: {roles: [OTHER], devices: 1}}"


def makers(*settings: str) -> dict[str, frozenset[str]]:
    """By team."""
    config = load_config(settings[0], list(settings[1:]), components=COMPONENTS)
    graph = build_task_graph(config)
    return {team.name: TokenExchange(graph, team.nodes).makers for team in place(graph, config).teams}


def apart(roles: str, other: str) -> list[str]:
    return [text.replace("ROLES", roles).replace("OTHER", other) for text in PLACED]


def test_samples_are_exchanged_where_they_are_drawn_and_trained_on():
    assert makers("grpo_quickstart") == {"all": {"rollout"}}
    assert makers("ppo_quickstart") == {"all": {"rollout"}}
    assert makers("ppo_quickstart", *apart("actor, rollout", "critic")) == {"train": {"rollout"}, "other": frozenset()}
    assert makers("grpo_quickstart", *apart("actor", "rollout")) == dict.fromkeys(["train", "other"], frozenset())


def test_what_is_before_dynamic_sampling_is_not_exchanged():
    assert makers("dapo_quickstart") == {"all": {"dynamic_sampling"}}


# -- one exchange ------------------------------------------------------------------------------------------------------


class Pair:
    """One of two replicas; the other one has told `theirs`."""

    rank, size = 0, 2

    def __init__(self, theirs: list) -> None:
        self.theirs = theirs

    def all_gather_json(self, mine: list) -> list:
        return [mine, self.theirs]


def context(theirs: list, cuts: tuple[int, ...] | None = ()) -> SimpleNamespace:
    layout = SimpleNamespace(dp_group=Pair(theirs), dp_size=2)
    return SimpleNamespace(layout=layout, cuts=cuts, metrics=Metrics(), config=RunConfig(name="run"))


def samples(*lengths: int) -> Batch:
    """One of each prompt."""
    batch = Batch({"response_ids": Jagged.from_list([[7] * n for n in lengths], dtype=torch.int64)})
    batch.set("prompt_ids", batch["response_ids"])
    batch.set("uid", [f"p{2 * k}" for k in range(len(lengths))])
    return batch


def test_handles_of_work_under_way_cannot_go_to_other_replicas():
    config = load_config("grpo_quickstart", [], components=COMPONENTS)
    graph = build_task_graph(config)
    batch = samples(9, 9)
    batch.set("pending", [object(), object()])
    with pytest.raises(ConfigError, match=r"placement\.share(?s:.*)'rollout' cannot be sent .*'pending'") as refused:
        TokenExchange(graph, graph.order()).share(context([[1, 1], [1, 1]]), graph["rollout"], batch)
    assert "list the node before nodes that start work" in str(refused.value)


def test_what_has_been_shared_by_tokens_and_other_nodes_samples_stay():
    config = load_config("grpo_quickstart", [], components=COMPONENTS)
    graph = build_task_graph(config)
    exchange, batch = TokenExchange(graph, graph.order()), samples(9, 9)
    assert exchange.share(context([]), graph["advantage"], batch) is batch
    batch.set(ORDINAL, [0, 2])
    assert exchange.share(context([]), graph["rollout"], batch) is batch


def test_metrics_tell_how_even_mini_batches_are_and_would_have_been():
    # Two mini-batches of two groups; those of this replica have 18 and 2 tokens, the others 2 and 18.
    batch = samples(9, 1)
    batch.set(ORDINAL, [0, 3])
    c = context([[1, 2], [2, 18]], cuts=(2,))
    record_tokens(c, batch)
    assert c.metrics.result() == {
        "balance/tokens_max_over_mean": 1.8,
        "balance/tokens_max_over_mean_dealt": 1.8,
    }
    c = context([[1, 2], [2, 18]])
    record_tokens(c, batch)
    assert c.metrics.result() == {
        "balance/tokens_max_over_mean": 1.0,
        "balance/tokens_max_over_mean_dealt": 1.8,
    }
    c = context([], cuts=None)
    record_tokens(c, batch)
    assert c.metrics.result() == {}


# -- whole runs --------------------------------------------------------------------------------------------------------

TOKENS = "placement.share=tokens"
ONE_STEP = ("trainer.steps=1", "trainer.save_every=0", "trainer.export_hf=false", "validation.before_train=false")
#: Recipes whose mini-batches have several groups for each replica.
RUNS = {
    "grpo-tp2-dp2": ("sft.steps=0", "cluster.nproc=4", "actor.parallel.tp=2", "data.batch_size=8"),
    "ppo-dp3": (
        *harness.PPO,
        "critic.warmup_steps=0",
        "cluster.nproc=3",
        "data.batch_size=12",
        "critic.mini_batch_size=6",
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("exchange"))


def assert_near(steps: dict[int, dict[str, float]], others: dict[int, dict[str, float]]) -> None:
    """The same sums of float32 numbers in another order, over a few updates with a large learning rate."""
    assert steps.keys() == others.keys()
    for step, numbers in steps.items():
        assert others[step] == pytest.approx(numbers, rel=1e-4, abs=1e-5, nan_ok=True), f"step {step}"


def without_balance(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in numbers.items() if not name.startswith("balance/")}
        for step, numbers in steps.items()
    }


@pytest.mark.procs
@pytest.mark.timeout(600)
@pytest.mark.campaign("teams")  # as with dynamic sampling and of teams, below
@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_same_up_to_rounding(recipe, name):
    settings = (*RUNS[name], "actor.mini_batch_size=" + ("4" if "grpo" in name else "12"), *ONE_STEP)
    dealt = harness.train(recipe, recipe.parent / f"{name}-dealt", *settings)
    tokens = harness.train(recipe, recipe.parent / f"{name}-tokens", *settings, TOKENS)
    assert_near(dealt, without_balance(tokens))
    pairs = [
        (numbers["balance/tokens_max_over_mean"], numbers["balance/tokens_max_over_mean_dealt"])
        for step, numbers in tokens.items()
        if step > 0
    ]
    assert all(even <= before for even, before in pairs)
    assert any(even < before for even, before in pairs)


@pytest.mark.procs
@pytest.mark.timeout(600)
def test_dynamic_sampling_shares_by_tokens_and_goes_on_from_a_checkpoint(recipe):
    settings = (*harness.DAPO, "trainer.seed=4", "data.batch_size=8", "actor.mini_batch_size=4", "trainer.steps=3")
    dealt = harness.train(recipe, recipe.parent / "dapo-dealt", *settings)
    run_dir = recipe.parent / "dapo-tokens"
    tokens = harness.train(recipe, run_dir, *settings, TOKENS)
    assert_near(dealt, without_balance(tokens))
    assert any(numbers.get("sampling/surplus", 0) for numbers in tokens.values())
    shutil.rmtree(run_dir / "checkpoints" / "step_3")
    assert harness.train(recipe, run_dir, *settings, TOKENS) == tokens


@pytest.mark.procs
@pytest.mark.timeout(600)
def test_teams_share_by_tokens_what_one_of_them_has_exchanged(recipe):
    sizes = ("data.batch_size=8", "actor.mini_batch_size=4", "critic.mini_batch_size=8")
    settings = (*harness.PPO, "critic.warmup_steps=0", *sizes, *ONE_STEP)
    one = harness.train(recipe, recipe.parent / "ppo-one", *settings, "cluster.nproc=1")
    roles = {"train": "actor, rollout, reference", "value": "critic"}
    placed = [f"placement.teams.{name}={{roles: [{held}], devices: 2}}" for name, held in roles.items()]
    several = harness.train(recipe, recipe.parent / "ppo-teams", *settings, TOKENS, "cluster.nproc=4", *placed)
    names = ("balance/", "team/", "store/", "sync/")
    assert_near(
        one,
        {
            step: {name: value for name, value in numbers.items() if not name.startswith(names)}
            for step, numbers in several.items()
        },
    )
    assert several[1]["balance/tokens_max_over_mean"] < several[1]["balance/tokens_max_over_mean_dealt"]
