"""Checks of recipes whose prompts have images, with samples from servers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.architectures.vision_language import VisionEncoder
from megarl.checks.checklist import Checklist
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang import checks as server_checks
from megarl.rollout.sglang import server_places
from tests.models.vlm_tiny import config_of

#: Patches of 14 pixels, as servers want them.
PUBLISHED = [
    *("model.hf_config.vision_config.patch_size=14", "model.hf_config.vision_config.window_size=56"),
    *("data.min_pixels=3136", "data.max_pixels=3136", "rollout.engine=sglang"),
]

GPUS = ["cluster.device_memory_gb=80"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    """The same checks on any machine."""
    for checks in (server_checks, server_places):
        monkeypatch.setattr(checks, "nvidia_devices", lambda: 0)


def failed(python: Path, *overrides: str) -> list[tuple[str, str]]:
    """Key and message of the failed checks of the recipe on servers."""
    config = load_config("grpo_shapes_quickstart", [*PUBLISHED, f"rollout.sglang.python={python}", *overrides])
    return [(check.key, check.message) for check in check_config(config).items if check.status == "fail"]


def test_images_go_to_servers(python: Path) -> None:
    assert failed(python) == []


def test_what_servers_cannot_see_is_named(python: Path) -> None:
    ((key, message),) = failed(python, "model.hf_config.vision_config.patch_size=8", "data.min_pixels=1024")
    assert (key, "finished features" in message) == ("model: vision_config.patch_size", True)
    ((key, message),) = failed(python, "data.video_key=videos", "model.hf_config.video_token_id=7")
    assert (key, "another video than the trainer" in message) == ("data.video_key", True)
    ((key, message),) = failed(python, "rollout.sglang.tp_size=4", "model.hf_config.vision_config.num_heads=6")
    assert (key, "vision encoder" in message) == ("rollout.sglang.tp_size", True)


@pytest.mark.parametrize(("blocks", "keys"), [((0, 1), ["deepstack_visual_indexes"]), ((0, 1, 2), [])])
def test_a_mixture_has_as_many_features_as_servers_add(blocks: tuple[int, ...], keys: list[str]) -> None:
    raw = config_of("qwen3_vl_moe", deepstack=list(blocks))
    encoder = VisionEncoder.from_config(raw, 64, "config.json")
    checks = Checklist(name="images")
    server_checks._check_encoder(SGLangConfig(), encoder, checks)
    assert [str(check.key).rpartition(".")[2] for check in checks.items] == keys


def test_an_interpreter_that_cannot_read_images_is_named(python: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info")
    ((key, message),) = failed(python)
    assert (key, "lacks torchvision" in message) == ("rollout.sglang.python", True)
    assert failed(python, "rollout.sglang.urls=[http://127.0.0.1:1]") == []
    assert failed(python, *GPUS) == [], "the recipe is for another machine, which may have another interpreter"


def test_an_interpreter_that_cannot_read_images_is_named_on_a_machine_with_gpus(
    python: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(server_checks, "nvidia_devices", lambda: 1)
    shutil.rmtree(tmp_path / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info")
    assert any("lacks torchvision" in message for _, message in failed(python, *GPUS))


def test_an_interpreter_that_cannot_read_images_is_only_warned_of_on_a_machine_that_is_not_the_runs(
    python: Path, tmp_path: Path, monkeypatch
) -> None:
    shutil.rmtree(tmp_path / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info")
    config = load_config("grpo_shapes_quickstart", [*PUBLISHED, f"rollout.sglang.python={python}"])
    items = check_config(config, here=False).items
    assert [check.status for check in items if "lacks torchvision" in check.message] == ["warn"]
    monkeypatch.setattr(server_checks, "nvidia_devices", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not any("lacks torchvision" in message for _, message in failed(python, *GPUS))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.min_pixels=100000", "data.max_pixels=5000"), "no image size is within these limits"),
        (("model.hf_config.image_token_id=100000",), "this special token of images is not in the vocabulary"),
        (("env={name: agent, command: [python, a.py]}", "data.video_key=videos"), "requests of agents have no videos"),
        (("data.video_key=images",), "one column cannot hold both images and videos"),
        (
            ("data.image_key=null", "data.video_key=videos", "model.vision=false"),
            "cannot see the videos of data.video_key without its vision encoder",
        ),
        (("model.vision=false",), "cannot see the images of data.image_key without its vision encoder"),
    ],
)
def test_numbers_of_images_are_checked_before_the_start(overrides, words) -> None:
    checks = check_config(load_config("grpo_shapes_quickstart", overrides)).items
    assert [check.message for check in checks if check.status == "fail" and words in check.message]
