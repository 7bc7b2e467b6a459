"""Generation in real processes: the single process's tokens in every layout, dense and mixture of experts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.campaigns import chosen, split
from tests.dist import fresh_parallel, run_distributed, single_process
from tests.rollout.cases import (
    PROMPTS,
    STOP,
    build,
    engine,
    logprobs,
    make_requests,
    play_turns,
    requests_for,
    sampled,
    tokens,
)

DENSE, MOE, LATENT, IMAGES = "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_vl_moe"
FULL_NORM, BIASES, GEMMA, CAPPED = "olmo3", "granite", "gemma3_text", "gemma2"
SAMPLINGS = {
    "sampled": sampled(temperature=0.8, max_new_tokens=12),
    "filtered": sampled(top_k=20, top_p=0.9, min_p=0.02, min_new_tokens=3, max_new_tokens=5, logprobs="processed"),
    "greedy": sampled(temperature=0.0, max_new_tokens=8),
}
# name -> (model, layout); the data-parallel size is what is left of the processes
TWO = {
    "tp2": (DENSE, {"tp": 2}),
    "tp2-sp": (DENSE, {"tp": 2, "sp": True}),
    "pp2": (DENSE, {"pp": 2}),
    "pp2-vpp2": (DENSE, {"pp": 2, "vpp": 2}),
    "cp2": (DENSE, {"cp": 2}),
    "dp2": (DENSE, {}),
    "latent-tp2": (LATENT, {"tp": 2}),
    "latent-pp2": (LATENT, {"pp": 2}),
    "full-norm-tp2": (FULL_NORM, {"tp": 2}),
    "biases-tp2": (BIASES, {"tp": 2}),
    "gemma-pp2": (GEMMA, {"pp": 2}),
    "caps-tp2": (CAPPED, {"tp": 2}),
    "moe-ep2": (MOE, {"ep": 2}),
    "moe-tp2": (MOE, {"tp": 2}),
    "moe-tp2-ep2-sp": (MOE, {"tp": 2, "ep": 2, "sp": True}),
    "moe-cp2-ep2": (MOE, {"cp": 2, "ep": 2}),
    "moe-pp2": (MOE, {"pp": 2}),
    "moe-pp2-vpp2": (MOE, {"pp": 2, "vpp": 2}),
    "images-ep2": (IMAGES, {"ep": 2}),
    "images-tp2-ep2-sp": (IMAGES, {"tp": 2, "ep": 2, "sp": True}),
}
FOUR = {
    "tp2-pp2": (DENSE, {"tp": 2, "pp": 2}),
    "tp2-cp2": (DENSE, {"tp": 2, "cp": 2}),
    "tp2-dp2": (DENSE, {"tp": 2}),
    "tp2-pp2-vpp2-sp": (DENSE, {"tp": 2, "pp": 2, "vpp": 2, "sp": True}),
    "moe-dp2-ep2": (MOE, {"ep": 2}),
    "moe-pp2-ep2": (MOE, {"pp": 2, "ep": 2}),
    "moe-tp2-ep2": (MOE, {"tp": 2, "ep": 2}),
    "moe-tp2-ep2-etp2": (MOE, {"tp": 2, "ep": 2, "etp": 2}),
    "moe-tp2-pp2": (MOE, {"tp": 2, "pp": 2}),
}
THOROUGH = ("tp2", "pp2", "moe-ep2")  # greedy and filtered, too
# Every way of splitting a model, and every kind of layer that a split concerns; others combine the same parts.
KEPT = (
    *("tp2", "pp2-vpp2", "cp2", "dp2", "latent-tp2", "full-norm-tp2", "moe-ep2", "moe-tp2-ep2-sp", "moe-pp2"),
    *("tp2-pp2-vpp2-sp", "moe-tp2-ep2-etp2"),
)
TIED = {"tie_word_embeddings": True}


def depth(layout: dict) -> int:
    """As few layers as the layout can cut."""
    return 4 if "vpp" in layout else 2


def generate(model: str, layout: dict, sampling: str, layers: int, **hf: Any) -> list:
    """This replica's (tokens, log-probs) per request: data-parallel rank r works on requests r, r + dp, ..."""
    fresh_parallel(**{key: value for key, value in layout.items() if key != "sp"})
    from megatron.core import parallel_state as mpu

    chunks = build(model, hf={"num_hidden_layers": layers, **hf}, **layout)
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    mine = list(enumerate(requests_for(chunks[0].hf_config)))[rank::size]
    made = engine(chunks, max_running=7, replay_routes=model in (MOE, IMAGES), replay_kept_tokens=True)
    results = made.generate([r for _, r in mine], SAMPLINGS[sampling], STOP)
    return [
        [i, tokens([group]) + routes_of(group) + kept_by(group), logprobs([group])]
        for (i, _), group in zip(mine, results, strict=True)
    ]


