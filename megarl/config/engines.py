"""The generation engines, as everything below `megarl/rollout` needs to know them: names and a few facts.

What an engine does is answered by its `EngineFamily` (`megarl/rollout/<engine>/family.py`), which imports more.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.system.imports import import_callable

KEY = "rollout.engine"


@dataclass(frozen=True)
class EngineFacts:
    """The facts of an engine that need no import of it.

    Attributes:
        holds_model: the workers of a rollout team hold the model, split by the team's layout.
        servers: name of the section of `rollout` that describes its servers, processes of their own to which weights
            are sent; None: it generates in the workers.
    """

    holds_model: bool = False
    servers: str | None = None


DEFAULT = "embedded"
ENGINES = {DEFAULT: EngineFacts(holds_model=True), "sglang": EngineFacts(servers="sglang")}


def engine_facts(engine: str) -> EngineFacts:
    """Return the facts of an included engine, or of a user's `file.py:Family`.

    Raises:
        UserError: the user's class does not import.
    """
    if engine in ENGINES:
        return ENGINES[engine]
    facts = getattr(import_callable(engine, where=KEY), "facts", None)
    assert isinstance(facts, EngineFacts), f"{engine} has the attribute `facts`"
    return facts
