"""The table of devices, what `--hardware` takes, and that documentation and metrics say the same."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megarl.planning.assumptions import PlanAssumptions, assume
from megarl.planning.hardware import KINDS, read_hardware, this_cpu
from megarl.simulation.planned import Assumptions
from megarl.system.errors import ConfigError
from megarl.tracking.perf import known_peak

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
_OTHER_SHARES = ("server_memory", "kept_groups", "usable_memory")


def test_a_kind_with_numbers_and_without():
    kind, counted = read_hardware("h100x8x4")
    assert (kind.devices, kind.per_node, kind.nodes, counted) == (32, 8, 4, True)
    assert kind.describe() == "h100x8x4"
    kind, counted = read_hardware("MI300X")
    assert (kind.name, counted) == ("mi300x", False)


def test_links_join_a_machine_or_a_rack():
    assert read_hardware("h100x8x4")[0].joined == 8
    assert read_hardware("gb200x4x18")[0].joined == 72


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("h10x8x4", "did you mean h100"),
        ("h100x0x4", "1 or more"),
        ("h100x8", "write h100x8x1 for one machine"),
        ("nothing.yaml", "YAML"),
    ],
)
def test_what_is_no_hardware_is_refused(text, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_hardware(text)


RIGHT = {
    "name": "mine",
    "bf16_tflops": 500,
    "fp32_tflops": 50.0,
    "memory_gb": 96,
    "memory_tb_s": 4.0,
    "node_gb_s": 450,
    "net_gbit": 400,
    "per_node": 4,
    "source": "measured",
}


def written(tmp_path, **changes):
    values = {key: value for key, value in (RIGHT | changes).items() if value is not None}
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return file


def test_a_file_defines_another_kind(tmp_path):
    kind, counted = read_hardware(str(written(tmp_path, nodes=3, gpu="true")))
    assert (kind.name, kind.bf16_tflops, kind.devices, counted) == ("mine", 500.0, 12, True)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"per_node": None}, "per_node"),
        ({"memory": 3}, "memory_gb"),
        ({"memory_gb": -1}, "a number above 0"),
        ({"per_node": 2.5}, "an integer from 1"),
        ({"source": "''"}, "text"),
        ({"gpu": 3}, "true or false"),
    ],
)
def test_every_key_of_a_file_is_checked(tmp_path, changes, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_hardware(str(written(tmp_path, **changes)))


@pytest.mark.parametrize("name", KINDS)
def test_metrics_know_the_same_peaks(name):
    """`perf/mfu` of a run and the MFU of its plan are shares of the same rate."""
    kind = KINDS[name]
    assert known_peak(name, "bf16") == kind.peak("bf16")
    assert known_peak(name, "fp32") == kind.peak("fp32")
    assert kind.source.startswith(("NVIDIA", "AMD"))
    assert kind.fp8_tflops in (0, pytest.approx(2 * kind.bf16_tflops, rel=0.001))


@pytest.mark.parametrize("name", KINDS)
def test_documentation_has_the_same_table(name):
    kind = KINDS[name]
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |"))
    said = [cell.strip() for cell in row.strip("|").split("|")][1:]
    numbers = [kind.bf16_tflops, kind.fp8_tflops, kind.fp32_tflops, kind.memory_gb, kind.memory_tb_s, kind.node_gb_s]
    numbers += [kind.net_gbit, kind.host_gb_s, kind.per_node, kind.joined]
    assert said == [*(f"{number:g}" if number else "" for number in numbers), kind.source]


def test_the_simulator_takes_its_defaults_from_the_table():
    given, kind = Assumptions(), KINDS["h100"]
    assert (given.peak_tflops, given.memory_tb_s, given.link_gbit) == (989.0, 3.35, 400.0)
    assert (kind.bf16_tflops, kind.memory_tb_s, kind.net_gbit) == (989.0, 3.35, 400.0)


def test_assumptions_are_set_by_name():
    assert assume(PlanAssumptions(), {"gemm_share": "0.7"}).gemm_share == 0.7
    for values, part in (({"gem_share": "1"}, "did you mean gemm_share"), ({"sigma": "-1"}, "a number from 0 on")):
        with pytest.raises(ConfigError, match=part):
            assume(PlanAssumptions(), values)


@pytest.mark.parametrize("given", [PlanAssumptions(), Assumptions()], ids=["plan", "simulate"])
def test_shares_and_divisors_are_held_to_their_ranges(given):
    """No plan is divided by zero, and nothing takes more than all of a device."""
    names = [one.name for one in fields(given)]
    shares = [name for name in names if name.endswith(("_share", "_mfu")) or name in _OTHER_SHARES]
    divisors = [name for name in names if name in ("disk_gb_s", "peak_tflops", "memory_tb_s", "link_gbit")]
    assert len(shares) >= 4
    assert divisors
    for name, text in [(one, text) for one in shares for text in ("60", "0") if (one, text) != ("overlap_share", "0")]:
        with pytest.raises(ConfigError, match=f"--assume {name}"):
            assume(given, {name: text})
    for name in divisors:
        with pytest.raises(ConfigError, match="above 0"):
            assume(given, {name: "0"})
    assert assume(given, {"sigma": "0"}).sigma == 0


def test_this_machine_is_measured():
    """Two processes share what one would have; how fast this machine is at the moment is not looked at."""
    found = this_cpu(2, 1)
    assert (found.devices, found.gpu) == (2, False)
    assert min(found.bf16_tflops, found.fp32_tflops, found.memory_tb_s) > 0
