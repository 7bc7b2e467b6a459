"""What TensorFlow makes of some frames, for the tests of pictures.

    python tests/robots/data/golden_pictures.py        writes golden_pictures.npz beside itself; needs tensorflow (2.21)

Every array is what the evaluation of OpenVLA-OFT does to a frame of `frame`; large ones are thinned by THIN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
THIN = 4
#: name: height, width, quality of frames that go through JPEG only
JPEG = {"even": (48, 64, 95), "odd": (37, 51, 95), "coarse": (48, 64, 50), "harsh": (32, 32, 95)}
JPEG |= {"tiny": (6, 6, 95), "narrow": (31, 17, 95), "low": (6, 50, 75), "worst": (20, 33, 1), "best": (20, 33, 100)}
#: name: height, width of frames that are resized with lanczos3, then cropped
SHRUNK = {"libero": (256, 256), "enlarged": (128, 128), "wide": (240, 320)}
#: name: height, width of frames that are cropped only
CROPPED = {"robotwin": (240, 320), "square": (224, 224)}


def frame(name: str, height: int, width: int) -> np.ndarray:
    """A frame of slopes, edges, discs and a little noise, uint8 [H, W, 3]; integers only: the same on any machine."""
    noise = np.random.default_rng(sum(map(ord, name)))
    if name == "harsh":
        return noise.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x * 200 // width, y * 220 // height, (x + y) * 120 // (height + width)], axis=-1) + 20
    for _ in range(12):
        cy, cx, radius = noise.integers(0, height), noise.integers(0, width), noise.integers(1, max(2, height // 4))
        picture[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = noise.integers(0, 256, 3)
    return (picture + noise.integers(-5, 6, picture.shape)).clip(0, 255).astype(np.uint8)


def main() -> None:
    import tensorflow as tf

    def through_jpeg(picture: np.ndarray, quality: int) -> Any:
        return tf.io.decode_image(tf.image.encode_jpeg(picture, quality=quality), expand_animations=False)

    def resized(picture: Any) -> Any:
        picture = tf.image.resize(picture, (224, 224), method="lanczos3", antialias=True)
        return tf.cast(tf.clip_by_value(tf.round(picture), 0, 255), tf.uint8)

    def cropped(picture: Any) -> np.ndarray:
        shares = tf.image.convert_image_dtype(picture, tf.float32)[None]
        side = tf.clip_by_value(tf.sqrt(0.9), 0, 1)
        low = (1 - side) / 2
        shares = tf.image.crop_and_resize(shares, tf.stack([low, low, low + side, low + side])[None], [0], (224, 224))
        levels = tf.image.convert_image_dtype(tf.clip_by_value(shares[0], 0, 1), tf.uint8, saturate=True)
        return levels.numpy()

    arrays = {}
    for name, (height, width, quality) in JPEG.items():
        arrays[f"jpeg_{name}"] = through_jpeg(frame(name, height, width), quality).numpy()
    for name, (height, width) in SHRUNK.items():
        small = resized(through_jpeg(frame(name, height, width), 95))
        arrays[f"resized_{name}"] = small.numpy()[::THIN, ::THIN]
        arrays[f"seen_{name}"] = cropped(small)[::THIN, ::THIN]
    for name, (height, width) in CROPPED.items():
        arrays[f"cropped_{name}"] = cropped(frame(name, height, width))[::THIN, ::THIN]
    np.savez_compressed(FILE, **arrays)
    print(f"tensorflow {tf.__version__}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
