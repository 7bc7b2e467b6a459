"""Log-probs and hidden states of every architecture against transformers, on the same device."""

from __future__ import annotations

from pathlib import Path

from megarl.certificate.findings import Findings
from megarl.certificate.models import save_model
from megarl.device import dist_backend, has_cuda

_MODELS = ("dense", "tied", "mixture", "llama", "mistral", "mixtral", "qwen2")
_DEADLINE_S = 300.0


def run(found: Findings, folder: Path) -> None:
    """Compare every model as `megarl doctor parity` does; bf16 only on GPUs, whose kernels differ by dtype."""
    from megarl.comm import single_world
    from megarl.commands.parity import parity
    from megarl.config.model import ParallelConfig
    from megarl.training.parallel import init_parallel

    for model in _MODELS:
        layout = init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))
        save_model(model, folder / model, layout)
        layout.close()
        for dtype in ("fp32", "bf16") if has_cuda() else ("fp32",):
            result = parity(folder / model, dtype, server=False)
            worst = max((*result.places, *result.logprobs), key=lambda place: place.relative)
            told = f"largest relative difference {worst.relative:.2g} at {worst.name}, at most {result.tolerance:g}"
            found.check(f"{model} {dtype}", result.first is None, told)
