"""Policy calls of a flow-matching policy through the engine: chains, their log-probs, and the flow-matching loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.artifacts.action_statistics import ActionStatistics
from megarl.data.batch import Batch
from megarl.robots.models.flow.calls import SampledChains
from megarl.robots.models.vla.actions import NumberCodec
from megarl.robots.rollout.denoising import DenoisingPolicy
from megarl.robots.rollout.policy import PolicyCall
from megarl.robots.simulators.protocol import Observation
from tests.dist import single_process, world
from tests.robots.models.flow.small import CAMERAS, CHANGES, CHUNK, DIM, NUMBERS, PROCESS, calls, engine_of
from tests.robots.models.vla.small import save_small

pytestmark = pytest.mark.procs


def sampled(engine, rows: Batch, seeds: list[int], *, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Chains [B, S + 1, K, D] and the log-probs [B, S * K * D] of the calls in `rows`."""
    policy = DenoisingPolicy(engine.evaluate, NumberCodec(ActionStatistics.plain(DIM)), PROCESS, CAMERAS, CHUNK)
    policy.temperature = 0.0 if greedy else 1.0
    frames = {name: rows[f"frames/{name}"].numpy() for name in CAMERAS}
    given = [
        PolicyCall(
            ids.tolist(), Observation({name: frames[name][n] for name in CAMERAS}, rows["states"][n].numpy()), seed
        )
        for n, (ids, seed) in enumerate(zip(rows["prompt_ids"].unbind(), seeds, strict=True))
    ]
    chunks = policy.act(given)
    for chunk in chunks:
        assert chunk.chain is not None
        assert np.array_equal(chunk.actions, chunk.chain[-1])
    chains = torch.from_numpy(np.stack([chunk.chain for chunk in chunks if chunk.chain is not None]))
    return chains, torch.tensor([chunk.logprobs for chunk in chunks])


def test_training_finds_the_log_probs_of_the_rollout(tmp_path: Path) -> None:
    single_process()
    save_small(tmp_path, **CHANGES)
    engine, rows, seeds = engine_of(tmp_path), calls(), [3, 4, 5, 1 << 40]
    chains, logps = sampled(engine, rows, seeds)
    rows.set("chain", chains)
    found, entropy = engine.logprobs(rows)
    # float32: the rollout denoises step by step, training all steps at once; log-probs are a few units
    torch.testing.assert_close(found.values.view(4, -1), logps, atol=2e-5, rtol=0)
    assert entropy.values.view(4, -1)[0, 0] == pytest.approx(0.5 * np.log(2 * np.pi * np.e * PROCESS.deviation(0) ** 2))
    alone, _ = sampled(engine, rows.select([2]), [5])
    # sums in another order, which every step of these random weights enlarges
    torch.testing.assert_close(alone[0], chains[2], atol=1e-3, rtol=0)
    assert not torch.allclose(sampled(engine, rows, [9, 4, 5, 6])[0][0], chains[0])
    greedy, zeros = sampled(engine, rows, seeds, greedy=True)
    assert torch.equal(greedy[:, 0], chains[:, 0]), "the same noise at the beginning"
    assert not zeros.any()
    assert not torch.allclose(greedy[:, -1], chains[:, -1])


def test_a_greedy_call_is_the_ode_of_the_experts_velocities(tmp_path: Path) -> None:
    """By cloning examples whose target is zero: their log-prob at (x, t) is -v(x, t)^2 / 2."""
    single_process()
    save_small(tmp_path, **CHANGES)
    engine, rows = engine_of(tmp_path), calls()
    chains, _ = sampled(engine, rows, [3, 4, 5, 6], greedy=True)
    at = calls(numbers=CHUNK * DIM)
    for step, time in enumerate(PROCESS.times):
        point = chains[:, step]
        at.set("chain", torch.stack([point, point], 1))  # noise = actions: x_t is the point, e - a is zero
        at.set("flow_time", torch.full((4,), time))
        squares = -2 * engine.logprobs(at)[0].values.view_as(point)
        moved = (chains[:, step + 1] - point) * PROCESS.steps
        torch.testing.assert_close(moved.square(), squares, atol=1e-4, rtol=1e-4)  # float32 of differences times 3


def test_the_flow_matching_loss_falls_and_a_checkpoint_keeps_every_tensor(tmp_path: Path) -> None:
    from megarl.models.weights import export_weights

    single_process()
    tensors = save_small(tmp_path, **CHANGES)
    engine, rows = engine_of(tmp_path), calls(numbers=CHUNK * DIM)
    export_weights(engine.chunks, tmp_path / "out", engine.hf_config, world=world())
    stored = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert "model.dit.layers.1.mlp.up_proj.weight" in stored
    rng = torch.Generator().manual_seed(1)
    rows.set("chain", torch.randn(4, 2, CHUNK, DIM, generator=rng))
    rows.set("flow_time", torch.tensor([0.2, 0.5, 0.7, 0.9]))
    rows.set("loss_weights", rows["response_ids"].like(torch.full((4 * CHUNK * DIM,), 1 / (4 * CHUNK * DIM))))
    losses = [engine.sft_step(rows).result()["sft/loss"] for _ in range(4)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("frozen", [["action_expert"], ["tower", "merger", "language_model"]])
def test_a_frozen_part_stays_and_the_other_learns(frozen: list[str], tmp_path: Path) -> None:
    single_process()
    save_small(tmp_path, **CHANGES)
    engine, rows = engine_of(tmp_path, freeze=frozen), calls()
    rows.set("chain", sampled(engine, rows, [1, 2, 3, 4])[0])
    rows.set("loss_weights", rows["response_ids"].like(torch.linspace(-1, 1, 4 * NUMBERS) / NUMBERS))
    before = {name: p.detach().clone() for name, p in engine.chunks[0].named_parameters()}
    engine.sft_step(rows)
    moved = {name for name, p in engine.chunks[0].named_parameters() if not torch.equal(p, before[name])}
    assert any(name.startswith("vision.expert.") for name in moved) == (frozen != ["action_expert"])
    assert any(name.startswith("decoder.") for name in moved) == (frozen == ["action_expert"])


def test_a_seed_gives_the_same_noise_whatever_else_is_sampled() -> None:
    head = SampledChains(PROCESS, torch.tensor([3, 9]), stochastic=True)
    shape = torch.Size((CHUNK, DIM))
    both = head.noise(torch.tensor([3, 9]), shape)
    assert torch.equal(head.noise(torch.tensor([9]), shape), both[1:])
