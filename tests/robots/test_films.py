"""Films of episodes, and the report that shows them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megarl.artifacts.jsonl import JsonlWriter
from megarl.data.batch import Batch, Jagged
from megarl.robots.films import film, film_rows
from megarl.tracking.report import write_report
from tests.tracking.test_report import make_run, page_data


def episodes() -> Batch:
    """Two that were played, of two and three policy calls, and one that was not."""
    frames = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 8, 12, 3) * 40
    return Batch(
        {
            "frames/top": Jagged.from_lengths(frames.contiguous(), [2, 3, 1]),
            "end_frames/top": torch.full((3, 8, 12, 3), 255, dtype=torch.uint8),
            "success": torch.tensor([True, False, False]),
        },
        {
            "sample_id": ["val-0-0#0", "val-0-1#0", "val-0-2#0"],
            "prompt_text": ["reach red", "reach blue", "reach red"],
            "response_text": ["success after 3 environment steps", "no success", "not played: it fell"],
            "env_error": ["", "", "it fell"],
        },
    )


def moments(data: bytes) -> list[np.ndarray]:
    with Image.open(io.BytesIO(data)) as picture:
        found = []
        for number in range(picture.n_frames):
            picture.seek(number)
            found.append(np.asarray(picture.convert("RGB")))
    return found


def test_a_film_shows_every_policy_call_and_the_end_side_by_side() -> None:
    top = np.stack([np.full((8, 12, 3), value, np.uint8) for value in (10, 120, 250)])
    hand = np.stack([np.full((4, 4, 3), value, np.uint8) for value in (250, 120, 10)])
    found = moments(film([top, hand], success=True))
    assert len(found) == 3
    assert found[0].shape == (128 + 8, 192 + 128 + 8, 3), "enlarged to the same height, with a border"
    assert [int(picture[60, 60, 0]) for picture in found] == [10, 120, 250]
    assert [int(picture[60, 300, 0]) for picture in found] == [250, 120, 10]
    assert found[0][1, 1, 1] > found[0][1, 1, 0], "green"
    red = moments(film([top], success=False))[0][1, 1]
    assert red[0] > red[1]
    large = np.random.default_rng(0).integers(0, 255, (2, 480, 640, 3), dtype=np.uint8)
    assert moments(film([large], success=False))[0].shape[0] == 256 + 8


def test_rows_of_the_report_name_their_films(tmp_path: Path) -> None:
    rows = film_rows(tmp_path, 20, episodes(), 5)
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row.get("video") for row in rows] == ["videos/step_20/val-0-0-0.png", "videos/step_20/val-0-1-0.png", None]
    assert [len(moments((tmp_path / row["video"]).read_bytes())) for row in rows[:2]] == [3, 4]
    assert film_rows(tmp_path, 20, episodes(), 1)[0]["video"] == rows[0]["video"]
    assert film_rows(tmp_path, 20, episodes(), 0) == []


def test_the_report_holds_films_of_its_own_folder_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = film_rows(run, 5, episodes(), 2)
    (tmp_path / "other.png").write_bytes((run / rows[0]["video"]).read_bytes())
    make_run(run)
    table = JsonlWriter(run / "samples.jsonl", durable=False)
    for row in [*rows, {"prompt": "a", "video": "../other.png"}, {"prompt": "b", "film": "data:text/html,evil"}]:
        table.write({"stage": "train", "step": 5, **row})
    found = page_data(write_report(run).read_text())["samples"]
    assert [row.get("film", "")[:22] for row in found] == ["data:image/png;base64,"] * 2 + ["", ""]


def test_films_of_the_latest_steps_are_in_the_report_and_it_says_how_many_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    table = JsonlWriter(tmp_path / "samples.jsonl", durable=False)
    for step in (5, 10):
        for row in film_rows(tmp_path, step, episodes(), 2):
            table.write({"stage": "train", "step": step, **row})
    sizes = [path.stat().st_size for path in tmp_path.glob("videos/step_10/*.png")]
    monkeypatch.setattr("megarl.tracking.report_runs._FILM_BYTES", sum(sizes))
    data = page_data(write_report(tmp_path).read_text())
    filmed = [(row["step"], "film" in row) for row in data["samples"] if "video" in row]
    assert filmed == [(5, False), (5, False), (10, True), (10, True)]
    assert "2 films are too large for this page" in data["samplesNote"]
