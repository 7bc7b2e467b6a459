"""Images of rows: as transformers' processor makes them, and each bad one named."""

import base64
import io
import json
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from megarl.architectures.vision_language import ImageSettings
from megarl.checks.rows import check_rows
from megarl.config.data import DataConfig
from megarl.config.load import load_config
from megarl.data.image_prompts import ImagePrompts
from megarl.data.image_set import patches_of
from megarl.data.images import fitting_size, image_size, open_image, resized, unpatchify
from megarl.data.messages import PromptColumn, read_messages, response_of
from megarl.data.prompts import PromptDataset
from megarl.data.render import given_prompts
from megarl.data.rows import Row
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError
from tests.models.vlm_tiny import config_of

SETTINGS = ImageSettings(14, 2, 56 * 56, 28 * 28 * 64, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def picture(width=60, height=40, mode="RGB", seed=0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def as_bytes(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize("patch", [14, 16])
def test_patches_are_those_of_transformers_processor(patch):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = ImageSettings(patch, 2, 56 * 56, 28 * 28 * 64, SETTINGS.mean, SETTINGS.deviation)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        patch_size=patch,
        image_mean=settings.mean,
        image_std=settings.deviation,
    )
    rng = random.Random(0)
    for seed in range(8):
        image = picture(rng.randint(5, 600), rng.randint(5, 600), seed=seed)
        want = processor(image, return_tensors="np")
        ours = patches_of(image, settings, None, "a row")
        rows, columns = (side * settings.merge for side in ours.places[0][1:3])
        assert want["image_grid_thw"].tolist() == [[1, rows, columns]]
        values = ours.patches.numpy()
        colours = values.reshape(len(values), 3, 1, -1).astype(np.float32) / 255
        mean, deviation = (np.array(one, np.float32).reshape(1, 3, 1, 1) for one in (settings.mean, settings.deviation))
        pixels = ((colours - mean) / deviation).repeat(2, 2).reshape(len(colours), -1)
        np.testing.assert_allclose(pixels, want["pixel_values"], atol=1e-6)
        assert (unpatchify(values, rows, columns, 2) == resized(image, settings)).all()


def test_a_picture_of_twelve_million_pixels_has_the_tokens_of_the_limit():
    limits = ImageSettings(14, 2, 3136, 1_003_520, SETTINGS.mean, SETTINGS.deviation)
    height, width = fitting_size(3000, 4000, limits)
    assert height * width // 28**2 == 1230


def test_every_form_of_an_image_is_the_same_image(tmp_path):
    image = picture()
    content = as_bytes(image)
    (tmp_path / "a.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [image, content, {"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, "a.png", url]
    found = [patches_of(form, SETTINGS, tmp_path, "a row") for form in forms]
    assert len({one.digests for one in found}) == 1
    assert patches_of(picture(seed=1), SETTINGS, None, "a row").digests != found[0].digests


def test_colours_of_every_kind_become_rgb():
    wide = Image.fromarray(np.full((20, 30), 0x80FF, np.uint16))
    assert np.asarray(open_image(as_bytes(wide), None, "a row"))[0, 0].tolist() == [0x80] * 3
    clear = Image.new("RGBA", (20, 30), (10, 20, 30, 0))
    assert np.asarray(open_image(as_bytes(clear), None, "a row"))[0, 0].tolist() == [255] * 3
    assert open_image(as_bytes(picture(mode="CMYK"), "JPEG"), None, "a row").mode == "RGB"
    assert open_image(as_bytes(picture(mode="L")), None, "a row").mode == "RGB"
    assert open_image(as_bytes(picture(mode="P"), "GIF"), None, "a row").mode == "RGB"


def test_an_image_that_exif_turns_is_turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = as_bytes(picture(60, 40), "JPEG", exif=exif)
    assert image_size(content, None, "a row") == (60, 40)
    assert open_image(content, None, "a row").size == (40, 60)


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_turn_of_exif_is_pils(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    content = as_bytes(picture(60, 40), exif=exif)
    image = open_image(content, None, "a row")
    assert np.array_equal(np.asarray(image), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content)))))
    assert image_size(content, None, "a row") == (image.height, image.width)


