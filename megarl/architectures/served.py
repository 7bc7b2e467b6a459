"""How SGLang 0.5.23 reads an architecture's config.json, where its class differs from transformers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models.layers.mixer import Mixer


@dataclass(frozen=True)
class ServedClass:
    """How SGLang's class of an architecture differs from transformers' class for the same config.json."""

    # why the class computes another model, whatever the config, or a function that returns the reason (None: there is
    # none) for the values of `Architecture.keys` and the layers' mixers
    wrong: str | Callable[[Mapping[str, Any], Sequence[Mixer]], str | None] | None = None
    # whether the class uses tied embeddings as head; otherwise it expects a head in the checkpoint
    tied: bool = True
    windows: bool = False  # whether the class applies sliding windows
    # whether the class reads `head_dim`; otherwise the width of a head is hidden_size / num_attention_heads
    head_dim: bool = True
    # the kinds of RoPE that the class computes; None: all kinds of the architecture
    rope_types: tuple[str, ...] | None = None
    # the only theta with which the class computes RoPE; None: the class reads the config's theta
    rope_theta: float | None = None
    # whether groups of a server's ranks can compute the attention of different samples; in other classes all ranks
    # add up one sum
    attention_dp: bool = False
    # with attention groups: whether each rank stores the whole embedding instead of its group's share of the rows
    whole_embedding: bool = False
    # whether SGLang computes the model on GPUs only, or a function that returns this for the arguments of `wrong`
    needs_gpu: bool | Callable[[Mapping[str, Any], Sequence[Mixer]], bool] = False

    @property
    def partial(self) -> bool:
        """Whether SGLang's class computes some configs of the architecture differently from the model, apart from
        windows."""
        other = self.rope_types is not None or self.rope_theta is not None
        return other or callable(self.wrong) or not (self.head_dim and self.tied)
