"""The gated delta net while decoding: a state of fixed size for each row instead of cached positions.

A state is what all tokens so far have left. It cannot be shortened: a row continues only after the last token that it
has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.layers.gated_delta.plain import GatedDelta
from megarl.models.layers.gated_delta.rule import causal_conv, delta_rule, delta_step, gated_norm
from megarl.models.layers.gated_delta.training import delta_inputs, split_projection
from megarl.models.layers.mesh import Mesh
from megarl.models.layers.passes import DecodeStep, Pass, Preparation, Prompts, Room


class DeltaStates:
    """The recurrent states of all running samples, for this process's gated delta layers; implements `Store`.

    Attributes:
        state: float32 [layers][slots, G, r, dk, dv].
        window: [layers][slots, taps - 1, channels], the last inputs of the convolution, the oldest first.
        length: 0, because the states do not grow with the positions.
    """

    length = 0

    def __init__(self, mixer: GatedDelta, layers: int, room: Room) -> None:
        state = (room.slots, mixer.key_heads // room.tp, mixer.per, mixer.key, mixer.value)
        window = (room.slots, mixer.taps - 1, mixer.channels(room.tp))
        self.state = [torch.zeros(state, dtype=torch.float32, device=room.device) for _ in range(layers)]
        self.window = [torch.zeros(window, dtype=room.dtype, device=room.device) for _ in range(layers)]

    @staticmethod
    def bytes_per_row(mixer: GatedDelta, layers: int, max_length: int, tp: int, dtype: torch.dtype) -> int:
        """Return the bytes that one sample takes in all layers, whatever its length."""
        return layers * int(mixer.state_bytes(tp, dtype.itemsize))

    def reserve(self, rows: int, needed: int) -> None:
        """Do nothing: a state has no positions."""

    def clear(self, rows: Tensor) -> None:
        """Zero `rows`."""
        for tensor in (*self.state, *self.window):
            tensor[rows] = 0

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows `sources` to `targets` in all layers; all rows are read before any row is written."""
        for tensor in (*self.state, *self.window):
            tensor[targets] = tensor[sources]


class GatedDeltaDecoder:
    """The gated delta net of one layer while decoding; see `MixerDecoder`."""

    def __init__(
        self, module: Any, mixer: GatedDelta, number: int, mesh: Mesh, prepared: Preparation, kernels: Any
    ) -> None:
        self._mixer, self._number, self._eps = mixer, number, module.config.layernorm_epsilon
        self._sections = mixer.sections(mesh.tp.size)
        self._in, self._out = prepared.layer(module.in_proj), prepared.layer(module.out_proj)
        self._taps = prepared.cast(module.conv1d.weight).squeeze(1)
        self._norm = prepared.cast(module.out_norm.weight)
        self._parameters = module.A_log.detach(), module.dt_bias.detach()

    def __call__(self, x: Tensor, step: Pass) -> Tensor:
        """Return the layer's output [n, h] of hidden states x [n, h], before the sum over tensor-parallel ranks, and
        update the states of the running samples."""
        qkv, z, b, a = split_projection(self._in(x), self._mixer, self._sections)
        states: DeltaStates = step.caches[GatedDelta.kind]
        parts = states.state[self._number], states.window[self._number]
        if isinstance(step, DecodeStep):
            out = self._step(qkv, b, a, *parts, step)
        elif isinstance(step, Prompts):
            out, state, window = self._read(qkv, b, a, step.lengths, step.memo, None, None)
            sources = [i for i, group in enumerate(step.rows) for _ in group]
            source, rows = _indices(step, "rows", (sources, [row for group in step.rows for row in group]), x.device)
            parts[0][rows], parts[1][rows] = state[source], window[source]
        else:
            (rows,) = _indices(step, "rows", (step.rows,), x.device)
            out, state, window = self._read(qkv, b, a, step.lengths, step.memo, *(part[rows] for part in parts))
            parts[0][rows], parts[1][rows] = state, window
        return self._out(gated_norm(out.flatten(1, 2), z, self._norm, self._eps).flatten(1))

    def _step(self, qkv: Tensor, b: Tensor, a: Tensor, state: Tensor, window: Tensor, step: DecodeStep) -> Tensor:
        """Advance the first n = len(qkv) rows by one token each; rows that are not live keep their state."""
        n = len(qkv)
        inputs = torch.cat([window[:n], qkv[:, None]], 1)
        total = (inputs.float() * self._taps.float().t()).sum(1)
        mixed = F.silu(total).to(qkv.dtype)
        delta = delta_inputs(mixed, b, a, *self._parameters, self._mixer)
        if step.live is not None:
            live = step.live[:, None, None]
            inputs = torch.where(live, inputs[:, 1:], inputs[:, :-1])
            delta.g.mul_(live)
            delta.beta.mul_(live)
            window[:n] = inputs
        else:
            window[:n] = inputs[:, 1:]
        return delta_step(delta, state[:n]).to(qkv.dtype)

    def _read(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        lengths: Sequence[int],
        memo: dict[Any, Any],
        state: Tensor | None,
        window: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run over packed sequences, each continuing from its `state` and `window`; None: from zero.

        Returns:
            The outputs [t, G, r, dv], and the states and windows after the last tokens.
        """
        before = self._mixer.taps - 1
        name = ("delta window", qkv.device)
        if name not in memo:
            memo[name] = _with_window(lengths, before, qkv.device)
        places, last = memo[name]
        stream = qkv.new_zeros(len(qkv) + before * len(lengths), qkv.shape[1])
        stream[places] = qkv
        if window is not None:
            first = last - torch.tensor(lengths, device=last.device)[:, None]
            stream[first] = window
        longer = [length + before for length in lengths]
        mixed = causal_conv(stream, self._taps, longer, memo)[places]
        inputs = delta_inputs(mixed, b, a, *self._parameters, self._mixer)
        out, after = delta_rule(inputs, lengths, memo, state, want_state=True)
        return out, cast(Tensor, after), stream[last]


def _with_window(lengths: Sequence[int], before: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of packed tokens in a stream with `before` more places in front of each sequence, and the last
    `before` places of each sequence [m, before]."""
    sizes = torch.tensor(lengths)
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(sizes)
    places = torch.arange(int(sizes.sum())) + before * numbers
    ends = (sizes + before).cumsum(0)
    return places.to(device), (ends[:, None] - torch.arange(before, 0, -1)).to(device)


def _indices(step: Pass, name: str, values: tuple[Sequence[int], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return lists of indices as tensors on `device`; the first layer of a pass creates them for all layers."""
    key = (GatedDelta.kind, name)
    if key not in step.memo:
        step.memo[key] = tuple(torch.tensor(list(each), device=device) for each in values)
    return step.memo[key]
