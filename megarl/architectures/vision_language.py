"""Vision-language models of Qwen: a vision encoder whose features stand in the places of a decoder's image tokens.

    image -> patches -> encoder -> features of merge x merge patches each -> the embeddings of <|image_pad|> tokens
                                \\-> features after some of its blocks (Qwen3-VL) -> added after the first layers

The decoder is a language model of this package (`DECODERS`), but for positions, which have three numbers per token. The
encoder's tensors are those of transformers' modules. Nothing here imports torch. Source: the configuration and
modelling files of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megarl.system.errors import ConfigError

#: Model types and the architecture of their decoders.
DECODERS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


class Prefixes(NamedTuple):
    """Beginnings of the tensors' names in checkpoints: of the decoder (without the head), and of the encoder."""

    decoder: str
    encoder: str


_FLAT, _NESTED = Prefixes("model.", "visual."), Prefixes("model.language_model.", "model.visual.")
#: Sizes of decoders that their configuration classes have, and the classes of `DECODERS` not.
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
    """The vision encoder of a model, and how its features enter the decoder.

    Attributes:
        model_type: of the whole model, a key of `DECODERS`.
        width, blocks, ffn, heads: sizes of the encoder's layers.
        out: width of its features: the decoder's.
        patch: side of a patch in pixels.
        merge: side of the square of patches that make one feature.
        temporal: frames of a patch; a picture is repeated.
        grid: learned positions; 0: positions are rotations only.
        deepstack: blocks after which features are also taken; number i of them is added after decoder layer i.
        window: side in pixels of the windows that blocks other than `full` attend in; 0: all attend to the picture.
        full: blocks that attend to the whole picture.
        sections: number of rotation frequencies that go by the first, second, third number of a position.
        interleaved: these frequencies take turns; else they stand in a row.
        image_tokens: ids of the token before an image, of the one in whose place a feature stands, of that after it.
    """

    model_type: str
    width: int
    blocks: int
    ffn: int
    heads: int
    out: int
    patch: int
    merge: int
    temporal: int
    grid: int
    deepstack: tuple[int, ...]
    window: int
    full: tuple[int, ...]
    sections: tuple[int, int, int]
    interleaved: bool
    image_tokens: tuple[int, int, int]

    @property
    def image_token(self) -> int:
        """Id of the token in whose place a feature stands."""
        return self.image_tokens[1]

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: colours, frames, pixels."""
        return 3 * self.temporal * self.patch**2

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors by name of the parameter in transformers' module: name and shape in a checkpoint."""
        found = self._outer() | self._blocks() | self._merger("merger", self.width)
        for number in range(len(self.deepstack)):
            found |= self._merger(f"deepstack_merger_list.{number}", self.width * self.merge**2)
        return {name: (prefixes(self.model_type).encoder + name, shape) for name, shape in found.items()}

    def _outer(self) -> dict[str, tuple[int, ...]]:
        weight = (self.width, 3, self.temporal, self.patch, self.patch)
        found: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": weight}
        if self.grid:
            found |= {"patch_embed.proj.bias": (self.width,), "pos_embed.weight": (self.grid, self.width)}
        return found

    def _blocks(self) -> dict[str, tuple[int, ...]]:
        width, ffn, older = self.width, self.ffn, self.model_type == "qwen2_5_vl"
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        if older:
            layers |= {"mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn)}
        else:
            layers |= {"mlp.linear_fc1": (ffn, width), "mlp.linear_fc2": (width, ffn)}
        found = dict[str, tuple[int, ...]]()
        for block in range(self.blocks):
            for name, shape in layers.items():
                found |= {f"blocks.{block}.{name}.weight": shape, f"blocks.{block}.{name}.bias": shape[:1]}
            for norm in ("norm1", "norm2"):
                found[f"blocks.{block}.{norm}.weight"] = (width,)
                if not older:
                    found[f"blocks.{block}.{norm}.bias"] = (width,)
        return found

    def _merger(self, name: str, normed: int) -> dict[str, tuple[int, ...]]:
        wide = self.width * self.merge**2
        older = self.model_type == "qwen2_5_vl"
        norm, first, second = ("ln_q", "mlp.0", "mlp.2") if older else ("norm", "linear_fc1", "linear_fc2")
        found: dict[str, tuple[int, ...]] = {f"{name}.{norm}.weight": (normed,)}
        if not older:
            found[f"{name}.{norm}.bias"] = (normed,)
        for layer, rows in ((first, wide), (second, self.out)):
            found |= {f"{name}.{layer}.weight": (rows, wide), f"{name}.{layer}.bias": (rows,)}
        return found

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], hidden: int, where: str) -> VisionEncoder:
        """Return the encoder that `raw`, a model's config.json, describes.

        Args:
            hidden: width of the decoder.
            where: names `raw` in errors.

        Raises:
            ConfigError: sizes that are missing, do not fit, or are not supported.
        """
        kind = str(raw["model_type"])
        older = kind == "qwen2_5_vl"
        known = {**_COMMON, **_SIZES["qwen2_5_vl" if older else "qwen3_vl"]}
        sizes = {**known, **(raw.get("vision_config") or {})}
        for key in known:
            if isinstance(sizes[key], bool) or not isinstance(sizes[key], int) or sizes[key] < 1:
                raise ConfigError(
                    "not a size of the vision encoder",
                    where=f"{where}: vision_config.{key}",
                    found=sizes[key],
                    allowed="integer > 0",
                )
        if sizes["out_hidden_size"] != hidden or sizes["hidden_size"] % sizes["num_heads"]:
            raise ConfigError(
                "sizes of the vision encoder do not fit",
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
    """Return how the names of tensors begin in the checkpoints that transformers writes."""
    return _FLAT if model_type == "qwen2_5_vl" else _NESTED


def canonical_name(model_type: object, stored: str) -> str:
    """Return the name of a tensor in the form of `prefixes`, for any of the forms that published files have; of another
    model the name as it is."""
    if model_type not in DECODERS:
        return stored
    own = prefixes(model_type)
    for form in (_NESTED, _FLAT):
        for prefix, replaced in ((form.encoder, own.encoder), (form.decoder, own.decoder)):
            if stored.startswith(prefix):
                return replaced + stored.removeprefix(prefix)
    return stored


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a config.json: nested, or among the other keys as older files have it."""
    kind = str(raw["model_type"])
    own = raw.get("text_config") or {key: value for key, value in raw.items() if key != "vision_config"}
    found = {**_DECODER_DEFAULTS[kind], **own}
    if kind == "qwen3_vl_moe":
        found["norm_topk_prob"] = True  # its router always does
        if "num_local_experts" in own:  # the other name of the number
            found["num_experts"] = own["num_local_experts"]
    return found


def _sections(raw: Mapping[str, Any], hidden: int, where: str) -> tuple[int, int, int]:
    """Return how many rotation frequencies go by each number of a position."""
    kind, text = str(raw["model_type"]), _text(raw)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    found = tuple(rope.get("mrope_section") or _SECTIONS[kind])
    head = text.get("head_dim") or (128 if kind == "qwen3_vl" else hidden // text["num_attention_heads"])
    if len(found) != 3 or sum(found) != head // 2:
        raise ConfigError(
            "the sections of positions do not make up the frequencies of a head",
            where=f"{where}: mrope_section",
            found=list(found),
            allowed=f"three numbers whose sum is {head // 2}, half of a head",
        )
    return found[0], found[1], found[2]


def decoder_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the decoder as a language model, of that of a vision-language model."""
    text = _text(raw)
    tied = raw.get("tie_word_embeddings", False)
    # Files of Qwen2.5-VL before transformers 5 say it of the decoder.
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
    """The way from pixels to the encoder's input.

    Attributes:
        patch, merge: see `VisionEncoder`.
        min_pixels, max_pixels: limits of an image's pixels; others are resized.
        mean, deviation: of each colour, from 0 to 1, that it is normalised by.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def limited(self, least: int | None, most: int | None) -> ImageSettings:
        """Return the settings with other limits of an image's pixels; None: the model's.

        Raises:
            ConfigError: no image of whole features is within them.
        """
        unit = (self.patch * self.merge) ** 2
        found = replace(self, min_pixels=least or self.min_pixels, max_pixels=most or self.max_pixels)
        if found.min_pixels > found.max_pixels or found.max_pixels < unit:
            raise ConfigError(
                "no image is within these limits",
                where="data.min_pixels, data.max_pixels",
                found=[found.min_pixels, found.max_pixels],
                allowed=f"the first at most the second, which is at least the {unit} pixels of a feature",
            )
        return found

    @classmethod
    def from_config(
        cls, encoder: VisionEncoder, processor: Mapping[str, Any] | None = None, where: str = ""
    ) -> ImageSettings:
        """Return the settings of a model, from its preprocessor_config.json; None: those of its published models.

        Raises:
            ConfigError: other sizes of patches than config.json has; `where` names the file.
        """
        given, published = processor or {}, _PROCESSORS[encoder.model_type == "qwen2_5_vl"]
        limits = given.get("size") or {}
        for key, own in (("patch_size", encoder.patch), ("merge_size", encoder.merge)):
            if given.get(key, own) != own:
                raise ConfigError(
                    "not the patches of config.json", where=f"{where}: {key}", found=given[key], allowed=str(own)
                )
        return cls(
            patch=encoder.patch,
            merge=encoder.merge,
            min_pixels=given.get("min_pixels") or limits.get("shortest_edge") or published["min_pixels"],
            max_pixels=given.get("max_pixels") or limits.get("longest_edge") or published["max_pixels"],
            mean=tuple(given.get("image_mean") or published["image_mean"]),
            deviation=tuple(given.get("image_std") or published["image_std"]),
        )


#: What the preprocessor_config.json of published models says: of Qwen3-VL, of Qwen2.5-VL.
_PROCESSORS: tuple[dict[str, Any], dict[str, Any]] = (
    {"min_pixels": 65536, "max_pixels": 16777216, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3},
    {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    },
)
