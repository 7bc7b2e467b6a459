"""The embedded engine in one process: against the training model, against transformers, and against itself."""

from __future__ import annotations

import pytest
import torch

from megarl.rollout.embedded.memory import free_bytes
from megarl.rollout.embedded.model import can_pack
from megarl.rollout.engine import Request
from megarl.rollout.stop_strings import StopStrings
from tests.campaigns import split
from tests.data.templates import tokenizer_of
from tests.models.tiny import ARCHITECTURES
from tests.rollout.cases import (
    STOP,
    build,
    cut_at,
    engine,
    full_forward,
    logprobs,
    make_requests,
    sampled,
    strings_of,
    tokens,
)

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def dense(single_process, request):
    return build(request.param)


@pytest.fixture(scope="module")
def requests():
    return make_requests()


#: One for each part of a layer that decodes in its own way.
KINDS = (
    "deepseek_v3",
    "exaone4",
    "gemma2",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "qwen2",
    "qwen3_5_moe_text",
    "qwen3_next",
)


@pytest.mark.parametrize("model_type", split("families", ARCHITECTURES, KINDS))
def test_logprobs_equal_a_full_forward_for_every_token(model_type, requests):
    # A delta net's state is summed token by token while decoding, and by chunks in training: twice the rounding.
    tolerance = 2e-5 if model_type.startswith(("qwen3_5", "qwen3_next")) else 1e-5
    chunks = build(model_type)
    results = engine(chunks).generate(requests, sampled(temperature=0.7), STOP)
    for request, group in zip(requests, results, strict=True):
        for completion in group:
            expected = full_forward(chunks[0], request.prompt_ids, completion.token_ids, 0.7)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "mistral", "qwen2"])
def test_torch_operations_do_what_the_compiled_kernels_do(model_type, monkeypatch):
    requests = [*make_requests(), Request([4] * 40, [3])]
    chunks = build(model_type)
    compiled = engine(chunks, max_running=6).generate(requests, sampled(max_new_tokens=40), [2])
    monkeypatch.setattr("megarl.rollout.embedded.model.load_kernels", lambda: None)
    plain = engine(chunks, max_running=6).generate(requests, sampled(max_new_tokens=40), [2])
    assert tokens(plain) == tokens(compiled)
    torch.testing.assert_close(logprobs(plain), logprobs(compiled), rtol=0, atol=1e-5)


def test_cpu_threads_share_samples_without_changing_them(dense):
    requests = make_requests(count=9, n=9)
    torch.set_num_threads(1)
    alone = engine(dense).generate(requests, sampled(), STOP)
    torch.set_num_threads(2)
    try:
        assert engine(dense)._lanes(requests, 256) == 2
        shared = engine(dense).generate(requests, sampled(), STOP)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert tokens(shared) == tokens(alone)


def test_a_sample_depends_on_its_own_seed_only(dense, requests):
    together = engine(dense).generate(requests, sampled(), STOP)
    for i, request in enumerate(requests):
        for k, seed in enumerate(request.seeds):
            alone = engine(dense).generate([Request(request.prompt_ids, [seed])], sampled(), STOP)
            assert alone[0][0].token_ids == together[i][k].token_ids
            assert alone[0][0].logprobs == pytest.approx(together[i][k].logprobs, abs=1e-5)


@pytest.mark.parametrize("config", [{"max_running": 1}, {"max_running": 4}, {"max_prefill_tokens": 1}])
def test_queue_and_batch_limits_do_not_change_samples(dense, requests, config):
    free = engine(dense).generate(requests, sampled(), STOP)
    tight = engine(dense, **config).generate(requests, sampled(), STOP)
    assert tokens(tight) == tokens(free)
    torch.testing.assert_close(logprobs(tight), logprobs(free), rtol=0, atol=1e-5)