def kept_by(group: list) -> list:
    """The tokens that the filters kept for each token, in ascending order, of samples that have some."""
    return [done.kept_tokens.padded().sort(-1).values.tolist() for done in group if done.kept_tokens is not None]


def routes_of(group: list) -> list:
    """The experts of each token and layer, in ascending order, of samples that have some."""
    return [done.routes.unflatten(1, (-1, 2)).sort(-1).values.tolist() for done in group if done.routes is not None]


def turns(model: str, layout: dict) -> list:
    """This replica's share of PROMPTS, played in turns: (number, tokens of the turns, their log-probs)."""
    fresh_parallel(**{key: value for key, value in layout.items() if key != "sp"})
    from megatron.core import parallel_state as mpu

    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    mine = {number: prompt for number, prompt in PROMPTS.items() if number % size == rank}
    chunks = build(model, hf={"num_hidden_layers": depth(layout)}, **layout)
    played = play_turns(engine(chunks, max_running=3), mine)
    return [
        [number, [t[1] for t in done], torch.tensor([x for t in done for x in t[2]])] for number, done in played.items()
    ]


def every_layout(layouts: dict) -> dict:
    """Results of all layouts, one after the other, in the processes that call this together."""
    results = {}
    for name, (model, layout) in layouts.items():
        samplings, layers = SAMPLINGS if name in THOROUGH else ("sampled",), depth(layout)
        results[name] = {sampling: generate(model, layout, sampling, layers) for sampling in samplings}
        if name in ("tp2", "pp2", "pp2-vpp2"):
            results[name]["tied"] = generate(model, layout, "sampled", layers, **TIED)
        if name in ("tp2", "pp2", "cp2", "moe-ep2", "latent-tp2"):
            results[name]["turns"] = turns(model, layout)
    return results


@functools.cache
def expected(model: str, layers: int, sampling: str) -> list:
    """What one process generates."""
    single_process()
    if sampling == "turns":
        return turns(model, {})
    if sampling == "tied":
        return generate(model, {}, "sampled", layers, **TIED)
    return generate(model, {}, sampling, layers)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict]:
    return run_distributed(every_layout, 2, 400, {name: TWO[name] for name in chosen(request, "of_two")})


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> list[dict]:
    return run_distributed(every_layout, 4, 500, {name: FOUR[name] for name in chosen(request, "of_four")})


def check(ranks: list[dict], name: str, model: str, layout: dict) -> None:
    layers = depth(layout)
    for sampling in ranks[0][name]:
        seen, wanted = set(), expected(model, layers, sampling)
        for rank in ranks:
            for number, toks, logps in rank[name][sampling]:
                _, want_tokens, want_logps = wanted[number]
                assert toks == want_tokens, f"{name}, {sampling}, request {number}"
                torch.testing.assert_close(logps, want_logps, rtol=0, atol=1e-5)
                seen.add(number)
        assert seen == set(range(len(wanted)))


@pytest.mark.procs
@pytest.mark.parametrize("of_two", split("teams", TWO, KEPT))
def test_two_processes_generate_what_one_does(of_two, two):
    check(two, of_two, *TWO[of_two])


@pytest.mark.procs
@pytest.mark.parametrize("of_four", split("teams", FOUR, KEPT))
def test_four_processes_generate_what_one_does(of_four, four):
    check(four, of_four, *FOUR[of_four])


def unequal_work() -> list:
    """Two replicas share experts; the second has nothing to generate, then less than the first."""
    import torch.distributed as dist

    fresh_parallel(ep=2)
    generator = engine(build(MOE, hf={"num_hidden_layers": 2}, ep=2))
    requests = make_requests()
    one = generator.generate(requests[:2] if dist.get_rank() == 0 else [], SAMPLINGS["sampled"], STOP)
    two = generator.generate(requests[2:4] if dist.get_rank() == 0 else requests[4:], SAMPLINGS["sampled"], STOP)
    return [tokens(one), tokens(two)]


@pytest.mark.procs
def test_replicas_that_share_experts_may_have_unequal_work():
    first, second = run_distributed(unequal_work, 2, 200)
    want = [toks for _, toks, _ in expected(MOE, 2, "sampled")]
    assert [first[0], first[1]] == [[w[0] for w in want[:2]], [w[0] for w in want[2:4]]]
    assert [second[0], second[1]] == [[], [w[0] for w in want[4:]]]
