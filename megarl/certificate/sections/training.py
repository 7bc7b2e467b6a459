"""Tests training of every kind of model against float64, with all state offloaded and restored between steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.certificate.findings import Findings, worst
from megarl.certificate.models import make_batch, make_engine, outputs, save_model, single_layout, step
from megarl.certificate.reference import Reference
from megarl.certificate.sections.kernels import difference
from megarl.system.device import device

if TYPE_CHECKING:
    from megarl.models.layer_forms import Form
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

_MODELS = ("dense", "tied", "mixture", "critic")
_STEPS = 4
#: Limits of the relative difference between a model's outputs before training and the float64 reference. Sums in
#: float32 have a different order (5e-7 on a CPU); bf16 keeps 8 bits, over four layers (0.01 measured on a CPU).
_NUMBERS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
#: Limits of the relative difference between loss and gradient norm of training steps and the reference. In bf16 a token
#: may be routed to another expert than in float64, which changes its gradient (0.08 measured on a CPU).
_AFTER_STEPS = {torch.float32: 1e-4, torch.bfloat16: 0.3}


def run(found: Findings, folder: Path) -> None:
    """Train every model for some steps in float32 and bf16."""
    layout = single_layout()
    for model in _MODELS:
        save_model(model, folder / model, layout)
        reference = Reference(folder / model, critic=model == "critic")
        batch = make_batch()
        with torch.no_grad():
            exact = reference.outputs(batch)
        steps = [reference.step(batch) for _ in range(_STEPS)]
        for dtype in _NUMBERS:
            for layers in forms(dtype):
                train(found, model, layout, dtype, layers, exact, steps)


def forms(dtype: torch.dtype) -> tuple[Form, ...]:
    """Return the layer implementations to train with, including Transformer Engine's if `auto` would use it."""
    from megarl.config.training import EngineConfig
    from megarl.models.layer_forms import layer_form

    return ("local",) if layer_form(EngineConfig(), dtype) == "local" else ("local", "te")


def train(
    found: Findings,
    model: str,
    layout: Layout,
    dtype: torch.dtype,
    layers: Form,
    exact: dict[str, torch.Tensor],
    steps: list[dict[str, float]],
) -> None:
    """Compare with the reference an engine's outputs before training and the metrics of its training steps."""
    name = f"{model} {str(dtype).removeprefix('torch.')}{'' if layers == 'local' else ' in Transformer Engine'}"
    engine, batch, limit = make_engine(model, layout, dtype, layers=layers), make_batch(), _NUMBERS[dtype]
    elsewhere = left_on_host(engine)
    found.check(f"{name}: all on {device()}", not elsewhere, ", ".join(elsewhere[:4]))
    before = outputs(engine, batch)
    for quantity, values in before.items():
        found.within(f"{name}: {quantity}", difference(values.cpu(), exact[quantity]), limit)
    _round_trip(engine)
    same = all(torch.equal(values, before[quantity]) for quantity, values in outputs(engine, batch).items())
    found.check(f"{name}: the same bits after a round trip to host memory", same)
    ours = []
    for _ in range(_STEPS):
        ours.append(step(engine, batch))
        _round_trip(engine)
    for quantity in ("loss", "gradient norm"):
        largest = worst(
            abs(a[quantity] - b[quantity]) / max(abs(b[quantity]), 0.1) for a, b in zip(ours, steps, strict=True)
        )
        found.within(f"{name}: {quantity} of {_STEPS} steps", largest, _AFTER_STEPS[dtype])
    found.check(f"{name}: loss falls", ours[-1]["loss"] < ours[0]["loss"], ", ".join(f"{s['loss']:.4f}" for s in ours))


def left_on_host(engine: MegatronEngine) -> list[str]:
    """Return the parameters and buffers that are not on this process's device."""
    return [
        f"{name} on {tensor.device}"
        for chunk in engine.chunks
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        if tensor.device.type != device().type
    ]


def _round_trip(engine: MegatronEngine) -> None:
    from megarl.system.offload_schedule import PARTS

    engine.hold()
    engine.hold(*PARTS)
