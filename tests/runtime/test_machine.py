"""What a machine has, from the kernel's files and the driver's library."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from megarl.system import machine
from megarl.system.compat.cuda import gpu_uuids
from megarl.system.machine import (
    find_malloc_trim,
    free_host_memory,
    host_memory,
    resident_bytes,
    smallest_gpu,
    this_machine,
    visible_gpus,
)

GB = 10**9


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_without_limits_it_is_what_is_installed(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 3 kB", "proc/self/cgroup": "0::/user"})
    assert host_memory(tmp_path) == 1000 * 1024


def test_here_it_is_what_the_system_says() -> None:
    assert 0 < host_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_host_memory() <= host_memory()


@pytest.mark.parametrize("inside", [True, False], ids=["its own path", "mounted at the top, in a container"])
def test_the_smallest_limit_above_the_process_counts(tmp_path: Path, inside: bool) -> None:
    top = "sys/fs/cgroup"
    own = f"{top}/batch/job" if inside else top
    files = {
        "proc/meminfo": f"MemTotal: {64 * GB // 1024} kB",
        "proc/self/cgroup": "0::/batch/job",
        f"{own}/memory.max": "max" if inside else 8 * GB,
        f"{own}/memory.current": 3 * GB,
        f"{own}/memory.stat": f"anon 1\ninactive_file {GB}",
    }
    if inside:
        files |= {f"{top}/batch/memory.max": 8 * GB, f"{top}/batch/memory.current": 3 * GB}
        files |= {f"{top}/batch/memory.stat": f"inactive_file {GB}"}
    write(tmp_path, files)
    assert host_memory(tmp_path) == 8 * GB
    assert free_host_memory(tmp_path) <= 6 * GB


def test_limits_of_the_first_version_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 50 * GB}))
    write(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {64 * GB // 1024} kB",
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": 4 * GB,
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": 2 * GB,
            "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {GB}",
        },
    )
    assert (host_memory(tmp_path), free_host_memory(tmp_path)) == (4 * GB, 3 * GB)


def test_gpus_are_asked_through_the_drivers_library(tmp_path: Path) -> None:
    """The library of a driver is not there without a GPU: this one has its functions and three devices."""
    source = tmp_path / "nvml.c"
    source.write_text(
        """
        struct memory { unsigned long long total, free, used; };
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1ul); return 0; }
        int nvmlDeviceGetHandleByUUID(const char *name, void **device) {
            *device = (void *)3ul;
            return name[4] == 'c' ? 0 : 6;  /* not found */
        }
        int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
            const char *uuid = "GPU-0\\0";
            for (unsigned at = 0; at < 6 && at < length; at++) text[at] = uuid[at];
            text[4] += (unsigned long)device;
            return 0;
        }
        int nvmlDeviceGetMemoryInfo(void *device, struct memory *m) {
            if ((unsigned long)device == 1) return 3;  /* not permitted */
            m->total = (unsigned long)device * 40000000000ull;
            return 0;
        }
        """
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "nvml.so"), str(source)], check=True)
    library = str(tmp_path / "nvml.so")
    assert gpu_uuids(library) == ["GPU-1", "GPU-2", "GPU-3"]
    assert gpu_uuids(str(tmp_path / "none.so")) == []
    assert smallest_gpu(library=library) == (80e9, True)
    assert smallest_gpu(library=str(tmp_path / "none.so")) == (None, True)
    # CUDA's numbers are those of the library in bus order only; without it only names are certain.
    assert smallest_gpu(["2"], in_bus_order=True, library=library) == (120e9, True)
    assert smallest_gpu(["0"], in_bus_order=True, library=library) == (None, True)
    assert smallest_gpu(["GPU-c"], library=library) == (120e9, True)
    for unknown in (["2"], ["GPU-c", "GPU-other"], ["7"]):
        assert smallest_gpu(unknown, library=library) == (80e9, False)


@pytest.mark.parametrize(
    ("text", "visible"),
    [(None, None), ("", []), ("-1", []), ("1, 0", ["1", "0"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]), ("0,-1,1", ["0"])],
)
def test_visible_gpus_end_at_the_first_that_is_none(text: str | None, visible: list[str] | None) -> None:
    assert visible_gpus({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == visible


def test_a_machine_whose_gpus_are_all_hidden_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_nvidia_device", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (this_machine().has_gpu, this_machine().gpu_memory) == (False, None)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_trimming_gives_pages_back() -> None:
    blocks = [b"x" * 50_000 for _ in range(2000)]
    last = b"x" * 50_000  # keeps the end of the heap in use, so that free() by itself returns nothing
    before = resident_bytes()
    del blocks
    freed = resident_bytes()
    find_malloc_trim()(0)
    # 100 MB were free; half of them is far from any noise, and free() may have returned them before already.
    assert min(freed, resident_bytes()) < before - 50_000_000
    assert len(last) == 50_000
