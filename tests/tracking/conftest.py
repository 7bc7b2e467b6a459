import shutil

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A database with MLflow's tables, which take seconds to make."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path, empty_store):
    """A copy of it, where runs whose `tracking.dir` is `tmp_path` look for theirs."""
    return shutil.copy(empty_store, tmp_path / "mlflow.db")
