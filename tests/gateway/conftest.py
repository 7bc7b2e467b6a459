"""Fixtures of the gateway's tests."""

from tests.rollout.conftest import single_process

__all__ = ["single_process"]
