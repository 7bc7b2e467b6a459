"""A small random flow-matching policy, its sequence layout and its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.architectures.vision import VisionShape
from megarl.data.batch import Batch, Jagged
from megarl.robots.data.pictures import DINO_SIGLIP
from megarl.robots.models.flow.process import Denoising
from megarl.robots.models.flow.sequences import FlowLayout
from tests.robots.models.vla.small import CONFIG

DIM, CHUNK, STATE, CAMERAS = 2, 3, 5, ("front", "wrist")
#: Changes of the configuration of tests/robots/models/vla/small.py.
CHANGES: dict[str, Any] = {
    "state_dim": 0,
    "action_expert": {"hidden_size": 24, "intermediate_size": 40, "action_dim": DIM, "state_dim": STATE},
    "text_config": CONFIG["text_config"] | {"tie_word_embeddings": True, "num_key_value_heads": 2},
}
PROCESS = Denoising(steps=3, noise=0.6)
NUMBERS = PROCESS.steps * CHUNK * DIM


def flow_layout() -> FlowLayout:
    shape = VisionShape.from_config(CONFIG | CHANGES, 32, "small")
    assert shape.expert is not None
    return FlowLayout(shape, shape.expert, DINO_SIGLIP, CAMERAS, CHUNK, PROCESS)


def calls(count: int = 4, numbers: int = NUMBERS) -> Batch:
    """Policy calls with prompts of several lengths."""
    rng = torch.Generator().manual_seed(0)
    return Batch(
        {
            "prompt_ids": Jagged.from_list([torch.arange(4 + n % 3) * 5 + n for n in range(count)]),
            "response_ids": Jagged.from_lengths(torch.zeros(count * numbers, dtype=torch.int64), [numbers] * count),
            **{f"frames/{name}": torch.randint(0, 256, (count, 8, 8, 3), generator=rng).byte() for name in CAMERAS},
            "states": torch.randn(count, STATE, generator=rng),
        },
        {"sample_id": [f"s{n}" for n in range(count)]},
    )


def engine_of(folder: Path, budget: int = 100, **settings: Any) -> Any:
    from megarl.config.model import ParallelConfig
    from megarl.config.training import EngineConfig, OptimConfig
    from megarl.models.weights import load_weights
    from megarl.robots.models.vla.config import read_policy_config
    from megarl.training.engine import MegatronEngine
    from tests.dist import layout_for

    return MegatronEngine(
        read_policy_config(folder),
        ParallelConfig(),
        EngineConfig(micro_batch_tokens=budget),
        OptimConfig(lr=1e-2, eps=1e-3),
        dtype=torch.float32,
        layout=layout_for(ParallelConfig()),
        total_steps=10,
        weights=lambda chunks: load_weights(chunks, folder),
        sequences=flow_layout(),
        **settings,
    )
