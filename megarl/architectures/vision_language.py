"""The vision encoders of Qwen's vision-language models, whose features replace the embeddings of image tokens.

    image -> patches -> encoder -> features of merge x merge patches each -> the embeddings of <|image_pad|> tokens
                                \\-> features after some of its blocks (Qwen3-VL) -> added after the first layers

The decoder is a language model (`megarl.architectures.decoders`). The encoder's tensors are those of transformers'
modules. Nothing here imports torch. Source: the configuration and modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.architectures.decoders import decoder_config, decoder_section, prefixes
from megarl.architectures.values import read_keys, rotated_width
from megarl.system.errors import ConfigError

#: Number of frames in one temporal patch of a video, in all published models.
TEMPORAL = 2
_COMMON = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": TEMPORAL}
_CLIP = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
#: Older key of a video's pixel limit -> the key in `size` with the same meaning. If both are set, the older key counts.
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_HALF = {"min_pixels": 65536, "max_pixels": 16777216, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}


@dataclass(frozen=True)
class TowerForm:
    """The differences between the encoders of model families: names of tensors, biases, keys and their defaults."""

    sizes: dict[str, int]  # sizes in vision_config that differ from `_COMMON`, or are further ones
    processor: dict[str, Any]  # the content of preprocessor_config.json of the published models
    mlp: tuple[str, ...]  # linear layers of a block's MLP; the last one projects back to the hidden size
    merger: tuple[str, str, str]  # a merger's norm and its two linear layers
    wide_results: int = 2  # results of the MLP's width that a block keeps for its backward pass
    norm_bias: bool = True  # norms have a bias
    learned: bool = False  # the patches' layer has a bias, and patches have learned positions
    windows: bool = False  # blocks attend to windows, except those of `fullatt_block_indexes`
    width: str = "hidden_size"  # the key of the encoder's width
    out: str = "out_hidden_size"  # the key of the width of its features


_QWEN2 = TowerForm(
    sizes={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14},
    processor=_CLIP,
    mlp=("mlp.fc1", "mlp.fc2"),
    wide_results=3,
    merger=("ln_q", "mlp.0", "mlp.2"),
    width="embed_dim",
    out="hidden_size",
)
_QWEN2_5 = TowerForm(
    sizes={
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
        "out_hidden_size": 3584,
    },
    processor=_CLIP,
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    wide_results=4,
    merger=("ln_q", "mlp.0", "mlp.2"),
    norm_bias=False,
    windows=True,
)
_QWEN3 = TowerForm(
    sizes={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
    },
    processor=_HALF,
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
    merger=("norm", "linear_fc1", "linear_fc2"),
    learned=True,
)


@dataclass(frozen=True)
class VisionFamily:
    """The vision encoder of a model type: its form, and the defaults of its configuration class."""

    form: TowerForm
    sections: tuple[int, int, int]  # the default of mrope_section
    # whether the rotary frequencies for time, height and width alternate; false: they are consecutive
    interleaved: bool = True
    deepstack: tuple[int, ...] = ()  # the default of deepstack_visual_indexes; empty: the class has no such key
    # default ids of the token before an image, the token that a feature replaces, and the token after it
    tokens: tuple[int, int, int] = (151652, 151655, 151653)
    video_token: int = 151656  # the default id of the token that a video's feature replaces
    clock: int | None = None  # the default of tokens_per_second; None: the class has no such key
    # default of the least and most pixels of each frame of a video, or with `timestamps` of all its frames together
    video_pixels: tuple[int, int] = (128 * 28**2, 768 * 28**2)
    timestamps: bool = False  # prompts have a time and a video token for each temporal patch, not one per video


_DEEP = VisionFamily(
    _QWEN3, (24, 20, 20), deepstack=(8, 16, 24), video_pixels=(128 * 32**2, 768 * 32**2), timestamps=True
)
_LINEAR = replace(_DEEP, sections=(11, 11, 10), deepstack=(), tokens=(248053, 248056, 248054), video_token=248057)
#: The vision encoder of each model type in `megarl.architectures.decoders.DECODERS`.
FAMILIES = {
    "qwen2_vl": VisionFamily(_QWEN2, (16, 24, 24), interleaved=False),
    "qwen2_5_vl": VisionFamily(_QWEN2_5, (16, 24, 24), interleaved=False, clock=4),
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
}


@dataclass(frozen=True)
class VisionEncoder:
    """The vision encoder of a model, and how the decoder uses its features.

    Attributes:
        width, blocks, ffn, heads: sizes of the encoder's layers.
    """

    model_type: str  # model type of the whole model; a key of `FAMILIES`
    width: int
    blocks: int
    ffn: int
    heads: int
    out: int  # width of the encoder's features, equal to that of the decoder
    patch: int  # side of a patch in pixels
    merge: int  # side of the square of patches that become one feature
    temporal: int  # frames of a patch; an image is repeated
    grid: int  # number of learned positions; 0: only rotary positions
    deepstack: tuple[int, ...]  # blocks whose features are also used; the i-th is added after decoder layer i
    window: int  # side in pixels of the attention windows of blocks that are not `full`; 0: no windows
    full: tuple[int, ...]  # blocks that attend to the whole image
    sections: tuple[int, int, int]  # number of rotary frequencies for time, height and width
    interleaved: bool  # whether the frequencies for time, height and width alternate; false: they are consecutive
    # ids of the token before an image, the token that a feature replaces, and the token after it
    image_tokens: tuple[int, int, int]
    video_token: int  # id of the token that a video's feature replaces
    clock: int | None  # positions per second of a video; None: one for each temporal patch

    @property
    def image_token(self) -> int:
        """Id of the token that an image feature replaces."""
        return self.image_tokens[1]

    @property
    def patch_values(self) -> int:
        """Number of values of a patch: channels x frames x pixels."""
        return 3 * self.temporal * self.patch**2

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors by parameter name in transformers' module: (name in a checkpoint, shape)."""
        tensors = self._outer() | self._blocks() | self._merger("merger", self.width)
        for number in range(len(self.deepstack)):
            tensors |= self._merger(f"deepstack_merger_list.{number}", self.width * self.merge**2)
        return {name: (prefixes(self.model_type).encoder + name, shape) for name, shape in tensors.items()}

    @property
    def form(self) -> TowerForm:
        """The tensor names, biases and config keys of this encoder."""
        return FAMILIES[self.model_type].form

    def _outer(self) -> dict[str, tuple[int, ...]]:
        weight = (self.width, 3, self.temporal, self.patch, self.patch)
        tensors: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": weight}
        if self.form.learned:
            tensors |= {"patch_embed.proj.bias": (self.width,), "pos_embed.weight": (self.grid, self.width)}
        return tensors

    def _blocks(self) -> dict[str, tuple[int, ...]]:
        width, ffn, form = self.width, self.ffn, self.form
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        layers |= {**dict.fromkeys(form.mlp[:-1], (ffn, width)), form.mlp[-1]: (width, ffn)}
        tensors = dict[str, tuple[int, ...]]()
        for block in range(self.blocks):
            for name, shape in layers.items():
                tensors |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[:1]}
            for norm in ("norm1", "norm2"):
                tensors |= self._norm(f"blocks.{block}.{norm}", width)
        return tensors

    def _norm(self, name: str, width: int) -> dict[str, tuple[int, ...]]:
        names = ("weight", "bias") if self.form.norm_bias else ("weight",)
        return {f"{name}.{part}": (width,) for part in names}

    def _merger(self, name: str, normed: int) -> dict[str, tuple[int, ...]]:
        wide = self.width * self.merge**2
        norm, first, second = self.form.merger
        tensors = self._norm(f"{name}.{norm}", normed)
        for layer, rows in ((first, wide), (second, self.out)):
            tensors |= {f"{name}.{layer}.weight": (rows, wide), f"{name}.{layer}.bias": (rows,)}
        return tensors

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], hidden: int, where: str) -> VisionEncoder:
        """Return the encoder that `raw`, a model's config.json, describes.

        Args:
            hidden: width of the decoder.
            where: names `raw` in errors.
        """
        kind = str(raw["model_type"])
        family = FAMILIES[kind]
        form, given = family.form, raw.get("vision_config") or {}
        sizes = {key: given.get(key, default) for key, default in (_COMMON | form.sizes).items()}
        for key, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    "a size of the vision encoder is invalid",
                    where=f"{where}: vision_config.{key}",
                    found=size,
                    allowed="integer > 0",
                )
        width, out = sizes[form.width], sizes[form.out]
        if out != hidden or width % sizes["num_heads"]:
            raise ConfigError(
                "the sizes of the vision encoder do not fit together",
                where=f"{where}: vision_config",
                found={key: sizes[key] for key in (form.out, form.width, "num_heads")},
                allowed=f"{form.out} is the decoder's {hidden}, and num_heads divides {form.width}",
            )
        ids = zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"), family.tokens, strict=True)
        before, token, after = (raw.get(key, default) for key, default in ids)
        return cls(
            model_type=kind,
            width=width,
            blocks=sizes["depth"],
            ffn=sizes["intermediate_size"] if "intermediate_size" in sizes else sizes["mlp_ratio"] * width,
            heads=sizes["num_heads"],
            out=out,
            patch=sizes["patch_size"],
            merge=sizes["spatial_merge_size"],
            temporal=sizes["temporal_patch_size"],
            grid=sizes.get("num_position_embeddings", 0),
            deepstack=tuple(given.get("deepstack_visual_indexes", family.deepstack)) if family.deepstack else (),
            window=given.get("window_size", 112) if form.windows else 0,
            full=tuple(given.get("fullatt_block_indexes", (7, 15, 23, 31))) if form.windows else (),
            sections=_sections(raw, where),
            interleaved=family.interleaved,
            image_tokens=(before, token, after),
            video_token=raw.get("video_token_id", family.video_token),
            clock=None if family.clock is None else given.get("tokens_per_second", family.clock),
        )


