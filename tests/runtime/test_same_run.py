"""The same recipe under every launcher (Ray: tests/launchers) and layout: the same numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.runtime import harness, test_algorithms

pytestmark = [pytest.mark.procs, pytest.mark.timeout(900)]


#: The step samples what the cold start has changed, and a validation comes after it.
STEPS = "trainer.steps=1"
#: One for each stage, or for a certain course of a run.
TWO_LAYERS = "model.hf_config.num_hidden_layers=2"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def local(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return harness.train(recipe, tmp_path_factory.mktemp("local"), STEPS)


def test_torchrun_gives_the_same_bits_under_the_same_layout(recipe, local, tmp_path):
    assert harness.run(recipe, tmp_path, STEPS, launcher="torchrun") == local


@pytest.mark.campaign("teams")  # with PPO and several updates: below
def test_tensor_parallelism_gives_the_same_metrics(recipe, local, tmp_path):
    assert_same(harness.train(recipe, tmp_path, STEPS, "actor.parallel={tp: 2, sp: true}"), local)


def test_the_program_with_one_worker_gives_the_same_metrics(recipe, local, tmp_path):
    assert_same(harness.run(recipe, tmp_path, STEPS, "cluster.nproc=1", program=True), local)


def test_context_parallelism_small_micro_batches_and_offload_give_the_same_metrics(recipe, local, tmp_path):
    layout = ["actor.parallel.cp=2", "actor.engine.micro_batch_tokens=200", "actor.engine.offload=true"]
    assert_same(harness.train(recipe, tmp_path, STEPS, *layout), local)


def test_a_mixture_of_experts_is_the_same_under_expert_parallelism_and_virtual_stages(recipe, tmp_path):
    sizes = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, norm_topk_prob: true"
    experts = [f"model.hf_config={{model_type: qwen3_moe, {sizes}, decoder_sparse_step: 1, mlp_only_layers: []}}"]
    experts += ["model.hf_config.num_hidden_layers=4", STEPS, "sft.steps=1"]  # a layer for each stage's two parts
    single = harness.train(recipe, tmp_path / "single", *experts, "cluster.nproc=1")
    both = ["cluster.nproc=4", "actor.parallel={pp: 2, vpp: 2, ep: 2}"]
    assert_same(harness.train(recipe, tmp_path / "vpp2-ep2", *experts, *both), single)


def test_bf16_starts_where_fp32_does(recipe, tmp_path):
    once = ("sft.steps=0", "trainer.steps=1", "cluster.nproc=1")
    first = harness.train(recipe, tmp_path, "model.dtype=bf16", *once)[1]
    exact = harness.train(recipe, tmp_path / "fp32", *once)[1]
    assert first.keys() == exact.keys()
    # A bf16 number has 8 bits: log-probs move by about 1%, and with them the odd sampled token.
    assert math.isclose(first["actor/entropy"], exact["actor/entropy"], rel_tol=0.02)


def assert_same(other: dict[int, dict[str, float]], local: dict[int, dict[str, float]]) -> None:
    assert other.keys() == local.keys()
    for step, numbers in local.items():
        assert other[step].keys() == numbers.keys()
        for name, value in numbers.items():
            # Updates at a large learning rate on float32 sums in another order: rounding grows to about 1e-5.
            assert math.isclose(other[step][name], value, rel_tol=1e-3, abs_tol=1e-5), (step, name)


# Two mini-batches of the actor, two passes over each: old log-probs matter. The adaptive KL coefficient moves with
# every step.
UPDATES = [
    *harness.PPO,
    "trainer.steps=3",
    "actor.mini_batch_size=2",
    "actor.ppo_epochs=2",
    "algorithm.kl={use: reward, coef: 0.1, adaptive: true, target: 0.01, horizon: 40}",
]


@pytest.fixture(scope="module")
def ppo(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return harness.train(recipe, tmp_path_factory.mktemp("ppo"), *UPDATES)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["cluster.nproc=1"], marks=pytest.mark.campaign("teams")),
        pytest.param(["actor.parallel.pp=2"], marks=pytest.mark.campaign("teams")),
        [
            "actor.parallel={tp: 2, sp: true}",
            "critic.engine={micro_batch_tokens: 40, offload: true}",
            "actor.engine={micro_batch_tokens: 50, offload: true}",
        ],
    ],
    ids=["single", "pp2", "tp2-sp-micro-batches-offload"],
)
def test_layouts_give_the_same_critic_and_the_same_updates_of_the_actor(recipe, ppo, tmp_path, layout):
    if "actor.parallel.pp=2" in layout:
        layout = [*layout, TWO_LAYERS]
        ppo = harness.train(recipe, tmp_path / "deep", *UPDATES, TWO_LAYERS)
    assert_same(harness.train(recipe, tmp_path / "layout", *UPDATES, *layout), ppo)


def test_the_critic_learns_before_the_actor_moves(ppo):
    assert "critic/vf_loss" in ppo[1]
    assert "actor/pg_loss" not in ppo[1]
    assert {"actor/pg_loss", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"} <= ppo[2].keys()
    assert ppo[2]["critic/vpred_mean"] > ppo[1]["critic/vpred_mean"]  # returns are positive, the value head starts at 0
    assert 0 < ppo[3]["critic/vf_loss"] < ppo[1]["critic/vf_loss"]


def test_several_updates_per_step_move_the_actor_from_its_old_log_probs_and_the_kl_coefficient(ppo):
    steps = [numbers for step, numbers in ppo.items() if step > 0]
    assert len({numbers["actor/reward_kl_coef"] for numbers in steps}) == len(steps)
    assert all(numbers["actor/ppo_kl"] != 0 for numbers in steps[1:])


def test_dynamic_sampling_goes_on_from_a_checkpoint_of_another_layout(recipe, tmp_path):
    # With this seed the model refills at step 3, and leaves more than one sample over.
    settings = [
        *harness.DAPO,
        *harness.KEPT,
        "rollout.sampling={top_k: 20, top_p: 1}",
        "data.curriculum.pools={hard: {up_to: 0.4, weight: 2}, easy: {weight: 0.5}}",  # dropped groups count
        "trainer.seed=4",
        TWO_LAYERS,
    ]
    whole = harness.run(recipe, tmp_path / "whole", *settings)
    assert whole[3]["sampling/rounds"] > 1
    assert whole[3]["sampling/surplus"] > 1, "the checkpoint would hold too few samples"
    assert whole[4]["curriculum/hard/rows"] > 0
    refills = sum(int(numbers["sampling/rounds"]) - 1 for step, numbers in whole.items() if step > 0)
    events = json.loads((tmp_path / "whole" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "refill" for event in events) == 2 * refills, "each of 2 ranks names every round"
    harness.train(recipe, tmp_path / "parts", *settings, "trainer.steps=3", "cluster.nproc=1")
    assert list(tmp_path.glob("parts/checkpoints/step_3/surplus_0*"))
    assert_same(harness.train(recipe, tmp_path / "parts", *settings), whole)


@pytest.mark.campaign("teams")
@pytest.mark.parametrize("layout", ["cluster.nproc=1", "actor.parallel={tp: 2, sp: true}", "actor.parallel.pp=2"])
def test_layouts_give_several_policies_the_same_numbers(recipe, tmp_path, layout):
    (tmp_path / "proposing.py").write_text(test_algorithms.AGENT)
    policies = [text.replace("FOLDER", str(tmp_path)) for text in test_algorithms.POLICIES]
    settings = [*policies, *test_algorithms.OWN_WEIGHTS, "algorithm.kl.use=none", "sft.steps=0", STEPS, TWO_LAYERS]
    apart = harness.train(recipe, tmp_path / "apart", *settings)
    assert "proposer/actor/grad_norm" in apart[1]
    assert_same(harness.train(recipe, tmp_path / "layout", *settings, layout), apart)
