"""The description of a layer's mixer for checks, dry runs and the planner: sizes and counts, without torch.

The mixer is the part of a layer that moves information between tokens: softmax attention, or another kind. Each layer
has one; `ModelFacts.mixers` and `PolicyConfig.mixers` list those of all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Mixer(ABC):
    """The mixer of one layer. A subclass has its sizes.

    kind: name of the kind, which is also the `part` of its weight rules.
    """

    kind: ClassVar[str]
    window: int | None = None
    """Largest number of keys that a query sees, itself included; None: all before it, or the kind has no keys."""

    @abstractmethod
    def dimensions(self) -> dict[str, int]:
        """Return the sizes that this kind of mixer uses in its weight rules, by name."""

    @abstractmethod
    def widths(self) -> dict[str, int]:
        """Return what tensor parallelism divides, by its name in messages: each number must be a multiple of tp."""

    @abstractmethod
    def kept_elements(self, tp: int) -> float:
        """Return the elements per token that one layer keeps for the backward pass on a rank, without the residual
        stream and without attention's row statistics."""

    def attended_elements(self, tp: int) -> tuple[float, float]:
        """Return the elements per token of the queries, and of the keys and values together, that training's attention
        reads on a rank."""
        return 0.0, 0.0

    @property
    def pair_flops(self) -> float:
        """Forward FLOPs of one (query, key) pair in training and prefill; 0: the mixer has no keys."""
        return 0.0

    @property
    def decoded_pair_flops(self) -> float:
        """FLOPs of one (query, key) pair in a decoding step."""
        return self.pair_flops

    @property
    def token_flops(self) -> float:
        """Forward FLOPs per token that are neither matmuls with weights nor in `pair_flops`."""
        return 0.0

    def cache_elements(self, tp: int) -> float:
        """Return the elements that decoding caches per token on a rank; ranks hold whole heads."""
        return 0.0

    def state_bytes(self, tp: int, element: int) -> float:
        """Return the bytes that decoding keeps per sequence on a rank, whatever the sequence's length.

        Args:
            element: bytes of an element in the decoding dtype.
        """
        return 0.0

    def projected_elements(self, hidden: int, cp: int) -> tuple[int, ...]:
        """Return the elements of each input of the projections whose outputs tensor parallelism splits, per token that
        a context-parallel rank holds.

        Tensor-parallel ranks sum the gradients of these inputs. Under sequence parallelism they gather the inputs, in
        the backward pass again.

        Args:
            hidden: width of the layer's input.
            cp: context-parallel ranks, of which each holds 1 / cp of the tokens.
        """
        return (hidden,)

    def copied_elements(self) -> tuple[int, ...]:
        """Return the elements, per token that a context-parallel rank holds, of each tensor that all tensor-parallel
        ranks use whole and that enters no split projection, such as a rope key. Ranks sum its gradients. Under sequence
        parallelism they gather it in the forward pass only."""
        return ()

    def gathered_elements(self, tp: int, cp: int) -> float:
        """Return the elements per token of all context-parallel ranks that a rank receives in the forward pass; it
        sends as many in the backward pass."""
        return 0.0

    def context_widths(self) -> dict[str, int]:
        """Return the widths that tensor and context parallelism divide together, by their names in messages; each must
        be a multiple of tp * cp."""
        return {}
