"""Tests embedded generation: captured steps against plain ones, log-probs against the training pass, memory freed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.certificate.findings import Findings
from megarl.certificate.models import make_engine, single_layout
from megarl.certificate.sections.kernels import difference
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.data.batch import Batch, Jagged
from megarl.system.device import empty_cache, has_cuda

if TYPE_CHECKING:
    from megarl.rollout.engine import Completion, Request
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

_MODELS = ("dense", "mixture")
_EOS = [2]
_ROUNDS = 3
_SLACK = 1 << 16  # tolerated growth in bytes; a cache of these models has a megabyte
#: Limits for the difference between log-probs of decoding and of the training pass, which use different kernels. In
#: bf16 a token may be routed to another expert (0.003 measured on a CPU).
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def run(found: Findings, folder: Path) -> None:
    """Generate with every model and dtype, with and without CUDA graphs."""
    layout = single_layout()
    if not has_cuda():
        found.skip("graphs", "no GPU")
    for model in _MODELS:
        for dtype in _LIMITS:
            generate(found, model, layout, dtype)


def generate(found: Findings, model: str, layout: Layout, dtype: torch.dtype) -> None:
    """Check the generated samples of one model."""
    from megarl.models.layers.mesh import Mesh
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.embedded.model import DecoderStage

    name = f"{model} {str(dtype).removeprefix('torch.')}"
    engine = make_engine(model, layout, dtype, frozen=True)
    requests, sampling = _requests(), SamplingConfig(max_new_tokens=16, temperature=1.0)
    plain, captured = (
        EmbeddedEngine(engine.chunks, RolloutConfig(cuda_graphs=graphs, max_running=8), layout)
        for graphs in (False, True)
    )
    samples = plain.generate(requests, sampling, _EOS)
    decoded = torch.tensor([value for group in samples for sample in group for value in sample.logprobs])
    error = difference(decoded, _training_logprobs(engine, requests, samples))
    found.within(f"{name}: log-probs are those of the training pass", error, _LIMITS[dtype])
    stage = DecoderStage(engine.chunks, Mesh.of(layout), dtype, rows=8, steps=1)
    if has_cuda() and not stage.can_be_captured:
        found.skip(f"{name}: graphs", "its steps wait for the device, and are not captured")
    elif has_cuda():
        same = captured.generate(requests, sampling, _EOS)
        tokens = [[sample.token_ids for sample in group] for group in same]
        found.check(
            f"{name}: graphs change no token", tokens == [[sample.token_ids for sample in group] for group in samples]
        )
    captured.generate(requests, sampling, _EOS)
    before = live_bytes()
    for _ in range(_ROUNDS):
        captured.generate(requests, sampling, _EOS)
    grown = live_bytes() - before
    found.check(
        f"{name}: memory is given back", grown <= _SLACK, f"{grown} bytes more after {_ROUNDS} more generations"
    )


def live_bytes() -> int:
    """Return the bytes of this process's tensors: the count of the GPU's allocator, or on a CPU the sum over Python's
    tensors.
    """
    gc.collect()
    if has_cuda():
        empty_cache()
        return torch.cuda.memory_allocated()
    storages = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu":
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _requests() -> list[Request]:
    from megarl.rollout.engine import Request

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (5,), generator=g).tolist()
    return [
        Request(torch.randint(3, 131, (length,), generator=g).tolist(), [1000 * i, 1000 * i + 1])
        for i, length in enumerate(lengths)
    ]


def _training_logprobs(
    engine: MegatronEngine, requests: Sequence[Request], samples: Sequence[Sequence[Completion]]
) -> torch.Tensor:
    pairs = [(request, sample) for request, group in zip(requests, samples, strict=True) for sample in group]
    columns = {
        "prompt_ids": Jagged.from_list([torch.tensor(request.prompt_ids) for request, _ in pairs]),
        "response_ids": Jagged.from_list([torch.tensor(sample.token_ids) for _, sample in pairs]),
    }
    logp, _ = engine.logprobs(Batch(columns, {}), entropy=False)
    return logp.values.cpu()
