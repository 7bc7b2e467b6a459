"""The kinds of mixers: where a new one is registered.

kind          sizes, weights, work     training              decoding            what a running sample keeps
attention     attention/plain.py       PackedAttention       AttentionDecoder    KVCache
mla           mla/plain.py             LatentAttention       LatentDecoder       LatentCache
gated_delta   gated_delta/plain.py     GatedDeltaNet         GatedDeltaDecoder   DeltaStates
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megarl.models.layers.attention.cache import KVCache
from megarl.models.layers.attention.decoding import AttentionDecoder
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.gated_delta.decoding import DeltaStates, GatedDeltaDecoder
from megarl.models.layers.gated_delta.plain import GatedDelta
from megarl.models.layers.gated_delta.training import gated_delta_net
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.mla.decoding import LatentCache, LatentDecoder
from megarl.models.layers.mla.plain import MLA
from megarl.models.layers.mla.training import latent_attention
from megarl.models.layers.passes import Caches, MixerDecoder, Room, Store

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class KindOfMixer:
    """The modules of one kind of mixer.

    decoder: computes the mixer while decoding. store: holds what decoding keeps of running samples. training: returns
    the spec of the training module, which takes the place of Megatron's self-attention; None: Megatron's own with this
    package's core attention.
    """

    decoder: type[MixerDecoder]
    store: type[Store]
    training: Callable[[Mixer], ModuleSpec] | None = None


KINDS: dict[str, KindOfMixer] = {
    Attention.kind: KindOfMixer(AttentionDecoder, KVCache),
    MLA.kind: KindOfMixer(LatentDecoder, LatentCache, latent_attention),
    GatedDelta.kind: KindOfMixer(GatedDeltaDecoder, DeltaStates, gated_delta_net),
}


def numbers_of_kinds(mixers: Sequence[Mixer]) -> list[int]:
    """Return, for each layer, its place among the layers of its kind."""
    seen: dict[str, int] = {}
    numbers = []
    for mixer in mixers:
        numbers.append(seen.get(mixer.kind, 0))
        seen[mixer.kind] = numbers[-1] + 1
    return numbers


def _by_kind(mixers: Sequence[Mixer]) -> dict[str, tuple[Mixer, int]]:
    """Return, for each kind, a mixer and the number of its layers."""
    first = {mixer.kind: mixer for mixer in reversed(mixers)}
    return {kind: (mixer, sum(other.kind == kind for other in mixers)) for kind, mixer in first.items()}


def allocate(mixers: Sequence[Mixer], room: Room) -> Caches:
    """Return the caches of a session for layers with these mixers."""
    stores = {kind: KINDS[kind].store(mixer, layers, room) for kind, (mixer, layers) in _by_kind(mixers).items()}
    return Caches(stores, room)


def bytes_per_row(mixers: Sequence[Mixer], max_length: int, tp: int, dtype: torch.dtype) -> int:
    """Return the bytes of one row of the caches that `allocate` makes."""
    kinds = _by_kind(mixers).items()
    return sum(KINDS[kind].store.bytes_per_row(mixer, layers, max_length, tp, dtype) for kind, (mixer, layers) in kinds)
