"""Pictures per second from a camera's frames to what a policy reads: `python -m megarl.benchmarks.pictures`.

One thread unless `--threads` says otherwise; frames of 256 x 256, each case the best of several rounds. On
`--device cuda` the frames are there before the clock starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megarl.data.jpeg import through_jpeg
from megarl.data.pictures import DINO_SIGLIP, PIPELINES, VideoPipeline

ROUNDS = 5


def cases() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What is measured, by name: from uint8 [N, 256, 256, 3]."""
    libero = PIPELINES["libero"]
    return {
        "libero": libero,
        "libero without JPEG": replace(libero, jpeg=None),
        "JPEG only": through_jpeg,
        "robotwin": PIPELINES["robotwin"],
        "normalise to 6 channels": DINO_SIGLIP,
        "V-JEPA 2, a clip of all frames": lambda frames: VideoPipeline(frames=len(frames))(frames),
    }


def rate(work: Callable[[torch.Tensor], torch.Tensor], frames: torch.Tensor) -> float:
    """Pictures per second, of the best round."""
    best = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work(frames)
        if frames.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return len(frames) / best


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (arguments.frames, 256, 256, 3), generator=generator, dtype=torch.uint8)
    frames = frames.to(arguments.device)
    for name, work in cases().items():
        print(f"{name:32} {rate(work, frames):8.0f} pictures/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
