"""A step of whole recipes: what adds up, what grows with what, and measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.dag.placement import place
from megarl.dag.stage import Role
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.flops import FlopCounter
from megarl.planning.hardware import KINDS
from megarl.planning.lengths import Lengths
from megarl.planning.memory import SERVER_CACHE
from megarl.planning.schedule import Schedule
from megarl.planning.step import StepFormulas, occupied
from megarl.system.errors import ConfigError
from tests.planning.planned import H100, TWO_CORES, planned, read

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BIG = "grpo_qwen3_8b_8gpu"


def cluster(nodes):
    """The recipe on more machines, with as many servers, and a batch that all replicas share."""
    size = 8 * nodes
    keys = [f"cluster.nproc={size}", f"cluster.nnodes={nodes}", f"rollout.sglang.servers={size}"]
    return [*keys, "data.batch_size=1024", "actor.mini_batch_size=1024"], replace(KINDS["h100"], nodes=nodes)


def test_a_frozen_model_shares_prefixes_only_where_it_can():
    teams = [
        "rollout.sglang={colocated: false, servers: 2}",
        "placement.teams={train: {roles: [actor], devices: 4}, score: {roles: [reference], devices: 2}, "
        "draw: {roles: [rollout], devices: 2}}",
        "actor.parallel={tp: 2}",
        "actor.engine.share_prefixes=true",
    ]
    for cp in (1, 2):
        config, graph, sizes = read(BIG, *teams, f"reference.parallel={{cp: {cp}}}")
        formulas = StepFormulas(config, graph, place(graph, config), sizes, H100, PlanAssumptions.of(gpu=True))
        assert formulas.model(Role.ACTOR).engine.share_prefixes
        assert formulas.model(Role.REFERENCE).engine.share_prefixes == (cp == 1)


def test_one_team_does_one_thing_after_the_other():
    plan = planned(BIG)
    assert plan.step_s == pytest.approx(sum(phase.seconds for phase in plan.phases))
    assert [phase.name for phase in plan.phases] == [
        *("rollout", "ref_logp", "actor_train"),  # bypass: the rollout's log-probs are the old ones
        *("moves", "weights", "other"),
    ]
    assert plan.tokens_per_s == pytest.approx(plan.tokens / plan.step_s)
    assert plan.per_device == pytest.approx(plan.tokens_per_s / 8)


def test_every_number_has_a_formula():
    for phase in planned("grpo_qwen3_30b_a3b_32gpu", hardware=replace(KINDS["h100"], nodes=4)).phases:
        assert phase.parts
        assert all(part.formula for part in phase.parts)


def test_a_pipeline_of_teams_goes_at_the_pace_of_the_busiest():
    plan = planned("grpo_async_quickstart", hardware=TWO_CORES)
    busy = {team: sum(phase.seconds for phase in plan.phases if phase.team == team) for team in ("train", "draw")}
    assert plan.step_s == pytest.approx(max(busy["train"], busy["draw"] + plan["weights"].seconds))


def test_teams_that_wait_for_each_other_work_at_the_same_time_where_they_can():
    """S1: `score` and `train` need `draw`; `train` needs both, and `score` is a team of its own."""
    nodes = (("draw", "a", ()), ("score", "b", ("draw",)), ("old", "a", ("draw",)), ("train", "a", ("score", "old")))
    begins, step = Schedule(nodes, "a", "a", ahead=False).run(
        {"draw": 3.0, "score": 5.0, "old": 2.0, "train": 4.0}, 0.5, 0.0
    )
    assert begins == {"draw": 0.0, "score": 3.0, "old": 3.0, "train": 8.0}
    assert step == 12.5


def test_a_critic_scores_and_trains():
    names = planned("ppo_quickstart", hardware=TWO_CORES).seconds
    assert {"value", "critic_train", "old_logp", "actor_train"} <= set(names)
    assert names["critic_train"] == pytest.approx(names["actor_train"], rel=0.1)  # they differ in the head


def test_flops_are_those_that_a_run_counts():
    """F2: PPO generates, scores and trains with the policy, and scores and trains a critic without a vocabulary."""
    overrides = ["model.dtype=fp32", "rollout.sampling.ignore_eos=true"]  # responses of exactly 6 tokens
    plan = planned("ppo_quickstart", *overrides, hardware=TWO_CORES, assumed=["prompt_tokens=8"])
    counter = FlopCounter.of(read("ppo_quickstart")[2][Role.ACTOR])
    policy, critic = counter.forward([14.0], head_tokens=6), counter.forward([14.0], head_tokens=0)
    drawn = counter.generate([8.0], [[6.0]])
    assert plan.flops == pytest.approx(256 * (drawn + (1 + 3) * policy + (1 + 3) * critic))


def test_flops_of_images_are_those_that_a_run_counts():
    """F2: each image once in generation, in scoring, and three times in training; of a frozen encoder once there."""
    from megarl.planning.vision import image_flops

    encoder, groups = read("grpo_shapes_quickstart")[2][Role.ACTOR].encoder, 32
    seen = groups * image_flops(encoder, [16.0])
    plans = [
        planned("grpo_shapes_quickstart", *more, hardware=TWO_CORES, assumed=[f"prompt_patches={patches}"])
        for patches in (16, 1e-9)
        for more in ([], ["model.freeze=[tower]"])
    ]
    learns, frozen, blind, _ = plans
    assert learns.flops - blind.flops == pytest.approx((1 + 3) * seen, rel=1e-6)
    assert frozen.flops - blind.flops == pytest.approx((1 + 1) * seen, rel=1e-6)
    first, second = (sum(part.seconds for phase in one.phases for part in phase.parts) for one in (learns, blind))
    assert first > second


def test_flops_are_those_of_lengths_that_vary():
    """F2: drawing, two passes of scoring, one of training. 4,000 lengths have their mean within 2%, and taking all of
    them as long as the mean would be 8% off."""
    keys = ["rollout.sampling.max_new_tokens=32768", "data.max_prompt_tokens=600"]
    plan = planned(BIG, *keys, assumed=["mean_tokens=8000"])
    config, _, sizes = read(BIG, *keys)
    counter = FlopCounter.of(sizes[Role.ACTOR])
    drawn = [float(one[0]) for one in Lengths(8000.0, 0.8, 32768).sample((0,), 4000, 1)]
    passes = sum(counter.forward([300 + length], head_tokens=length) for length in drawn) / len(drawn)
    decoded = sum(counter.generate([300.0], [[length]]) for length in drawn) / len(drawn)
    number = config.data.batch_size * config.rollout.sampling.n
    assert plan.flops == pytest.approx(number * (decoded + (1 + 3) * passes), rel=0.02)


def test_dynamic_sampling_draws_as_often_as_groups_are_dropped():
    every = planned("dapo_quickstart", hardware=TWO_CORES, assumed=["kept_groups=1"])
    half = planned("dapo_quickstart", hardware=TWO_CORES, assumed=["kept_groups=0.5"])
    assert half.seconds["rollout"] == pytest.approx(2 * every.seconds["rollout"])
    assert half.seconds["actor_train"] == every.seconds["actor_train"]


def test_replayed_groups_are_trained_but_not_generated():
    """With a share of one half a step trains on as many stored groups as new ones."""
    plain, replayed = (
        planned(BIG, "rollout_correction.preset=ppo_is_bypass", *keys) for keys in ([], ["data.replay={share: 0.5}"])
    )
    assert replayed.seconds["rollout"] == plain.seconds["rollout"]
    assert replayed.seconds["ref_logp"] == plain.seconds["ref_logp"]
    assert replayed.seconds["actor_train"] == pytest.approx(2 * plain.seconds["actor_train"], rel=0.1)
    config, _, sizes = read(BIG)
    samples = config.data.batch_size * config.rollout.sampling.n
    sample = FlopCounter.of(sizes[Role.ACTOR]).forward([plain.tokens / samples], head_tokens=0)
    assert replayed.flops - plain.flops > 3 * samples * sample


def test_a_cold_start_has_seconds_of_its_own():
    assert planned("grpo_quickstart", hardware=TWO_CORES).sft
    assert not planned("grpo_quickstart", "sft.steps=0", hardware=TWO_CORES).sft


def test_a_robot_is_refused():
    with pytest.raises(ConfigError, match="simulators"):
        planned("srpo_metaworld", hardware=TWO_CORES)


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="does not divide the workers"):
        planned(BIG, "actor.parallel.tp=3")


def test_more_devices_are_never_slower_at_equal_layout():
    plans = []
    for nodes in (1, 2, 4, 8, 16):
        overrides, hardware = cluster(nodes)
        plans.append(planned(BIG, *overrides, hardware=hardware))
    for phase in ("rollout", "ref_logp", "actor_train"):
        seconds = [plan.seconds[phase] for plan in plans]
        assert seconds == sorted(seconds, reverse=True), phase
    assert [plan.step_s for plan in plans] == sorted((plan.step_s for plan in plans), reverse=True)


def test_recomputing_takes_longer_and_needs_less():
    plans = [planned(BIG, f"actor.engine.recompute={mode}") for mode in ("none", "selective", "full")]
    seconds = [plan.seconds["actor_train"] for plan in plans]
    update = [plan.filled[0].bytes for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    assert update == sorted(update, reverse=True)
    assert update[0] > update[-1]


@pytest.mark.parametrize("name", ["memory_tb_s", "bf16_tflops", "node_gb_s", "host_gb_s"])
def test_better_hardware_is_faster(name):
    """Each of these rates is part of some phase of this recipe."""
    better = replace(H100, **{name: 2 * getattr(H100, name)})
    assert planned(BIG, hardware=better).step_s < planned(BIG).step_s


def test_longer_responses_take_longer():
    seconds = [planned(BIG, assumed=[f"mean_tokens={mean}"]).step_s for mean in (100, 200, 400, 800)]
    assert seconds == sorted(seconds)


def test_servers_have_what_the_recipe_gives_them():
    """K1: 0.6 of what half of the parameters (tp 2) leaves of 80 GB, less 16.4 GB of weights; 144 KiB of keys
    and values for each token of Qwen3-8B."""
    room = planned(BIG).room
    assert room.bytes == pytest.approx(0.6 * (80e9 - 8.191e9) - room.weights, rel=1e-4)
    assert room.weights == pytest.approx(2 * 8.19e9, rel=0.01)
    assert room.tokens == pytest.approx(room.bytes / (2 * 36 * 8 * 128 * 2))
    assert room.slots > 128  # as many as fit: nothing else bounds them
    assert planned(BIG, "rollout.sglang.max_concurrency=100").room.slots == 100


def test_a_cache_in_fp8_has_room_for_twice_the_tokens():
    plan, plain = planned(BIG, "rollout.sglang.kv_cache_dtype=fp8_e4m3"), planned(BIG)
    assert plan.room.tokens == pytest.approx(2 * plain.room.tokens)
    assert plan.seconds["rollout"] < plain.seconds["rollout"]


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_model_of_delta_nets_only_has_room_for_any_number_of_tokens(engine):
    recurrent = "model.hf_config={model_type: qwen3_5_text, num_hidden_layers: 2, full_attention_interval: 3}"
    plan = planned("grpo_quickstart", "model.hf_config=null", recurrent, f"rollout.engine={engine}", "cluster.nproc=8")
    assert plan.room.fits
    assert plan.room.slots >= 8


def test_a_small_cache_lets_fewer_samples_run():
    tight = planned(BIG, "rollout.sglang.memory_fraction=0.25")
    assert tight.room.slots < 128
    assert tight.seconds["rollout"] > planned(BIG).seconds["rollout"]


def test_a_cache_on_the_trainers_device_counts_there():
    plan = planned(BIG)
    drawing = next(one for one in plan.filled if one.moment.name == "generation")
    terms = {part.what: part.bytes for part in drawing.moment.terms}
    assert terms[SERVER_CACHE] == pytest.approx(plan.room.bytes)
    assert "actor parameters" not in terms  # they come back for the log-probs
    held = plan.room.weights + plan.room.bytes
    assert drawing.bytes - beside(drawing) == pytest.approx(held)


def beside(filled) -> float:
    """Bytes of buffers, contexts, graphs and connections, which come after a server has taken its share."""
    terms = filled.moment.terms
    return sum(
        t.bytes
        for t in terms
        if "context" in t.what or "graphs" in t.what or "new weights" in t.what or "NCCL" in t.what
    )


def test_servers_take_their_share_of_what_is_free_when_they_start():
    """What comes later, the first step's Adam moments for one, comes on top."""
    for share in (0.5, 0.95):
        drawing = drawn(f"rollout.sglang.memory_fraction={share}")
        assert drawing.bytes - beside(drawing) == pytest.approx(
            share * (80e9 - 8.191e9), rel=1e-4
        )  # the parameters leave then
    parts = "actor.engine.offload=[gradients, optimizer]"
    held = drawn("rollout.sglang.memory_fraction=0.5", parts)
    assert held.bytes - beside(held) > 0.5 * (80e9 - 8.191e9) + 8.191e9  # of actor, and of the reference
    stays = drawn("rollout.sglang.memory_fraction=0.5", "actor.engine.offload=false")
    held = {part.what: part.bytes for part in stays.moment.terms}
    others = sum(size for what, size in held.items() if what.startswith(("actor", "reference")))
    free = 80e9 - (others - held["actor optimizer"] * 8 / 12)
    assert stays.bytes - beside(stays) == pytest.approx(others + 0.5 * free, rel=1e-4)


