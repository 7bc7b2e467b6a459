"""What is predicted of a server's storage, and its comparison with what the server describes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.storage import check_described
from megarl.sync.shards.boxes import RankStorage
from megarl.system.errors import UserError
from tests.sync.layouts import config, trainer
from tests.sync.shards.walk import job


def predicted() -> RankStorage:
    return job("qwen3", trainer(), 2).servers[0].ranks[1]


def test_a_description_in_another_order_is_that_predicted() -> None:
    storage = predicted()
    order = np.arange(len(storage.boxes))[::-1]

    check_described(RankStorage(storage.parameters, storage.boxes.take(order)), storage, "server 0")


def test_a_difference_names_the_parameter() -> None:
    storage = predicted()
    fused = storage.parameters.names.tolist().index("model.layers.2.self_attn.qkv_proj.weight")
    offset = storage.boxes.offset + (storage.boxes.parameter == fused)

    with pytest.raises(UserError, match=r"server 0 stores parameter model\.layers\.2\.self_attn\.qkv_proj\.weight in"):
        check_described(RankStorage(storage.parameters, storage.boxes.replace(offset=offset)), storage, "server 0")


def test_rows_of_a_vocabulary_are_padded_for_each_rank() -> None:
    layout = ServerLayout.of(config("qwen3"), 5)  # 131 rows: 192 do not divide by 5, so ranks have multiples of 64

    parts = [next(layout.parts(rank, "lm_head.weight", torch.ones(131, 2))) for rank in range(5)]

    assert [(part.shape[0], int(part.sum()) // 2) for _, part, _ in parts] == [
        (64, 64),
        (64, 64),
        (64, 3),
        (64, 0),
        (64, 0),
    ]


def test_with_attention_dp_each_rank_has_all_heads() -> None:
    layout = ServerLayout.of(config("deepseek_v3"), 4, attention_dp=4)

    whole, split = (
        next(layout.parts(3, f"model.layers.0.{name}.weight", torch.ones(96, 32)))[1]
        for name in ("self_attn.q_b_proj", "mlp.gate_proj")
    )

    assert (len(whole), len(split)) == (96, 24)
