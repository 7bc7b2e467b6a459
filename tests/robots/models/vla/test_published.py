"""Folders of published policies: what lies beside the weights is read, and what nothing reads is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.architectures.vision import state_size
from megarl.artifacts.action_statistics import FILE, ActionStatistics, DatasetStatistics, write_statistics
from megarl.artifacts.facts import facts_from_config, raw_config
from megarl.artifacts.vla_folder import PREPROCESSOR, complete_config
from megarl.checks.weights import check_weights
from megarl.config.load import load_config
from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.robots.statistics import policy_statistics, refuse_other_state
from megarl.system.errors import ConfigError
from tests.dist import single_process, world
from tests.robots.models.vla.small import CONFIG, PROMPTS, save_small
from tests.robots.models.vla.test_policy import build, hidden_of, oracle_of
from tests.robots.recipes import write_robots_recipe

PROJECTOR = "proprio_projector."
FILE_OF_ITS_OWN = "proprio_projector--150000_checkpoint.pt"


def publish(folder: Path, *, own_file: bool, prefix: str = "module.", **changes: Any) -> dict[str, Tensor]:
    """The small policy as OpenVLA-OFT (`own_file`) or SimpleVLA-RL leaves it; its tensors."""
    tensors = save_small(folder)
    config = {key: value for key, value in CONFIG.items() if key != "state_dim"}
    if own_file:
        part = {prefix + n.removeprefix(PROJECTOR): one for n, one in tensors.items() if n.startswith(PROJECTOR)}
        torch.save(part, folder / FILE_OF_ITS_OWN)
        save_file({n: one for n, one in tensors.items() if not n.startswith(PROJECTOR)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return tensors


def check(folder: Path) -> str:
    """What a dry run says of the folder."""
    found = raw_config(ModelConfig(path=str(folder)))
    assert found is not None
    return check_weights(folder, facts_from_config(*found))


@pytest.mark.parametrize(
    "form",
    [
        {"own_file": True},
        {"own_file": True, "prefix": "", "use_proprio": True},
        {"own_file": True, "use_proprio": True, "proprio_dim": 5},
        {"own_file": False, "use_proprio": True, "proprio_dim": 5},
    ],
)
def test_a_policy_sees_the_state_that_it_was_published_with(form: dict[str, Any], tmp_path: Path) -> None:
    single_process()
    tensors = publish(tmp_path, **form)
    check(tmp_path)
    (model,) = build(tmp_path)
    with torch.no_grad():
        for number, found in enumerate(hidden_of(model, list(range(len(PROMPTS))))):
            torch.testing.assert_close(found.double(), oracle_of(tensors, number, "all"), atol=2e-5, rtol=0)


def test_what_was_read_is_in_what_is_exported(tmp_path: Path) -> None:
    from megarl.models.convert import convert
    from megarl.models.weights import export_weights

    single_process()
    (tmp_path / "in").mkdir()
    tensors = publish(tmp_path / "in", own_file=True)
    preprocessor = {"means": [[0.25] * 3] * 2, "stds": [[0.5] * 3] * 2, "image_processor_type": "Prismatic"}
    (tmp_path / "in" / PREPROCESSOR).write_text(json.dumps(preprocessor))
    chunks = build(tmp_path / "in")
    export_weights(chunks, tmp_path / "out", chunks[0].hf_config, world=world())
    convert(tmp_path / "in", tmp_path / "converted")
    for folder in (tmp_path / "out", tmp_path / "converted"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        written = json.loads((folder / "config.json").read_text())
        assert (written["use_proprio"], written["proprio_dim"]) == (True, 5)
        assert json.loads((folder / PREPROCESSOR).read_text()) == preprocessor
        check(folder)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 0),
        ({"use_proprio": False, "proprio_dim": 14}, 0),  # as SimpleVLA-RL writes it for a policy without a state
        ({"use_proprio": True, "proprio_dim": 14}, 14),
        ({"proprio_dim": 14}, 0),
        ({"state_dim": 3}, 3),
        ({"state_dim": 14, "use_proprio": True, "proprio_dim": 14}, 14),
        ({"use_proprio": True}, "state is missing"),
        ({"use_proprio": "yes", "proprio_dim": 3}, "must be true or false"),
        ({"use_proprio": True, "proprio_dim": "14"}, "the size of the proprioceptive state is invalid"),
        ({"state_dim": -1}, "the size of the proprioceptive state is invalid"),
        ({"state_dim": 3, "use_proprio": True, "proprio_dim": 14}, "different sizes"),
        ({"state_dim": 3, "use_proprio": False}, "different sizes"),
    ],
)
def test_the_size_of_the_state_goes_by_either_systems_keys(config: dict[str, Any], size: int | str) -> None:
    if isinstance(size, int):
        assert state_size(config, "config.json") == size
        return
    with pytest.raises(ConfigError, match=size) as caught:
        state_size(config, "config.json")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("proprio_projector.fc1.weight", "set use_proprio to true"),
        ("action_head.model.fc1.weight", "that the model in config"),
        ("vision_backbone.featurizer.blocks.0.scale.weight", "that the model in config"),
        ("language_model.model.layers.2.mlp.up_proj.weight", "that the model in config"),
        ("vision_backbone.featurizer.blocks.2.mlp.fc1.weight", None),  # the last block, whose features nobody takes
        ("vision_backbone.fused_featurizer.attn_pool.latent", None),
        ("vision_backbone.fused_featurizer.norm.weight", None),
        ("language_model.model.layers.0.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_tensors_that_nothing_reads_are_refused_by_name(extra: str, text: str | None, tmp_path: Path) -> None:
    single_process()
    tensors = {name: one for name, one in save_small(tmp_path).items() if not name.startswith(PROJECTOR)}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "state_dim": 0}))
    save_file(tensors | {extra: torch.zeros(2)}, tmp_path / "model.safetensors")
    for look in (build, check):
        if text is None:
            look(tmp_path)
            continue
        with pytest.raises(ConfigError, match=text) as caught:
            look(tmp_path)
        assert extra in str(caught.value)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a checkpoint was run",))


def test_files_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    def refused(text: str, config: dict[str, Any] | None = None) -> None:
        with pytest.raises(ConfigError, match=text):
            complete_config(config or {}, tmp_path)

    file = tmp_path / FILE_OF_ITS_OWN
    file.write_bytes(pickle.dumps(_Code()))
    refused("cannot be read")
    torch.save({"fc1.weight": torch.zeros(4, 2)}, file)
    refused("this file is not a projector of the proprioceptive state")
    publish(tmp_path, own_file=True)
    refused("contradicts", {"use_proprio": False})
    refused("contradicts", {"use_proprio": True, "proprio_dim": 8})
    assert complete_config({"proprio_dim": 8}, tmp_path) == {"use_proprio": True, "proprio_dim": 5}
    save_small(tmp_path)
    with pytest.raises(ConfigError, match="stored twice"):
        build(tmp_path)
    (tmp_path / "proprio_projector--50000_checkpoint.pt").touch()
    refused("several projectors")
    (tmp_path / "action_head--50000_checkpoint.pt").touch()
    refused("its actions come from a separate head, not from tokens")


def test_statistics_are_those_of_the_file_or_of_config(tmp_path: Path) -> None:
    known = {name: DatasetStatistics(ActionStatistics.of([[0.0], [width]])) for name, width in (("a", 1), ("b", 2))}
    assert policy_statistics(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": {"a": known["a"].to_json()}}))
    found, where = policy_statistics(tmp_path) or ({}, "")
    assert (list(found), found["a"].action.max, where) == (["a"], [1.0], f"{tmp_path / 'config.json'}: norm_stats")
    write_statistics(tmp_path / FILE, {"a": known["b"]})
    found, where = policy_statistics(tmp_path) or ({}, "")
    assert (found["a"].action.max, where) == ([2.0], str(tmp_path / FILE))


def test_a_state_needs_its_own_statistics() -> None:
    of_actions = DatasetStatistics(ActionStatistics.of([[0.0], [1.0]]))
    with pytest.raises(ConfigError, match="statistics cover only actions"):
        refuse_other_state(of_actions, 5)
    with pytest.raises(ConfigError, match="robot state of a different size"):
        refuse_other_state(DatasetStatistics(of_actions.action, ActionStatistics.plain(4)), 5)
    refuse_other_state(of_actions, 0)
    refuse_other_state(DatasetStatistics(ActionStatistics.plain(2)), 5)  # a fresh policy's


def test_runs_normalise_pictures_as_the_checkpoint_says(tmp_path: Path) -> None:
    from megarl.robots.setup import vla_layout

    recipe = load_config(write_robots_recipe(tmp_path))
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(recipe.model.hf_config))
    usual = vla_layout(recipe, load_hf_config(ModelConfig(path=str(folder)))).normalise
    assert usual.means == ((0.5, 0.5, 0.5),)
    (folder / PREPROCESSOR).write_text(json.dumps({"means": [[0.25, 0.5, 0.75]], "stds": [[0.125] * 3]}))
    own = vla_layout(recipe, load_hf_config(ModelConfig(path=str(folder)))).normalise
    assert (own.means, own.deviations) == (((0.25, 0.5, 0.75),), ((0.125,) * 3,))
