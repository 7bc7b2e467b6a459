"""Stops a training step whose loss or gradients are not finite, before any parameter changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megarl.system import tracing
from megarl.system.comm import WorkerGroup
from megarl.system.device import device
from megarl.system.errors import MegarlError

_SHOWN = 4


class NonFiniteError(MegarlError):
    """A loss or gradient is NaN or infinite; the message names rank, phase, optimizer step, samples and parameters."""

    repeats = True


def check_finite(
    losses: Sequence[torch.Tensor],
    samples: Sequence[Sequence[str]],
    grad_norm: float,
    chunks: Sequence[torch.nn.Module],
    step: int,
    world: WorkerGroup,
    draft_norm: float | None = None,
) -> None:
    """Raise on every rank if a gradient norm or the loss of any rank is not finite. Collective over `world`.

    Args:
        losses: scalar loss of each micro-batch that this rank computed.
        samples: names of the samples in each of these micro-batches.
        grad_norm: global gradient norm.
        chunks: model chunks whose parameters carry `main_grad`.
        step: optimizer step, for the message.
        world: all ranks of the engine.
        draft_norm: global gradient norm of the draft head, which `grad_norm` leaves out; None: no head is trained.

    Raises:
        NonFiniteError: lists each rank's samples and parameters with such numbers.
    """
    finite = torch.stack(list(losses)).isfinite().tolist() if losses else []
    bad = not all(finite) or not math.isfinite(grad_norm) or not math.isfinite(draft_norm or 0.0)
    if not world.all_reduce(torch.tensor(float(bad), device=device()), "max").item():
        return
    report = {
        "samples": [name for ok, names in zip(finite, samples, strict=True) if not ok for name in names][:_SHOWN],
        "parameters": _bad_gradients(chunks),
    }
    norms = f"gradient norm {grad_norm}" + ("" if draft_norm is None else f", of the draft head {draft_norm}")
    lines = [
        f"loss or gradient is not finite at optimizer step {step} in phase {tracing.current()} "
        f"({norms}); no parameter was changed"
    ]
    for rank, entry in enumerate(world.all_gather_json(report)):
        if entry["samples"]:
            lines.append(f"  rank {rank}: loss of the micro-batch with samples {', '.join(entry['samples'])}, ...")
        if entry["parameters"]:
            lines.append(f"  rank {rank}: gradient of {', '.join(entry['parameters'])}, ...")
    lines.append(
        "  fix:     inspect these samples; the usual causes are log(0), 0/0 and overflow in a custom loss, otherwise "
        "a too high learning rate or a damaged weight file"
    )
    raise NonFiniteError("\n".join(lines))


def _bad_gradients(chunks: Sequence[torch.nn.Module]) -> list[str]:
    names = (
        name
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and not bool(parameter.main_grad.isfinite().all())  # type: ignore[attr-defined]
    )
    return [name for name, _ in zip(names, range(_SHOWN), strict=False)]
