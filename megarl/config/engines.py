"""Names of the generation engines, and those properties of engines that packages below `megarl/rollout` need.

Everything else about an engine is in its `EngineFamily` (`megarl/rollout/<engine>/family.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.system.imports import import_callable

KEY = "rollout.engine"


@dataclass(frozen=True)
class EngineFacts:
    """Properties of an engine that are known without importing it.

    Attributes:
        holds_model: whether the workers of a rollout team hold the model, split by the team's layout.
        servers: the section of `rollout` that configures the engine's server processes; None: the engine generates in
            workers.
    """

    holds_model: bool = False
    servers: str | None = None


DEFAULT = "embedded"
ENGINES = {DEFAULT: EngineFacts(holds_model=True), "sglang": EngineFacts(servers="sglang")}


def engine_facts(engine: str) -> EngineFacts:
    """Return the properties of a built-in engine, or of a user's engine, which is named as `file.py:Family`.

    Raises:
        UserError: the user's class cannot be imported.
    """
    if engine in ENGINES:
        return ENGINES[engine]
    facts = getattr(import_callable(engine, where=KEY), "facts", None)
    assert isinstance(facts, EngineFacts), f"{engine} has the attribute `facts`"
    return facts
