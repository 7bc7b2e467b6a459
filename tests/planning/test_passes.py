"""Seconds of passes, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.artifacts.facts import facts_from_config
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.layers.mla.plain import MLA
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.flops import FlopCounter, token_flops
from megarl.planning.hardware import KINDS
from megarl.planning.lengths import Lengths
from megarl.planning.passes import ModelPass, total
from megarl.planning.shards import owned_parameters, stage_parameters
from megarl.planning.vision import image_flops, patch_tokens
from megarl.planning.workload import Share, Workload
from tests.models.vlm_tiny import config_of
from tests.planning.planned import H100, IDEAL, TWO_CORES, seconds_by

DENSE = facts_from_config(
    {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "here",
)
EXPERTS = facts_from_config(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "here",
)
SHARE = Share(64, 256.0, 768.0)


def model(facts=DENSE, devices=8, given=IDEAL, hardware=H100, engine=None, **parallel):
    engine = EngineConfig(**({"micro_batch_tokens": 8192} | (engine or {})))
    return ModelPass(facts, ParallelConfig(**parallel), devices, engine, "bf16", hardware, given)


def part(parts, formula):
    return next(one for one in parts if one.formula == formula)


@pytest.mark.parametrize("facts", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_products_are_the_flops_of_the_model_over_its_ranks(facts):
    """T1. With everything ideal a pass takes what `FlopCounter` counts, the head for response tokens only; backward
    computes logits again, and context parallel ranks in fp32 all pairs of a query and a key."""
    counter = FlopCounter.of(facts)
    layers, head = counter.forward([1024.0], head_tokens=0), 768.0 * counter.per_head_token
    scores = layers - 1024 * counter.per_token
    for parallel, dtype, more in (
        ({}, "bf16", 0.0),
        ({"tp": 2}, "bf16", 0.0),
        ({"tp": 2, "cp": 2}, "bf16", 0.0),
        ({"tp": 2, "cp": 2}, "fp32", scores),
    ):
        one = replace(model(facts, **parallel), dtype=dtype)
        ranks, peak = one.parallel.model_parallel_size, H100.peak(dtype)
        found = seconds_by(one.forward(SHARE))["T1"]
        assert found == pytest.approx(64 * (layers + more + head) / ranks / peak)
        found = seconds_by(one.update(SHARE, 1, 1))["T1"]
        assert found == pytest.approx(64 * (3 * (layers + more) + 4 * head) / ranks / peak)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=repr)
def test_a_draft_head_adds_its_passes_to_an_update(parallel):
    """T1, T3: what `FlopCounter` counts, the logits of its chunks once more, and the fixed time of a ninth layer."""
    given, drafting = replace(IDEAL, layer_ms=1.0), replace(EXPERTS, trains_draft=True)
    counter = FlopCounter.of(drafting)
    plain, more = (model(facts, given=given, **parallel) for facts in (EXPERTS, drafting))
    assert seconds_by(more.forward(SHARE)) == seconds_by(plain.forward(SHARE))
    plain, more = (seconds_by(one.update(SHARE, 1, 1)) for one in (plain, more))
    flops = counter.train_draft([1024.0], 768.0) + 768.0 * counter.per_head_token
    assert more["T1"] - plain["T1"] == pytest.approx(64 * flops / parallel.get("tp", 1) / 989e12)
    assert more["T3"] / plain["T3"] == pytest.approx(9 / 8)


def test_logits_of_one_chunk_are_kept_for_the_backward_pass():
    """T1. A micro-batch has 8 samples, so 6,144 tokens with logits."""
    chunks, one = (
        seconds_by(model(engine={"logits_chunk_tokens": tokens}).update(SHARE, 1, 1))["T1"] for tokens in (6143, 6144)
    )
    assert chunks - one == pytest.approx(64 * 768 * FlopCounter.of(DENSE).per_head_token / 989e12)


def test_products_of_uneven_lengths_are_the_mean_over_them():
    """T1. Samples of 512 and 1,536 tokens."""
    share = Share(64, 256.0, 768.0, 512.0**2)
    each = [FlopCounter.of(DENSE).forward([length], head_tokens=768.0) for length in (512.0, 1536.0)]
    assert seconds_by(model().forward(share))["T1"] == pytest.approx(64 * sum(each) / 2 / 989e12)


def test_recomputation_adds_a_forward_pass_of_the_layers():
    """T1: full: 4 passes of the layers; selective: attention over the context once more."""
    counter = FlopCounter.of(DENSE)
    layers, head = counter.forward([1024.0], head_tokens=0), 768.0 * counter.per_head_token
    scores = layers - 1024 * counter.per_token
    for mode, flops in (
        ("none", 3 * layers + 4 * head),
        ("full", 4 * layers + 4 * head),
        ("selective", 3 * layers + 4 * head + scores),
        (["attention", "mlp"], 3 * layers + 4 * head + scores + 1024 * token_flops(DENSE)["mlp"]),
    ):
        found = seconds_by(model(engine={"recompute": mode}).update(SHARE, 1, 1))["T1"]
        assert found == pytest.approx(64 * flops / 989e12), mode


def test_thin_products_are_slower():
    given = replace(IDEAL, gemm_half_rows=8192.0)
    wide, thin = model().forward(SHARE), model(given=given).forward(SHARE)
    assert seconds_by(thin)["T1"] == pytest.approx(2 * seconds_by(wide)["T1"])  # micro-batches of 8,192 rows


def test_elements_are_counted_as_memory_counts_them():
    """T2: (4 h + 2 (q + k) + 3 f) elements of a token and layer, 20 bytes each in a training pass."""
    given = replace(IDEAL, element_bytes=20.0)
    elements = 64 * 1024 * 8 * (4 * 1024 + 2 * (16 + 8) * 64 + 3 * 4096)
    assert seconds_by(model(given=given).update(SHARE, 1, 1))["T2"] == pytest.approx(elements * 20 / 3.35e12)
    assert seconds_by(model(given=given).forward(SHARE))["T2"] == pytest.approx(elements * 20 / 3 / 3.35e12)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_logit_counts_as_some_elements(recompute):
    """T2: those of response tokens, on as many ranks as share them; they are not recomputed."""
    without, given = replace(IDEAL, element_bytes=20.0), replace(IDEAL, element_bytes=20.0, logit_elements=3.0)
    seconds = [
        seconds_by(model(given=one, tp=2, cp=2, engine={"recompute": recompute}).update(SHARE, 1, 1))["T2"]
        for one in (without, given)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 64 * 768 * 32000 / 4 * 20 / 3.35e12)


@pytest.mark.parametrize(("cp", "pairs"), [(1, 1), (2, 2)])
def test_on_a_cpu_the_probabilities_count_too(cp, pairs):
    given = replace(IDEAL, element_flops=100.0)
    elements = 64 * 8 * (1024 * (4 * 1024 + 2 * (16 + 8) * 64 + 3 * 4096) + pairs * 16 * 1024**2) / cp
    found = seconds_by(model(given=given, hardware=TWO_CORES, devices=2, cp=cp).update(SHARE, 1, 1))["T2"]
    assert found == pytest.approx(elements * 100 / TWO_CORES.peak("fp32"))


@pytest.mark.parametrize("link_gb_s", [4.3, 1e-3])
def test_processes_that_share_a_core_take_turns(link_gb_s):
    """What is fixed takes twice as long; in the bubble stages that wait leave the core to the others, not the link."""
    given = replace(IDEAL, layer_ms=1.0)
    full = replace(TWO_CORES, node_gb_s=link_gb_s)
    half = replace(full, cores=0.5, bf16_tflops=full.bf16_tflops / 2)
    alone, together = (model(given=given, hardware=one, devices=2, pp=2).forward(SHARE) for one in (full, half))
    assert seconds_by(together)["T3"] == pytest.approx(2 * seconds_by(alone)["T3"])
    assert part(together, "T1").seconds == pytest.approx(2 * part(alone, "T1").seconds)
    for formula in ("T7", "T8"):
        assert part(together, formula).seconds == pytest.approx(part(alone, formula).seconds)


@pytest.mark.parametrize(("sp", "sums"), [(False, 2), (True, 2.5)])
def test_tensor_parallel_ranks_sum_twice_in_a_layer_and_direction(sp, sums):
    """T4: 2 sums of tokens x hidden each way; a ring sends 2 (n - 1) / n of what it sums; sp gathers once more."""
    found = part(model(tp=4, sp=sp).update(SHARE, 1, 1), "T4")
    sent = sums * 2 * 8 * (2 * 3 / 4) * 64 * 1024 * 1024 * 2
    assert found.bytes == pytest.approx(sent)
    assert found.seconds == pytest.approx(sent / 450e9)


@pytest.mark.parametrize(
    ("rank", "cp", "sp", "train", "sent", "rings"),
    [
        (256, 1, False, False, 2 * 1024, 2),
        (256, 1, False, True, 2 * 1024 + 2 * (256 + 128 + 64), 2 + 6),
        (256, 2, False, True, 2 * 1024 + 2 * (256 + 2 * 128 + 64), 2 + 6),
        (None, 1, False, True, 2 * 1024 + 2 * (1024 + 128 + 64), 2 + 6),
        (256, 1, True, True, 2 * (256 + 128 + 64 + 1024) + 256 + 128, 4 + 4 + 2),
    ],
)
def test_ranks_that_share_latents_exchange_these_and_not_their_hidden_states(rank, cp, sp, train, sent, rings):
    """T4: what ranks send per token and layer for latent attention, as tests/planning/test_collectives.py counts it."""
    sizes = {"heads": 16, "q_rank": rank, "kv_rank": 128, "nope": 64, "rope": 64, "value": 64}
    latent = MLA(**sizes, scale=1.0, eps=1e-6, interleaved=True)
    facts = replace(DENSE, given_mixers=(latent,) * DENSE.layers)
    # on links without limit whose latency is one second, seconds are rings
    links, given = replace(H100, node_gb_s=1e30), replace(IDEAL, node_hop_us=1e6)
    both = []
    for each in (facts, DENSE):
        made = model(each, tp=4, cp=cp, sp=sp, given=given, hardware=links)
        both.append(part(made.update(SHARE, 1, 1) if train else made.forward(SHARE), "T4"))
    usual = 2 if not train else 4 if not sp else 5  # rings of hidden states for other attention
    ring = DENSE.layers * 3 / 4 * 64 * 1024 * 2 / cp
    assert both[0].bytes - both[1].bytes == pytest.approx(ring * (sent - usual * 1024))
    micro = made.micro_batches(SHARE)
    assert both[0].seconds - both[1].seconds == pytest.approx(micro * DENSE.layers * 3 * (rings - usual))


def test_context_parallel_ranks_gather_keys_and_values():
    """T5: forward gathers, backward scatters: twice (n - 1) / n of all keys and values; recomputing gathers again."""
    for recompute, times in (("none", 2), ("full", 3)):
        found = part(model(cp=4, engine={"recompute": recompute}).update(SHARE, 1, 1), "T5")
        assert found.bytes == pytest.approx(times * 8 * 3 / 4 * 64 * 1024 * 2 * 8 * 64 * 2)


def test_gathers_and_scatters_have_a_share_of_the_rate_of_sums():
    """L1, with TP's sums (T4), SP's and CP's gathers (T4, T5), and gradients with and without overlap (T9)."""
    given = replace(IDEAL, scatter_share=0.5)
    for formula, slower, layout, engine in (
        ("T4", 1, {"tp": 2}, {}),
        ("T4", 2, {"tp": 2, "sp": True}, {}),
        ("T5", 2, {"cp": 2}, {}),
        ("T9", 1, {}, {}),
        ("T9", 2, {}, {"overlap_grad_reduce": True}),
        ("T9", 1, {}, {"distributed_optimizer": False}),
    ):
        both = [part(model(given=one, engine=engine, **layout).update(SHARE, 1, 1), formula) for one in (IDEAL, given)]
        assert both[1].seconds == pytest.approx(slower * both[0].seconds)