def entry(tag: int, value: int | bytes) -> bytes:
    """An entry of Exif: a number of 16 bits, or a text of up to four characters."""
    if isinstance(value, int):
        return struct.pack("<HHIHH", tag, 3, 1, value, 0)
    return struct.pack("<HHI4s", tag, 2, len(value), value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    ("entries", "turned"),
    [
        ({0x0112: b"6"}, False),
        ({0x0112: 9}, False),
        ({0x0112: 6, 0x013E: b"abc"}, True),
        ({0x0112: 6, 0x011A: b"abc"}, True),
        ({0x0112: 6, 0x0213: b"abc"}, True),
    ],
)
def test_odd_entries_of_exif_do_not_hinder_the_turn(entries, turned, kind):
    table = b"".join(entry(tag, value) for tag, value in sorted(entries.items()))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4)
    content = as_bytes(picture(60, 40), kind, exif=exif)
    height, width = (60, 40) if turned else (40, 60)
    assert image_size(content, None, "a row") == (height, width)
    assert open_image(content, None, "a row").size == (width, height)


def claimed(width: int, height: int) -> bytes:
    """A PNG whose first bytes say that it has this size."""
    content = as_bytes(Image.new("1", (4, 4)))
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def several_frames() -> bytes:
    return as_bytes(picture(mode="P"), "GIF", save_all=True, append_images=[picture(mode="P", seed=1)])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("nowhere.png", "cannot be read: No such file"),
        (b"no image at all", "not an image"),
        (b"", "not an image"),
        (17, "not an image"),
        (as_bytes(picture())[:-200], "cannot be read"),
        (Image.open(io.BytesIO(as_bytes(picture())[:-200])), "cannot be read"),
        (as_bytes(Image.new("1", (12_000, 12_000))), "too many pixels"),
        (claimed(40_000, 40_000), "too many pixels"),
        (as_bytes(picture(900, 2)), "a size that no vision encoder accepts"),
        (several_frames(), "several frames"),
        ("data:image/png;base64,???", "the data URL of an image is invalid"),
    ],
    ids=["missing", "text", "empty", "number", "cut", "cut_pil", "huge", "bomb", "thin", "frames", "url"],
)
def test_a_bad_image_is_named(value, what, tmp_path):
    with pytest.raises(DataError, match=what) as raised:
        open_image(value, tmp_path, "rows.jsonl:3: column 'images'")
    assert "rows.jsonl:3" in str(raised.value)


@pytest.mark.parametrize("raised", [TypeError("int"), struct.error("4 bytes"), KeyError(274), EOFError(), IndexError()])
def test_whatever_a_decoder_raises_names_the_row(monkeypatch, raised):
    def load(image):
        raise raised

    content = as_bytes(picture())
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(DataError, match=r"rows.jsonl:3: the image cannot be read: \S"):
        open_image(content, None, "rows.jsonl:3")


# -- prompts ------------------------------------------------------------------------------------------------------


def prompts(**settings) -> tuple[DataConfig, ImagePrompts]:
    from megarl.architectures.vision_language import VisionEncoder

    raw = config_of("qwen2_5_vl") | {"vision_start_token_id": 4, "image_token_id": 5, "vision_end_token_id": 6}
    encoder = VisionEncoder.from_config(raw, 64, "here")
    config = DataConfig(**{"train_files": ["tests.data.test_images:rows"], "image_key": "images"} | settings)
    found = ImagePrompts.of(config, encoder, SETTINGS, character_tokenizer("[#]abc?"))
    assert found is not None
    return config, found


ROWS: list[dict] = []


def rows() -> list[dict]:
    return ROWS


def dataset(*given: dict, **settings) -> PromptDataset:
    ROWS[:] = [{"answer": "1", **row} for row in given]
    config, images = prompts(**settings)
    return PromptDataset(config, character_tokenizer("[#]abc?"), images=images)


def test_a_mark_becomes_the_tokens_of_its_image_and_rows_without_images_mix():
    data = dataset(
        {"prompt": "a<image>b<image>c?", "images": [picture(56, 84), as_bytes(picture(56, 56))]},
        {"prompt": "abc?", "images": None},
        {"prompt": "ab?"},
    )
    assert [len(ids) for ids in data.prompt_ids.unbind()] == [4 + 2 * 2 + 6 + 4, 4, 3]
    batch = data.batch([0, 1, 2])
    assert batch["image_grids"].unbind()[0].tolist() == [[2, 3, 2], [11, 2, 2]]
    assert batch["image_patches"].lengths.tolist() == [4 * 10, 0, 0]
    assert all("images" not in row for row in batch["row"])
    ids = batch["prompt_ids"].unbind()[0].tolist()
    assert ids[1:10] == [4, *[5] * 6, 6, ids[9]]


