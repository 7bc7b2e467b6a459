"""`data.val_split`: which rows of the training files are held out."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl.config.data import DataConfig
from megarl.data.prompts import read_split
from megarl.data.rows import Row
from megarl.data.split import split_rows
from megarl.system.errors import DataError
from tests.data.test_images import picture

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]


def splits(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> tuple[list[Row], list[Row]]:
    """The rows of training and those that are held out."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train_files=[str(path)], **settings)
    return read_split(config, "train"), read_split(config, "val")


@pytest.mark.parametrize("settings", [{"val_split": 0.25}, {"val_split": 37}])
def test_every_row_is_on_one_side_and_the_order_of_rows_does_not_matter(tmp_path, settings):
    train, val = splits(tmp_path, ROWS, **settings)
    assert [row for row in ROWS if row in train] == train
    assert [row for row in ROWS if row not in train] == val
    assert len(val) == 37 if settings["val_split"] == 37 else 70 <= len(val) <= 130
    mixed = random.Random(0).sample(ROWS, len(ROWS))
    assert sorted(row["prompt"] for row in splits(tmp_path, mixed, **settings)[1]) == sorted(r["prompt"] for r in val)


def test_further_rows_move_none_to_the_other_side_of_a_share(tmp_path):
    few, more = (splits(tmp_path, rows, val_split=0.3)[1] for rows in (ROWS[:200], ROWS))
    assert few == [row for row in more if row in ROWS[:200]]


@pytest.mark.parametrize("val_split", [0.5, 3])
def test_rows_with_one_prompt_are_on_one_side(tmp_path, val_split):
    rows = [{"prompt": f"{i % 6}", "answer": str(i), "more": {"b": i, "a": 0}} for i in range(24)]
    train, val = splits(tmp_path, rows, val_split=val_split)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    assert len(train) + len(val) == 24
    assert len(val) == 12 or val_split < 1


def test_the_same_question_about_another_image_is_another_prompt(tmp_path):
    rows = [{"prompt": "<image>?", "image": f"{i}.png", "answer": "1"} for i in range(30)]
    assert len(splits(tmp_path, rows, val_split=10, image_key="image")[1]) == 10


def test_images_that_are_of_pil_are_told_apart_by_their_pixels():
    settings = DataConfig(val_split=10, image_key="image")
    colors = [(i, j, 0) for i in range(6) for j in range(5)]

    def rows() -> list[Row]:
        made = [Image.new("RGB", (2, 3), color) for color in colors]
        return [Row({"prompt": "<image>?", "image": image}, "images", n) for n, image in enumerate(made)]

    held, again = (split_rows(rows(), settings, "val") for _ in range(2))
    assert len(held) == 10
    assert [row.number for row in held] == [row.number for row in again]


def test_a_damaged_image_of_pil_is_named_with_its_row():
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    damaged = Image.open(io.BytesIO(file.getvalue()[:-900]))
    rows = [Row({"prompt": "<image>?", "image": image}, "a.parquet", n) for n, image in ((1, picture()), (2, damaged))]
    with pytest.raises(DataError, match=r"a\.parquet row 2: column 'image': the image cannot be read"):
        split_rows(rows, DataConfig(val_split=1, image_key="image"), "val")


def test_files_without_held_out_prompts_are_trained_on_whole():
    rows = [Row(row, "examples", number) for number, row in enumerate(ROWS)]
    assert split_rows(rows, DataConfig(val_split=1e-9), "train") == rows


def test_pairs_without_a_column_for_the_prompt_are_held_out_as_a_whole(tmp_path):
    rows = [{"chosen": f"{i} yes", "rejected": f"{i} no"} for i in range(30)]
    assert len(splits(tmp_path, rows, val_split=10)[1]) == 10


@pytest.mark.parametrize(("val_split", "words"), [(1e-9, "no prompt is held out"), (400, "none is left to train on")])
def test_a_side_without_rows_is_refused(tmp_path, val_split, words):
    with pytest.raises(DataError, match=r"data\.val_split(?s:.*)of 400 different prompts") as error:
        splits(tmp_path, ROWS, val_split=val_split)
    assert words in str(error.value)
