"""Devices, their memory and their links, from data sheets, or measured on this machine.

h100x8x4        kind x devices of a machine x machines
my_gpus.yaml    another kind: a mapping with the fields of `Hardware`
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.system.errors import ConfigError, UserError, choose, close_matches

_SPEC = re.compile(r"([a-z]+\d*[a-z]*)(?:x(\d+)x(\d+))?")
_WHERE = "--hardware"


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how many there are. Rates are peaks of one device, in one direction."""

    name: str
    bf16_tflops: float  # dense matrix products in bf16
    fp32_tflops: float  # dense matrix products in fp32, without TF32
    memory_gb: float  # memory of a device in GB
    memory_tb_s: float
    node_gb_s: float  # GB/s of a device's link to other devices of its domain
    net_gbit: float  # Gbit/s of a device's link to other machines
    per_node: int  # devices of a machine
    source: str  # data sheet or measurement that the numbers are from
    fp8_tflops: float = 0.0  # dense matrix products in fp8; 0: the device has no fp8
    host_gb_s: float = 55.0  # GB/s of a device's link to host memory
    domain: int = 0  # number of devices that the fast links connect; 0: the devices of a machine
    nodes: int = 1  # number of machines
    gpu: bool = True  # False: processes on CPU cores
    cores: float = 1.0  # cores per process, if the device is not a GPU

    @property
    def pace(self) -> float:
        """Share of a core that a process has; fixed costs are divided by it, as processes take turns on a core."""
        return min(1.0, self.cores)

    @property
    def devices(self) -> int:
        """Number of devices of all machines."""
        return self.per_node * self.nodes

    @property
    def joined(self) -> int:
        """Number of devices that the fast links join."""
        return self.domain or self.per_node

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a device for products in fp32 or bf16."""
        return (self.fp32_tflops if dtype == "fp32" else self.bf16_tflops) * 1e12

    def while_others_wait(self, stages: int) -> Hardware:
        """Return the hardware as one of `stages` pipeline stages sees it while the others wait for it: processes that
        share CPU cores then leave it more of them."""
        more = min(1.0, self.cores * stages) / self.pace
        if more == 1.0:
            return self
        rates = {name: getattr(self, name) * more for name in ("bf16_tflops", "fp32_tflops", "memory_tb_s", "cores")}
        return replace(self, **rates)

    def describe(self) -> str:
        """Return the hardware in the form of `--hardware`."""
        return f"{self.name}x{self.per_node}x{self.nodes}"


#: Dense rates, without sparsity. Data sheets add both directions of a link; these numbers are for one direction.
_NUMBERS = """
name    bf16_tflops  fp8_tflops  fp32_tflops  memory_gb  memory_tb_s  node_gb_s  net_gbit  host_gb_s  per_node  domain
a100            312           0         19.5         80        2.039        300       200         32         8       0
h100            989        1979           67         80         3.35        450       400         64         8       0
h200            989        1979           67        141          4.8        450       400         64         8       0
b200           2250        4500           75        180            8        900       400         64         8       0
gb200          2500        5000           80        186            8        900       400        225         4      72
mi300x         1307        2614          163        192          5.3        448       400         64         8       0
"""
_SOURCES = {
    "a100": "NVIDIA A100 Tensor Core GPU data sheet (80GB SXM); network: DGX A100 data sheet",
    "h100": "NVIDIA H100 Tensor Core GPU data sheet (SXM); network: DGX H100 data sheet",
    "h200": "NVIDIA H200 Tensor Core GPU data sheet (SXM); network: DGX H200 data sheet",
    "b200": "NVIDIA DGX B200 data sheet, an eighth of a system",
    "gb200": "NVIDIA GB200 NVL72 data sheet, a 72nd of a rack",
    "mi300x": "AMD Instinct MI300X data sheet and platform data sheet (seven Infinity Fabric links)",
}


def _kinds() -> Iterator[Hardware]:
    """Yield the hardware of each row of the table `_NUMBERS`."""
    (_, *names), *rows = (line.split() for line in _NUMBERS.strip().splitlines())
    for name, *texts in rows:
        numbers: dict[str, Any] = dict(zip(names, map(float, texts), strict=True))
        counts = {key: int(numbers[key]) for key in ("per_node", "domain")}
        yield Hardware(name=name, source=_SOURCES[name], **numbers | counts)


KINDS: Mapping[str, Hardware] = {kind.name: kind for kind in _kinds()}


def with_memory(gigabytes: float) -> Hardware:
    """Return the kind of device with this much memory; if there is none, or several, an H100 with this memory."""
    h100 = KINDS["h100"]
    if gigabytes == h100.memory_gb:
        return h100
    same = [kind for kind in KINDS.values() if kind.memory_gb == gigabytes]
    return same[0] if len(same) == 1 else replace(h100, name=f"h100-{gigabytes:g}gb", memory_gb=gigabytes)


def read_hardware(text: str) -> tuple[Hardware, bool]:
    """Return the hardware that `--hardware` names, and whether the name or the named file sets the number of devices.

    Raises:
        ConfigError: `text` is neither a known kind nor a file, or a key or value of the file is invalid.
    """
    spec = _SPEC.fullmatch(text.lower())
    if spec is not None and spec[1] in KINDS:
        kind = KINDS[spec[1]]
        if spec[2] is None:
            return kind, False
        per_node, nodes = int(spec[2]), int(spec[3])
        if not per_node or not nodes:
            raise ConfigError(
                "the numbers of machines and devices must be 1 or more",
                where=_WHERE,
                found=text,
                allowed="for example h100x8x4: 8 devices on each of 4 machines",
            )
        return replace(kind, per_node=per_node, nodes=nodes), True
    file = Path(text).expanduser()
    if file.is_file():
        return _read_file(file), True
    part = re.fullmatch(r"([a-z0-9]+?)x(\d+)", text.lower())
    if part is not None and part[1] in KINDS and int(part[2]):
        raise ConfigError(
            "the number of machines is missing after the devices per machine",
            where=_WHERE,
            found=text,
            allowed="devices of a machine x machines",
            fix=f"write {text}x1 for one machine",
        )
    name = text.lower().partition("x")[0]
    near = [f"{name}x8x4"] if name in KINDS else close_matches(name, list(KINDS))
    raise ConfigError(
        "unknown kind of hardware",
        where=_WHERE,
        found=text,
        allowed=f"{', '.join(KINDS)}, cpu; or with x devices per machine x machines, such as h100x8x4; or a YAML file",
        fix=f"did you mean {near[0]}?" if near else "docs/planning.md describes the file of another kind",
    )


def _read_file(file: Path) -> Hardware:
    """Read a kind of device from a YAML file, and check every key and value."""
    from megarl.config.yamlio import read_yaml

    values: dict[str, Any] = read_yaml(file).data
    known = {field.name: field for field in fields(Hardware)}
    for name, value in values.items():
        where = f"{file}: {name}"
        kind = choose(known, name, "unknown key of hardware", where=str(file)).type
        if kind == "str":
            right, allowed = isinstance(value, str) and bool(value.strip()), "text"
        elif kind == "bool":
            right, allowed = isinstance(value, bool), "true or false"
        else:
            number = isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
            least = 0 if known[name].default == 0 else 1 if kind == "int" else 1e-9
            right = number and least <= value < float("inf")
            allowed = f"{'an integer' if kind == 'int' else 'a number'} {'from' if least in (0, 1) else 'above'} "
            allowed += f"{least if least in (0, 1) else 0}"
        if not right:
            raise ConfigError(
                "the value of a key in the hardware file is invalid", where=where, found=value, allowed=allowed
            )
        values[name] = float(value) if kind == "float" else value
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise ConfigError(
            f"the hardware file lacks the keys {', '.join(missing)}",
            where=str(file),
            found=list(values),
            fix="add them",
        )
    return Hardware(**values)


def this_cpu(
    processes: int, threads: int | None = None, rates: Sequence[float] | None = None, cores: int | None = None
) -> Hardware:
    """Return this machine as hardware with one device per process.

    Args:
        threads: threads of each process; None: an equal share of the cores.
        rates: FLOP/s of a core in bf16 and fp32, and bytes copied per second; None: measure them in about a second.
        cores: cores of the machine; None: those that this process may use.
    """
    from megarl.system.machine import available_cores, host_memory

    cores = cores or available_cores()
    used = min(threads or cores / processes, cores / processes)  # more threads than cores take turns
    bf16, fp32, copied = (rate * used for rate in rates or measure_cores())
    return Hardware(
        name="cpu",
        bf16_tflops=bf16 / 1e12,
        fp32_tflops=fp32 / 1e12,
        memory_gb=host_memory() / processes / 1e9,
        memory_tb_s=copied / 1e12,
        node_gb_s=_GLOO_GB_S,
        net_gbit=8 * _GLOO_GB_S,
        per_node=processes,
        host_gb_s=copied / 1e9,
        source=f"measured on one core, times {used:g} for each process: products of 1024 x 1024, copies of 64 MB",
        gpu=False,
        cores=used,
    )


def typical_cpu(processes: int, threads: int | None = None, cores: int | None = None) -> Hardware:
    """Return `this_cpu` with typical rates of its kind of processor, which may be wrong by a factor of two.

    Nothing is measured, so this takes no time and needs no torch.
    """
    from megarl.system.machine import bf16_products, processor_flags

    flags = processor_flags()
    fp32 = next((rate for flag, rate in _TYPICAL_FP32.items() if flag in flags), _LEAST_FP32)
    bf16 = fp32 * _BF16_GAIN.get(bf16_products(), _OTHER_BF16_GAIN)
    hardware = this_cpu(processes, threads, (bf16, fp32, _TYPICAL_COPIED), cores)
    return replace(hardware, source="typical rates of a core with the instructions of this processor")


# Typical fp32 FLOP/s of one core by its instruction set, the fastest first; docs/performance.md has the measured rates
# of a machine.
_TYPICAL_FP32 = {"avx512f": 90e9, "avx2": 50e9, "asimd": 40e9}
_LEAST_FP32 = 15e9
#: How many times faster products in bf16 are than in fp32, by the processor's instructions for them; None: it has none.
_BF16_GAIN = {"amx_bf16": 8.0, None: 0.1}
_OTHER_BF16_GAIN = 2.3
_TYPICAL_COPIED = 10e9

_GLOO_GB_S = 4.3
"""GB/s: a gloo broadcast of 400 MB took 0.094 s on two cores (docs/performance.md)."""


_MEASURE_S = 0.3
_MEASURE_SIZE = 1024
_COPIED = 1 << 26  # copied bytes, more than most caches hold


def measure_peak(dtype: str, seconds: float = _MEASURE_S, size: int = _MEASURE_SIZE) -> float:
    """Multiply `size` x `size` matrices for `seconds` on this process's device; return the fastest product's FLOP/s.

    Matrices of a quarter of the size are used if one product takes longer: a processor without instructions for the
    dtype takes seconds for it, and is equally slow with small matrices.
    """
    import torch

    from megarl.system import device

    if dtype not in device.DTYPES:
        raise UserError("this dtype is unknown", where="peak_flops", found=dtype, allowed=sorted(device.DTYPES))

    def product(size: int) -> Callable[[], object]:
        a = torch.randn(size, size, device=device.device()).to(device.DTYPES[dtype])
        out = torch.empty_like(a)
        return lambda: torch.mm(a, a, out=out)

    if 4**3 * best_seconds(product(size // 4), 0) > seconds:
        size //= 4
    return 2 * size**3 / best_seconds(product(size), seconds)


def measure_memory() -> float:
    """Return the bytes per second, read and written, of the fastest copy in a short time."""
    import torch

    source = torch.zeros(_COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * _COPIED / best_seconds(lambda: target.copy_(source), _MEASURE_S)


def best_seconds(call: Callable[[], object], seconds: float, repeats: int = 1) -> float:
    """Call repeatedly for `seconds` on this process's device, and return the seconds of the fastest call.

    The clock is read after every `repeats` calls.
    """
    from megarl.system.device import synchronize

    call()
    synchronize()
    best, end = math.inf, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or best == math.inf:
        for _ in range(repeats):
            call()
        synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def measure_cores() -> tuple[float, float, float]:
    """Measure one core: FLOP/s in bf16 and in fp32, and bytes copied per second (read plus written).

    It uses one thread: threads that wait for each other are many times slower when other programs use the cores.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_peak("bf16"), measure_peak("fp32"), measure_memory()
    finally:
        torch.set_num_threads(threads)
