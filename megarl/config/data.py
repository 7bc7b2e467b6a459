"""The recipe's sections `data` and `reward`: prompts and how responses are scored."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from megarl.config.base import Seconds, Section


def _as_text(value: object) -> object:
    """Return a date of YAML as text."""
    return value.isoformat() if isinstance(value, datetime.date) else value


def _date(text: str) -> str:
    if datetime.date.fromisoformat(text).isoformat() != text:
        raise ValueError("YYYY-MM-DD")
    return text


class DataConfig(Section):
    """The source of prompts."""

    train_files: list[str] = Field(
        default_factory=list,
        description="jsonl, json, csv, parquet files, folders, hub names org/name[:config]@split, pkg.mod:fn, "
        "or text:<the prompt itself>",
    )
    val_files: list[str] = Field(default_factory=list, description="held-out prompts, same forms")
    val_split: float | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="hold out prompts of train_files, in place of val_files: a share of the different prompts (below "
        "1), or a number of them. A hash of the prompt chooses: no prompt is on both sides, whatever the "
        "order of rows or trainer.seed",
    )
    prompt_key: str = Field(
        "prompt", description="column of the prompt: text or chat messages. Dots lead into a column (extra.question)"
    )
    answer_key: str | None = Field(
        "answer", description="column of the reference answer (reward_model.ground_truth); null: none"
    )
    image_key: str | None = Field(
        None,
        description="column of a prompt's images: path, bytes, {bytes, path}, or a list of these; each replaces one "
        "<image> of the prompt. For vision-language models; null: prompts are text",
    )
    image_dir: str | None = Field(None, description="folder that paths of images are relative to")
    min_pixels: PositiveInt | None = Field(None, description="smaller images are enlarged; null: the model's own limit")
    max_pixels: PositiveInt | None = Field(None, description="larger images are reduced; null: the model's own limit")
    limit_images: PositiveInt | None = Field(
        None, description="most images of a prompt or a whole episode; null: any number"
    )
    format_prompt: str | None = Field(
        None, description="Jinja template, or a file that holds one; sees `content` and the row"
    )
    system_prompt: str | None = Field(
        None,
        description="system message of prompts that have none, in training, validation, eval and generate",
    )
    chat_template: bool | Literal["auto"] = Field(
        "auto",
        description="wrap prompts in the tokenizer's chat template; true: refuse a tokenizer without one; auto: where"
        " there is one, unless the name of model.path says `base`, as Qwen3-8B-Base",
    )
    override_chat_template: str | None = Field(None, description="Jinja chat template, or a file that holds one")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    date: Annotated[str, BeforeValidator(_as_text), AfterValidator(_date)] | None = Field(
        None,
        description="YYYY-MM-DD for chat templates that write the date (`strftime_now`); null: the day of the run's "
        "start, which resumed runs and eval keep",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="longer prompts are overlong")
    overlong: Literal["filter", "error"] = Field("filter", description="drop overlong prompts (counted) or stop")
    batch_size: PositiveInt = Field(32, le=1_000_000_000, description="prompts per training step over all ranks")
    val_batch_size: PositiveInt | None = Field(None, description="prompts per validation round; null: all at once")
    max_val_samples: PositiveInt | None = Field(None, description="validate on the first N held-out prompts; null: all")
    shuffle: bool = Field(True, description="shuffle each epoch by seed and epoch number")
    loader_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of pkg.mod:fn sources, by argument name"
    )

    @property
    def held_out(self) -> list[str]:
        """The sources of held-out prompts: `val_files`, or the training files that `val_split` holds rows out of."""
        return self.val_files if self.val_split is None else self.train_files


class RewardPartConfig(Section):
    """One of several rewards, whose weighted sum is the score."""

    name: str = Field(description="as reward.name")
    weight: float = Field(
        1.0,
        ge=-1e6,
        le=1e6,
        description="factor of its score in the sum; 0: it is only measured",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of its function")
    mode: Literal["batch", "sequential"] | None = Field(None, description="null: as reward.mode")


#: The name of the reward that a model of the run gives.
BY_MODEL = "reward_model"


class RewardConfig(Section):
    """The scoring of responses."""

    name: str = Field(
        "exact_match",
        description="gsm8k, math, exact_match, numeric, format, classifier, http, judge, reward_model (the model of "
        "that section), file.py:function or pkg.mod:fn",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    parts: dict[str, RewardPartConfig] = Field(
        default_factory=dict,
        description="several named rewards in place of `name`; the score is their weighted sum",
    )
    mode: Literal["batch", "sequential"] = Field("batch", description="function takes a list, or one sample at a time")
    workers: PositiveInt = Field(
        1,
        le=1024,
        description="processes that score per data-parallel rank; a single one is a thread for included rewards other"
        " than math",
    )
    timeout_s: Seconds = Field(300.0, description="deadline for one batch of rewards")
    sample_timeout_s: Seconds = Field(
        60.0, description="deadline of one sample, for included functions and those that get one at a time"
    )
    on_error: Annotated[float, annotated_types.Ge(-1e15), annotated_types.Le(1e15)] | Literal["raise"] = Field(
        "raise", description="stop and name the sample, or the score that a failing sample gets"
    )

    @property
    def functions(self) -> dict[str, RewardConfig]:
        """The section of each function that scores: of every part by its name, or this one under an empty name."""
        if not self.parts:
            return {"": self}
        return {
            label: self.model_copy(
                update={"name": part.name, "kwargs": part.kwargs, "mode": part.mode or self.mode, "parts": {}}
            )
            for label, part in self.parts.items()
        }

    @property
    def of_model(self) -> str | None:
        """The part that the role `reward_model` gives, empty where it is the whole reward; None: there is no such."""
        return next((label for label, one in self.functions.items() if one.name == BY_MODEL), None)

    @property
    def described(self) -> str:
        """The names of the functions that score."""
        return " + ".join(one.name for one in self.functions.values())
