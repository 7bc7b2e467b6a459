"""Images of validation samples: small pictures in the run's folder, and in the report."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.artifacts.jsonl import JsonlWriter
from megarl.tracking.report import write_report
from megarl.tracking.sample_images import MOST_SHOWN, thumbnail, write_images
from tests.tracking.test_report import make_run, page_data

SMALL, LARGE = np.full((32, 16, 3), 7, np.uint8), np.zeros((300, 600, 3), np.uint8)


def test_pictures_are_small_and_visible() -> None:
    sizes = [Image.open(io.BytesIO(thumbnail(pixels))).size for pixels in (SMALL, LARGE, SMALL[:1])]
    assert sizes == [(48, 96), (192, 96), (96, 6)]
    assert (np.asarray(Image.open(io.BytesIO(thumbnail(SMALL)))) == 7).all()


def test_equal_images_are_one_file(tmp_path: Path) -> None:
    names = write_images(tmp_path, [(-1, SMALL), (5, LARGE), (-1, SMALL)])
    assert names == ["images/ffffffffffffffff.png", "images/0000000000000005.png", "images/ffffffffffffffff.png"]
    assert len(list(tmp_path.glob("images/*.png"))) == 2
    assert len(write_images(tmp_path, [(number, SMALL) for number in range(20)])) == MOST_SHOWN


def test_the_report_shows_them_once_and_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    early, late = (write_images(tmp_path, [(digest, SMALL)]) for digest in (1, 2))
    (tmp_path / "other.png").write_bytes(thumbnail(SMALL))
    table = JsonlWriter(tmp_path / "samples.jsonl", durable=False)
    rows = [(5, early), (10, late), (10, [*late, "other.png", "images/../other.png", 3]), (10, "images/x.png")]
    for step, images in rows:
        table.write({"stage": "train", "step": step, "prompt": "<image>?", "images": images})
    data = page_data(write_report(tmp_path).read_text())
    assert [row["images"] for row in data["samples"]] == [early, late, late, []]
    assert set(data["pictures"]) == {*early, *late}
    assert data["sampleColumns"][:2] == ["images", "prompt"]
    monkeypatch.setattr("megarl.tracking.sample_images.REPORT_BYTES", (tmp_path / late[0]).stat().st_size)
    data = page_data(write_report(tmp_path).read_text())
    assert set(data["pictures"]) == set(late), "the latest steps come first"
    assert "1 images do not fit" in data["samplesNote"]
