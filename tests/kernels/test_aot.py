"""Triton kernels compiled for GPUs that are not here (campaign: a minute for each kind of GPU)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from megarl.benchmarks.aot import LIMITS, Compiled

#: The largest kernel of each file, for the suite.
FEW = "gradients of experts"


def compiled(capability: int, only: str = "") -> list[Compiled]:
    """Compile in a process of its own: in this one kernels may be those of Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: make triton-test")
    command = [sys.executable, "-m", "megarl.benchmarks.aot", "--json", "--capability", str(capability)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    text = subprocess.check_output([*command, "--only", only], env=environment, text=True)
    return [Compiled(**made) for made in json.loads(text.splitlines()[-1])]


@pytest.mark.parametrize(
    ("capability", "only"),
    [(90, FEW), *(pytest.param(each, "", marks=pytest.mark.campaign("kernels")) for each in LIMITS)],
)
def test_kernels_fit_into_registers_and_shared_memory(capability, only):
    every = compiled(capability, only)
    assert [made for made in every if not made.fits] == []
    assert len({made.kernel for made in every}) == (1 if only else 15)


def test_what_does_not_fit_is_found():
    fitting = Compiled("a call", "a kernel", 120, 255, 99 << 10, 0)
    assert fitting.fits
    assert not fitting._replace(stack=8).fits
    assert not fitting._replace(shared=(99 << 10) + 1).fits
