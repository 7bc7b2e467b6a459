"""Trainer layouts and large tables of names and shapes for the tests and the bench of the sync layer."""

from __future__ import annotations

import itertools

from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.models.weight_table import Coordinate
from megarl.sync.plan import TrainerRank
from tests.models.tiny import tiny_dict

HERE = "127.0.0.1"


def config(name: str, **changes):
    return load_hf_config(ModelConfig(hf_config=tiny_dict(name, **changes)))


def trainer(tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, etp: int = 1, dp: int = 1) -> list[Coordinate]:
    """Coordinates by global rank in Megatron's order: tensor parallel fastest, then data, then pipeline."""
    at = []
    for p, d, t in itertools.product(range(pp), range(dp), range(tp)):
        inner = d * tp + t  # experts: their own tensor parallelism fastest, then expert parallelism
        at.append(Coordinate(tp, t, pp, p, vpp, ep, inner // etp % ep, etp, inner % etp))
    return at


def ranks_of(ranks: list[Coordinate], hosts: list[str] | None = None) -> list[TrainerRank]:
    return [TrainerRank(at.pp_rank, hosts[i] if hosts else HERE) for i, at in enumerate(ranks)]