def test_long_samples_outlive_cache_relayouts(dense):
    requests = [Request([7, 8, 9], [1, 2]), Request([4] * 40, [3])]
    results = engine(dense, max_running=2).generate(requests, sampled(max_new_tokens=80), [2])
    for request, group in zip(requests, results, strict=True):
        for completion in group:
            expected = full_forward(dense[0], request.prompt_ids, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


def test_shared_prefill_equals_separate_prefills(dense):
    prompt = list(range(20, 33))
    shared = engine(dense).generate([Request(prompt, [1, 2, 3])], sampled(), STOP)
    separate = engine(dense).generate([Request(prompt, [seed]) for seed in (1, 2, 3)], sampled(), STOP)
    assert tokens(shared)[0] == [group[0] for group in tokens(separate)]


def test_equal_seeds_give_equal_samples_and_others_differ(dense):
    group = engine(dense).generate([Request([3, 4], [11, 11, 12])], sampled(), [])[0]
    assert group[0] == group[1]
    assert group[0].token_ids != group[2].token_ids


def test_stop_tokens_end_a_sample_and_are_part_of_it(dense, requests):
    stop = list(range(0, 131, 4))
    samples = [c for group in engine(dense).generate(requests, sampled(), stop) for c in group]
    assert {"stop"} == {c.finish_reason for c in samples if len(c.token_ids) < 20}
    for c in samples:
        assert not set(c.token_ids[:-1]) & set(stop)
        assert (c.token_ids[-1] in stop) == (c.finish_reason == "stop")
        assert len(c.token_ids) == len(c.logprobs) <= 20


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("running", [256, 4])
def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(model_type, running, requests):
    """Tokens and log-probs are those without it, up to there."""
    made = engine(build(model_type), tokenizer_of("bytes"), max_running=running)
    free = made.generate(requests, sampled(), STOP)
    strings = strings_of(free, tokenizer_of("bytes"))
    found = made.generate(requests, sampled(stop=strings), STOP)
    expected = cut_at(StopStrings(strings, tokenizer_of("bytes")), free)
    assert [[(c.token_ids, c.finish_reason) for c in group] for group in found] == expected
    assert tokens(found) != tokens(free)
    for group, whole in zip(found, free, strict=True):
        for c, other in zip(group, whole, strict=True):
            assert c.logprobs == pytest.approx(other.logprobs[: len(c.token_ids)], abs=1e-5)


def test_configured_stop_tokens_join_the_tokenizers(dense, requests):
    both = engine(dense).generate(requests, sampled(), [2, 5, 9])
    split = engine(dense).generate(requests, sampled(stop_token_ids=[5, 9]), [2])
    assert both == split


def test_ignore_eos_runs_to_the_limit(dense, requests):
    results = engine(dense).generate(requests, sampled(ignore_eos=True), list(range(131)))
    assert {(len(c.token_ids), c.finish_reason) for group in results for c in group} == {(20, "length")}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_min_new_tokens_holds_stop_tokens_back(dense, requests, temperature):
    stop = list(range(0, 131, 2))
    sampling = sampled(min_new_tokens=6, temperature=temperature)
    for group in engine(dense).generate(requests, sampling, stop):
        for c in group:
            assert len(c.token_ids) >= 7
            assert not set(c.token_ids[:6]) & set(stop)


def test_min_new_tokens_leaves_the_logprobs_those_of_the_full_distribution(dense):
    sampling = sampled(min_new_tokens=6)
    (completion,) = engine(dense).generate([Request([3, 4], [1])], sampling, list(range(0, 131, 2)))[0]
    expected = full_forward(dense[0], [3, 4], completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


def test_weight_updates_are_seen_at_once(requests):
    chunks = build("qwen3")
    generator = engine(chunks)
    before = generator.generate(requests, sampled(), STOP)
    with torch.no_grad():
        chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data.add_(0.05)
    generator.weight_version = 7
    after = generator.generate(requests, sampled(), STOP)
    assert tokens(after) != tokens(before)
    assert all(c.versions == [[7, len(c.token_ids)]] for group in after for c in group)
    expected = full_forward(chunks[0], requests[1].prompt_ids, after[1][0].token_ids)
    torch.testing.assert_close(torch.tensor(after[1][0].logprobs), expected, rtol=0, atol=1e-5)


def test_decoding_dtype_can_differ_from_the_models(requests):
    chunks = build("qwen3", dtype=torch.bfloat16)
    results = engine(chunks, dtype="fp32").generate(requests, sampled(), STOP)
    wide = build("qwen3")
    with torch.no_grad():
        for p, q in zip(wide[0].parameters(), chunks[0].parameters(), strict=True):
            p.copy_(q)
    assert tokens(results) == tokens(engine(wide).generate(requests, sampled(), STOP))


def test_bf16_stays_close_to_the_full_forward(requests):
    chunks = build("qwen3", dtype=torch.bfloat16)
    errors = []
    for request, group in zip(requests, engine(chunks).generate(requests, sampled(), STOP), strict=True):
        for c in group:
            errors.append(torch.tensor(c.logprobs) - full_forward(chunks[0], request.prompt_ids, c.token_ids))
    assert torch.cat(errors).abs().mean() < 0.03


def test_fp16_decodes_eight_times_closer_to_fp32_than_bf16(requests):
    chunks, errors = build("qwen3"), dict[str, float]()
    for dtype in ("bf16", "fp16"):
        differences = [
            torch.tensor(c.logprobs) - full_forward(chunks[0], request.prompt_ids, c.token_ids)
            for request, group in zip(
                requests, engine(chunks, dtype=dtype).generate(requests, sampled(), STOP), strict=True
            )
            for c in group
        ]
        errors[dtype] = float(torch.cat(differences).abs().mean())
    assert 0 < errors["fp16"] < errors["bf16"] / 4  # 11 and 8 bits of a number


def test_a_cpu_that_cannot_multiply_by_packed_weights_reads_them_as_they_are(requests, monkeypatch):
    """Those without AVX-512, such as most of laptops, in bf16."""

    def refused(*args):
        raise AssertionError("packed")

    chunks = build("qwen3", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refused)
    results = engine(chunks).generate(requests, sampled(), STOP)
    error = torch.tensor(results[0][0].logprobs) - full_forward(
        chunks[0], requests[0].prompt_ids, results[0][0].token_ids
    )
    assert error.abs().mean() < 0.03
    assert can_pack(torch.float32)
    assert not can_pack(torch.bfloat16)


def test_nothing_to_do(dense):
    assert engine(dense).generate([], sampled(), STOP) == []
    assert engine(dense).generate([Request([1, 2], [])], sampled(), STOP) == [[]]


def test_a_request_without_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one prompt token"):
        Request([], [1])


def test_caches_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr("megarl.rollout.embedded.memory.free_host_memory", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_bytes(torch.device("cpu")) == 800
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu"), sessions=2) == 100


def test_a_gpu_s_free_memory_counts_what_the_allocator_would_give_back(monkeypatch):
    """100 bytes at the driver; of 60 that the allocator keeps and nobody uses, 10 are rests of blocks in use."""
    stats = {"reserved_bytes.all.current": 160, "active_bytes.all.current": 100, "inactive_split_bytes.all.current": 10}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert free_bytes(torch.device("cuda", 0)) == 0.8 * 150
    assert free_bytes(torch.device("cuda", 0), sessions=2) == 0.4 * 150


def test_a_request_may_have_less_room_than_the_sampling_settings_give(dense, requests):
    free = engine(dense).generate(requests, sampled(), STOP)
    rooms = [[3, 7, 1, 20, 30][i % 5] for i in range(len(requests))]
    tight = engine(dense).generate(
        [Request(r.prompt_ids, r.seeds, room) for r, room in zip(requests, rooms, strict=True)], sampled(), STOP
    )
    for group, cut, room in zip(free, tight, rooms, strict=True):
        for whole, part in zip(group, cut, strict=True):
            assert part.token_ids == whole.token_ids[:room]
            assert part.finish_reason == (whole.finish_reason if len(whole.token_ids) <= room else "length")


ADAPTED = [("qwen3", None), ("qwen3_5_text", None), ("qwen3_moe", ["experts"])]
BF16 = {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("model", "targets", "steps", "settings"),
    [
        (*ADAPTED[0], 4, {}),
        (*ADAPTED[0], 20, BF16),
        (*ADAPTED[1], 4, BF16),
        (*ADAPTED[1], 20, {}),
        (*ADAPTED[2], 4, {}),
        (*ADAPTED[2], 20, {}),
        *(
            pytest.param(*case, marks=pytest.mark.campaign("lora"))
            for case in (
                (*ADAPTED[0], 4, BF16),
                (*ADAPTED[0], 20, {}),
                (*ADAPTED[1], 4, {}),
                (*ADAPTED[1], 20, BF16),
                (*ADAPTED[2], 4, BF16),
                (*ADAPTED[2], 20, BF16),
                ("gpt_oss", ["attention", "experts"], 4, {}),
                ("gpt_oss", ["attention", "experts"], 20, {}),
            )
        ),
    ],
)
def test_adapters_are_decoded_with(model, targets, settings, steps, requests):
    """Weights are packed, and adapters merged, only where there are steps enough; 1e-5 as for other weights, and in
    bf16 what one rounding of a weight, or of a product, does to a log-prob."""
    from megarl.config.model import LoraConfig
    from megarl.models.lora import adapters_off

    chunks = build(model, lora=LoraConfig(rank=4, alpha=8, targets=targets))
    results = engine(chunks, **settings).generate(requests, sampled(max_new_tokens=steps), STOP)
    with adapters_off(chunks):
        other = engine(chunks, **settings).generate(requests, sampled(max_new_tokens=steps), STOP)
    assert tokens(results) != tokens(other)
    for request, group in zip(requests, results, strict=True):
        for completion in group:
            expected = full_forward(chunks[0], request.prompt_ids, completion.token_ids)
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found, expected, rtol=0, atol=0.5 if settings else 1e-5)
