"""What estimators declare is what their functions take: the settings are parameters, with the same defaults."""

import inspect

import pytest

from megarl.algorithms.advantages import ADVANTAGES

#: Parameters that are settings of some estimator; the others are data.
SETTINGS = {key for name in ADVANTAGES.names() for key in ADVANTAGES.spec(name).settings.model_fields}


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_settings_of_an_estimator_are_parameters_of_its_function(name):
    parameters = inspect.signature(ADVANTAGES.get(name)).parameters
    defaults = {
        key: info.default for key, info in ADVANTAGES.spec(name).settings.model_fields.items() if key != "parts"
    }
    assert {key: parameters[key].default for key in defaults} == defaults
    assert set(parameters) & SETTINGS == set(ADVANTAGES.spec(name).settings.model_fields)
