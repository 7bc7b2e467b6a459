import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.tracking.flops import FlopCounter
from megarl.tracking.perf import known_peak, measure_peak, peak_flops, perf_metrics

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def hf_config(kind):
    import transformers

    if kind == "llama":
        return transformers.LlamaConfig(**SMALL)
    if kind == "qwen3":
        return transformers.Qwen3Config(**SMALL, head_dim=32)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
        )
    return transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral"])
def test_forward_equals_torch_s_own_count(kind):
    from transformers import AutoModelForCausalLM

    config = hf_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    length = 24
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.randint(0, 128, (1, length)))
    ours = FlopCounter.from_hf(config)
    # Eager attention computes the whole square, the model itself only needs the causal half.
    full_square = (length**2 - length * (length + 1) / 2) * ours.per_pair
    assert counted.get_total_flops() == pytest.approx(ours.forward([length]) + full_square, rel=1e-9)


def counter(window=None):
    return FlopCounter(per_token=100.0, per_pair=7.0, per_head_token=11.0, window=window)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_generation_equals_adding_up_token_by_token(window):
    prompts, responses = [5, 1, 9], [[3, 1], [4], [1, 8, 2]]
    seen = (lambda c: c) if window is None else (lambda c: min(c, window))
    total = 0.0
    for prompt, samples in zip(prompts, responses, strict=True):
        total += 100.0 * prompt + 7.0 * sum(seen(c) for c in range(1, prompt + 1)) + 11.0
        for sample in samples:
            total += sum(111.0 + 7.0 * seen(prompt + i) for i in range(1, sample))
    assert counter(window).generate(prompts, responses) == pytest.approx(total)


def test_training_is_three_forwards_and_the_head_may_see_fewer_tokens():
    assert counter().train([4, 2], head_tokens=3) == 3 * (6 * 100.0 + (10 + 3) * 7.0 + 33.0)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GH200 480GB", "bf16", 989),
    ],
)
def test_known_peaks(name, dtype, tflops):
    assert known_peak(name, dtype) == tflops * 1e12


def test_tf32_and_unknown_devices():
    assert known_peak("NVIDIA A100", "fp32", tf32=True) == 156e12
    assert known_peak("Some Chip", "bf16") is None


def test_cpu_peak_is_measured_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megarl.device.has_cuda", lambda: False)
    first = peak_flops("fp32")
    assert 1e8 < first < 1e15
    monkeypatch.setattr("megarl.tracking.perf.measure_peak", lambda dtype: 1.0)
    assert peak_flops("fp32") == first
    assert peak_flops("bf16") == 1.0
    assert peak_flops("bf16", stated_tflops=2.5) == 2.5e12


def test_measure_refuses_unknown_dtypes():
    with pytest.raises(Exception, match="unknown dtype"):
        measure_peak("fp7")


def test_perf_metrics_are_per_device():
    metrics = perf_metrics(tokens=8000, seconds=2.0, devices=4, flops=8e12, peak=10e12)
    assert metrics["perf/throughput"] == 1000
    assert metrics["perf/tflops"] == 1.0
    assert metrics["perf/mfu"] == pytest.approx(0.1)
    assert metrics["perf/max_memory_gb"] > 0


def test_a_window_that_the_class_does_not_read_saves_nothing():
    import transformers

    config = transformers.LlamaConfig(**SMALL, sliding_window=4, num_experts=2)
    assert FlopCounter.from_hf(config) == FlopCounter.from_hf(hf_config("llama"))
    assert FlopCounter.from_hf(transformers.MixtralConfig(**SMALL, sliding_window=4)).window == 4
