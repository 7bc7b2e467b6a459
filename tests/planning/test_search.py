"""The search: it finds what comparing everything finds, what it finds fits, and it is quick."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from megarl.checks.planned import refuse_lengths, refuse_plan, refuse_simulated
from megarl.dag.placement import place
from megarl.dag.stage import Role
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.candidates import RECOMPUTE, Choice
from megarl.planning.hardware import KINDS
from megarl.planning.search import Search
from megarl.planning.step import occupied, plan_step
from megarl.system.errors import ConfigError
from tests.checks.conftest import check_config
from tests.models.tiny import tiny_dict
from tests.planning.planned import H100, TWO_CORES, read

BIG = "grpo_qwen3_8b_8gpu"
LARGEST = "grpo_qwen3_30b_a3b_32gpu"
AHEAD = "grpo_async_qwen3_8b_32gpu"
#: A tiny model with a draft head.
DRAFTING = (
    "model.path=null",
    f"model.hf_config={json.dumps(tiny_dict('glm4_moe') | {'max_position_embeddings': 2048})}",
)
FOUR = replace(H100, per_node=4)
#: Cases with other sizes than those of the suite; each compares hundreds of layouts.
MORE = pytest.mark.campaign("teams")


def search(name, *overrides, hardware=H100, **given):
    config, graph, sizes = read(name, *overrides)
    return Search(config, graph, sizes, hardware, replace(PlanAssumptions.of(gpu=hardware.gpu), **given))


def choices(space):
    """Every choice, whether or not it fits into memory."""
    for spread in space.spreads():
        for parallel in space.layouts(spread):
            for tokens, offload in space.budgets(spread):
                for recompute in RECOMPUTE:
                    yield Choice(spread, parallel, tokens, recompute, offload)


def timed(asked, choice):
    """Seconds of a step of one choice, with the cache that its servers have room for; None: it does not fit."""
    config = choice.apply(asked._config, asked._hardware, asked.space.trains)
    fraction = asked._fraction(asked._formulas(config, place(asked._graph, config)))
    if fraction == 0:
        return None
    config = replace(choice, memory_fraction=fraction).apply_engine(config, asked.space.trains)
    formulas = asked._formulas(config, place(asked._graph, config))
    return formulas.step_seconds() if asked._fits(choice, formulas) else None


@pytest.mark.parametrize(
    ("name", "overrides", "hardware"),
    [
        (BIG, [], FOUR),
        pytest.param(
            BIG, ["rollout.sampling.max_new_tokens=16384", "actor.engine.micro_batch_tokens=32768"], FOUR, marks=MORE
        ),
        (BIG, ["rollout.engine=embedded"], FOUR),
        ("grpo_quickstart", [], TWO_CORES),
        pytest.param("grpo_async_quickstart", ["model.dtype=bf16"], FOUR, marks=MORE),
    ],
    ids=["servers", "long", "embedded", "cpu", "ahead"],
)
def test_the_best_is_the_best_of_all(name, overrides, hardware):
    """Every choice is timed and held against memory by itself."""
    asked, every = search(name, *overrides, hardware=hardware), []
    for choice in choices(asked.space):
        asked._memo.clear()  # nothing of other layouts
        every += [seconds for seconds in [timed(asked, choice)] if seconds is not None]

    best = search(name, *overrides, hardware=hardware).run(3).best

    assert best[0].plan.step_s == pytest.approx(min(every))
    assert [one.plan.step_s for one in best] == sorted(one.plan.step_s for one in best)


@pytest.mark.parametrize(("name", "nodes"), [(BIG, 1), pytest.param(BIG, 4, marks=MORE), (LARGEST, 4)])
def test_what_it_finds_fits_divides_and_takes_all_devices(name, nodes):
    hardware = replace(H100, nodes=nodes)
    for found in search(name, hardware=hardware).run(5).best:
        assert found.plan.fullest.bytes <= 0.9 * 80e9
        graph = read(name)[1]
        assert occupied(found.config, place(graph, found.config)) == hardware.devices
        failed = [check.message for check in check_config(found.config).items if check.status == "fail"]
        assert failed == []


@pytest.mark.parametrize("overrides", [[], ["rollout.engine=embedded"]], ids=["servers", "embedded"])
def test_a_plan_of_what_it_finds_says_the_same(overrides):
    """Nothing of the search's memory of other layouts is in its numbers."""
    _, graph, sizes = read(BIG, *overrides)
    for best in search(BIG, *overrides).run(20).best:
        assert plan_step(best.config, graph, sizes, H100).step_s == pytest.approx(best.plan.step_s)