def test_experts_send_tokens_there_and_back():
    """T6: 4 experts of each token, there and back, forward and backward; a 4th of them stays."""
    found = part(model(EXPERTS, ep=4).update(SHARE, 1, 1), "T6")
    assert found.bytes == pytest.approx(2 * 8 * 2 * 64 * 1024 * 4 * 1024 * 2 * 3 / 4)


def test_what_leaves_the_machine_takes_the_slower_link():
    """L2: of 15 others 7 are inside: 8/15 go out at 50 GB/s."""
    parts = model(EXPERTS, devices=16, hardware=replace(H100, nodes=2), ep=16).forward(SHARE)
    found = part(parts, "T6")
    assert found.seconds == pytest.approx(found.bytes * 8 / 15 / 50e9)


@pytest.mark.parametrize(("vpp", "waits"), [(None, 3), (2, 1.5)])
def test_the_bubble_is_the_stages_that_wait(vpp, waits):
    """T8: pp - 1 micro-batches' time, divided by the chunks."""
    parts = model(pp=4, vpp=vpp).forward(SHARE)
    rest = total([one for one in parts if one.formula != "T8"])
    assert part(parts, "T8").seconds == pytest.approx(waits / 8 * rest)  # 8 micro-batches of 8 samples


@pytest.mark.parametrize(
    ("tokens", "parallel", "count"),
    [(8192, {}, 8), (4096, {}, 16), (500, {}, 64), (10**6, {}, 1), (12000, {"pp": 4, "vpp": 2}, 8)],
)
def test_micro_batches_hold_whole_samples(tokens, parallel, count):
    """A sample of 1,024 tokens that is longer than the budget is one by itself; chunks want a multiple of pp."""
    assert model(engine={"micro_batch_tokens": tokens}, **parallel).micro_batches(SHARE) == count


