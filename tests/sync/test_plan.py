"""The plan is data: what arrives at the servers is counted element by element."""

import pytest
import torch

from megarl.benchmarks.sync.deepseek import deepseek_v3
from megarl.models.weight_table import WeightTable
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.plan import SLAB_BYTES, TrainerRank, holdings, make_plan
from tests.models.tiny import ARCHITECTURES
from tests.sync.layouts import HERE, config, ranks_of, trainer

LAYOUTS = {
    "one": {},
    "tp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "tp2 pp2": {"tp": 2, "etp": 2, "pp": 2},
    "dp2": {"dp": 2},
    "dp4 tp2": {"dp": 4, "tp": 2, "etp": 2},
}
MOE = {
    "ep2": {"ep": 2, "dp": 2},
    "ep2 dp4": {"ep": 2, "dp": 4},
    "tp2 ep4": {"tp": 2, "ep": 4, "dp": 2},
    "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2, "dp": 2},
    "pp2 ep2": {"pp": 2, "ep": 2, "dp": 2},
}
CASES = [(name, layout) for name in ARCHITECTURES for layout in LAYOUTS]
CASES += [(name, layout) for name in ("qwen3_moe", "mixtral") for layout in MOE]
BUCKETS: list[dict] = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "fp8": True}, {"dtype": "float32"}]


def spread(values: list) -> list:
    """Parameters (name, layout, value): one value, in turn, of every third case, so that each name and each layout has
    some, and of every layout of experts; the others are for the campaign."""
    marks = pytest.mark.campaign("families")
    return [
        (*case, value) if chosen else pytest.param(*case, value, marks=marks)
        for number, case in enumerate(CASES)
        for place, value in enumerate(values)
        for turn, rest in [(number, 0) if case[1] in MOE else divmod(number, 3)]
        for chosen in [rest == 0 and (turn - place) % len(values) == 0]
    ]


def planned(name: str, layout: str, servers: int = 3, tied: bool = False, **settings):
    hf = config(name, tie_word_embeddings=tied)
    ranks = trainer(**(LAYOUTS | MOE)[layout])
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks), [HERE] * servers, **settings)
    return hf, ranks, plan


@pytest.mark.parametrize(("name", "layout", "tied"), spread([False, True]))
def test_every_server_gets_every_element_once(name, layout, tied):
    hf, ranks, plan = planned(name, layout, tied=tied, bucket_bytes=SLAB_BYTES + 40_000)
    held = [{(p.source, p.source_region) for s in WeightTable.of(hf).shards(at) for p in s.pieces} for at in ranks]
    for server in range(3):
        (route,) = (route for route in plan.routes if server in route.receivers)
        sent = [e.name for buckets in route.senders.values() for b in buckets for e in b.entries]
        assert sorted(sent) == sorted(WeightTable.of(hf).shapes())
        for tensor, shape in WeightTable.of(hf).shapes().items():
            seen = torch.zeros(shape, dtype=torch.int32)
            for region, giver in route.givers[tensor]:
                assert (tensor, region) in held[giver]
                seen[tuple(slice(*span) for span in region)] += 1
            assert seen.min() == seen.max() == 1, tensor


@pytest.mark.parametrize(("name", "layout", "settings"), spread(BUCKETS))
def test_buckets_are_bounded_packed_and_aligned(name, layout, settings):
    _, _, plan = planned(name, layout, bucket_bytes=SLAB_BYTES + 40_000, **settings)
    for route in plan.routes:
        for bucket in (b for buckets in route.senders.values() for b in buckets):
            assert bucket.nbytes <= 40_000 or len(bucket.sources()) == 1
            end = 0
            for entry in bucket.entries:
                size = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[entry.dtype]
                assert entry.offset == end
                assert entry.offset % size == 0
                end += entry.nbytes
            assert end == bucket.nbytes


@pytest.mark.parametrize(("vocabulary", "tied", "large"), [(4000, False, 2), (4000, True, 1), (131, True, 0)])
@pytest.mark.parametrize("bound", [40_000, 100_000, 400_000])
def test_of_two_buffers_only_the_first_is_as_large_as_the_embedding(vocabulary, tied, large, bound):
    hf, ranks = config("qwen3", vocab_size=vocabulary, tie_word_embeddings=tied), trainer()
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks), [HERE], bucket_bytes=SLAB_BYTES + bound)
    sizes = [bucket.nbytes for bucket in plan.routes[0].senders[0]]
    assert sum(size > bound for size in sizes) == large
    assert max(sizes[1::2], default=0) <= bound
    assert len(sizes) <= 2 * large + 1 or sizes[0] <= bound


def test_replicas_share_the_servers_out():
    _, _, plan = planned("qwen3", "dp4 tp2", servers=6)
    assert [route.receivers for route in plan.routes] == [(0, 4), (1, 5), (2,), (3,)]
    assert [set(route.senders) for route in plan.routes] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_senders_of_a_replica_are_balanced():
    hf = config("llama", num_hidden_layers=16, num_key_value_heads=4)
    ranks = trainer(tp=4, pp=2)
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks), [HERE])
    (route,) = plan.routes
    sizes = [sum(bucket.nbytes for bucket in buckets) for buckets in route.senders.values()]
    assert len(sizes) == 8
    assert max(sizes) < 1.1 * sum(sizes) / 8


