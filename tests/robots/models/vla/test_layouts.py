"""Log-probs of action tokens and all gradients of a robot policy: pipeline and data parallelism against one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.config.model import ParallelConfig
from tests.dist import fresh_layout, run_distributed
from tests.robots.models.vla.small import save_small
from tests.robots.models.vla.test_policy import build, stream_of

COLUMNS = (64, 320)  # of 330: 101 on the first of two ranks, 155 on the second
CALLS = [[0, 2], [1]]
LAYOUTS = [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {}]


def _run(folder: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Of this rank: what the head gave of each micro-batch, which calls these were, and gradients of its parameters
    by tensor and region."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megarl.models.weights.fill import local_shards
    from megarl.training.heads import LogProbs

    place = fresh_layout(ParallelConfig(**parallel))
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    (model,) = build(Path(folder), **parallel)
    model.config.variable_seq_lengths = True
    head = LogProbs(0.7, 16, place.tp_group, columns=COLUMNS)
    numbers = CALLS if place.dp_size == 1 else [CALLS[place.dp_rank]]
    seen: list[torch.Tensor] = []

    def forward(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        ids, stream, layouts = next(iterator)
        starts = torch.tensor([0, *(one.length for one in layouts)]).cumsum(0)[:-1].tolist()
        rows = [
            torch.arange(one.predictors.start, one.predictors.stop) + at
            for one, at in zip(layouts, starts, strict=True)
        ]
        targets = torch.cat([COLUMNS[0] + torch.arange(one.actions) * 37 % 256 for one in layouts])
        hidden = chunk(ids, stream.position_ids, None, packed_seq_params=stream.params)

        def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            micro = SimpleNamespace(rows=torch.cat(rows), targets=targets, kept_tokens=None)
            found = torch.stack(head(hidden[:, 0], chunk, micro))
            seen.append(found.detach())
            value = (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum()
            return value, torch.zeros((), dtype=torch.int), {}

        return hidden, loss

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([stream_of(part, multiple=place.tp_size) for part in numbers]),
        model=model,
        num_microbatches=len(numbers),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = []
    for shard, parameter in local_shards([model]):
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if getattr(parameter, "sequence_parallel", False):  # each rank has that of its own tokens
            dist.all_reduce(gradient, group=mpu.get_tensor_model_parallel_group())
        if place.dp_size > 1:
            dist.all_reduce(gradient, group=mpu.get_data_parallel_group())
        gradients += [(p.source, p.source_region, gradient[_cut(p.target_region)]) for p in shard.pieces]
    return {"seen": dict(zip(map(str, numbers), seen, strict=False)), "gradients": gradients}


def _cut(region: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def _all(folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_run(folder, parallel) for parallel in layouts]


@pytest.mark.procs
def test_every_layout_equals_one_process(tmp_path):
    tensors = save_small(tmp_path)
    ((expected,),) = run_distributed(_all, 1, 120, str(tmp_path), [{}])
    whole = {name: torch.zeros_like(value) for name, value in tensors.items()}
    for name, region, gradient in expected["gradients"]:
        whole[name][_cut(region)] = gradient
    assert all(value.abs().max() > 0 for value in whole.values())
    ranks = run_distributed(_all, 2, 90, str(tmp_path), LAYOUTS)
    for number, parallel in enumerate(LAYOUTS):
        assert {name for rank in ranks for name in rank[number]["seen"]} == expected["seen"].keys()
        for found in (rank[number] for rank in ranks):
            for name, value in found["seen"].items():
                # Sums in another order: a few units in the last place of logits of about 10.
                torch.testing.assert_close(value, expected["seen"][name], rtol=1e-6, atol=1e-5)
            for name, region, gradient in found["gradients"]:
                error = (gradient - whole[name][_cut(region)]).abs().max()
                assert error <= 1e-5 * whole[name].abs().max(), (parallel, name, error)
