"""Another environment than the one of the recipe below: its settings are in the way until they are replaced."""

from __future__ import annotations

import pytest

from megarl.config.load import load_config
from megarl.envs.registry import load_environment
from megarl.system.errors import ConfigError

RECIPE = "grpo_tools_quickstart"


def test_the_refusal_of_an_inherited_setting_says_how_to_drop_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(load_config(RECIPE, ["env.name=single_turn"]).env)
    fix = "env='!replace {name: single_turn}'"
    assert fix in str(caught.value)
    load_environment(load_config(RECIPE, [fix.replace("'", "")]).env)