def test_less_memory_is_never_faster():
    seconds = [search(BIG, usable_memory=share).run(1).best[0].plan.step_s for share in (0.95, 0.7, 0.5)]
    assert seconds == sorted(seconds)


def test_no_layout_is_below_the_floor_of_its_placement():
    """S4 leaves out placements and layouts, so that it must not be above what any of them takes."""
    asked = search(BIG)
    for best in search(BIG).run(100).best:
        choice = replace(best.choice, recompute=RECOMPUTE[0])
        config = choice.apply(asked._config, H100, asked.space.trains)
        least = asked._least_seconds(choice, asked._formulas(config, place(asked._graph, config)))
        assert asked.floor(best.choice.spread) <= least <= best.plan.step_s


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(LARGEST, ["data.batch_size=1024", "actor.mini_batch_size=1024"], marks=MORE),
        (BIG, ["data.batch_size=1024", "actor.mini_batch_size=512"]),
    ],
)
def test_1024_devices_take_seconds(name, overrides):
    """1 CPU-second on a quiet machine; other programs and slower ones make it more, so that 30 are allowed."""
    hardware = replace(KINDS["h100"], nodes=128)
    before = time.process_time()
    result = search(name, *overrides, hardware=hardware).run()
    assert time.process_time() - before < 30
    assert result.compared > 100
    assert result.best[0].plan.devices == 1024


def test_where_nothing_fits_the_largest_and_what_would_help_are_named():
    small = replace(H100, per_node=2, memory_gb=40.0)
    with pytest.raises(ConfigError, match=r"none of \d+ layouts fits") as caught:
        search(BIG, hardware=small).run()
    assert "optimizer" in str(caught.value)
    assert "more devices" in str(caught.value)


def test_where_activations_are_what_does_not_fit_their_keys_are_named():
    long = ["rollout.sampling.max_new_tokens=39000", "actor.engine.micro_batch_tokens=4000000"]
    with pytest.raises(ConfigError) as caught:
        search(BIG, *long, hardware=replace(H100, per_node=4, memory_gb=70.0)).run()
    assert "micro_batch_tokens" in str(caught.value) or "max_new_tokens" in str(caught.value)


def test_where_servers_may_not_hold_a_sample_their_keys_are_named():
    with pytest.raises(ConfigError, match="max_total_tokens"):
        search(BIG, "rollout.sglang.max_total_tokens=100", hardware=FOUR).run()


def test_where_nothing_divides_the_sizes_are_named():
    keys = ["data.batch_size=1", "actor.mini_batch_size=1", "rollout.engine=embedded"]
    with pytest.raises(ConfigError, match=r"data\.batch_size=1"):
        search(BIG, *keys, hardware=replace(H100, per_node=5)).run()


def test_servers_of_a_team_that_draws_are_on_the_devices_of_its_workers_where_there_are_several_machines():
    ahead = ["async.max_staleness=1", "rollout.sglang.colocated=false"]
    ahead.append(
        "placement.teams={train: {roles: [actor, reference], devices: 7}, draw: {roles: [rollout], devices: 1}}"
    )
    wide = search(BIG, *ahead, hardware=replace(H100, nodes=2))
    for spread in wide.space.spreads():
        (_, _, trains), (_, _, draws) = spread.teams
        assert spread.servers * spread.tp_size == draws
        assert spread.workers == trains + draws == 16
    graph = read(BIG, *ahead)[1]
    for best in wide.run(5).best:
        assert occupied(best.config, place(graph, best.config)) == best.plan.devices == 16
        failed = [check.message for check in check_config(best.config).items if check.status == "fail"]
        assert failed == []

    best = search(BIG, *ahead).run(1).best[0]
    assert [name for name, *_ in best.choice.spread.teams] == ["train", "draw"]
    assert best.plan.devices == 8


