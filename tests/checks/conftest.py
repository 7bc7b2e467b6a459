from pathlib import Path

import pytest

from megarl.checks.recipe import check_config
from megarl.system.compat.sglang import TESTED
from tests.config.conftest import config_of, write  # noqa: F401


@pytest.fixture
def failures(config_of):  # noqa: F811
    """failures("actor.parallel.tp=3", ...) -> the failed checks of that recipe."""
    return lambda *overrides: [check for check in check_config(config_of(*overrides)).items if check.status == "fail"]


@pytest.fixture
def warned(config_of):  # noqa: F811
    """warned(...) -> the doubtful checks of that recipe."""
    return lambda *overrides: [check for check in check_config(config_of(*overrides)).items if check.status == "warn"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that says it has the tested sglang, and has torchvision."""
    file = tmp_path / "bin/python"
    (tmp_path / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    (tmp_path / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info/METADATA").write_text(metadata)
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\necho {TESTED}\n")
    file.chmod(0o755)
    return file
