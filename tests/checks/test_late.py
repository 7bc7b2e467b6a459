"""Refusals that need no worker come before the start, and settings that a run does not use are not judged."""

import pytest

from megarl.artifacts.facts import model_facts
from megarl.checks.checklist import Checklist
from megarl.checks.files import check_end_tokens
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS


def test_an_end_token_beyond_the_vocabulary(config_of, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 900]}')
    config, checks = config_of(), Checklist()
    facts = model_facts(config.model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    check_end_tokens(config, facts, checks)
    assert [(check.status, check.message) for check in checks.items] == [
        ("fail", "this end token is not in the vocabulary")
    ]


@pytest.mark.parametrize(("recipe", "judged"), [("dpo_quickstart", False), ("grpo_quickstart", True)])
def test_the_deadline_of_rewards_is_judged_where_there_are_rewards(recipe, judged):
    config = load_config(recipe, ["reward.timeout_s=1e5", "cluster.nproc=2"], components=COMPONENTS)
    assert ("reward.timeout_s" in [check.key for check in check_config(config).items]) == judged


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_a_config_of_a_model_that_is_nested_too_deeply(failures, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    messages = [check.message for check in failures(f"model.path={tmp_path}", "model.hf_config=null")]
    assert any("cannot read the model's config" in message for message in messages)