@pytest.mark.parametrize(
    ("nodes", "per_node"), [(1, 8), pytest.param(1, 4, marks=MORE), (3, 8), pytest.param(5, 8, marks=MORE)]
)
def test_what_it_finds_for_teams_fits_divides_and_takes_all_devices(nodes, per_node):
    hardware, graph = replace(H100, per_node=per_node, nodes=nodes), read(AHEAD)[1]
    for found in search(AHEAD, hardware=hardware).run(5).best:
        assert occupied(found.config, place(graph, found.config)) == hardware.devices
        failed = [check.message for check in check_config(found.config).items if check.status == "fail"]
        assert failed == []


def test_whole_machines_may_draw_and_so_may_what_the_recipe_has():
    draws = {spread.teams[1][2] for spread in search(AHEAD, hardware=replace(H100, nodes=5)).space.spreads()}
    assert draws == {5, 8, 10, 15, 16, 20, 24, 25, 30, 32, 35}
    teams = "placement.teams={train: {roles: [actor, reference], devices: 26}, draw: {roles: [rollout], devices: 6}}"
    draws = {spread.teams[1][2] for spread in search(AHEAD, teams, hardware=replace(H100, nodes=4)).space.spreads()}
    assert 6 in draws


def test_sizes_of_the_actor_have_the_draft_head_that_a_run_trains():
    plain, drafting = (search(BIG, *DRAFTING, *more) for more in ((), ("actor.mtp={}",)))
    actor, rollout = drafting._sizes[Role.ACTOR], drafting._sizes[Role.ROLLOUT]
    assert rollout == plain._sizes[Role.ACTOR]
    assert actor.parameters == rollout.parameters + rollout.draft_parameters


def test_plans_of_draft_heads_that_cannot_be_trained_are_refused():
    for refuse in (refuse_plan, refuse_lengths):
        with pytest.raises(ConfigError, match="no draft head"):
            refuse(*read(BIG, "actor.mtp={}")[:2])


def test_plans_of_critics_that_cannot_share_prefixes_are_refused():
    with pytest.raises(ConfigError, match=r"critic\.engine\.share_prefixes"):
        refuse_plan(*read(BIG, "critic.engine.share_prefixes=true", "critic.parallel={cp: 2}")[:2])
    with pytest.raises(ConfigError, match=r"critic\.engine\.share_prefixes"):
        refuse_simulated(*read(BIG, "critic.engine.share_prefixes=true", "critic.parallel={cp: 2}")[:2])


@pytest.mark.parametrize("role", [None, "actor", "critic"])
def test_models_that_share_prefixes_have_no_context_parallelism(role):
    keys = [] if role is None else [f"{role}.engine.share_prefixes=true"]
    space = search(BIG, "rollout.sampling.max_new_tokens=32768", *keys).space
    contexts = {one.cp for spread in space.spreads() for one in space.layouts(spread)}
    assert (contexts == {1}) == (role is not None)


def test_layouts_share_out_every_batch_that_a_run_trains_on():
    """24 prompts, mini-batches of 12, examples of 20 in the cold start: the largest number of replicas is 4."""
    keys = ["data.batch_size=24", "actor.mini_batch_size=12", "sft.steps=1", "sft.batch_size=20"]
    space = search(BIG, *keys, hardware=replace(H100, nodes=2)).space
    for spread in space.spreads():
        replicas = {spread.trainers() // one.model_parallel_size for one in space.layouts(spread)}
        assert replicas <= {1, 2, 4}


def test_stages_with_the_head_may_have_fewer_layers_and_parameters_may_stay_beside_servers():
    """Qwen3-8B: the head is 622 million parameters, as many as 3.2 of 36 layers; 10, 10, 10 and 6 take 10 and 9.2."""
    space = search(BIG).space
    (spread,) = [spread for spread in space.spreads() if spread.colocated][:1]
    last = {(one.pp, one.last_stage_layers) for one in space.layouts(spread) if one.tp == one.cp == 1}
    assert {(2, None), (2, 16), (4, None), (4, 6)} <= last
    assert {offload for _, offload in space.budgets(spread)} == {False, True, ("gradients", "optimizer")}
