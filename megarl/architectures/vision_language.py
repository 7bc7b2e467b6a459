"""Qwen's vision-language models: a vision encoder whose features replace the embeddings of a decoder's image tokens.

    image -> patches -> encoder -> features of merge x merge patches each -> the embeddings of <|image_pad|> tokens
                                \\-> features after some of its blocks (Qwen3-VL) -> added after the first layers

The decoder is a language model of this package (`DECODERS`), except that positions have three numbers per token. The
encoder's tensors are those of transformers' modules. Nothing here imports torch. Source: the configuration and
modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megarl.system.errors import ConfigError

#: Model type -> architecture of its decoder.
DECODERS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


#: Model type whose vision encoder is not supported -> architecture of its language model, which is supported.
TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


class Prefixes(NamedTuple):
    """Prefixes of the names of the decoder's tensors (without the head) and the encoder's tensors in checkpoints."""

    decoder: str
    encoder: str


_FLAT, _NESTED = Prefixes("model.", "visual."), Prefixes("model.language_model.", "model.visual.")
#: Default sizes of decoders in which their configuration classes differ from the classes of `DECODERS`.
_DECODER_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
        "rope_theta": 1e6,
    },
    "qwen3_vl": {"max_position_embeddings": 128000, "rope_theta": 5e5},
    "qwen3_vl_moe": {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "rope_theta": 5e5,
    },
}
_SECTIONS = {"qwen2_5_vl": (16, 24, 24), "qwen3_vl": (24, 20, 20), "qwen3_vl_moe": (24, 20, 20)}
_OF_POSITIONS = ("mrope_section", "mrope_interleaved")
_SIZES: dict[str, dict[str, int]] = {
    "qwen2_5_vl": {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14},
    "qwen3_vl": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16},
}
_COMMON = {
    "num_heads": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}


@dataclass(frozen=True)
class VisionEncoder:
    """The vision encoder of a model, and how the decoder uses its features.

    Attributes:
        width, blocks, ffn, heads: sizes of the encoder's layers.
    """

    model_type: str  # model type of the whole model; a key of `DECODERS`
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
    sections: tuple[int, int, int]  # number of rotary frequencies for the first, second and third number of a position
    interleaved: bool  # these frequencies alternate; otherwise they are consecutive
    # ids of the token before an image, the token that a feature replaces, and the token after it
    image_tokens: tuple[int, int, int]

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

    def _outer(self) -> dict[str, tuple[int, ...]]:
        weight = (self.width, 3, self.temporal, self.patch, self.patch)
        tensors: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": weight}
        if self.grid:
            tensors |= {"patch_embed.proj.bias": (self.width,), "pos_embed.weight": (self.grid, self.width)}
        return tensors

    def _blocks(self) -> dict[str, tuple[int, ...]]:
        width, ffn, older = self.width, self.ffn, self.model_type == "qwen2_5_vl"
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        if older:
            layers |= {"mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn)}
        else:
            layers |= {"mlp.linear_fc1": (ffn, width), "mlp.linear_fc2": (width, ffn)}
        tensors = dict[str, tuple[int, ...]]()
        for block in range(self.blocks):
            for name, shape in layers.items():
                tensors |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[:1]}
            for norm in ("norm1", "norm2"):
                tensors[f"blocks.{block}.{norm}.weight"] = (width,)
                if not older:
                    tensors[f"blocks.{block}.{norm}.bias"] = (width,)
        return tensors

    def _merger(self, name: str, normed: int) -> dict[str, tuple[int, ...]]:
        wide = self.width * self.merge**2
        older = self.model_type == "qwen2_5_vl"
        norm, first, second = ("ln_q", "mlp.0", "mlp.2") if older else ("norm", "linear_fc1", "linear_fc2")
        tensors: dict[str, tuple[int, ...]] = {f"{name}.{norm}.weight": (normed,)}
        if not older:
            tensors[f"{name}.{norm}.bias"] = (normed,)
        for layer, rows in ((first, wide), (second, self.out)):
            tensors |= {f"{name}.{layer}.weight": (rows, wide), f"{name}.{layer}.bias": (rows,)}
        return tensors

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], hidden: int, where: str) -> VisionEncoder:
        """Build the encoder from `raw`, a model's config.json.

        Args:
            hidden: width of the decoder.
            where: names `raw` in errors.
        """
        kind = str(raw["model_type"])
        older = kind == "qwen2_5_vl"
        known = {**_COMMON, **_SIZES["qwen2_5_vl" if older else "qwen3_vl"]}
        sizes = {**known, **(raw.get("vision_config") or {})}
        for key in known:
            if isinstance(sizes[key], bool) or not isinstance(sizes[key], int) or sizes[key] < 1:
                raise ConfigError(
                    "a size of the vision encoder is invalid",
                    where=f"{where}: vision_config.{key}",
                    found=sizes[key],
                    allowed="integer > 0",
                )
        if sizes["out_hidden_size"] != hidden or sizes["hidden_size"] % sizes["num_heads"]:
            raise ConfigError(
                "the sizes of the vision encoder do not fit together",
                where=f"{where}: vision_config",
                found={key: sizes[key] for key in ("out_hidden_size", "hidden_size", "num_heads")},
                allowed=f"out_hidden_size is the decoder's {hidden}, and num_heads divides hidden_size",
            )
        return cls(
            model_type=kind,
            width=sizes["hidden_size"],
            blocks=sizes["depth"],
            ffn=sizes["intermediate_size"],
            heads=sizes["num_heads"],
            out=sizes["out_hidden_size"],
            patch=sizes["patch_size"],
            merge=sizes["spatial_merge_size"],
            temporal=sizes["temporal_patch_size"],
            grid=0 if older else sizes.get("num_position_embeddings", 2304),
            deepstack=() if older else tuple(sizes.get("deepstack_visual_indexes", (8, 16, 24))),
            window=sizes.get("window_size", 112) if older else 0,
            full=tuple(sizes.get("fullatt_block_indexes", (7, 15, 23, 31))) if older else (),
            sections=_sections(raw, hidden, where),
            interleaved=not older,
            image_tokens=(
                raw.get("vision_start_token_id", 151652),
                raw.get("image_token_id", 151655),
                raw.get("vision_end_token_id", 151653),
            ),
        )


def prefixes(model_type: object) -> Prefixes:
    """Return the prefixes of tensor names in checkpoints that transformers writes."""
    return _FLAT if model_type == "qwen2_5_vl" else _NESTED


def canonical_name(model_type: object, stored: str) -> str:
    """Translate a tensor's name from any form in published files to that of `prefixes`; names of other models stay."""
    if model_type in TEXT_PARTS and stored.startswith(_NESTED.decoder):
        return _FLAT.decoder + stored.removeprefix(_NESTED.decoder)
    if model_type not in DECODERS:
        return stored
    written = prefixes(model_type)
    for form in (_NESTED, _FLAT):
        for prefix, replaced in ((form.encoder, written.encoder), (form.decoder, written.decoder)):
            if stored.startswith(prefix):
                return replaced + stored.removeprefix(prefix)
    return stored


