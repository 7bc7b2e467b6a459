import pytest

from megarl.planning.hardware import measure_peak
from megarl.tracking.perf import known_peak, peak_flops, perf_metrics, remeasured_peak


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
    assert known_peak("NVIDIA RTX A4000", "bf16") is None, "it is no A40"


def test_cpu_peak_is_the_fastest_of_five_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megarl.system.device.has_cuda", lambda: False)
    rates = iter([2.0, 5.0, 1.0, 1.0, 1.0, 7.0])
    monkeypatch.setattr("megarl.tracking.perf.measure_peak", lambda dtype: next(rates))
    assert [peak_flops("fp32") for _ in range(6)] == [2.0, *[5.0] * 5], "slowed by other programs at first"
    assert peak_flops("fp32", stated_tflops=2.5) == 2.5e12
    assert peak_flops("bf16") == 7.0, "of another dtype"


def test_a_peak_that_a_step_exceeds_is_measured_again_and_the_largest_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("megarl.system.device.has_cuda", lambda: False)
    rates = iter([2.0] * 5 + [5.0, 1.0])
    monkeypatch.setattr("megarl.tracking.perf.measure_peak", lambda dtype: next(rates))
    assert [peak_flops("fp32") for _ in range(5)] == [2.0] * 5
    assert remeasured_peak(2.0, "fp32", stated_tflops=1.0) == 2.0
    assert remeasured_peak(2.0, "fp32") == 5.0
    assert remeasured_peak(5.0, "fp32") == 5.0, "busy again"
    assert peak_flops("fp32") == 5.0


def test_measure_refuses_unknown_dtypes():
    with pytest.raises(Exception, match="this dtype is unknown"):
        measure_peak("fp7")


@pytest.mark.parametrize(("took", "sizes"), [(1e-4, [16, 64]), (0.01, [16, 16])])
def test_a_dtype_whose_products_take_too_long_is_measured_with_small_ones(took, sizes, monkeypatch):
    made = []

    def best_seconds(product, seconds):
        made.append(len(product()))
        return took

    monkeypatch.setattr("megarl.planning.hardware.best_seconds", best_seconds)
    assert measure_peak("fp32", 0.3, 64) == 2 * sizes[-1] ** 3 / took
    assert made == sizes


def test_perf_metrics_are_per_device():
    metrics = perf_metrics(tokens=8000, seconds=2.0, devices=4, flops=8e12, peak=10e12)
    assert metrics["perf/throughput"] == 1000
    assert metrics["perf/tflops"] == 1.0
    assert metrics["perf/mfu"] == pytest.approx(0.1)
    assert metrics["perf/max_memory_gb"] > 0
