"""How long a step waits for its images: `python -m megarl.benchmarks.reading`.

The loader reads the prompts of a vision-language recipe. With `--side` their images are replaced by JPEG photographs of
that size. A step is a sleep, which leaves the processor free, as a step on a GPU does. For each `data.loader_workers`
the table has the milliseconds that a step waits for its batch, and the CPU-milliseconds that the batch takes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time

import numpy as np


def photograph(side: int, seed: int) -> bytes:
    """Return a JPEG of side x side pixels, with smooth random colours and some noise: about 0.2 bytes a pixel."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((side, side))
    noisy = np.asarray(smooth).astype(np.int16) + rng.integers(-6, 7, (side, side, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Print a table with one row for each number of threads; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.reading", description=__doc__)
    parser.add_argument("--recipe", default="grpo_shapes_quickstart")
    parser.add_argument("--side", type=int, default=0, help="pixels of an image's side; 0: the recipe's own images")
    parser.add_argument("--batch", type=int, help="prompts of a step; default: the recipe's")
    parser.add_argument("--step-s", type=float, default=0.3, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    options = parser.parse_args(argv)
    from megarl.config.load import load_config
    from megarl.data.loader import PromptLoader
    from megarl.data.prompts import PromptDataset, read_split
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.config import load_hf_config
    from megarl.runtime.setup import image_prompts

    pixels = options.side**2
    limits = [f"data.min_pixels={pixels}", f"data.max_pixels={pixels}", "data.max_prompt_tokens=100000"]
    config = load_config(options.recipe, limits if options.side else [])
    rows, batch = read_split(config.data, "train"), options.batch or config.data.batch_size
    rows = rows[: batch * (options.steps + 2)]
    if options.side:
        photographs = [photograph(options.side, seed) for seed in range(8)]
        for number, row in enumerate(rows):
            row["images"] = [photographs[number % len(photographs)]]
    tokenizer = load_tokenizer(config.model)
    images = image_prompts(config, load_hf_config(config.model), tokenizer)
    data = PromptDataset(config.data, tokenizer, images=images, rows=rows)
    print(f"{options.recipe}: {batch} prompts a step, images {options.side or 'as they are'}")
    print("| threads | wait of a step, ms | CPU-ms of a batch |\n|---|---|---|")
    for workers in options.workers:
        with contextlib.closing(PromptLoader(data, batch, seed=0, workers=workers)) as loader:
            next(loader)  # no step runs beside the first batch
            waits, cpu = [], time.process_time()
            for _ in range(options.steps):
                time.sleep(options.step_s)
                start = time.perf_counter()
                next(loader)
                waits.append(time.perf_counter() - start)
            cpu = time.process_time() - cpu
        print(
            f"| {workers} | {1000 * sorted(waits)[len(waits) // 2]:.1f} | {1000 * cpu / options.steps:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
