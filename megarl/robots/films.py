"""Films of robots' episodes for the report: RUN_DIR/videos/step_N/SAMPLE.png, small animated PNGs.

Animated PNG has all colours and stores only the changes between frames; with a still camera a GIF is several times as
large.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.batch import Batch
from megarl.robots.config import END_FRAMES, FRAMES
from megarl.system.processes import write_atomically

FOLDER = "videos"
#: Height of a film in pixels: smaller frames are enlarged to be visible, larger ones reduced.
_LEAST, _MOST = 128, 256
_BORDER = 4
_GREEN, _RED = (40, 160, 70), (200, 50, 50)
_FRAME_MS, _LAST_MS = 250, 1500


def film_rows(run_dir: Path, step: int, episodes: Batch, count: int) -> list[dict[str, Any]]:
    """Write films of the first `count` episodes, and return their rows for the report's table of samples.

    If a step is repeated, its new films replace the old ones.

    Args:
        episodes: a batch with the fields of megarl/robots/rollout/episode.py.
    """
    folder = Path(FOLDER) / f"step_{step}"
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    shown = episodes.select(list(range(min(count, len(episodes)))))
    cameras = [name.removeprefix(FRAMES) for name in shown.names() if name.startswith(FRAMES)]
    seen = {camera: shown[FRAMES + camera].unbind() for camera in cameras}
    rows: list[dict[str, Any]] = []
    for number in range(len(shown)):
        success, failure = bool(shown["success"][number]), shown["env_error"][number]
        row: dict[str, Any] = {
            "prompt": shown["prompt_text"][number],
            "response": shown["response_text"][number],
            "answer": None,
            "score": float(success),
        }
        if not failure:
            ends = {camera: shown[END_FRAMES + camera][number : number + 1] for camera in cameras}
            frames = [np.concatenate([seen[camera][number].numpy(), ends[camera].numpy()]) for camera in cameras]
            path = folder / f"{shown['sample_id'][number].replace('#', '-').replace('/', '-')}.png"
            write_atomically(run_dir / path, film(frames, success=success))
            row["video"] = str(path)
        rows.append(row)
    return rows


def film(cameras: list[NDArray[np.uint8]], *, success: bool) -> bytes:
    """Return an animated PNG of frames uint8 [T, H, W, 3] per camera, side by side; the border is green for success,
    else red.
    """
    from PIL import Image

    height = min(max(max(frames.shape[1] for frames in cameras), _LEAST), _MOST)
    pictures = []
    for moment in zip(*cameras, strict=True):
        parts = [Image.fromarray(frame) for frame in moment]
        sizes = [(max(1, round(part.width * height / part.height)), height) for part in parts]
        width, left = sum(width for width, _ in sizes), _BORDER
        whole = Image.new("RGB", (width + 2 * _BORDER, height + 2 * _BORDER), _GREEN if success else _RED)
        for part, size in zip(parts, sizes, strict=True):
            method = Image.Resampling.NEAREST if height >= part.height else Image.Resampling.BILINEAR
            whole.paste(part.resize(size, method), (left, _BORDER))
            left += size[0]
        pictures.append(whole)
    times = [_FRAME_MS] * (len(pictures) - 1) + [_LAST_MS]
    data = io.BytesIO()
    pictures[0].save(data, "PNG", save_all=True, append_images=pictures[1:], duration=times, loop=0)
    return data.getvalue()