def test_one_sender_per_stage_when_asked():
    _, ranks, plan = planned("qwen3_moe", "pp2 ep2", servers=1, senders_per_stage=1)
    assert [ranks[sender].pp_rank for sender in plan.routes[0].senders] == [0, 1]


def test_senders_on_the_host_of_their_server():
    hf, ranks = config("qwen3"), trainer(pp=2)
    plan = make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks, ["a", "b"]), ["a", "b"], same_host=True)
    assert [(route.receivers, set(route.senders)) for route in plan.routes] == [((0,), {0}), ((1,), {1})]
    with pytest.raises(ValueError, match="'c'"):
        make_plan(holdings(WeightTable.of(hf), ranks), ranks_of(ranks, ["a", "b"]), ["c"], same_host=True)


def routes_of(layout: dict, gpus: list[list[str]], machines: int = 1) -> list[tuple[set[int], tuple[int, ...]]]:
    """(senders, receivers) of every route, where rank r has the r-th GPU and 8 ranks are on a machine."""
    hf = config("qwen3_moe") if "ep" in layout else config("llama", num_key_value_heads=4)
    at = trainer(**layout)
    ranks = [TrainerRank(c.pp_rank, f"m{r // 8}", str(r % 8)) for r, c in enumerate(at)]
    each = len(gpus) // machines
    hosts = [f"m{number // each}" for number in range(len(gpus))]
    plan = make_plan(holdings(WeightTable.of(hf), at), ranks, hosts, same_host=True, gpus=gpus)
    return [(set(route.senders), route.receivers) for route in plan.routes]


def test_colocated_servers_are_fed_by_ranks_on_their_gpus():
    one_each = [[str(gpu)] for gpu in range(8)]
    assert routes_of({"tp": 2, "dp": 4}, one_each) == [({2 * r, 2 * r + 1}, (2 * r, 2 * r + 1)) for r in range(4)]
    pairs = [[str(2 * s), str(2 * s + 1)] for s in range(4)]
    assert routes_of({"tp": 2, "dp": 4}, pairs) == [({2 * r, 2 * r + 1}, (r,)) for r in range(4)]
    # Stages of a replica are half a machine apart.
    assert routes_of({"tp": 2, "pp": 2, "dp": 2}, one_each) == [
        ({0, 1, 4, 5}, (0, 1, 4, 5)),
        ({2, 3, 6, 7}, (2, 3, 6, 7)),
    ]
    fours = [[str(4 * half + gpu) for gpu in range(4)] for half in (0, 1)] * 2
    assert routes_of({"tp": 4, "dp": 4}, fours, machines=2) == [(set(range(4 * r, 4 * r + 4)), (r,)) for r in range(4)]
    assert routes_of({"dp": 8, "ep": 2}, one_each) == [({2 * r, 2 * r + 1}, (2 * r, 2 * r + 1)) for r in range(4)]


def test_servers_whose_gpus_are_not_the_trainers_are_dealt_out():
    layout = {"tp": 2, "dp": 2}
    expected = [({0, 1}, (0, 2)), ({2, 3}, (1, 3))]
    assert routes_of(layout, [[]] * 4) == routes_of(layout, [["4"], ["5"], ["6"], ["7"]]) == expected
    assert routes_of(layout, [["3"], [], [], []]) == [({0, 1}, (1, 2)), ({2, 3}, (0, 3))]


def test_experts_go_to_the_ranks_that_own_them():
    hf = config("qwen3_moe")
    spread, whole = ServerLayout.of(hf, tp=4, ep=2), ServerLayout.of(hf, tp=2)
    for name in WeightTable.of(hf).shapes():
        needing = [spread.needs(rank, name) for rank in range(4)]
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            assert needing == [expert < 2, expert < 2, expert >= 2, expert >= 2]
        else:
            assert all(needing)
        assert whole.needs(0, name)


def test_fp8_sends_projections_and_their_scales():
    hf, _, plan = planned("qwen3_moe", "one", servers=1, fp8=True)
    by_name = {e.name: e for b in plan.routes[0].senders[0] for e in b.entries}
    assert by_name["model.layers.0.mlp.experts.3.down_proj.weight"].dtype == "float8_e4m3fn"
    assert by_name["model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"].shape == (1, 1)
    for plain in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert by_name[plain].dtype == "bfloat16"
    assert {e.source for e in by_name.values()} == set(WeightTable.of(hf).shapes())


def test_a_671b_model_from_1024_ranks_to_32_servers():
    tensors, ranks = deepseek_v3(pp=16, ep=64)
    assert 670e9 < sum(torch.Size(held.shape).numel() for held in tensors.values()) < 673e9
    plan = make_plan(tensors, ranks, [HERE] * 32, bucket_bytes=1 << 30)
    (route,) = plan.routes
    assert len(route.senders) == 1024
    assert sum(len(b.entries) for buckets in route.senders.values() for b in buckets) == len(tensors)
    assert route.receivers == tuple(range(32))
