"""A policy with images as input: transformers' vision encoder on the first pipeline stage, in front of a decoder.

    patches of a micro-batch's images -> encoder -> features -> into the embeddings of image tokens
                                               \\-> deeper features -> added to the outputs of the first layers

Each tensor-parallel rank holds the whole encoder. Under sequence parallelism a rank inserts the features of its own
columns only, so encoder gradients are summed over ranks, as for a norm. Under context parallelism a rank encodes the
images that have a feature among its columns; gradients are summed over these ranks with those of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megarl.architectures.vision_language import VisionEncoder
from megarl.data.image_set import STILL, ImageSet, Place, frames_of
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
    """The distinct images of a packed stream, and where their features go."""

    # uint8 [P, 3 * patch * patch], of all images, as `megarl.data.images.patchify` orders them; where one is a temporal
    # patch of a video, uint8 [P, 3 * frames * patch * patch], with an image repeated over frames
    patches: Tensor
    grids: Tensor  # int64 [n, 2], rows and columns of patches of each image
    places: Tensor  # int64 [F], columns of the packed stream that take a feature
    features: Tensor  # int64 [F], index of the feature that each of `places` takes; samples of a group share features

    def to(self, device: torch.device) -> Images:
        """Return the images with all tensors on `device`."""
        return Images(*(getattr(self, item.name).to(device) for item in fields(self)))

    def share(self, index: Tensor) -> Images | None:
        """Return the images with a feature among a context-parallel rank's tokens, and the places of these features.

        Args:
            index: int64 [t], the column of each of this rank's tokens, -1 for padding.

        Returns:
            Images whose `places` are indices of the t tokens; None if no token of this rank takes a feature.
        """
        here = torch.full((int(max(index.max(), self.places.max())) + 1,), -1)
        here[index[index >= 0]] = (index >= 0).nonzero()[:, 0]
        places = here[self.places]
        present = places >= 0
        if not present.any():
            return None
        sizes = self.grids.prod(1)  # patches of each image
        merged = int(sizes.sum()) // (int(self.features.max()) + 1)  # patches of a feature
        owner = torch.arange(len(sizes)).repeat_interleave(sizes // merged)  # image of each feature
        wanted = torch.zeros(len(sizes), dtype=torch.bool)
        wanted[owner[self.features[present]]] = True
        renumbered = wanted[owner].cumsum(0) - 1
        patches = self.patches[wanted.repeat_interleave(sizes)]
        return Images(patches, self.grids[wanted], places[present], renumbered[self.features[present]])


def gather_images(lengths: Sequence[int], sets: Sequence[ImageSet | None], encoder: VisionEncoder) -> Images | None:
    """Return the images of consecutive sequences, each distinct image once; None if there are none."""
    known, parts, grids = dict[int, int](), list[Tensor](), list[tuple[int, int]]()
    features, places, at, begin = list[Tensor](), list[Tensor](), 0, 0
    for length, image_set in zip(lengths, sets, strict=True):
        if image_set is not None:
            images = zip(image_set.parts(), image_set.digests, image_set.places, strict=True)
            for image, digest, place in images:
                start, rows, columns, _ = place
                inside = torch.arange(rows * columns)
                if digest not in known:
                    known[digest] = at
                    parts.append(image.unflatten(0, (frames_of(place), -1)))
                    grids.append((rows * encoder.merge, columns * encoder.merge))
                    at += len(inside)
                features.append(known[digest] + inside)
                places.append(begin + start + inside)
        begin += length
    if not parts:
        return None
    return Images(_joined_frames(parts), torch.tensor(grids), torch.cat(places), torch.cat(features))


def _joined_frames(parts: Sequence[Tensor]) -> Tensor:
    """Return `Images.patches` from those of each image, uint8 [frames, n, 3 * patch * patch]."""
    frames = max(map(len, parts))
    if frames == 1:
        return torch.cat([part[0] for part in parts])
    whole = [part.expand(frames, -1, -1).unflatten(2, (3, -1)) for part in parts]
    return torch.cat([part.permute(1, 2, 0, 3).flatten(1) for part in whole])


@dataclass
class _Deep:
    """The features that are added to the outputs of the first layers, and in the backward pass their gradients.

    A layer may be recomputed in the backward pass, which these features' autograd graph would not survive. So layers
    add values without a graph and store gradients here; autograd reaches `_Enter` after all layers, which returns them.
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
        gradient = torch.zeros_like(deep.values[number]).index_add_(0, deep.rows, grad[deep.places, 0])
        so_far = deep.gradients[number]
        deep.gradients[number] = gradient if so_far is None else so_far + gradient
        return grad, None, None


