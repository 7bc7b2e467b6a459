"""Prompts with images: `<image>` in a prompt becomes the model's image tokens, one for each feature of the image.

    "<image> How many circles?"  ->  <|vision_start|> <|image_pad|> x features <|vision_end|> How many circles?
The sizes of images are read with the prompts, because lengths depend on them; pixels are read when a prompt is used.

`<video>` becomes one such text for a whole video (Qwen2-VL, Qwen2.5-VL), or one after the time of each temporal patch
(Qwen3-VL, Qwen3.5):  `<0.2 seconds><|vision_start|><|video_pad|> x features <|vision_end|><1.2 seconds>...`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megarl.architectures.vision_language import ImageSettings, VideoSettings, VisionEncoder
from megarl.config.data import DataConfig
from megarl.data.image_set import ImageSet, clip_of, image_fields, patches_of
from megarl.data.images import fitting_size, image_folder, image_size
from megarl.data.jagged import Jagged
from megarl.data.row_images import MARK, VIDEO_MARK, check_marks, row_images
from megarl.data.rows import Row
from megarl.data.videos import VideoClip, check_video_marks, fitting_frames, open_video, row_videos
from megarl.system.errors import ConfigError, DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class VideoPrompts:
    """Reads the videos of prompts, and writes their text."""

    key: str  # column of videos, `data.video_key`
    fps: float  # `data.video_fps`
    most: int | None  # `data.max_frames`
    settings: VideoSettings
    token: int  # id of the video token, which stands for one feature
    text: str  # text of one temporal patch or video in a prompt, with one video token

    def clips(self, row: Row, folder: Path | None) -> list[VideoClip]:
        """Return a row's videos, whose frames are not decoded yet."""
        where = f"{row.where}: column {self.key!r}"
        return [open_video(value, folder, self.fps, self.most, where) for value in row_videos(row, self.key)]

    def written(self, clip: VideoClip) -> str:
        """Return a video's text in a prompt: one video token, or with timestamps one for each of the video's times."""
        if not self.settings.timestamps:
            return self.text
        return "".join(f"<{time:.1f} seconds>{self.text}" for time in clip.seconds(self.settings.temporal))

    def counts(self, clip: VideoClip) -> list[int]:
        """Return the number of features for which each video token of a video's text stands."""
        height, width = fitting_frames(len(clip.chosen), *clip.size, self.settings, clip.where)
        unit, blocks = self.settings.patch * self.settings.merge, clip.blocks(self.settings.temporal)
        features = height // unit * (width // unit)
        return [features] * blocks if self.settings.timestamps else [features * blocks]