def is_left_out(model_type: object, stored: str) -> bool:
    """Return whether a tensor of a checkpoint is not read: layers that predict more than one token ahead, and the
    vision encoder of a model of `TEXT_PARTS`."""
    return stored.startswith("mtp.") or (model_type in TEXT_PARTS and stored.startswith(_NESTED.encoder))


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model of a model of `TEXT_PARTS`."""
    text = dict(raw.get("text_config") or {})
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            text[key] = {name: value for name, value in text[key].items() if name not in _OF_POSITIONS}
    tied = raw.get("tie_word_embeddings", False)
    return {**text, "tie_word_embeddings": tied, "model_type": TEXT_PARTS[str(raw["model_type"])]}


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's section of a config.json; older files have the decoder's keys at the top level."""
    kind = str(raw["model_type"])
    section = raw.get("text_config") or {key: value for key, value in raw.items() if key != "vision_config"}
    text = {**_DECODER_DEFAULTS[kind], **section}
    if kind == "qwen3_vl_moe":
        text["norm_topk_prob"] = True  # the router of this model always normalises
        if "num_local_experts" in section:  # another name of num_experts
            text["num_experts"] = section["num_local_experts"]
    return text


def _sections(raw: Mapping[str, Any], hidden: int, where: str) -> tuple[int, int, int]:
    """Return how many rotary frequencies use each number of a position."""
    kind, text = str(raw["model_type"]), _text(raw)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = tuple(rope.get("mrope_section") or _SECTIONS[kind])
    head = text.get("head_dim") or (128 if kind == "qwen3_vl" else hidden // text["num_attention_heads"])
    if len(sections) != 3 or sum(sections) != head // 2:
        raise ConfigError(
            "mrope_section does not cover the rotary frequencies of a head",
            where=f"{where}: mrope_section",
            found=list(sections),
            allowed=f"three numbers whose sum is {head // 2}, half the width of a head",
        )
    return sections[0], sections[1], sections[2]


def decoder_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's config as that of a language model, from a vision-language model's config.json."""
    text = _text(raw)
    tied = raw.get("tie_word_embeddings", False)
    # Files of Qwen2.5-VL before transformers 5 have this key in the decoder's section.
    text["tie_word_embeddings"] = tied or (raw["model_type"] == "qwen2_5_vl" and text.get("tie_word_embeddings", False))
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            scaling = {name: value for name, value in text[key].items() if name not in _OF_POSITIONS}
            scaling |= {name: "default" for name in ("type", "rope_type") if scaling.get(name) == "mrope"}
            text[key] = scaling
    for key in ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        text.pop(key, None)
    return {**text, "model_type": DECODERS[str(raw["model_type"])]}


@dataclass(frozen=True)
class ImageSettings:
    """How pixels become the encoder's input.

    Attributes:
        patch, merge: see `VisionEncoder`.
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
        unit = (self.patch * self.merge) ** 2
        settings = replace(self, min_pixels=least or self.min_pixels, max_pixels=most or self.max_pixels)
        if settings.min_pixels > settings.max_pixels or settings.max_pixels < unit:
            raise ConfigError(
                "no image size is within these limits",
                where="data.min_pixels, data.max_pixels",
                found=[settings.min_pixels, settings.max_pixels],
                allowed=f"min_pixels <= max_pixels, and max_pixels >= {unit}, the pixels of one feature",
            )
        return settings

    @classmethod
    def from_config(
        cls, encoder: VisionEncoder, processor: Mapping[str, Any] | None = None, where: str = ""
    ) -> ImageSettings:
        """Build the settings from a model's preprocessor_config.json; None: the settings of the published models."""
        given, published = processor or {}, _PROCESSORS[encoder.model_type == "qwen2_5_vl"]
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


#: Contents of preprocessor_config.json of published models: Qwen3-VL, Qwen2.5-VL.
_PROCESSORS: tuple[dict[str, Any], dict[str, Any]] = (
    {"min_pixels": 65536, "max_pixels": 16777216, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3},
    {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    },
)