def _sections(raw: Mapping[str, Any], where: str) -> tuple[int, int, int]:
    """Return how many rotary frequencies use each number of a position."""
    text = decoder_section(raw)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = tuple(rope.get("mrope_section") or FAMILIES[str(raw["model_type"])].sections)
    frequencies = rotated_width(read_keys(decoder_config(raw))) // 2
    if len(sections) != 3 or sum(sections) != frequencies:
        raise ConfigError(
            "mrope_section does not cover the rotary frequencies of a head",
            where=f"{where}: mrope_section",
            found=list(sections),
            allowed=f"three numbers whose sum is {frequencies}, half the width of a head that is rotated",
        )
    return sections[0], sections[1], sections[2]


@dataclass(frozen=True)
class ImageSettings:
    """How pixels become the encoder's input.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that becomes one feature.
        min_pixels, max_pixels: smallest and largest number of pixels; other images are resized.
        mean, deviation: mean and deviation of each colour (0 to 1), used to normalise.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def limited(self, least: int | None, most: int | None) -> ImageSettings:
        """Return the settings with different limits on an image's pixels; None keeps the model's limit."""
        settings = replace(self, min_pixels=least or self.min_pixels, max_pixels=most or self.max_pixels)
        _check_limits(settings, "image", "data.min_pixels", "data.max_pixels")
        return settings

    @classmethod
    def from_config(
        cls, encoder: VisionEncoder, processor: Mapping[str, Any] | None = None, where: str = ""
    ) -> ImageSettings:
        """Build the settings from a model's preprocessor_config.json; None: the settings of the published models."""
        given, published = processor or {}, encoder.form.processor
        limits = given.get("size") or {}
        for key, size in (("patch_size", encoder.patch), ("merge_size", encoder.merge)):
            if given.get(key, size) != size:
                raise ConfigError(
                    "patch sizes differ from config.json", where=f"{where}: {key}", found=given[key], allowed=str(size)
                )
        return cls(
            patch=encoder.patch,
            merge=encoder.merge,
            min_pixels=given.get("min_pixels") or limits.get("shortest_edge") or published["min_pixels"],
            max_pixels=given.get("max_pixels") or limits.get("longest_edge") or published["max_pixels"],
            mean=tuple(given.get("image_mean") or published["image_mean"]),
            deviation=tuple(given.get("image_std") or published["image_std"]),
        )