def parts(*given) -> list[dict]:
    """A message whose content is in parts: text, or a part that is an image."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
    return [{"role": "user", "content": content}]


def test_parts_of_messages_are_images_as_marks_are():
    first, second = picture(56, 84), picture(56, 56)
    url, other = ("data:image/png;base64," + base64.b64encode(as_bytes(one)).decode() for one in (first, second))
    forms = [
        {"prompt": parts("a<image>b<image>c?"), "images": [first, second]},
        {"prompt": parts("a", {"type": "image"}, "b", {"type": "image"}, "c?"), "images": [first, second]},
        {"prompt": parts("a", {"type": "image_url", "image_url": {"url": url}}, "b<image>c?"), "images": [second]},
        {"prompt": parts("a", {"type": "image", "image": first}, "b", {"type": "image", "url": other}, "c?")},
    ]
    data = dataset(*forms, override_chat_template="{{ messages[0].content }}")
    batch = data.batch(range(4))
    for name in ("prompt_ids", "image_grids", "image_digests"):
        assert all(one.equal(batch[name].unbind()[0]) for one in batch[name].unbind()), name
    sent = json.dumps(batch["row"])
    assert "base64" not in sent, "reward functions get no images in rows"
    shown = PromptColumn("prompt", images=True).messages(batch["row"][3])
    assert shown == [{"role": "user", "content": "a<image>b<image>c?"}]


def test_a_zero_character_in_a_message_stays_where_it_is():
    talk = [{"role": "user", "content": "a\0<image>\0"}, {"role": "assistant", "content": "\0b"}]
    config, row = prompts()[0], Row({"prompt": [*talk, *parts("c?")], "images": [picture()]}, "rows", 1)
    (given,) = given_prompts(config, [row], chat=True, mark=lambda text, row: text.replace("<image>", "#"))
    assert [message["content"] for message in given] == ["a\0#\0", "\0b", "c?"]


def test_the_column_of_the_prompt_may_hold_the_images():
    inside = {"prompt": parts("a", {"type": "image", "image": picture(56, 84)}, "b?")}
    data = dataset(inside, image_key="prompt", override_chat_template="{{ messages[0].content }}")
    assert len(data.batch([0])["image_grids"].unbind()[0]) == 1


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": parts({"type": "image"}, "a?")}, "1 <image> for 0 images"),
        ({"prompt": parts({"type": "image", "image": picture()}, "a?"), "images": [picture()]}, "for 2 images"),
        ({"prompt": parts({"type": "image", "url": "https://a.b/c.png"}, "a?")}, "not fetched from the network"),
        ({"prompt": parts({"type": "video", "video": "a.mp4"}, "a?")}, "has content that is not text"),
    ],
    ids=["no image", "too many", "network", "video"],
)
def test_parts_that_do_not_fit_are_named(row, what):
    with pytest.raises(DataError, match=what) as raised:
        dataset({"prompt": "ab?"}, row, override_chat_template="{{ messages[0].content }}")
    assert "row 2" in str(raised.value)


def test_an_image_in_a_message_is_refused_where_nothing_sees_it():
    row = Row({"prompt": parts({"type": "image", "image": "a.png"})}, "rows", 1)
    with pytest.raises(DataError, match=r"set data\.image_key"):
        read_messages(row["prompt"], row, "prompt")
    for part, what in (({"type": "image", "image": "a.png"}, "an image"), ({"type": "video"}, "a video")):
        talk = [*parts("a?"), {"role": "assistant", "content": "b"}, *parts(part)]
        talk.append({"role": "assistant", "content": "c"})
        with pytest.raises(DataError, match=f"holds {what}, which only prompts may contain"):
            response_of(Row({"talk": talk}, "rows", 1), "talk", "talk", images=True, videos=True)


def test_a_part_stands_for_a_video_only_if_videos_are_read_and_it_has_none_itself():
    row = Row({"prompt": parts({"type": "video", "text": None}, "a?")}, "rows", 1)
    (message,) = read_messages(row["prompt"], row, "prompt", images=True, videos=True)
    assert message["content"] == "<video>a?"
    for part in ({"type": "video"}, {"type": "video", "video": "a.gif"}):
        with pytest.raises(DataError, match=r"set data\.video_key"):
            read_messages(parts(part), row, "prompt", images=True)
    for part in ({"type": "video", "frames": ["a.png"]}, {"type": "video_url", "video_url": {"url": "a.gif"}}):
        with pytest.raises(DataError, match=r"put the video into the column of data\.video_key"):
            read_messages(parts(part), row, "prompt", images=True, videos=True)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a?", "images": ["good.png"]}, "0 <image>s for 1 image"),
        ({"prompt": "<image>?", "images": ["gone.png"]}, "No such file"),
        ({"prompt": "<image>?", "images": ["text.png"]}, "not an image"),
        ({"prompt": "<image>?", "images": ["wide.png"]}, "40000 x 3"),
        ({"prompt": "<image>?", "images": ["huge.png"]}, "too many pixels"),
        ({"prompt": "<image>?", "images": ["film.gif"]}, "several frames"),
        ({"prompt": "<image>" * 3, "images": ["good.png"] * 3}, "more images than a prompt may have"),
    ],
    ids=["zero", "missing", "broken", "wide", "huge", "gif", "many"],
)
def test_bad_rows_are_named_before_a_start(row, what, tmp_path):
    (tmp_path / "good.png").write_bytes(as_bytes(picture()))
    (tmp_path / "text.png").write_bytes(b"no image")
    (tmp_path / "wide.png").write_bytes(as_bytes(Image.new("1", (40_000, 3))))
    (tmp_path / "huge.png").write_bytes(claimed(40_000, 40_000))
    (tmp_path / "film.gif").write_bytes(several_frames())
    good = {"prompt": "<image>?", "images": ["good.png"], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"answer": "1", **one}) + "\n" for one in (good, row)))
    data = [f"data.{key}_files=[{tmp_path}/rows.jsonl]" for key in ("train", "val")]
    given = [*data, f"data.image_dir={tmp_path}", "data.limit_images=2", "data.loader_kwargs={}"]
    with pytest.raises(DataError, match=what) as raised:
        check_rows(load_config("grpo_shapes_quickstart", given), "train")
    assert "rows.jsonl:2" in str(raised.value)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a?", "images": [picture()]}, "0 <image>s for 1 image"),
        ({"prompt": "a<image>?"}, "1 <image> for 0 images"),
        ({"prompt": "a#<image>?", "images": [picture()]}, "contains the model's image token"),
        ({"prompt": "<image>" * 3, "images": [picture()] * 3}, "more images than a prompt may have"),
        ({"prompt": "<image>?", "images": ["gone.png"]}, "No such file"),
    ],
    ids=["no mark", "no image", "token", "many", "missing"],
)
def test_rows_that_do_not_fit_are_named(row, what):
    with pytest.raises(DataError, match=what) as raised:
        dataset({"prompt": "ab?"}, row, limit_images=2)
    assert "row 2" in str(raised.value)


def test_expanded_tokens_count_for_the_limit():
    data = dataset({"prompt": "<image>?", "images": [picture(280, 280)]}, {"prompt": "a?"}, max_prompt_tokens=50)
    assert (len(data), data.overlong) == (1, 1)


def test_a_column_of_images_that_nothing_reads_is_refused():
    with pytest.raises(DataError, match="which this run does not read") as raised:
        dataset({"prompt": "a?", "images": [picture()]}, image_key="other")
    assert "data.image_key" in str(raised.value)
    with pytest.raises(DataError, match=r"or data\.video_key for videos"):
        dataset({"prompt": "a?", "films": ["a.npy"]})


def test_limits_that_no_image_meets_are_refused():
    with pytest.raises(ConfigError, match="no image size is within these limits"):
        prompts(min_pixels=9000, max_pixels=5000)


def test_a_tokenizer_without_the_models_tokens_is_refused():
    from megarl.architectures.vision_language import VisionEncoder

    config = DataConfig(image_key="images")
    encoder = VisionEncoder.from_config(config_of("qwen2_5_vl"), 64, "here")
    with pytest.raises(ConfigError, match="the tokenizer lacks the image tokens that the model"):
        ImagePrompts.of(config, encoder, SETTINGS, character_tokenizer("abc"))
