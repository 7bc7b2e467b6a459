"""Kernel files compiled for several processors, and what happens where a library is wrong or cannot be made."""

from __future__ import annotations

import ctypes
import multiprocessing
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megarl.kernels import amx, build, cpu, cpu_check, delta
from megarl.kernels.build import compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = {  # flags for the compiler, and what a CPU must have to run the code
    "x86-64-v3": ("-march=x86-64-v3", {"avx2", "bmi2", "fma"}),
    "x86-64-v4": ("-march=x86-64-v4", AVX512),
    # What an Intel compiler flag chooses, with instructions that AMD's processors have too.
    "x86-64-v4 for Intel": ("-march=x86-64-v4 -mtune=sapphirerapids", AVX512),
    "native": ("-march=native", set()),
    "sapphirerapids": ("-march=sapphirerapids", AVX512 | {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"}),
    "znver4": ("-march=znver4", AVX512 | {"avx512_bf16", "avx512_vbmi2", "avx512_vpopcntdq"}),
}
HEADS = (80,)  # of all head sizes: the others differ in a loop's length, and take most of a minute to compile
FILES = {
    "cpu": (cpu._SOURCE, lambda library: cpu_check.check(library, HEADS)),
    "delta": (delta._SOURCE, delta.check),
    "amx": (amx._SOURCE, amx.check),
}


#: Both forms of the code: without AVX-512, and with the masks that GCC 12 reads wrongly. Other tests use `native`.
_KEPT = {("cpu", "x86-64-v3"), ("delta", "x86-64-v3"), ("delta", "x86-64-v4 for Intel")}
CASES = [
    pytest.param(name, processor, level, marks=[pytest.mark.campaign("kernels")] if is_repeated else [])
    for name in FILES
    for processor in (PROCESSORS if name != "amx" else ("native", "sapphirerapids"))
    for level, is_repeated in (("-O1", True), ("-O3", (name, processor) not in _KEPT))
]


@pytest.mark.parametrize(("name", "processor", "level"), CASES)
def test_a_kernel_file_compiled_for_a_processor(name, processor, level, tmp_path):
    """GCC 12 reads a comparison's mask wrongly in one of these and not in another."""
    (source, check), (flags, needed) = FILES[name], PROCESSORS[processor]
    missing = needed - set(Path("/proc/cpuinfo").read_text().split())
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    if name == "amx" and not amx._has_tiles():
        pytest.skip("this CPU has no AMX")
    sizes = "-DSIZES=" + " ".join(f"CASE({size // 16})" for size in HEADS)
    target = tmp_path / "kernels.so"
    try:
        build.compile_to(target, source, "g++", [*build.FLAGS, *flags.split(), level, sizes], tmp_path)
    except subprocess.CalledProcessError as error:
        if "bad value" in error.stderr and "-m" in error.stderr:
            pytest.skip(f"this compiler does not know {flags}")
        raise AssertionError(error.stderr) from error
    with build._one_thread():
        assert check(ctypes.CDLL(str(target))) is None


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megarl"


@pytest.fixture
def source(tmp_path) -> Path:
    file = tmp_path / "three.cpp"
    file.write_text('extern "C" int three() { return 3; }\n')
    return file


def test_a_library_is_checked_once_on_a_machine(cache, source):
    calls = []
    for _ in range(2):
        assert compiled(source, calls.append).three() == 3
    assert len(calls) == 1
    assert sorted(file.suffix for file in cache.iterdir()) == [".so", ".verdict"]


def test_ranks_may_compile_side_by_side(cache, source):
    ranks = [multiprocessing.get_context("fork").Process(target=_compile, args=(source,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(200)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert sorted(file.suffix for file in cache.iterdir()) == [".so", ".verdict"]


def _compile(source: Path) -> None:
    library = compiled(source, lambda library: None)
    assert library is not None
    assert library.three() == 3


def test_the_sum_of_a_trees_parts_is_checked():
    """The check runs on one thread, on which a tree has one part and no sum unless more parts are requested."""
    library = ctypes.CDLL(str(build._build(cpu._SOURCE, shutil.which("g++"))))
    run = library.megarl_stream

    def add_wrongly(is_bf16, tensors, lse, starts, parents, nodes, groups, heads, size, threads, scale):
        run.argtypes = add_wrongly.argtypes
        failed = run(is_bf16, tensors, lse, starts, parents, nodes, groups, heads, size, threads, scale)
        trees = nodes if parents is None else (ctypes.c_int64 * nodes).from_address(parents)[:].count(-1)
        if tensors[6] is not None and trees * groups < threads:  # gradients of keys, in a backward pass
            ctypes.memset(tensors[6], 0, 8)
        return failed

    library.megarl_stream = add_wrongly
    with build._one_thread():
        assert "gradient of keys" in cpu_check.check(library, HEADS)


def test_a_library_that_differs_is_never_used(cache, source):
    verdicts = iter(["three is 4"])
    for _ in range(2):  # the verdict is kept, and every process says so
        with pytest.warns(
            UserWarning, match=r"three\.cpp: the library that .*g\+\+.* differs from the reference \(three is 4\)"
        ):
            assert compiled(source, lambda library: next(verdicts)) is None


def test_the_reference_is_used_instead(cache, tmp_path, monkeypatch):
    before, after = "mask &= mask - 1", "mask &= mask - 1 << 1"  # a mistake that a compiler could make
    text = delta._SOURCE.read_text()
    assert before in text
    monkeypatch.setattr(delta, "_SOURCE", tmp_path / "broken.cpp")
    delta._SOURCE.write_text(text.replace(before, after))
    with pytest.warns(UserWarning, match="differs from the reference"):
        assert delta._load.__wrapped__() is None


def test_a_broken_compiler_means_torch_and_one_warning(cache, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", ["-no-such-flag"])
    with pytest.warns(UserWarning, match="no-such-flag"):
        assert cpu.load.__wrapped__() is None
    assert not list(cache.iterdir())


def test_a_compiler_without_amx_is_named_and_runs_once(cache, monkeypatch, capsys):
    """Its message is kept for later processes, which warn without compiling; a newer compiler is tried again."""
    monkeypatch.setattr(amx, "_has_tiles", lambda: True)
    monkeypatch.setattr(build, "FLAGS", ["-std=c++17", "-march=x86-64-v3"])
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"amx\.cpp cannot be compiled.*this compiler cannot use the processor's AMX"
        ):
            assert amx.load.__wrapped__() is None
    assert capsys.readouterr().out.count("compiling amx.cpp") == 1
    (kept,) = cache.iterdir()
    kept.rename(kept.with_stem("amx-of-another-compiler"))
    with pytest.warns(UserWarning, match="cannot be compiled"):
        assert amx.load.__wrapped__() is None
    assert capsys.readouterr().out.count("compiling amx.cpp") == 1


def test_checks_take_well_under_a_second_and_change_nothing():
    threads, state, seconds = torch.get_num_threads(), torch.get_rng_state(), 0.0
    for check, source in ((cpu_check.check, cpu._SOURCE), (delta.check, delta._SOURCE)):
        library = ctypes.CDLL(str(build._build(source, shutil.which("g++"))))
        start = time.process_time()
        with build._one_thread():
            assert check(library) is None
        seconds += time.process_time() - start
    assert seconds < 5.0  # of CPU; 0.13 measured
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
