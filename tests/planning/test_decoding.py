"""Seconds of generation, against numbers worked out by hand and against batches that are walked token by token."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest

from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.decoding import Decoder
from megarl.planning.lengths import Lengths
from megarl.planning.passes import total
from megarl.planning.workload import Workload
from tests.planning.planned import H100, IDEAL
from tests.planning.test_passes import DENSE, EXPERTS


def decoder(facts=DENSE, given=IDEAL, tp=1, pp=1, ep=1, hardware=H100, etp=0, vpp=1, attention_dp=1):
    return Decoder(facts, "bf16", tp, pp, ep, hardware, given, etp, vpp, attention_dp=attention_dp)


def test_a_step_reads_weights_and_caches():
    """G2: 2 bytes of each parameter; 2 x 8 layers x 8 heads x 64 x 2 bytes of keys and values for each token."""
    seconds, read = decoder().step(4, 1000)
    assert read == pytest.approx(2 * DENSE.parameters + 4 * 1000 * 2 * 8 * 8 * 64 * 2)
    assert seconds == pytest.approx(read / 3.35e12)


def test_a_large_batch_is_bound_by_its_products():
    """G2: 50,000 samples with a context of one token, whose keys and values are read after that."""
    seconds, _ = decoder().step(50_000, 1)
    products, caches = 2 * DENSE.computing_parameters / 989e12, 2 * 8 * 8 * 64 * 2 / 3.35e12
    assert seconds == pytest.approx(50_000 * (products + caches))


def test_ranks_share_weights_and_copy_heads():
    """Eight key/value heads on 16 ranks: each rank has one of them, as on 8."""
    assert decoder(tp=2).key_bytes == decoder().key_bytes / 2
    assert decoder(tp=16).key_bytes == decoder(tp=8).key_bytes


def test_a_group_of_ranks_reads_the_attention_and_its_own_samples():
    """G2: of 4 ranks in 2 groups each reads half of the attention and of the heads of half of the samples."""
    attention = 2 * DENSE.parameters_of["attention"]
    rest, caches = 2 * DENSE.parameters - attention, 1000 * 2 * 8 * 8 * 64 * 2
    assert decoder(tp=4, attention_dp=2).step(8, 1000)[1] == pytest.approx(rest / 4 + attention / 2 + caches / 2 * 4)
    assert decoder(tp=4).step(8, 1000)[1] == pytest.approx((rest + attention) / 4 + caches / 4 * 8)


def test_a_tied_head_is_divided_among_the_ranks_of_a_group_only():
    """G2: of 4 ranks in 2 groups, each reads and multiplies half of the rows of a tied head; Qwen3.5's has all rows."""
    head = 2 * DENSE.hidden * DENSE.dimensions["vocab"]
    for tied, model_type, share in ((False, "qwen3", 1 / 4), (True, "qwen3", 1 / 2), (True, "qwen3_5_text", 1)):
        facts = replace(DENSE, tied=tied, model_type=model_type)
        near = replace(H100, node_gb_s=1e15)  # so that only products and reads take time
        groups, plain = (decoder(facts, tp=4, hardware=near, attention_dp=count) for count in (2, 1))
        attention = 2 * facts.parameters_of["attention"]
        assert groups.step(8, 0)[1] - plain.step(8, 0)[1] == pytest.approx(attention / 4 + head * (share - 1 / 4))
        products = groups.step(1e6, 0)[0] - plain.step(1e6, 0)[0]
        assert products == pytest.approx(1e6 * head * (share - 1 / 4) / 989e12)


def test_groups_exchange_rows_once_per_layer():
    """G2: 2 all-reduces per layer among 4 ranks become one, and one of half the rows among the 2 ranks of a group."""
    slow = replace(H100, node_gb_s=1.0)
    rows = 8 * DENSE.hidden * 2 / 1e9

    def meets(**sizes):
        return decoder(hardware=slow, **sizes).step(8, 1)[0] - decoder(**sizes).step(8, 1)[0]

    fast = 1 / H100.node_gb_s
    assert meets(tp=4) == pytest.approx(DENSE.layers * 2 * 2 * 3 / 4 * rows * (1 - fast))
    assert meets(tp=4, attention_dp=2) == pytest.approx(DENSE.layers * (2 * 3 / 4 + 2 * 1 / 2 / 2) * rows * (1 - fast))
    assert meets(tp=4, attention_dp=4) == pytest.approx(DENSE.layers * 2 * 3 / 4 * rows * (1 - fast))


