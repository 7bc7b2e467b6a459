"""Generated images of shapes, with questions: rows for `data.train_files: [megarl.recipes.shapes:make_rows]`."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image, ImageDraw

#: Colours by letter, as RGB values.
COLOURS = {"r": (220, 40, 40), "g": (40, 170, 60), "b": (50, 80, 220)}
#: Shapes by letter: circle, square, triangle.
KINDS = ("c", "s", "t")
SIDE, CELLS = 32, 2
MOST = CELLS * CELLS


def make_rows(
    split: str = "train", count: int = 4096, held_out: int = 512, seed: int = 0, shuffled: bool = False
) -> list[dict[str, Any]]:
    """Return questions about images of 32 x 32 pixels with one to four shapes, each in its own quarter.

    `<image>n?` asks for the number of shapes; `<image>l?` asks for the colour of the upper left shape, only for images
    with shapes in both upper quarters. Answers have one character.

    Args:
        split: `train`, or `val` for images that are never trained on.
        count: rows of `train`.
        held_out: rows of `val`.
        seed: seed of the images.
        shuffled: whether to exchange the images between questions, as a control experiment.

    Returns:
        Rows with `prompt`, `images` (one PNG), `answer`, and `data_source`: counting or left.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    rng = random.Random(f"{seed} {split}")
    rows = [_row(rng) for _ in range(count if split == "train" else held_out)]
    if shuffled:
        images = [row["images"] for row in rows]
        rng.shuffle(images)
        rows = [{**row, "images": image} for row, image in zip(rows, images, strict=True)]
    return rows


def _row(rng: random.Random) -> dict[str, Any]:
    asks_left = rng.random() < 0.5
    places = [0, 1, *rng.sample([2, 3], rng.randint(0, 2))]
    if not asks_left:
        places = rng.sample(range(MOST), rng.randint(1, MOST))
    shapes = {place: (rng.choice(list(COLOURS)), rng.choice(KINDS)) for place in places}
    if asks_left:
        prompt, answer, source = "<image>l?", shapes[0][0], "left"
    else:
        prompt, answer, source = "<image>n?", str(len(shapes)), "counting"
    return {"prompt": prompt, "images": [_png(shapes, rng)], "answer": answer, "data_source": source}


def _png(shapes: dict[int, tuple[str, str]], rng: random.Random) -> bytes:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw, cell = ImageDraw.Draw(image), SIDE // CELLS
    for place, (colour, kind) in shapes.items():
        left, top, size = place % CELLS * cell, place // CELLS * cell, rng.randint(9, 13)
        x, y = left + rng.randint(1, cell - size - 1), top + rng.randint(1, cell - size - 1)
        box = (x, y, x + size, y + size)
        if kind == "c":
            draw.ellipse(box, fill=COLOURS[colour])
        elif kind == "s":
            draw.rectangle(box, fill=COLOURS[colour])
        else:
            draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
