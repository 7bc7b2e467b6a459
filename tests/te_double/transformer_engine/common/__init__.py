"""What does not depend on a framework."""

from transformer_engine.common import recipe  # noqa: F401