def test_few_samples_meet_few_experts():
    """Of 32 experts a token meets 4: one sample reads 1/8 of them, many read all."""
    every = 2 * EXPERTS.parameters_of["experts"]
    rest = 2 * EXPERTS.parameters - every
    assert decoder(EXPERTS).step(1, 0)[1] == pytest.approx(rest + every / 8)
    assert decoder(EXPERTS).step(4096, 0)[1] == pytest.approx(rest + every)


def test_a_prompt_is_read_once_for_all_its_samples():
    lengths = Lengths(100.0, 0.0, 100)
    parts = [decoder().generate(Workload(8, n, 500.0, lengths), 2, 64) for n in (1, 4)]
    first, second = (next(part for part in found if part.formula == "G1") for found in parts)
    assert first.seconds == second.seconds


def walked(lengths, prompt, number, slots, seed):
    """Seconds of a batch in which a sample that ends makes room for the next one, token by token."""
    waiting = [length for group in lengths.sample((seed,), 1, number) for length in group]
    one, at, now, running = decoder(given=PlanAssumptions()), 0.0, 0, []
    while waiting or running:
        while waiting and len(running) < slots:
            heapq.heappush(running, (now + waiting.pop(), now))
        steps = max(1, running[0][0] - now)
        context = prompt + sum(now - begun for _, begun in running) / len(running) + steps / 2
        at += steps * one.step(len(running), context)[0]
        now += steps
        while running and running[0][0] <= now:
            heapq.heappop(running)
    return at


@pytest.mark.parametrize(
    ("lengths", "number", "slots"),
    [
        (Lengths(200.0, 0.0, 200), 64, 64),
        (Lengths(300.0, 0.6, 2048), 64, 64),
        (Lengths(300.0, 0.8, 1024), 512, 64),
        (Lengths(100.0, 1.0, 4096), 256, 128),
        (Lengths(2000.0, 1.0, 16384), 512, 32),
    ],
)
def test_decoding_takes_what_a_walk_takes(lengths, number, slots):
    """G3 is a mean over batches: 20 of them, within a tenth; the longest sample of a batch varies by more."""
    walks = [walked(lengths, 200.0, number, slots, seed) for seed in range(20)]
    found = decoder(given=PlanAssumptions()).generate(Workload(number, 1, 200.0, lengths), 1, slots)
    decoding = next(part for part in found if part.formula == "G3")
    assert decoding.seconds == pytest.approx(sum(walks) / len(walks), rel=0.1)


def test_samples_that_follow_at_once_leave_no_slot_idle():
    work = Workload(256, 1, 200.0, Lengths(300.0, 0.8, 1024))
    one = decoder(given=PlanAssumptions())
    assert total(one.generate(work, 1, 64, flows=True)) < total(one.generate(work, 1, 64))


def test_places_that_are_always_taken_hold_long_samples_for_longer():
    """G3: a sample of n tokens reads keys and values of n prompts and of n^2 / 2 tokens. 20,000 lengths, within 3%."""
    lengths = Lengths(1000.0, 0.8, 16384)
    one = decoder()
    found = one.generate(Workload(256, 1, 200.0, lengths), 1, 64, flows=True)[-1]
    drawn = [group[0] for group in lengths.sample((0,), 20_000, 1)]
    keys = sum(200.0 * length + length**2 / 2 for length in drawn) / len(drawn)
    weights = 256 / 64 * lengths.expected * 2 * DENSE.parameters
    assert found.bytes - weights == pytest.approx(256 * keys * one.key_bytes, rel=0.03)


def test_more_engines_and_more_slots_are_never_slower():
    work = Workload(1024, 8, 200.0, Lengths(300.0, 0.8, 1024))
    one = decoder(given=PlanAssumptions())
    by_engines = [total(one.generate(work, engines, 64)) for engines in (1, 2, 4, 8, 64, 512)]
    by_slots = [total(one.generate(work, 4, slots)) for slots in (1, 4, 16, 64, 256)]
    assert by_engines == sorted(by_engines, reverse=True)
    assert by_slots == sorted(by_slots, reverse=True)