class VisionLanguageModel(PolicyModel):
    """A `PolicyModel` whose streams may have images, an `Images` in `packed_seq_params.seen`.

    `position_ids` are [3, t] (`positions_of`), or [1, t] for text.

    Args:
        encoder: form and sizes of the vision encoder.
        settings: further keyword arguments of `PolicyModel`.
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
                "the vision encoder adds features to more layers than the first pipeline chunk has",
                where="parallel.first_stage_layers, parallel.pp, parallel.vpp",
                found=f"{len(self.decoder.layers)} layers",
                allowed=f"at least {deep} layers in the first chunk",
                fix=f"set first_stage_layers to {deep} or more, or use fewer pipeline stages",
            )
        self.visual = build_encoder(hf, config.params_dtype)
        for param in self.visual.parameters():
            param.sequence_parallel = config.sequence_parallel
        if config.recompute_granularity == "full":
            self.visual.gradient_checkpointing_enable({"use_reentrant": False})
        for number in range(deep):
            self.decoder.layers[number].register_forward_hook(_add_features(number), with_kwargs=True)

    def _insert(self, hidden: Tensor, packed: PackedSequences, first: int) -> Tensor:
        """Replace the embeddings of image tokens by image features."""
        images = packed.seen
        if images is None:
            if not (torch.is_grad_enabled() and any(param.requires_grad for param in self.visual.parameters())):
                return hidden
            # Every parameter must get a gradient in every backward pass, for which other ranks wait.
            images = self._blank_image(hidden.device)
        features, deeper = self.encode(images)
        here = (images.places >= first) & (images.places < first + len(hidden))
        places, rows = images.places[here] - first, images.features[here]
        hidden = hidden.index_copy(0, places, features[rows].unsqueeze(1))
        if not len(images.places):
            return hidden + sum(x.sum() for x in (features, *deeper)) * 0.0
        if not deeper:
            return hidden
        deep = _Deep([x.detach() for x in deeper], places, rows)
        packed.cache["deep"] = deep
        return _Enter.apply(hidden, deep, *deeper)

    @torch.inference_mode()
    def insert_for_decoding(self, hidden: Tensor, images: Images) -> list[Tensor]:
        """Write the F image features into the embeddings [n, hidden] in place; return, for each of the first decoder
        layers, the features [F, hidden] to add to its output.
        """
        features, deeper = self.encode(images)
        hidden[images.places] = features[images.features].to(hidden.dtype)
        return [x[images.features].to(hidden.dtype) for x in deeper]

    def encode(self, images: Images) -> tuple[Tensor, list[Tensor]]:
        """Return the features [n, hidden] of all images in order: the final features, and the features of earlier
        blocks."""
        pixels = self._normalise(images.patches)
        ones = torch.ones_like(images.grids[:, :1])
        outputs = self.visual(pixels, grid_thw=torch.cat([ones, images.grids], 1))
        return outputs.pooler_output, list(getattr(outputs, "deepstack_features", None) or [])

    def _normalise(self, patches: Tensor) -> Tensor:
        """Return the encoder's input [P, 3 * frames * patch * patch] from uint8 patches; an image is repeated over
        frames."""
        encoder, settings = self.encoder, image_settings(self.hf_config)
        colours = patches.view(len(patches), 3, -1, encoder.patch**2).float() / 255
        mean, deviation = (colours.new_tensor(x).view(1, 3, 1, 1) for x in (settings.mean, settings.deviation))
        whole = ((colours - mean) / deviation).expand(-1, -1, encoder.temporal, -1)
        return whole.reshape(len(patches), -1).to(self.config.params_dtype)

    def _blank_image(self, device: torch.device) -> Images:
        """Return an image of one feature that replaces no token. A rank without images encodes it, so that the
        encoder's parameters get gradients there too."""
        merge, none = self.encoder.merge, torch.zeros(0, dtype=torch.int64, device=device)
        patches = torch.zeros(merge**2, 3 * self.encoder.patch**2, dtype=torch.uint8, device=device)
        return Images(patches, torch.full((1, 2), merge, device=device), none, none)


def _add_features(number: int) -> Any:
    """Return a forward hook for decoder layer `number` that adds this layer's image features to its output."""

    def hook(layer: nn.Module, arguments: Any, named: dict[str, Any], output: Any) -> Any:
        deep = named["packed_seq_params"].cache.get("deep")
        if deep is None:
            return output
        hidden, *rest = output
        return _Add.apply(hidden, deep, number), *rest

    return hook


def build_encoder(hf: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' vision encoder in `dtype`, with uninitialised weights."""
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**hf.vision_language).vision_config
    form: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    with no_init_weights():
        if hf.vision_language["model_type"] != "qwen2_vl":
            return AutoModel.from_config(config, **form)
        # transformers does not find this class by its configuration
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        return Qwen2VisionTransformerPretrainedModel._from_config(config, **form)


def positions_of(tokens: int, images: Sequence[Place]) -> npt.NDArray[np.int64]:
    """Return the positions [3, tokens] of a sequence of `tokens` tokens with `images`: for time, height and width.

    A text token has three equal numbers, one more than the token before it. The features of an image that begins at p
    have (p, p + row, p + column), and text continues at p + max(rows, columns) (Qwen2-VL, Wang et al. 2024, 3.1). So do
    those of a video's temporal patches, which follow each other, with p + lag for time; text continues after the
    largest number of them, as in the code of the published models. transformers 5.23 continues at p + max(rows,
    columns), which differs for a video of more seconds than its frames have features.
    """
    steps = np.ones(tokens, dtype=np.int64)
    offsets = np.zeros((3, tokens), dtype=np.int64)
    for start, rows, columns, lag in images:
        span = slice(start, start + rows * columns)
        steps[span] = 0
        inside = np.arange(rows * columns)
        offsets[0, span], offsets[1, span], offsets[2, span] = max(lag, 0), inside // columns, inside % columns
    for last, extent in _extents(images):
        steps[last] = extent
    return offsets + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(steps)[:-1]])


def _extents(images: Sequence[Place]) -> list[tuple[int, int]]:
    """Return the last token of each image or video, and how many positions it takes."""
    extents: list[tuple[int, int]] = []
    for start, rows, columns, lag in images:
        end, extent = start + rows * columns - 1, max(rows, columns, lag + 1)
        if lag != STILL and extents and extents[-1][0] == start - 1:  # a further temporal patch of the same video
            extent = max(extent, extents.pop()[1])
        extents.append((end, extent))
    return extents


def next_position(tokens: int, images: Sequence[Place]) -> int:
    """Return the position of the token after a sequence of `tokens` tokens with `images`."""
    features = sum(rows * columns for _, rows, columns, _ in images)
    return tokens - features + sum(extent for _, extent in _extents(images))
