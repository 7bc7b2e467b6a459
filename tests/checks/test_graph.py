"""The built task graph is asked what a recipe works with, for built-in pipelines and a user's own alike."""

import pytest

from megarl.checks import weights
from megarl.checks.dry_run import make_plan
from megarl.checks.recipe import check_config, validate
from megarl.config.base import ConfigErrors

MINE = "algorithm.pipeline=with_critic:build"


@pytest.fixture
def with_critic(write, monkeypatch, tmp_path):
    """A user's pipeline that is PPO under another name."""
    write("from megarl.recipes.ppo import build_graph as build", "with_critic.py")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("with_critic")
def test_a_users_pipeline_with_a_critic_is_checked_as_one(failures, warned):
    gae = "algorithm.advantage.name=gae"
    assert failures(MINE, gae) == []
    assert [check.key for check in failures(MINE, gae, "critic.path=/nowhere")] == ["critic.path"]
    assert [check.key for check in failures(MINE, gae, "critic.optim.min_lr=1")] == ["critic.optim.min_lr"]
    assert [check.key for check in warned(MINE, gae, "critic.warmup_steps=100")] == ["critic.warmup_steps"]
    (check,) = warned(MINE)
    assert check.message == "the with_critic:build pipeline trains a critic that grpo does not use"


@pytest.mark.usefixtures("with_critic")
def test_memory_counts_the_models_that_the_graph_has(config_of):
    text = make_plan(config_of(MINE, "algorithm.advantage.name=gae", "algorithm.kl.use=loss"), "local").text
    assert "critic parameters" in text
    assert "reference parameters" in text


def test_a_graph_that_cannot_be_built_is_one_of_the_problems(write, config_of, monkeypatch, tmp_path):
    write("def build(config): return 1 / 0", "broken_graph.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of("algorithm.pipeline=broken_graph:build", "reward.name=nope")
    with pytest.raises(ConfigErrors, match="ZeroDivisionError") as caught:
        validate(config)
    assert [problem.where for problem in caught.value.problems] == ["algorithm.pipeline", "reward.name"]
    assert check_config(config).graph is None


def test_what_stands_in_the_way_of_the_graph_is_told_once(failures):
    """The function is looked for when its name is checked, and imported when the graph is built."""
    (check,) = failures("algorithm.loss.name=no_such_module:loss")
    assert check.key == "algorithm.loss.name"


def test_a_dry_run_reads_the_headers_of_a_model_once(config_of, monkeypatch, tmp_path):
    read = []
    monkeypatch.setattr(weights, "read_header", lambda file: read.append(file) or {})
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 32}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    make_plan(config_of("model.hf_config=null", f"model.path={tmp_path}"), "local")
    assert len(read) == 1
