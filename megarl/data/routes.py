"""Routes: the experts that a mixture chose for each token while it was generated, which training replays.

The routes of a sequence are one row per token but the last, which is never an input: `layers * chosen` expert numbers,
layer by layer. A token without routes, such as an observation that no model has read, has the number of experts in
their place; the router then makes its own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.jagged import Jagged
from megarl.system.errors import MegarlError


class RouteError(MegarlError):
    """The generation engine returned no expert routes for a sample, or routes that do not belong to its tokens."""

    repeats = True


@dataclass(frozen=True)
class RouteForm:
    """Which layers of a model route tokens to experts, and to how many; this determines the shape of its routes."""

    sparse: tuple[bool, ...]  # whether each layer of the model has experts
    chosen: int  # experts per token
    experts: int  # experts per layer

    @property
    def layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.sparse)

    @property
    def width(self) -> int:
        """Number of experts of a token over all layers with experts."""
        return self.layers * self.chosen

    @property
    def none(self) -> int:
        """The number in place of an expert where a token has no routes."""
        return self.experts

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer type that holds every expert number and `none`."""
        return torch.uint8 if self.experts < 256 else torch.int16

    def empty(self, tokens: int) -> Tensor:
        """Return the routes [tokens, width] of tokens without recorded experts: `none` everywhere."""
        return torch.full((tokens, self.width), self.none, dtype=self.dtype)

    def field(self, known: Sequence[Tensor | None], lengths: Sequence[int], read: Sequence[int]) -> Jagged:
        """Return the batch's field of routes; tokens without known routes get `none`.

        Args:
            known: routes of each sample's first tokens, as its engine returned them.
            lengths: number of each sample's tokens (prompt and response) without its last token.
            read: number of each sample's first tokens that generation has certainly read: up to the one before the
                last sampled token.

        Raises:
            RouteError: a sample has fewer routes than `read`, or routes of another model.
        """
        rows = []
        for number, (routes, length, least) in enumerate(zip(known, lengths, read, strict=True)):
            have = 0 if routes is None else len(routes)
            if have < least or (routes is not None and (routes.shape[1] != self.width or routes.dtype != self.dtype)):
                each = "" if routes is None else f", each {routes.shape[1]} numbers of {routes.dtype}"
                raise RouteError(
                    f"the generation engine returned routes of {have} tokens of sample {number}{each}, instead of at "
                    f"least {least} tokens, each {self.width} numbers of {self.dtype}\n"
                    "  where:   rollout.replay_routes\n"
                    "  fix:     set rollout.replay_routes=false, or use an engine that returns the routes of this model"
                )
            rows.append(self.empty(length))
            if routes is not None:
                rows[-1][: min(length, have)] = routes[:length]
        values = torch.cat([self.empty(0), *rows])
        return Jagged(values, torch.tensor([0, *lengths]).cumsum(0))


def continued(known: Tensor | None, routes: Tensor) -> Tensor:
    """Return the routes of a sequence's first tokens: those of `known`, then those that `routes` has in addition.

    Tokens with known routes keep them, because the tokens after them were sampled after these choices.
    """
    return routes if known is None else torch.cat([known, routes[len(known) :]])