def test_gradients_are_scattered_and_parameters_gathered():
    """T9: 4 + 2 bytes of each parameter of a rank, (n - 1) / n of them."""
    dense, _ = stage_parameters(DENSE, ParallelConfig(tp=2))
    found = part(model(tp=2).update(SHARE, 1, 1), "T9")
    assert found.bytes == pytest.approx(dense * 6 * 3 / 4)
    assert found.seconds == pytest.approx(dense * 6 * 3 / 4 / 450e9)
    whole = part(model(tp=2, engine={"distributed_optimizer": False}).update(SHARE, 1, 1), "T9")
    assert whole.bytes == pytest.approx(dense * 8 * 3 / 4)


def test_experts_are_reduced_among_fewer():
    dense, expert = stage_parameters(EXPERTS, ParallelConfig(ep=4))
    found = part(model(EXPERTS, ep=4).update(SHARE, 1, 1), "T9")
    assert found.bytes == pytest.approx(dense * 6 * 7 / 8 + expert * 6 * 1 / 2)


def test_overlap_hides_the_scatter_only():
    given = replace(IDEAL, overlap_share=1.0)
    shown = part(model(tp=2, given=given).update(SHARE, 1, 1), "T9").seconds
    hidden = part(model(tp=2, given=given, engine={"overlap_grad_reduce": True}).update(SHARE, 1, 1), "T9").seconds
    assert hidden == pytest.approx(shown * 2 / 6)