def drawn(*overrides):
    return next(one for one in planned(BIG, *overrides).filled if one.moment.name == "generation")


def test_a_checkpoint_is_14_bytes_of_each_parameter():
    """C1: bf16 with fp32 masters and two moments."""
    size, seconds, _ = planned(BIG).checkpoint
    sizes = read(BIG)[2]
    assert size == 14 * sizes[Role.ACTOR].parameters
    assert seconds == pytest.approx(size / 2e9)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], 8),
        (["rollout.sglang.colocated=false"], 16),
        (["rollout.engine=embedded"], 8),
    ],
)
def test_servers_of_their_own_occupy_devices(overrides, devices):
    from megarl.dag.placement import place

    config, graph, _ = read(BIG, *overrides)
    assert occupied(config, place(graph, config)) == devices


@pytest.mark.parametrize("case", ["S", "M"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_measured_steps_of_the_benchmark_lie_within_a_fifth(case, dtype):
    """The machine of docs/performance.md, whose rates were measured right after each run. What is assumed of CPUs was
    fitted to these four. Case S has responses of up to 16 tokens, which end where the model ends them."""
    result = json.loads((BENCHMARKS / "results" / f"bench_{case}-{dtype}-2x-amd-epyc.json").read_text())
    hardware = replace(TWO_CORES, **{f"{dtype}_tflops": result["floor"]["gflops"] / 2e3})
    steps = result["steps"]
    generated = sum(step["generated_tokens"] for step in steps) / len(steps)
    # A mean that the cut at 16 tokens makes the measured one.
    assumed = ["prompt_tokens=6", *([f"mean_tokens={1.12 * generated / 256}", "sigma=0.45"] if case == "S" else [])]
    overrides = [f"model.dtype={dtype}", "cluster.nproc=2", "cluster.threads=1"]
    plan = planned(str(BENCHMARKS / "cases" / f"{case}.yaml"), *overrides, hardware=hardware, assumed=assumed)

    measured = {name: sum(step["phases"][name] for step in steps) / len(steps) for name in ("rollout", "actor_train")}
    assert plan.generated == pytest.approx(generated, rel=0.03)
    for name, seconds in measured.items():
        assert plan.seconds[name] == pytest.approx(seconds, rel=0.2), name
    assert plan.step_s == pytest.approx(sum(step["wall_s"] for step in steps) / len(steps), rel=0.2)


def test_parameters_that_leave_for_colocated_servers_are_copied_twice_a_step():
    """T11: 8.19 GB of half of Qwen3-8B, to host memory and back."""
    moved = [
        sum(cost.bytes for cost in planned(BIG, f"actor.engine.offload={parts}")["moves"].parts if "param" in cost.what)
        for parts in ("true", "[gradients, optimizer]")
    ]
    assert moved == [pytest.approx(2 * 8.191e9, rel=1e-3), 0.0]