def test_ranks_meet_twice_in_a_layer():
    """G2 on two ranks: 16 sums of one row of 1,024 elements, each 2 steps of a ring."""
    given = replace(IDEAL, node_hop_us=5.0)
    slower, faster = (decoder(given=each, tp=2).step(1, 0)[0] for each in (given, IDEAL))
    assert slower - faster == pytest.approx(16 * 2 * 5e-6)


def hops(**layout):
    """Of one step of one row, in steps of a ring."""
    given = replace(IDEAL, node_hop_us=1.0)
    slower, faster = (decoder(given=each, **layout).step(1, 0)[0] for each in (given, IDEAL))
    return round((slower - faster) * 1e6)


def test_experts_of_an_embedded_engine_gather_and_sum_all_rows():
    """G2: in each of 8 layers attention's sum over tp (2 steps), a gather and a sum over all ranks of the experts."""
    assert hops(facts=EXPERTS, ep=2, etp=1) == 8 * (1 + 2)
    assert hops(facts=EXPERTS, tp=2, ep=2, etp=1) == 8 * (2 + 1 + 2)
    assert hops(facts=EXPERTS, tp=2, ep=4, etp=1) == 8 * (2 + 3 * (1 + 2))
    assert hops(facts=EXPERTS, tp=2, etp=2) == 8 * (2 + 2)  # each has a slice of every expert, and the same rows
    assert hops(facts=EXPERTS, tp=2, ep=2) == 8 * (2 + 2)  # a server


def test_ranks_of_experts_compute_the_rows_of_all():
    """G2: 8 ranks with 4 of 32 experts each compute what each would by itself, for products of 8 times the rows."""
    given = replace(IDEAL, gemm_half_rows=64.0)
    one, eight = (decoder(EXPERTS, given, ep=ep, etp=1)._expert_products(128.0) for ep in (1, 8))
    assert one / eight == pytest.approx((1 + 64 / 16) / (1 + 64 / 128))
    four = decoder(EXPERTS, given, tp=2, ep=4, etp=1)._expert_products(128.0)  # tp's two ranks bring the same rows
    assert one / four == pytest.approx((1 + 64 / 16) / (1 + 64 / 64))


def test_ranks_of_experts_hold_a_share_of_them():
    every = 2 * EXPERTS.parameters_of["experts"]
    rest = 2 * EXPERTS.parameters - every
    assert decoder(EXPERTS, ep=8, etp=1).step(4096, 0)[1] == pytest.approx(rest + every / 8)
    assert decoder(EXPERTS, tp=2, ep=4, etp=2).step(4096, 0)[1] == pytest.approx(rest / 2 + every / 8)


def test_stages_hand_over_as_often_as_they_have_parts():
    assert (hops(pp=2), hops(pp=2, vpp=2)) == (2, 4)


def test_experts_of_a_rank_take_their_time():
    """G2: 32 experts of 8 layers, on 4 ranks."""
    slower, faster = (
        decoder(EXPERTS, given, ep=4, etp=1).step(1, 0)[0] for given in (replace(IDEAL, decode_expert_ms=0.5), IDEAL)
    )
    assert slower - faster == pytest.approx(8 * 32 / 4 * 0.5e-3)


@pytest.mark.parametrize("link_gb_s", [450.0, 1e-3])
@pytest.mark.parametrize("pp", [1, 2])
def test_processes_that_share_a_core_decode_in_turn(pp, link_gb_s):
    """Half a core each: all but the bytes that they send takes twice as long, and nothing does of two stages."""
    given = replace(IDEAL, decode_ms=1.0, node_hop_us=100.0)
    full = replace(H100, gpu=False, node_gb_s=link_gb_s)
    half = replace(full, cores=0.5, bf16_tflops=full.bf16_tflops / 2, memory_tb_s=full.memory_tb_s / 2)
    alone, together = (
        decoder(given=given, tp=2, pp=pp, hardware=one.while_others_wait(pp)).step(4, 100)[0] for one in (full, half)
    )
    sums = 16 * 4 * 1024 * 2  # 16 sums of 4 rows, half of whose bytes go out twice
    bytes_ = (sums + (pp * 4 * 1024 * 2 if pp > 1 else 0)) / link_gb_s / 1e9
    assert together == pytest.approx(alone if pp == 2 else 2 * alone - bytes_)
