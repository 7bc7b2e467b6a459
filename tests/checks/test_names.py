"""What estimators declare is what their functions take: the settings are parameters, with the same defaults."""

import inspect

import pytest

from megarl.algorithms.advantages import ADVANTAGES


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_settings_of_an_estimator_are_parameters_of_its_function(name):
    parameters = inspect.signature(ADVANTAGES.get(name)).parameters
    defaults = {
        key: info.default for key, info in ADVANTAGES.spec(name).settings.model_fields.items() if key != "parts"
    }
    assert {key: parameters[key].default for key in defaults} == defaults
    read = set(parameters) & {"allow_singleton", "norm_by_std", "gamma", "lam", "parts"}
    assert read == set(ADVANTAGES.spec(name).settings.model_fields)
