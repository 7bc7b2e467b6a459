"""The recipe's section `models`: models of the run in addition to the policy and the built-in roles."""

from __future__ import annotations

import keyword
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from megarl.config.training import ModelPlace, TrainingConfig

#: Names that a further model may not have: another argument of stages, a phase or a metric has the name.
_RESERVED = (
    *("actor", "advantage", "all", "critic", "default", "dynamic_sampling", "env", "more", "perf", "reference"),
    *("response_length", "reward", "reward_model", "rollout", "scorer", "servers", "sft", "teacher", "timing_s", "val"),
)


def _is_free(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in _RESERVED:
        raise ValueError(
            f"{name!r} cannot be a name: stages take it as an argument, and metrics begin with it; allowed: a "
            f"lower-case letter, then lower-case letters, digits and _, but no keyword of Python, and not "
            f"{', '.join(_RESERVED)}"
        )
    return name


#: A name by which stages take a model.
FreeName = Annotated[str, AfterValidator(_is_free)]


class FurtherModelPlace(ModelPlace):
    """Where a model of the section `models` comes from, its layout, and whether it is trained. These keys come first in
    the section, so they are in a base class.
    """

    train: bool = Field(False, description="train the model: it has an optimizer, and checkpoints and exports hold it")


class FurtherModelConfig(TrainingConfig, FurtherModelPlace):
    """A further model, which stages take as the argument of its name. It is in the actor's processes, unless a team of
    `placement.teams` has it.
    """

    path: str | None = Field(
        None,
        description="Hugging Face folder or hub name of a model with the policy's tokenizer; null: the policy's "
        "weights at the start of RL, only for a model that is trained",
    )