@dataclass(frozen=True)
class ImagePrompts:
    """Reads the images of prompts, and writes their image tokens into the text."""

    key: str  # column of images, `data.image_key`
    prompt_key: str  # column of prompts, `data.prompt_key`; its messages may contain images, too
    folder: Path | None  # folder of relative file names, `data.image_dir`
    limit: int | None  # maximum number of images per prompt, `data.limit_images`
    settings: ImageSettings  # patch size and limits on the number of pixels
    token: int  # id of the image token, which stands for one feature
    token_text: str
    text: str  # text of one image in a prompt, with one image token
    videos: VideoPrompts | None = None  # reader of videos; None: the recipe has no `data.video_key`

    @classmethod
    def of(
        cls,
        config: DataConfig,
        encoder: VisionEncoder,
        settings: ImageSettings,
        tokenizer: PreTrainedTokenizerBase,
        frames: VideoSettings | None = None,
    ) -> ImagePrompts | None:
        """Return the reader for a recipe; None: the recipe has no `data.image_key`.

        Args:
            encoder, settings: the model's encoder and image settings, whose limits `data.min_pixels` and
                `data.max_pixels` replace.
            frames: the model's video settings, if the recipe has `data.video_key`.
        """
        if config.image_key is None:
            return None
        folder = image_folder(config)
        limits = settings.limited(config.min_pixels, config.max_pixels)
        token, (_, token_text, _), text = encoder.image_token, *_texts_of(encoder.image_tokens, tokenizer)
        videos = None
        if config.video_key is not None and frames is not None:
            before, _, after = encoder.image_tokens
            _, of_video = _texts_of((before, encoder.video_token, after), tokenizer)
            videos = VideoPrompts(
                config.video_key, config.video_fps, config.max_frames, frames, encoder.video_token, of_video
            )
        return cls(
            config.image_key, config.prompt_key, folder, config.limit_images, limits, token, token_text, text, videos
        )

    def values(self, row: Row) -> list[Any]:
        """Return a row's images, which are not read yet; raises DataError like `row_images`."""
        return row_images(row, self.key, self.prompt_key, self.limit)

    def marked(self, text: str, row: Row) -> str:
        """Replace each `<image>` in a prompt by the text that the model expects for an image."""
        check_marks(text, len(self.values(row)), self.key, row)
        if self.videos is not None:
            clips = self.videos.clips(row, self.folder)
            check_video_marks(text, len(clips), self.videos.key, row)
            for clip in clips:
                text = text.replace(VIDEO_MARK, self.videos.written(clip), 1)
        return text.replace(MARK, self.text)

    def expanded(self, ids: Sequence[int], row: Row) -> list[int]:
        """Repeat each image token of a prompt once per feature of its image, and each video token likewise."""
        if self.videos is not None:
            ids = self._with_videos(ids, row, self.videos)
        values = self.values(row)
        if ids.count(self.token) != len(values):
            raise DataError(
                "the text of the prompt contains the model's image token",
                where=row.where,
                found=f"{ids.count(self.token)} tokens, {count(len(values), 'image')}",
                allowed=f"{MARK} for each image",
                fix=row.column_fix,
            )
        images, tokens, unit = iter(values), list[int](), self.settings.patch * self.settings.merge
        for token in ids:
            features = 1
            if token == self.token:
                size = image_size(next(images), self.folder, self._where(row))
                height, width = fitting_size(*size, self.settings)
                features = height // unit * (width // unit)
            tokens += [token] * features
        return tokens

    def _with_videos(self, ids: Sequence[int], row: Row, videos: VideoPrompts) -> list[int]:
        counts = [count for clip in videos.clips(row, self.folder) for count in videos.counts(clip)]
        if ids.count(videos.token) != len(counts):
            raise DataError(
                "the text of the prompt contains the model's video token",
                where=row.where,
                found=f"{ids.count(videos.token)} tokens, {len(counts)} places of videos",
                allowed=f"{VIDEO_MARK} for each video",
                fix=row.column_fix,
            )
        left = iter(counts)
        return [each for token in ids for each in [token] * (next(left) if token == videos.token else 1)]

    def read(self, value: Any, where: str) -> ImageSet:
        """Read an image as patches; one that has been read is returned unchanged.

        Raises:
            DataError: at `where`, if the image cannot be read or has an invalid size.
        """
        if isinstance(value, ImageSet):
            return value
        return patches_of(value, self.settings, self.folder, where)

    def patches(self, row: Row) -> list[ImageSet]:
        """Read the images of a row, and return them as patches."""
        return [self.read(value, self._where(row)) for value in self.values(row)]

    def placed(self, ids: Sequence[int], images: Sequence[ImageSet]) -> tuple[list[int], ImageSet | None]:
        """Return tokens with as many image tokens as the images have features, and the images in their places.

        Args:
            ids: tokens with one image token for each image.
        """
        if ids.count(self.token) != len(images):
            raise DataError(
                "the text contains the model's image token",
                found=f"{ids.count(self.token)} tokens, {count(len(images), 'image')}",
                allowed="images as parts, and no such token in text",
                fix="remove the token from the text",
            )
        left, tokens, starts = iter(images), list[int](), list[int]()
        for token in ids:
            if token == self.token:
                starts.append(len(tokens))
            tokens += [token] * (next(left).features if token == self.token else 1)
        return tokens, ImageSet.joined(images, starts)

    def _where(self, row: Row) -> str:
        return f"{row.where}: column {self.key!r}"

    def fields(self, rows: Sequence[Row], prompts: Sequence[Tensor]) -> dict[str, Jagged]:
        """Return the batch's image fields for prompts with these rows and tokens."""
        images, starts = list[list[ImageSet]](), list[list[int]]()
        for tokens, row in zip(prompts, rows, strict=True):
            shown = self._placed(tokens, self.token, self.patches(row), self._where(row))
            if self.videos is not None:
                clips = self.videos.clips(row, self.folder)
                blocks = [block for clip in clips for block in clip_of(clip, self.videos.settings)]
                shown += self._placed(tokens, self.videos.token, blocks, f"{row.where}: column {self.videos.key!r}")
            shown.sort(key=itemgetter(0))
            starts.append([start for start, _ in shown])
            images.append([image for _, image in shown])
        return image_fields(images, starts, self.settings, clips=self.videos is not None)

    @staticmethod
    def _placed(tokens: Tensor, token: int, images: Sequence[ImageSet], where: str) -> list[tuple[int, ImageSet]]:
        """Return each image with the position of its first feature among the tokens of a prompt."""
        places = (tokens == token).nonzero()[:, 0].tolist()
        counts = [image.features for image in images]
        if sum(counts) != len(places):
            raise DataError(
                "the size of an image or a video has changed since the prompts were read",
                where=where,
                found=f"{sum(counts)} image features, but {len(places)} image tokens in the prompt",
                fix="do not change files of images or videos during a run",
            )
        return [(places[sum(counts[:number])], image) for number, image in enumerate(images)]


def _texts_of(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str]:
    """Return the text of each token, and of all together; raises ConfigError if the tokenizer lacks one."""
    texts = [str(text) for text in tokenizer.convert_ids_to_tokens(list(tokens))]
    text = "".join(texts)
    if tokenizer(text, add_special_tokens=False)["input_ids"] != list(tokens):
        raise ConfigError(
            "the tokenizer lacks the image tokens that the model's config.json names",
            where="model.tokenizer",
            found=text,
            allowed=f"tokens {list(tokens)}: the beginning of an image, a feature, its end",
            fix="use the model's own tokenizer",
        )
    return texts, text
