"""The recipe's section `models`: models of the run in addition to the policy and the built-in roles."""

from __future__ import annotations

import keyword
import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from megarl.config.base import Section
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig

#: Names that stages take for something else, or that a phase or a metric has.
_RESERVED = (
    *("actor", "advantage", "all", "critic", "default", "dynamic_sampling", "env", "more", "perf", "reference"),
    *("response_length", "reward", "reward_model", "rollout", "scorer", "servers", "sft", "teacher", "timing_s", "val"),
)


def _is_free(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in _RESERVED:
        raise ValueError(
            f"{name!r} cannot be a name: stages take it as an argument, and metrics begin with it; allowed: lower-case "
            f"letters, digits and _, but not {', '.join(_RESERVED)}"
        )
    return name


#: A name by which stages take a model.
FreeName = Annotated[str, AfterValidator(_is_free)]


class FurtherModelConfig(Section):
    """A further model, which stages take as the argument of its name. It is in the actor's processes, unless a team of
    `placement.teams` has it.
    """

    path: str | None = Field(
        None,
        description="Hugging Face folder or hub name of a model with the policy's tokenizer; null: the policy's "
        "weights at the start of RL, only for a model that is trained",
    )
    parallel: ParallelConfig | None = Field(
        None, description="layout; null: the actor's. Another layout needs a team of its own (placement)"
    )
    train: bool = Field(False, description="train the model: it has an optimizer, and checkpoints and exports hold it")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="memory and speed of training")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer")
    mini_batch_size: PositiveInt | None = Field(
        None,
        le=1_000_000_000,
        description="prompts per optimizer step over all ranks; null: data.batch_size (one optimizer step)",
    )
    ppo_epochs: PositiveInt = Field(1, description="passes over the samples of a step")
    shuffle: bool = Field(False, description="as actor.shuffle")
