"""Checks of secrets that a recipe would write into its run folder, or that a run takes from the environment."""

from __future__ import annotations

import os
import re

from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.credentials import PASSWORD, USER, mask, put_back, take_out

_SECRET = re.compile(
    r"(\w*_)?((api|access|secret)_?key|passw(or)?d|secret)|token|(\w*_)?(access|api|auth|bearer|hf|hub)_token",
    re.IGNORECASE,
)


def check_secrets(config: RunConfig, checks: Checklist) -> None:
    """Refuse credentials in the recipe: the MLflow server's belong in the environment, and user functions take none."""
    uri = config.tracking.mlflow_uri
    if uri is not None and mask(kept := take_out(uri, {})) != kept:
        checks.fail(
            "tracking",
            "tracking.mlflow_uri",
            "this address has a secret that would be written to config.yaml, run.json and the report",
            found=mask(uri),
            allowed="user name and password in front of the host, or in the environment, and no other secret",
            fix=f"write scheme://USER:PASSWORD@host, or scheme://***@host and export {USER} and {PASSWORD}",
        )
    if config.tracking.mlflow and uri is not None:
        try:
            put_back(uri, os.environ)
        except KeyError:
            checks.fail(
                "tracking",
                "tracking.mlflow_uri",
                "user name and password of this store are in no file of the run",
                found=uri,
                allowed=f"both in the environment: {USER} and {PASSWORD}",
                fix="export them, or name the address with them once more, or set tracking.mlflow=false",
            )
    for key, arguments in (("data.loader_kwargs", config.data.loader_kwargs), ("reward.kwargs", config.reward.kwargs)):
        for name, value in arguments.items():
            if isinstance(value, str) and value and _SECRET.fullmatch(name):
                checks.warn(
                    "secrets",
                    f"{key}.{name}",
                    "this looks like a secret, and config.yaml, report.html and MLflow will show it",
                    fix="give the name of an environment variable instead, and let the function read that",
                )
