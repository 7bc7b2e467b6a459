"""What a machine has, from the kernel's files and the driver's library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megarl.machine import free_host_memory, host_memory, smallest_gpu

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
        int nvmlDeviceGetMemoryInfo(void *device, struct memory *m) {
            if ((unsigned long)device == 1) return 3;  /* not permitted */
            m->total = (unsigned long)device * 40000000000ull;
            return 0;
        }
        """
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "nvml.so"), str(source)], check=True)
    assert smallest_gpu(str(tmp_path / "nvml.so")) == 80e9
    assert smallest_gpu(str(tmp_path / "none.so")) is None