def test_the_optimizer_moves_30_bytes_of_each_parameter_that_a_rank_owns():
    """T10: gradient 4, master and moments 12 read and 12 written, parameter 2."""
    engine = EngineConfig()
    owned = owned_parameters(DENSE, ParallelConfig(tp=2), engine, 4)
    found = part(model(tp=2).update(SHARE, 1, 1), "T10")
    assert found.bytes == pytest.approx(owned * 30)
    assert found.seconds == pytest.approx(owned * 30 / 3.35e12)
    single = replace(model(tp=2), dtype="fp32")  # the parameter is its own master: 4, 12 and 12
    assert part(single.update(SHARE, 1, 1), "T10").bytes == pytest.approx(owned * 28)


def test_every_update_of_every_epoch_counts():
    once, six = model(tp=2).update(SHARE, 1, 1), model(tp=2).update(SHARE, 3, 2)
    assert total(six) == pytest.approx(6 * total(once))


def test_a_rack_joins_more_ranks_than_a_machine():
    """Eight gb200 are on two machines, and all links between them are fast."""
    gb200 = replace(KINDS["gb200"], nodes=2)
    found = part(model(tp=2, hardware=gb200).update(SHARE, 1, 1), "T9")
    assert found.seconds == pytest.approx(found.bytes / 900e9)


def test_defaults_make_everything_slower_than_the_ideal():
    assert total(model(tp=2, given=PlanAssumptions()).update(SHARE, 1, 1)) > total(model(tp=2).update(SHARE, 1, 1))


SEEING = facts_from_config(config_of("qwen2_5_vl"), "here")
#: 16 samples of 4 prompts, whose images have 80 patches each.
SEEN = Share(16, 100.0, 20.0, patches=80.0, group=4)


@pytest.mark.parametrize(
    ("settings", "frozen", "times"),
    [({}, (), 3), ({"tp": 2}, (), 3), ({"engine": {"recompute": "full"}}, (), 4), ({}, ("tower",), 1)],
    ids=["learns", "tp", "again", "frozen"],
)
def test_the_vision_encoder_sees_each_image_once_in_a_pass_on_every_rank(settings, frozen, times):
    """T12."""
    one = model(replace(SEEING, frozen=frozen), 2, **settings)
    image = image_flops(SEEING.encoder, [80.0]) / H100.peak("bf16")
    assert one.micro_batches(SEEN) == 1
    assert seconds_by(one.forward(SEEN))["T12"] == pytest.approx(4 * image)
    assert seconds_by(one.update(SEEN, 1, 1))["T12"] == pytest.approx(times * 4 * image)
    assert "T12" not in seconds_by(one.forward(replace(SEEN, patches=0.0)))


