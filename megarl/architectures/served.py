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
    tied: bool = True  # it uses tied embeddings as head; otherwise it expects a head in the checkpoint
    windows: bool = False  # it applies sliding windows
    head_dim: bool = True  # it reads `head_dim`; otherwise a head has hidden_size / num_attention_heads numbers
    rope_types: tuple[str, ...] | None = None  # the kinds of RoPE that it computes; None: all of the architecture's
    rope_theta: float | None = None  # the only theta that it computes; None: it reads the config's
    # whether SGLang computes it on GPUs only, or a function that returns it for the same two arguments as `wrong`
    needs_gpu: bool | Callable[[Mapping[str, Any], Sequence[Mixer]], bool] = False

    @property
    def partial(self) -> bool:
        """Whether SGLang's class computes some configs of the architecture differently from the model, apart from
        windows."""
        other = self.rope_types is not None or self.rope_theta is not None
        return other or callable(self.wrong) or not (self.head_dim and self.tied)
