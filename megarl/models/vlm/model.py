"""A policy that sees images: transformers' vision encoder on the first pipeline stage, in front of a decoder.

    patches of a micro-batch's images -> encoder -> features -> into the embeddings of image tokens
                                               \\-> deeper features -> added to the outputs of the first layers

The encoder is whole on each tensor-parallel rank. Under sequence parallelism a rank inserts the features of its own
columns, so that its gradient of the encoder is a part of the sum, as that of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megarl.architectures.vision_language import VisionEncoder
from megarl.data.image_set import ImageSet
from megarl.models.config import PolicyConfig
from megarl.models.hf import image_settings
from megarl.models.packing import PackedSequences
from megarl.models.policy import PolicyModel
from megarl.models.rope import Rope
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Images:
    """The images of a packed stream, each once, and where their features stand.

    Attributes:
        patches: uint8 [P, 3 * patch * patch], of all images, as `megarl.data.images.patchify` orders them.
        grids: int64 [n, 2], rows and columns of patches of each image.
        places: int64 [F], columns of the stream.
        features: int64 [F], the feature of each place: samples of a group share their images.
    """

    patches: Tensor
    grids: Tensor
    places: Tensor
    features: Tensor

    def to(self, device: torch.device) -> Images:
        """Move all tensors to `device`."""
        return Images(*(getattr(self, one.name).to(device) for one in fields(self)))


def gather_images(lengths: Sequence[int], sets: Sequence[ImageSet | None], encoder: VisionEncoder) -> Images | None:
    """Return the images of sequences that stand one after another, those of equal pixels once; None: there are none."""
    known, parts, grids = dict[int, int](), list[Tensor](), list[tuple[int, int]]()
    features, places, at, begin = list[Tensor](), list[Tensor](), 0, 0
    for length, own in zip(lengths, sets, strict=True):
        if own is not None:
            images = zip(own.parts(), own.digests, own.places, strict=True)
            for image, digest, (start, rows, columns) in images:
                inside = torch.arange(rows * columns)
                if digest not in known:
                    known[digest] = at
                    parts.append(image)
                    grids.append((rows * encoder.merge, columns * encoder.merge))
                    at += len(inside)
                features.append(known[digest] + inside)
                places.append(begin + start + inside)
        begin += length
    if not parts:
        return None
    return Images(torch.cat(parts), torch.tensor(grids), torch.cat(places), torch.cat(features))


@dataclass
class _Deep:
    """The features that are added after the first layers; and their gradients, in the backward pass.

    A layer may be computed again in the backward pass, which no graph of these features survives. So layers add values
    without a graph and leave gradients here, and `_Enter`, which autograd reaches after all layers, hands them on.
    """

    values: list[Tensor]
    places: Tensor
    rows: Tensor
    gradients: list[Tensor | None] = field(default_factory=list)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deep: _Deep, *values: Tensor) -> Tensor:
        ctx.deep = deep
        deep.gradients = [None] * len(values)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, *ctx.deep.gradients


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deep: _Deep, number: int) -> Tensor:
        ctx.deep, ctx.number = deep, number
        return hidden.index_add(0, deep.places, deep.values[number][deep.rows].unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        deep, number = ctx.deep, ctx.number
        found = torch.zeros_like(deep.values[number]).index_add_(0, deep.rows, grad[deep.places, 0])
        so_far = deep.gradients[number]
        deep.gradients[number] = found if so_far is None else so_far + found
        return grad, None, None


class VisionLanguageModel(PolicyModel):
    """A `PolicyModel` whose streams may bring images: `packed_seq_params.seen`, an `Images`.

    `position_ids` are [3, t] (`megarl.models.vlm.positions`), or [1, t] for text.

    Args:
        settings: see `PolicyModel`.

    Raises:
        ConfigError: the first pipeline chunk has fewer layers than get features of the encoder.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        config: PolicyConfig,
        spec: TransformerBlockSubmodules,
        encoder: VisionEncoder,
        **settings: Any,
    ) -> None:
        super().__init__(hf, config, spec, **settings)
        self.encoder = encoder
        self.rope = Rope(hf, encoder.sections, interleaved=encoder.interleaved)
        if not self.pre_process:
            return
        deep = len(encoder.deepstack)
        if len(self.decoder.layers) < deep:
            raise ConfigError(
                "the first pipeline stage has fewer layers than get features of the vision encoder",
                where="parallel.pp, parallel.vpp",
                found=f"{len(self.decoder.layers)} layers",
                allowed=f"at least {deep} layers in the first chunk",
                fix="take fewer stages",
            )
        self.visual = build_encoder(hf, config.params_dtype)
        for param in self.visual.parameters():
            param.sequence_parallel = config.sequence_parallel
        if config.recompute_granularity == "full":
            self.visual.gradient_checkpointing_enable({"use_reentrant": False})
        for number in range(deep):
            self.decoder.layers[number].register_forward_hook(_add_features(number), with_kwargs=True)

    def _insert(self, hidden: Tensor, packed: PackedSequences, first: int) -> Tensor:
        """Put the features of images into their columns."""
        images = packed.seen
        if images is None:
            if not (torch.is_grad_enabled() and any(param.requires_grad for param in self.visual.parameters())):
                return hidden
            # Every parameter takes part in every backward pass: other ranks wait for its gradient.
            images = self._nothing(hidden.device)
        features, deeper = self.look(images)
        here = (images.places >= first) & (images.places < first + len(hidden))
        places, rows = images.places[here] - first, images.features[here]
        hidden = hidden.index_copy(0, places, features[rows].unsqueeze(1))
        if not len(images.places):
            return hidden + sum(one.sum() for one in (features, *deeper)) * 0.0
        if not deeper:
            return hidden
        deep = _Deep([one.detach() for one in deeper], places, rows)
        packed.cache["deep"] = deep
        return _Enter.apply(hidden, deep, *deeper)

    @torch.inference_mode()
    def insert_for_decoding(self, hidden: Tensor, images: Images) -> list[Tensor]:
        """Put features into embeddings [n, hidden] in place; return those to add after the first layers, in their
        places: each [F, hidden]."""
        features, deeper = self.look(images)
        hidden[images.places] = features[images.features].to(hidden.dtype)
        return [one[images.features].to(hidden.dtype) for one in deeper]

    def look(self, images: Images) -> tuple[Tensor, list[Tensor]]:
        """Return the features [n, hidden] of all images, one after another, and those of its earlier blocks."""
        pixels = self._normalise(images.patches)
        ones = torch.ones_like(images.grids[:, :1])
        found = self.visual(pixels, grid_thw=torch.cat([ones, images.grids], 1))
        return found.pooler_output, list(getattr(found, "deepstack_features", None) or [])

    def _normalise(self, patches: Tensor) -> Tensor:
        """Return the encoder's input [P, 3 * frames * patch * patch] of pixels: a picture is repeated in time."""
        encoder, settings = self.encoder, image_settings(self.hf_config)
        colours = patches.view(len(patches), 3, 1, encoder.patch**2).float() / 255
        mean, deviation = (colours.new_tensor(one).view(1, 3, 1, 1) for one in (settings.mean, settings.deviation))
        whole = ((colours - mean) / deviation).expand(-1, -1, encoder.temporal, -1)
        return whole.reshape(len(patches), -1).to(self.config.params_dtype)

    def _nothing(self, device: torch.device) -> Images:
        """Return the smallest image there is, which stands nowhere."""
        merge, none = self.encoder.merge, torch.zeros(0, dtype=torch.int64, device=device)
        patches = torch.zeros(merge**2, 3 * self.encoder.patch**2, dtype=torch.uint8, device=device)
        return Images(patches, torch.full((1, 2), merge, device=device), none, none)


def _add_features(number: int) -> Any:
    """Return the hook of decoder layer `number`, which adds the features that enter there."""

    def hook(layer: nn.Module, arguments: Any, named: dict[str, Any], output: Any) -> Any:
        deep = named["packed_seq_params"].cache.get("deep")
        if deep is None:
            return output
        hidden, *rest = output
        return _Add.apply(hidden, deep, number), *rest

    return hook


def build_encoder(hf: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' vision encoder of the model, in `dtype`; its values are loaded later."""
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**hf.vision_language).vision_config
    with no_init_weights():
        return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
