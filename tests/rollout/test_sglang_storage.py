"""What is predicted of a server's storage."""

from __future__ import annotations

import torch

from megarl.rollout.sglang.layout import ServerLayout
from tests.sync.layouts import config


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
