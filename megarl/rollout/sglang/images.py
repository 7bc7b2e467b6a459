"""Images in requests to a server.

    trainer    token ids with an image token for each feature, and patches of an image in its final size
    request    token ids with one image token for each image, and the image as PNG; the server's processor resizes
               nothing and inserts the other image tokens again
    answer     must count as many prompt tokens as the trainer (`ServedSample.add`)

The server's processor decodes the ids to text, inserts image tokens and encodes the text again; it uses the ids of the
request if it finds as many images in them. `write_processor` gives the run's servers a tokenizer whose texts are the
ids, so that this works with any tokenizer and any sampled tokens.
"""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.vla_folder import PREPROCESSOR
from megarl.data.image_set import ImageSet, pixels_of
from megarl.data.images import MOST_PIXELS
from megarl.models.hf import encoder_of, image_settings
from megarl.rewards.images import png

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megarl.architectures.vision_language import VisionEncoder
    from megarl.config.sglang import SGLangConfig

#: The texts of `VisionEncoder.image_tokens` that SGLang and transformers look for.
_TEXTS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
#: Classes of transformers' processors that differ from Qwen3-VL's.
_PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}


@dataclass(frozen=True)
class ServedImages:
    """The images of a prompt in the form that requests contain; all samples of the prompt share this object."""

    images: ImageSet

    @functools.cached_property
    def pngs(self) -> list[str]:
        """The base64 of each image as a PNG, which is lossless."""
        return [base64.b64encode(png(pixels)).decode() for _, pixels in pixels_of(self.images)]

    def image_token(self, prompt_ids: list[int]) -> int:
        """Return the id of the image token, which takes the place of one image feature."""
        return prompt_ids[self.images.places[0][0]]

    def request(self, prompt_ids: list[int]) -> dict[str, Any]:
        """Return the fields of a request that hold the prompt, with one image token for each image."""
        ids, end = list[int](), 0
        for start, rows, columns, _ in self.images.places:
            ids += prompt_ids[end : start + 1]
            end = start + rows * columns
        return {"input_ids": ids + prompt_ids[end:], "image_data": self.pngs}


def keeping_sizes(config: SGLangConfig, encoder: VisionEncoder | None) -> SGLangConfig:
    """Return the settings of servers that resize no image whose sides are multiples of a feature's side.

    For Qwen2-VL SGLang replaces the limits that `write_processor` writes by others, which an argument overrides.
    """
    if encoder is None or encoder.model_type != "qwen2_vl":
        return config
    limits = json.dumps({"image": {"size": _any_size(encoder)}})
    return config.model_copy(update={"extra_args": ["--mm-process-config", limits, *config.extra_args]})


def _any_size(encoder: VisionEncoder) -> dict[str, int]:
    """Return limits on the pixels of an image so wide that the server resizes no image whose sides are multiples of a
    feature's side, patch * merge pixels."""
    return {"shortest_edge": (encoder.patch * encoder.merge) ** 2, "longest_edge": MOST_PIXELS}


def write_processor(folder: Path, hf_config: PretrainedConfig) -> None:
    """Write the config of an image processor and tokenizer into a server's folder of a vision-language model.

    The processor does not resize images whose sides are multiples of a feature's side. The tokenizer's text of token 17
    is "17,".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    encoder = encoder_of(hf_config)
    assert encoder is not None, "a vision-language model"
    names = dict(zip(encoder.image_tokens, _TEXTS, strict=True))
    vocabulary = {names.get(token, f"{token},"): token for token in range(hf_config.vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="0,"))
    backend.pre_tokenizer = pre_tokenizers.Split(",", "merged_with_previous")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in names.values()])
    # SGLang requires a padding token. Digits cannot be its text: the tokenizer would find "7," inside "17,".
    PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, pad_token=_TEXTS[-1]
    ).save_pretrained(folder)
    settings = image_settings(hf_config)
    processor: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": _PROCESSORS.get(encoder.model_type, "Qwen3VLProcessor"),
        "size": _any_size(encoder),
        "image_mean": settings.mean,
        "image_std": settings.deviation,
        "patch_size": settings.patch,
        "merge_size": settings.merge,
        "temporal_patch_size": encoder.temporal,
    }
    (folder / PREPROCESSOR).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
