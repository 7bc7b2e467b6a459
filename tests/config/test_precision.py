"""`model.dtype: auto`: bf16 where the machine has its products; a run that is continued keeps its precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import precision
from megarl.config.load import dump_config, load_config
from megarl.system.machine import bf16_products
from tests.config.conftest import RECIPE

AUTO = "model.dtype=auto"


@pytest.fixture
def processor(monkeypatch):
    """processor(flag) -> this machine has no GPU, and a processor with these products of bf16 numbers."""

    def set_flag(flag: str | None) -> None:
        monkeypatch.setattr(precision, "has_nvidia_device", lambda: False)
        monkeypatch.setattr(precision, "bf16_products", lambda: flag)

    return set_flag


@pytest.mark.parametrize(
    ("flag", "dtype", "words"),
    [("avx512_bf16", "bf16", "the processor has avx512_bf16"), (None, "fp32", "no bf16 instructions")],
)
def test_the_processor_decides_and_the_command_says_so(config_of, processor, capsys, flag, dtype, words):
    processor(flag)
    assert config_of(AUTO).model.dtype == dtype
    err = capsys.readouterr().err
    assert f"model.dtype=auto: {dtype}" in err
    assert words in err


def test_recipes_for_gpus_and_machines_with_gpus_have_bf16(config_of, processor, monkeypatch):
    processor(None)
    assert config_of(AUTO, "cluster.device_memory_gb=80").model.dtype == "bf16"
    monkeypatch.setattr(precision, "has_nvidia_device", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert config_of(AUTO).model.dtype == "bf16"


def test_a_run_that_is_continued_keeps_its_precision(write, tmp_path: Path, processor):
    processor("amx_bf16")
    recipe, run_dir = write(RECIPE), tmp_path / "run"
    assert load_config(recipe, [AUTO], run_dir=run_dir).model.dtype == "bf16"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(load_config(recipe, ["model.dtype=fp32"])))
    assert load_config(recipe, [AUTO], run_dir=run_dir).model.dtype == "fp32"
    assert load_config(recipe, [AUTO, "trainer.resume=never"], run_dir=run_dir).model.dtype == "bf16"
    named = f"trainer.resume={run_dir / 'checkpoints' / 'step_3'}"
    assert load_config(recipe, [AUTO, named]).model.dtype == "fp32"


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags : avx512_bf16 amx_bf16", "amx_bf16"),
        ("Features\t: fp asimd bf16", "bf16"),
        ("flags : fpu avx512f", None),
        ("", None),
    ],
)
def test_products_of_bf16_numbers_are_read_from_the_kernels_flags(tmp_path: Path, text, flag):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert bf16_products(tmp_path) == flag
