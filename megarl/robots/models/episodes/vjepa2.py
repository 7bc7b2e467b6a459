"""Embeds episodes with V-JEPA 2, a published video encoder (arXiv 2506.09985), as the mean over its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.models.weights.files import resolve_folder
from megarl.robots.config import CLIP, END_FRAMES, FRAMES
from megarl.robots.data.pictures import VideoPipeline
from megarl.robots.models.episodes import EpisodeEmbedder
from megarl.robots.models.episodes.states import valid_episodes
from megarl.robots.simulators.protocol import Recording
from megarl.system.errors import ConfigError

_PATH = "robot.reward.embedding.path"
_AGAIN = "download the checkpoint again, or name another one"


class VideoEmbedder(EpisodeEmbedder):
    """Embeds one clip per episode and camera, with frames of environment steps or of policy calls.

    Args:
        source: folder or hub name of a checkpoint of transformers' VJEPA2Model, as safetensors.
        cameras: cameras whose clips are embedded, each separately.
        device: device of the encoder, which computes in bfloat16 on CUDA and in float32 on CPUs.
        batch_size: number of clips embedded at a time.
        by_steps: a clip is what the simulator showed after every environment step; else what the policy saw before
            each call, and at the end.
    """

    def __init__(
        self, source: str, cameras: Sequence[str], device: torch.device, batch_size: int, *, by_steps: bool
    ) -> None:
        self._cameras, self._device, self._batch_size, self._by_steps = tuple(cameras), device, batch_size, by_steps
        self._encoder, config = _encoder(resolve_folder(source, where=_PATH), device)
        self._width = config.hidden_size
        self._clip = VideoPipeline(frames=config.frames_per_clip, size=config.crop_size)

    @property
    def recording(self) -> Recording | None:
        """The clips that simulators must record for the encoder; None if it embeds the pictures of policy calls."""
        return Recording(self._cameras, self._clip.frames) if self._by_steps else None

    @torch.no_grad()
    def embed(self, episodes: Batch) -> Tensor:
        """Return embeddings float32 [B, cameras * hidden_size], zeros for episodes with an error."""
        made = torch.zeros(len(episodes), len(self._cameras), self._width)
        rows = valid_episodes(episodes).nonzero().squeeze(1)
        parts = rows.split(self._batch_size) if len(rows) else []
        for number, camera in enumerate(self._cameras):
            for part in parts:
                seen = [self._frames(episodes, camera, row) for row in part.tolist()]
                clips = torch.stack([self._clip(some.to(self._device)) for some in seen])
                tokens = self._encoder(pixel_values_videos=clips).last_hidden_state
                made[part, number] = tokens.float().mean(1).cpu()
        return made.flatten(1)

    def _frames(self, episodes: Batch, camera: str, row: int) -> Tensor:
        """Return an episode's frames of a camera in the order of time, uint8 [T, H, W, 3]."""
        seen = episodes[(CLIP if self._by_steps else FRAMES) + camera]
        frames: Tensor = seen.values[seen.offsets[row] : seen.offsets[row + 1]]
        return frames if self._by_steps else torch.cat([frames, episodes[END_FRAMES + camera][row][None]])


def _encoder(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """Return the checkpoint's encoder, without the predictor, and its configuration."""
    from transformers import VJEPA2Model

    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the config.json of the encoder cannot be read: {error}", where=_PATH, found=str(folder), fix=_AGAIN
        ) from error
    if kind != "vjepa2":
        raise ConfigError(
            "the model is not a V-JEPA 2 encoder",
            where=_PATH,
            found=kind,
            allowed="a checkpoint whose model_type is vjepa2",
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model, loaded = VJEPA2Model.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the weights of the encoder cannot be read: {error}", where=_PATH, found=str(folder), fix=_AGAIN
        ) from error
    missing = sorted(name for name in loaded["missing_keys"] if name.startswith("encoder."))
    if missing:
        raise ConfigError("the checkpoint lacks weights of the encoder", where=_PATH, found=missing[:4], fix=_AGAIN)
    return model.encoder.to(device).eval().requires_grad_(False), model.config