def test_each_sample_of_an_environment_sees_images_of_its_own():
    shared = Workload(4, 4, 100.0, Lengths(20.0, 0.0, 20), patches=80.0)
    apart, one = replace(shared, apart=True), model(replace(SEEING, frozen=()), 2)
    found = [seconds_by(one.forward(work.share(1)))["T12"] for work in (shared, apart)]
    assert found[1] == pytest.approx(4 * found[0])
    assert (shared.seen, apart.seen) == (4, 16)


def test_of_stages_the_first_has_the_encoder_and_the_last_the_head():
    """T12: what a step takes longer for is the difference, of which T1 has the head."""
    one = model(SEEING, 2, pp=2)
    head = 16 * 20 * FlopCounter.of(SEEING).per_head_token
    found = seconds_by(one.forward(SEEN))["T12"]
    assert found == pytest.approx((4 * image_flops(SEEING.encoder, [80.0]) - head) / H100.peak("bf16"))


def test_micro_batches_have_room_for_patches():
    """T8: a prompt's samples and its images, or as many as fit beside the images once, or each with its own."""
    each = 80 * patch_tokens(SEEING, ParallelConfig(), EngineConfig(micro_batch_tokens=1), learns=True)

    def count(budget: float) -> int:
        return model(SEEING, 1, engine={"micro_batch_tokens": int(budget)}).micro_batches(SEEN)

    assert each == pytest.approx(79, abs=40)
    assert [count(budget) for budget in (4 * (480 + each) + 1, 480 + each + 1, 240 + each + 1, 10)] == [1, 4, 8, 16]


def test_shared_prompts_are_computed_once():
    """T1: in one micro-batch, the answers and their keys of the prompt are left. T8: more samples fit into each."""
    counter, share = FlopCounter.of(DENSE), Share(16, 256.0, 16.0, group=8)
    one = model(devices=1, engine={"share_prefixes": True})
    whole, prompt = (counter.forward([length], head_tokens=0) for length in (272.0, 256.0))
    work = 16 * (whole - prompt) + 2 * prompt + 16 * 16 * counter.per_head_token
    assert part(one.forward(share), "T1").seconds == pytest.approx(work / H100.peak("bf16"))
    budgets = {384: 2, 383: 3, 768: 1}
    counts = {
        budget: model(engine={"micro_batch_tokens": budget}).micro_batches(replace(share, once=True))
        for budget in budgets
    }
    assert counts == budgets


@pytest.mark.parametrize(("last", "share", "heads"), [(None, 1 / 2, 1), (1, 7 / 8, 0)])
def test_a_pass_takes_as_long_as_its_slowest_stage(last, share, heads):
    """T1, T8. Eight layers in two stages: 4 and 4 with the head, or 7 and 1 with the head."""
    counter = FlopCounter.of(DENSE)
    layers, head = counter.forward([1024.0], head_tokens=0), 768.0 * counter.per_head_token
    found = seconds_by(model(pp=2, last_stage_layers=last).forward(SHARE))["T1"]
    assert found == pytest.approx(64 * (share * layers + heads * head) / 989e12)


@pytest.mark.parametrize(("facts", "layers", "each"), [(DENSE, "local", 10), (DENSE, "te", 6), (EXPERTS, "local", 10)])
def test_gradients_are_added_in_every_micro_batch(facts, layers, each):
    """T13: 10 bytes of a parameter, and 6 where its product adds them."""
    found = model(facts, engine={"layers": layers})
    dense, experts = stage_parameters(facts, ParallelConfig(), trained=True)
    moved = found.micro_batches(SHARE) * (each * dense + 6 * experts)
    assert seconds_by(found.update(SHARE, 1, 1))["T13"] == pytest.approx(moved / 3.35e12)
    assert "T13" not in seconds_by(replace(found, hardware=TWO_CORES).update(SHARE, 1, 1))


def test_deepep_sends_a_token_once_to_each_rank():
    """T6. Of 4 ranks with 8 of 32 experts each, 4 drawn experts meet 4 (1 - (3/4)^4) = 2.73."""
    sent = [
        sum(part.bytes for part in model(EXPERTS, ep=4, dispatch=way).forward(SHARE) if part.formula == "T6")
        for way in ("alltoall", "deepep")
    ]
    assert sent[1] / sent[0] == pytest.approx(4 * (1 - (3 / 4) ** 4) / 4)