@dataclass(frozen=True)
class VideoSettings:
    """How frames of a video become the encoder's input; colours are those of `ImageSettings`.

    Attributes:
        patch, merge: as in `ImageSettings`.
        temporal: frames of a temporal patch.
        min_pixels, max_pixels: limits on the pixels of a frame or, with `whole`, of all frames together.
        whole: as above.
        timestamps: prompts name the time of each temporal patch, whose features have the positions of an image.
        clock: positions per second of a video without timestamps; None: one for each temporal patch.
    """

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    whole: bool
    timestamps: bool
    clock: int | None

    @classmethod
    def of(
        cls, encoder: VisionEncoder, processor: Mapping[str, Any] | None, least: int | None, most: int | None
    ) -> VideoSettings:
        """Build the settings from the file of a model's video processor.

        Args:
            processor: content of the file; None: the defaults of transformers' video processor.
            least, most: the recipe's limits on pixels (`data.video_min_pixels`, `data.video_max_pixels`), which replace
                those of the file; None: keep the file's.
        """
        if encoder.temporal != TEMPORAL:
            raise ConfigError(
                "videos need a vision encoder whose temporal patches have the allowed number of frames",
                where="vision_config.temporal_patch_size",
                found=encoder.temporal,
                allowed=str(TEMPORAL),
                fix="choose another model, or set data.video_key to null",
            )
        family, given = FAMILIES[encoder.model_type], processor or {}
        size = dict(given.get("size") or {})
        if not family.timestamps:  # transformers reads the older keys only for models without timestamps
            size |= {edge: given[key] for key, edge in _EDGES.items() if given.get(key) is not None}
        settings = cls(
            patch=encoder.patch,
            merge=encoder.merge,
            temporal=encoder.temporal,
            min_pixels=least or size.get("shortest_edge") or family.video_pixels[0],
            max_pixels=most or size.get("longest_edge") or family.video_pixels[1],
            whole=family.timestamps,
            timestamps=family.timestamps,
            clock=encoder.clock,
        )
        _check_limits(settings, "frame", "data.video_min_pixels", "data.video_max_pixels")
        return settings


def _check_limits(settings: ImageSettings | VideoSettings, picture: str, least: str, most: str) -> None:
    """Raise ConfigError if no image size is within the limits on pixels.

    Args:
        picture: `image` or `frame`, for the message.
        least, most: recipe keys of the lower and the upper limit, for the message.
    """
    unit = (settings.patch * settings.merge) ** 2
    if settings.min_pixels > settings.max_pixels or settings.max_pixels < unit:
        raise ConfigError(
            f"no {picture} size is within these limits",
            where=f"{least}, {most}",
            found=[settings.min_pixels, settings.max_pixels],
            allowed=f"{least} <= {most}, and {most} >= {unit}, the pixels that one feature covers",
        )
