"""Copies of a model's parameters in host memory, to be restored later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel


class ParameterCopies:
    """Copies the parameters of this process to host memory, and writes such copies back into the parameters.

    Args:
        chunks: this process's chunks of the model; values are written into their parameters in place.
    """

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self._parameters = [weight for chunk in chunks for weight in chunk.weights().values()]

    def take(self) -> list[Tensor]:
        """Return copies of the parameters' current values in host memory."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """Write `values` into the parameters."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    @contextlib.contextmanager
    def replaced(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Use `values` as the parameters inside the block, and restore the previous ones after it."""
        now = self.take()
        self.put(values)
        try:
            yield
        finally:
            self.put(now)
