"""Recipes of FP8. Like the real ones they are pydantic dataclasses, which ignore arguments that they do not know."""

from enum import Enum
from typing import NamedTuple

from pydantic.dataclasses import dataclass


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _FormatHelper(448, 448)
    E5M2 = _FormatHelper(57344, 57344)
    HYBRID = _FormatHelper(448, 57344)


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)

    def float8_block_scaling(self):
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self):
        return isinstance(self, MXFP8BlockScaling)


@dataclass()
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class Float8BlockScaling(Recipe):
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
