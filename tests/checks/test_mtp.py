"""Refusals of `actor.mtp` before a start: what is wrong, where, what was found, what is allowed, and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.artifacts.facts import facts_from_config
from megarl.checks.checklist import Check, Checklist
from megarl.checks.mtp import check_mtp
from megarl.config.load import load_config
from tests.models.tiny import tiny_dict
from tests.models.vlm_tiny import config_of as vision_config

GLM, QWEN = tiny_dict("glm4_moe"), tiny_dict("qwen3_5_text")
SEEING = vision_config("qwen3_5")
OFF = "remove actor.mtp"
KEPT = f"{OFF}; the run then keeps the draft head as it is"
HEADS = "deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_5_moe_text, qwen3_5_text, qwen3_next"


def checked(model: dict[str, Any], *overrides: str, recipe: str = "grpo_quickstart") -> list[Check]:
    """What the check records of a recipe with `actor.mtp` and this model."""
    config, checks = load_config(recipe, ["actor.mtp={}", *overrides]), Checklist()
    check_mtp(config, facts_from_config(model, "config.json", vision=True), checks.of("actor"))
    return checks.items


def test_a_head_that_is_trained_is_named_with_its_size():
    [check] = checked(GLM)
    assert (check.status, check.message) == (
        "ok",
        f"trains a draft head of {facts_from_config(GLM, '').draft_parameters:,} parameters, not counted in the "
        "policy's parameters above",
    )
    assert [check.status for check in checked(GLM, "actor.parallel={pp: 2, cp: 2}")] == ["ok"]
    assert checked(GLM, "actor.mtp=null") == []


@pytest.mark.parametrize(
    ("model", "settings", "what", "found", "allowed", "fix"),
    [
        (
            tiny_dict("qwen3"),
            {},
            "models of this kind have no draft head",
            "qwen3",
            HEADS,
            OFF,
        ),
        (
            {**QWEN, "layer_types": ["linear_attention"] * 4},
            {},
            "a draft head has softmax attention, of which this model has no layer",
            "layers without softmax attention only",
            "at least one layer of softmax attention",
            KEPT,
        ),
        (
            {**GLM, "num_nextn_predict_layers": 2},
            {},
            "only draft heads of one layer can be trained",
            "2 layers",
            "1 layer",
            KEPT,
        ),
        (
            SEEING,
            {},
            "the draft head of a model that reads images cannot be trained",
            "qwen3_5_text",
            "a model without its vision encoder",
            f"set model.vision=false, or {OFF}",
        ),
        (
            GLM,
            {"recipe": "srpo_reach_quickstart"},
            "only the draft head of a model that writes text can be trained",
            "glm4_moe",
            "a language model",
            OFF,
        ),
        (
            GLM,
            {"recipe": "reward_model_quickstart"},
            "a reward model has no draft head",
            "reward_model",
            "a pipeline that trains a policy",
            OFF,
        ),
        (
            GLM,
            {"model.lora": "{}"},
            "adapters freeze all other weights, so a draft head cannot be trained",
            "model.lora",
            "model.lora=null",
            f"set model.lora=null, or {OFF}",
        ),
        (
            QWEN,
            {"model.freeze": "[language_model]"},
            "the draft head is a part of the frozen language_model",
            "model.freeze=['language_model']",
            "model.freeze without language_model",
            f"remove language_model from model.freeze, or {OFF}",
        ),
    ],
)
def test_heads_that_cannot_be_trained_are_refused_with_the_reason(model, settings, what, found, allowed, fix):
    recipe = settings.get("recipe", "grpo_quickstart")
    overrides = [f"{name}={value}" for name, value in settings.items() if name != "recipe"]
    assert checked(model, *overrides, recipe=recipe) == [Check("fail", "actor", what, "actor.mtp", found, allowed, fix)]


def write_model(folder: Path, *names: str, **changes: Any) -> dict[str, Any]:
    """A folder with the config and some tensors of a model; the config."""
    config = {**GLM, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return config


def test_files_without_a_head_or_with_an_embedding_of_its_own_are_refused(tmp_path):
    path = f"model.path={tmp_path}", "model.hf_config=null"
    good = write_model(tmp_path, "model.embed_tokens.weight", "model.layers.4.eh_proj.weight")
    assert [check.status for check in checked(good, *path)] == ["ok"]

    bare = write_model(tmp_path, "model.embed_tokens.weight", "model.layers.3.input_layernorm.weight")
    assert checked(bare, *path)[1:] == [
        Check(
            "fail",
            "actor",
            "the model's files have no draft head",
            "actor.mtp",
            str(tmp_path),
            "files with the tensors of multi-token prediction",
            f"use files with them, or {OFF}",
        )
    ]

    own = write_model(tmp_path, "model.layers.4.eh_proj.weight", mtp_use_dedicated_embeddings=True)
    assert checked(own, *path)[1:] == [
        Check(
            "fail",
            "actor",
            "a draft head with its own embedding cannot be trained: megarl computes it with the policy's embedding",
            f"{tmp_path / 'config.json'}: mtp_use_dedicated_embeddings",
            True,
            "false with actor.mtp",
            f"{OFF}, which keeps the draft head as it is",
        )
    ]
