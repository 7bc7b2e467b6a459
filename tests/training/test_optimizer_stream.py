"""An optimizer step in pieces, whose state is in host memory between them, against the step of the whole.

What moves on a GPU moves here between storages of the CPU, which are emptied and filled again.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megarl.config.training import EngineConfig
from megarl.system.offload_schedule import GRADIENTS, OPTIMIZER, PARAMETERS, PARTS
from megarl.training import optimizer_stream
from megarl.training.optimizer_stream import StreamedOptimizer
from tests.training import cases

PIECE = 300_000  # of about 1.5 MB; the largest parameter has 294,912


def owned(engine) -> list[tuple[dict, torch.Tensor]]:
    """The optimizers' parameters that are masters, not the model's own memory, with the dictionary of their moments."""
    parts = optimizer_stream.parts(engine.optimizer)
    own = {parameter.untyped_storage().data_ptr() for parameter in engine.chunks[0].parameters()}
    parameters = [(part.optimizer.state, parameter) for part in parts for parameter in part.get_parameters()]
    return [pair for pair in parameters if pair[1].untyped_storage().data_ptr() not in own]


def size_of(parameters: list[tuple[dict, torch.Tensor]]) -> int:
    """Bytes of masters and moments that are there."""
    return sum(
        tensor.untyped_storage().nbytes()
        for state, parameter in parameters
        for tensor in (parameter, *state.get(parameter, {}).values())
        if tensor.numel() > 1
    )


def train(model: str, dtype: torch.dtype, *, stream: bool) -> tuple[dict[str, str], list[int]]:
    """Digests of parameters and state after three steps, and the bytes of state at each call of AdamW."""
    settings = EngineConfig(micro_batch_tokens=64, logits_chunk_tokens=16, offload=True, stream_optimizer=stream)
    engine = cases.make_engine(model, dtype=dtype, engine=settings, layers=2)
    if stream:
        engine._stream = StreamedOptimizer(engine.wrapped, engine.optimizer, PIECE)
    present, every = list[int](), owned(engine)
    whole = torch.optim.AdamW.step

    def step(self, *args):
        present.append(size_of(every))
        return whole(self, *args)

    with (
        patch.object(optimizer_stream, "moves", lambda tensor: tensor.numel() > 1),
        patch.object(torch.optim.AdamW, "step", step),
    ):
        for _ in range(3):
            engine.hold(*PARTS)
            assert engine.held == ({PARAMETERS, GRADIENTS} if stream else set(PARTS))
            cases.train(engine, cases.make_batch())
            engine.hold(PARAMETERS, OPTIMIZER)  # as for a checkpoint
            assert engine.held == {PARAMETERS, OPTIMIZER}
            engine.hold(PARAMETERS)
            assert size_of(every) == 0 or not stream
        engine.hold(PARAMETERS, OPTIMIZER)
    state = {f"parameter {n}": p for n, p in engine.chunks[0].named_parameters()}
    for place, part in enumerate(optimizer_stream.parts(engine.optimizer)):
        for number, parameter in enumerate(part.get_parameters()):
            state |= {f"{k} {place} {number}": v for k, v in part.optimizer.state[parameter].items()}
            state[f"master {place} {number}"] = parameter
    return {name: cases.digest(value.reshape(-1)) for name, value in state.items()}, present


@pytest.mark.parametrize(("model", "dtype"), [("moe", torch.bfloat16), ("dense", torch.float32)])
def test_steps_in_pieces_are_those_of_the_whole(alone, model, dtype):
    want, once = train(model, dtype, stream=False)
    got, present = train(model, dtype, stream=True)
    assert got == want
    assert len(present) > 2 * len(once)
    if dtype == torch.bfloat16:
        assert max(present) <= PIECE < max(once)
