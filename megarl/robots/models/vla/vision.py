"""Vision towers and projectors of a robot policy: from pictures to embeddings of the language model.

The parameters are on the first pipeline stage, whole on every tensor-parallel rank, and named as `VisionShape.tensors`
says. Sources: ViT (Dosovitskiy et al. 2021) in timm's form; DINOv2 with registers (Darcet et al. 2024); SigLIP (Zhai
et al. 2023); projectors of OpenVLA (Kim et al. 2024) and OpenVLA-OFT (Kim et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl.architectures.vision import TowerShape, VisionShape
from megarl.models.config import PolicyConfig
from megarl.models.packing import PackedSequences
from megarl.models.policy import PolicyModel
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig


_EPS = 1e-6


@dataclass(frozen=True)
class Seen:
    """The pictures and robot states that the policy calls in a packed stream read, and their columns in it."""

    pixels: Tensor  # [n, 3 * towers, side, side], pictures in each tower's normalisation, concatenated by channels
    places: Tensor  # int64 [n * patches], columns of the packed stream that get the embeddings of pictures
    states: Tensor  # [m, state], the robot's own states
    state_places: Tensor  # int64 [m], columns of the packed stream that get the embeddings of states
    blank: Tensor  # int64, columns of the stream with a zero embedding: slots of actions that are predicted in one pass

    def to(self, device: torch.device) -> Seen:
        """Move all tensors to `device`."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


class Tower(nn.Module):
    """A vision transformer of the sizes in `shape` that returns the features of patches."""

    def __init__(self, shape: TowerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        first = [shape.class_token, shape.registers]
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.width, dtype=dtype)) if first[0] else None
        self.reg_token = nn.Parameter(torch.empty(1, first[1], shape.width, dtype=dtype)) if first[1] else None
        self.pos_embed = nn.Parameter(torch.empty(1, shape.patches, shape.width, dtype=dtype))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, shape.width, shape.patch, shape.patch, dtype=dtype)})
        self.blocks = nn.ModuleList(_Block(shape, dtype) for _ in range(shape.blocks))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [n, patches, width] of pictures [n, 3, side, side]."""
        count = len(pixels)
        hidden = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        first = [token.expand(count, -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        hidden = torch.cat([*first, hidden], 1)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden[:, hidden.shape[1] - self.shape.patches :]


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, dtype=dtype)
        self.proj = nn.Linear(shape.width, shape.width, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        count, length, width = hidden.shape
        q, k, v = self.qkv(hidden).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, length, width)
        return self.proj(context)


class _Scale(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale_factor


class _Block(nn.Module):
    def __init__(self, shape: TowerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.width, _EPS, dtype=dtype) for _ in range(2))
        self.attn = _Attention(shape, dtype)
        layers = nn.Linear(shape.width, shape.mlp, dtype=dtype), nn.Linear(shape.mlp, shape.width, dtype=dtype)
        self.mlp = nn.ModuleDict(dict(zip(("fc1", "fc2"), layers, strict=True)))
        scales = [_Scale(shape.width, dtype) if shape.layer_scale else nn.Identity() for _ in range(2)]
        self.ls1, self.ls2 = scales

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.ls1(self.attn(self.norm1(hidden)))
        wide = F.gelu(self.mlp["fc1"](self.norm2(hidden)))
        return hidden + self.ls2(self.mlp["fc2"](wide))


class Vision(nn.Module):
    """The parts of a robot policy other than its language model: vision towers, projectors of features and of the
    robot's state, and the action expert, if the policy has one.

    Args:
        shape: the sizes of these parts.
        dtype: dtype of parameters and features.
        sequence_parallel: whether each tensor-parallel rank has only a part of a stream's columns (positions), so that
            gradients must be summed over the ranks.
    """

    def __init__(self, shape: VisionShape, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.shape = shape
        self.towers = nn.ModuleList(Tower(tower, dtype) for tower in shape.towers)
        sizes = {name: size for name, (_, size) in shape.tensors.items()}
        for part in ("projector", "proprio_projector"):
            layers = [name.split(".")[1] for name in sizes if name.startswith(f"{part}.") and name.endswith("weight")]
            shapes = {name: sizes[f"{part}.{name}.weight"] for name in layers}
            maps = {name: nn.Linear(size[1], size[0], dtype=dtype) for name, size in shapes.items()}
            if maps:
                self.add_module(part, nn.ModuleDict(maps))
        if shape.expert is not None:
            from megarl.robots.models.flow.expert import ActionExpert

            self.expert = ActionExpert(shape.expert, dtype)
        for param in self.parameters():
            param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def see(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [n * patches, hidden] of pictures [n, 3 * towers, side, side]."""
        features = [tower(part) for tower, part in zip(self.towers, pixels.split(3, 1), strict=True)]
        return self._project("projector", torch.cat(features, 2).flatten(0, 1))

    def insert(self, hidden: Tensor, seen: Seen, columns: slice) -> Tensor:
        """Write the embeddings of pictures and states into `hidden` [t, 1, hidden], columns `columns` of the stream."""
        inserted = [(self.see(seen.pixels.to(hidden.dtype)), seen.places)]
        if len(seen.state_places):
            states = self._project("proprio_projector", seen.states.to(hidden.dtype))
            inserted.append((states, seen.state_places))
        for embeddings, places in inserted:
            here = (places >= columns.start) & (places < columns.stop)
            hidden = hidden.index_copy(0, places[here] - columns.start, embeddings[here].unsqueeze(1))
        blank = seen.blank[(seen.blank >= columns.start) & (seen.blank < columns.stop)] - columns.start
        return hidden.index_fill(0, blank, 0.0)

    def _project(self, part: str, features: Tensor) -> Tensor:
        maps = getattr(self, part)
        for number, name in enumerate(maps):
            features = maps[name](F.gelu(features) if number else features)
        return features


class VlaModel(PolicyModel):
    """A `PolicyModel` that also reads pictures and states, from `packed_seq_params.seen` (a `Seen`).

    Args:
        shape: shape of towers and projectors.
        settings: further keyword arguments of `PolicyModel`.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        config: PolicyConfig,
        spec: TransformerBlockSubmodules,
        shape: VisionShape,
        **settings: Any,
    ) -> None:
        super().__init__(hf, config, spec, **settings)
        if shape.expert is not None and config.layers != "local":
            raise ConfigError(
                "an action expert needs the attention keys and values of each layer, which Transformer Engine's layers "
                "do not provide",
                where="actor.engine.layers",
                found=config.layers,
                allowed="local",
                fix="set actor.engine.layers=local",
            )
        if self.pre_process:
            self.vision = Vision(shape, config.params_dtype, sequence_parallel=config.sequence_parallel)

    def _insert(self, hidden: Tensor, packed: PackedSequences, first: int) -> Tensor:
        """Put the visual embeddings into their columns of the stream, of which `hidden` has those from `first` on."""
        if packed.seen is None:
            return hidden
        return self.vision.insert(hidden, packed.seen, slice(first, first + len(hidden)))

    def insert_for_decoding(self, hidden: Tensor, seen: Seen) -> list[Tensor]:
        """Write the embeddings of pictures and states into the embeddings `hidden` [n, hidden] in place.

        Return an empty list: in these policies no later layer gets image features.
        """
        hidden.copy_(self.vision.insert(hidden[:, None], seen, slice(0, len(hidden)))[:, 0])
        return []
