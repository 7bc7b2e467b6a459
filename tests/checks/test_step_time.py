"""The time of a step and of the run is known before the start."""

from __future__ import annotations

import pytest

from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.planning import hardware
from megarl.recipes.components import COMPONENTS
from megarl.system.machine import Machine

LAPTOP = Machine(cores=2, memory=64e9)
_QWEN = ["model.path=Qwen/Qwen3-0.6B", "model.hf_config=null", "model.tokenizer=null", "trainer.steps=100"]
_QWEN += ["sft.steps=0", "rollout.sampling.max_new_tokens=256", "data.max_prompt_tokens=512"]
_HUGE = [*_QWEN, "data.batch_size=512"]


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    monkeypatch.setattr("megarl.system.machine.processor_flags", lambda *_: frozenset({"avx2", "avx512f"}))


def checked(recipe, *overrides, machine=LAPTOP):
    """(estimated seconds of a step, the check of the time) of a dry run."""
    config = load_config(recipe, overrides, components=COMPONENTS)
    result = check_config(config, machine=machine)
    return result.step_s, [check for check in result.items if check.name == "time"]


def test_the_line_names_a_step_and_the_run():
    step_s, [check] = checked("grpo_quickstart", *_QWEN)
    assert check.status == "ok"
    assert check.message.startswith(f"about {step_s / 60:.0f} min a step, ")
    assert "for 100 steps on this CPU, by formulas and typical rates" in check.message
    _, [check] = checked("grpo_quickstart", "trainer.steps=1000")
    assert "for the cold start and 1,000 steps" in check.message


@pytest.mark.parametrize(
    ("overrides", "machine", "words"),
    [
        ([], LAPTOP, "make smollm2"),
        (["cluster.device_memory_gb=80", "data.batch_size=65536"], LAPTOP, "megarl plan --search"),
        (["data.batch_size=65536"], Machine(16, 256e9, has_gpu=True, gpu_memory=80e9), "megarl plan --search"),
    ],
)
def test_a_step_of_more_than_an_hour_is_warned_of(overrides, machine, words):
    step_s, [check] = checked("grpo_quickstart", *_HUGE, *overrides, machine=machine)
    assert step_s > 3600
    assert check.status == "warn"
    assert words in check.fix


def test_supervised_fine_tuning_by_itself_has_its_time():
    config = load_config("grpo_quickstart", ["sft.steps=100"], components=COMPONENTS)
    result = check_config(config, job="sft", machine=LAPTOP)
    [check] = [check for check in result.items if check.name == "time"]
    assert check.status == "ok"
    assert "for 100 steps on this CPU" in check.message
    assert 0.01 < result.step_s < 10
    huge = load_config("grpo_quickstart", [*_QWEN, "sft={steps: 9, batch_size: 65536}"], components=COMPONENTS)
    [check] = [check for check in check_config(huge, job="sft", machine=LAPTOP).items if check.name == "time"]
    assert (check.status, "sft.batch_size" in check.fix) == ("warn", True)


@pytest.mark.parametrize(
    ("recipe", "overrides", "why"),
    [
        ("dpo_quickstart", [], "runs that generate nothing"),
        ("srpo_reach_quickstart", [], "simulators"),
        ("grpo_quickstart", ["model.path=some/model", "model.hf_config=null"], "sizes are not known"),
    ],
)
def test_what_no_formula_knows_is_skipped_with_the_reason(recipe, overrides, why):
    step_s, [check] = checked(recipe, *overrides)
    assert (step_s, check.status) == (None, "skip")
    assert why in check.message


def test_a_processor_without_bf16_products_is_slow_in_bf16(monkeypatch):
    rates = {}
    amx, new = {"avx512f", "avx512_bf16", "amx_bf16"}, {"avx512f", "avx512_bf16"}
    for name, flags in {"amx": amx, "new": new, "old": {"avx2"}, "unknown": set()}.items():
        monkeypatch.setattr("megarl.system.machine.processor_flags", lambda *_, flags=flags: frozenset(flags))
        rates[name] = hardware.typical_cpu(2, cores=2)
    assert rates["amx"].bf16_tflops > 3 * rates["new"].bf16_tflops
    assert rates["amx"].fp32_tflops == rates["new"].fp32_tflops
    assert rates["new"].bf16_tflops > rates["new"].fp32_tflops > rates["old"].fp32_tflops
    assert rates["old"].bf16_tflops < rates["old"].fp32_tflops
    assert rates["unknown"].fp32_tflops > 0
