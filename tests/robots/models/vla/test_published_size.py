"""A policy of OpenVLA-OFT's published size with random weights in bf16: files, policy calls, an update of a slice.

The update trains the projectors, because with all 7.5 billion weights optimizer state and gradients would take 120 GB.
"""

from __future__ import annotations

import functools
import gc
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from tests.dist import layout_for, single_process
from tests.robots.models.vla.published import PARAMETERS, reference_logits, write_published
from tests.robots.models.vla.test_sequences import loss

pytestmark = [pytest.mark.procs, pytest.mark.campaign("vla-7b"), pytest.mark.timeout(3000)]

LAYERS = 32
#: Bytes that the whole policy and the update of its projectors take.
NEEDED = 18.5e9
PROMPT = [1, 512, 29901, 1724, 3158, 881, 278, 19964, 2125, 304, 29973, 13, 3744, 29901, 29871]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for 15 GB, which are removed."""
    yield tmp_path / "policy"
    shutil.rmtree(tmp_path / "policy", ignore_errors=True)


def sees() -> np.ndarray:
    """A picture with smooth shapes, uint8 [224, 224, 3]."""
    y, x = np.mgrid[:224, :224] / 224
    return (255 * np.stack([x, y, (np.sin(9 * x) * np.cos(7 * y) + 1) / 2], -1)).astype(np.uint8)


def built(folder: Path) -> tuple[Any, Any]:
    """The engine, and the policy as a recipe of the package has it."""
    from megarl.models.weights import load_weights
    from megarl.robots.config import robot_of
    from megarl.robots.models.vla.config import read_policy_config
    from megarl.robots.rollout.policy import SamplingPolicy
    from megarl.robots.setup import body_of, model_statistics, vla_layout
    from megarl.training.engine import MegatronEngine

    config = load_config("srpo_libero_goal_openvla_oft_8gpu", [f"model.path={folder}"])
    hf = read_policy_config(folder)
    sequences = vla_layout(config, hf)
    engine = MegatronEngine(
        hf,
        ParallelConfig(),
        EngineConfig(micro_batch_tokens=400, logits_chunk_tokens=64, recompute="full"),
        OptimConfig(lr=1e-4),
        dtype=torch.bfloat16,
        layout=layout_for(ParallelConfig()),
        total_steps=2,
        weights=functools.partial(load_weights, source_dir=folder),
        freeze=("tower", "language_model"),
        sequences=sequences,
    )
    robot = robot_of(config)
    body = body_of(config, sequences, hf, model_statistics(config, robot)[1])
    return engine, SamplingPolicy(engine.sample, body.codec, robot.cameras, robot.chunk)


@pytest.mark.parametrize("layers", [2, LAYERS])
def test_a_policy_of_the_published_size_acts_and_learns(layers: int, folder: Path, capsys: Any) -> None:
    from megarl.robots.rollout.policy import PolicyCall
    from megarl.robots.simulators.protocol import Observation

    if layers == LAYERS and (free := psutil.virtual_memory().available) < NEEDED:
        pytest.skip(f"needs {NEEDED / 1e9:.1f} GB of memory, of which {free / 1e9:.1f} GB are free")
    single_process()
    clock = Clock()
    count = write_published(folder, layers)
    assert count == PARAMETERS - (LAYERS - layers) * 202_383_360
    clock("write")
    engine, policy = built(folder)
    clock("load")
    observation = Observation({"agentview": sees()}, np.zeros(8, np.float32))
    calls = [PolicyCall(PROMPT, observation, seed) for seed in (5, 6)]
    chunks = policy.act(calls)
    clock("two policy calls")
    columns, slots = engine.sequences.columns, 56
    assert all(chunk.actions.shape == (8, 7) and np.isfinite(chunk.actions).all() for chunk in chunks)
    assert {columns[0] <= token < columns[1] for chunk in chunks for token in chunk.token_ids} == {True}
    assert chunks[0].token_ids != chunks[1].token_ids
    rows = Batch(
        {
            "prompt_ids": Jagged.from_list([torch.tensor(PROMPT)]),
            "response_ids": Jagged.from_list([torch.tensor(chunks[0].token_ids)]),
            "loss_weights": Jagged.from_list([torch.full((slots,), 1 / slots)]),
            "frames/agentview": torch.from_numpy(sees())[None],
            "states": torch.zeros(1, 8),
        }
    )
    frozen, trained = moving(engine)
    before = [parameter.detach().clone() for parameter in (frozen, trained)]
    metrics = engine.train_step(rows, loss).result()
    clock("update")
    assert metrics["actor/grad_norm"] > 0
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    pixels = engine.sequences.normalise(rows["frames/agentview"])
    del engine, policy, frozen, trained, before
    gc.collect()
    compare(folder, pixels, chunks[0], columns, also_causal=layers < LAYERS)
    clock("reference")
    with capsys.disabled():
        print(f"\n{layers} layers, {count / 1e9:.2f} billion parameters: at most {peak:.1f} GB; {clock}")


def moving(engine: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter of the language model, and one of the projectors."""
    named = dict(engine.chunks[0].named_parameters())
    return named["decoder.final_layernorm.weight"], named["vision.projector.fc3.weight"]


def compare(folder: Path, pixels: torch.Tensor, chunk: Any, columns: tuple[int, int], *, also_causal: bool) -> None:
    """Hold the log-probs of a call's tokens against transformers' classes in float32, with the weights of the files."""
    ids = torch.tensor(chunk.token_ids)[:, None] - columns[0]
    found = torch.tensor(chunk.logprobs)
    errors = []
    for causal in (False, True)[: 1 + also_causal]:
        logits = reference_logits(folder, PROMPT, pixels, len(ids), columns, causal=causal)
        errors.append((logits.log_softmax(-1).gather(1, ids)[:, 0] - found).abs())
    # bf16 keeps 8 bits, and errors of layers add up at random: 0.4% * sqrt(2 * 32 layers) of logits of size 1
    assert errors[0].max() < 0.15
    assert errors[0].mean() < 0.04
    if also_causal:
        assert errors[1].mean() > 5 * errors[0].mean(), "the comparison would not see a wrong attention"


class Clock:
    """Wall seconds of the parts of a test."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.began = time.monotonic()

    def __call__(self, part: str) -> None:
        now = time.monotonic()
        self.parts[part], self.began = now - self.began, now
        print(f"{part}: {self.parts[part]:.0f} s", flush=True)

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.0f} s" for part, seconds in self.parts.items())
