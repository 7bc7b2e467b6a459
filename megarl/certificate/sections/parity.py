"""Tests log-probs and hidden states of every architecture against transformers, on the same device."""

from __future__ import annotations

from pathlib import Path

from megarl.certificate.findings import Findings
from megarl.certificate.models import save_model, single_layout
from megarl.system.device import has_cuda

_MODELS = ("dense", "tied", "mixture", "llama", "mistral", "mixtral", "qwen2")


def run(found: Findings, folder: Path) -> None:
    """Compare small models of each kind with transformers; in bf16 only on GPUs, whose kernels differ by dtype."""
    from megarl.commands.parity import parity

    for model in _MODELS:
        layout = single_layout()
        save_model(model, folder / model, layout)
        layout.close()
        for dtype in ("fp32", "bf16") if has_cuda() else ("fp32",):
            result = parity(folder / model, dtype, server=False)
            worst = max((*result.places, *result.logprobs), key=lambda place: place.relative)
            detail = f"largest relative difference {worst.relative:.2g} at {worst.name}, at most {result.tolerance:g}"
            found.check(f"{model} {dtype}", result.first is None, detail)
