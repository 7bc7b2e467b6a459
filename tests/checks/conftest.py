import pytest

from megarl.checks.recipe import check_config
from tests.config.conftest import config_of, write  # noqa: F401


@pytest.fixture
def failures(config_of):  # noqa: F811
    """failures("actor.parallel.tp=3", ...) -> the failed checks of that recipe."""
    return lambda *overrides: [check for check in check_config(config_of(*overrides)).items if check.status == "fail"]


@pytest.fixture
def warned(config_of):  # noqa: F811
    """warned(...) -> the doubtful checks of that recipe."""
    return lambda *overrides: [check for check in check_config(config_of(*overrides)).items if check.status == "warn"]
