"""The recipe's sections `data` and `reward`: where prompts come from, and how responses are scored."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megarl.config.base import Seconds, Section


def _as_text(value: object) -> object:
    """Return a date as text, because YAML turns 2025-01-31 into a date object."""
    return value.isoformat() if isinstance(value, datetime.date) else value


def _date(text: str) -> str:
    try:
        is_date = datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise ValueError("a date of the form YYYY-MM-DD")
    return text


class PoolConfig(Section):
    """One pool of prompts of similar difficulty."""

    up_to: float | None = Field(
        None,
        description="largest average score of the pool's rows; null: all rows above the other pools (the last pool)",
    )
    weight: NonNegativeFloat = Field(1.0, le=1e6, description="weight of a row in the draw; 0: not drawn")


#: Pool of the rows without a score.
UNSEEN = "unseen"


class CurriculumConfig(Section):
    """Prompts are drawn by past success: the moving average of the mean scores of a row's groups."""

    decay: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of the old average in the new one; 0: only the score of the last group counts",
    )
    pools: dict[str, PoolConfig] = Field(
        default_factory=dict,
        description="pools by rising average; a row is in the first one whose `up_to` it does not exceed. A row "
        "without a score has weight 1",
    )


class ExpertsConfig(Section):
    """Responses to training prompts that others than the policy wrote, as further samples of prompt groups."""

    files: list[str] = Field(
        default_factory=list, description="rows with a prompt and a response, in the forms of train_files"
    )
    response_key: str = Field("response", description="column of the response: text, or a message of the assistant")
    logp_key: str | None = Field(
        None,
        description="column of the log-probs of the response's tokens under the policy that wrote it, a list of "
        "numbers; null: nobody knows them",
    )
    per_group: PositiveInt = Field(1, le=1024, description="most expert responses of a group")
    share: float = Field(1.0, gt=0, le=1, description="share of the groups that get expert responses")
    in_group: bool = Field(
        False,
        description="expert responses are samples of their group, with an advantage (luffy needs it; other losses need "
        "log-probs and rollout_correction); false: only algorithm.loss.expert_coef learns them",
    )
    max_tokens: PositiveInt | None = Field(
        None, description="longer examples, prompt included, are dropped; null: the model's limit"
    )


class ReplayConfig(Section):
    """Groups that were trained on are trained on again in later steps."""

    capacity: PositiveInt = Field(1024, le=1_000_000, description="groups that are stored, over all replicas")
    share: float = Field(0.25, gt=0, le=0.9, description="share of the replayed groups in the groups of a step")
    max_age: PositiveInt = Field(
        4, description="largest number of steps between the weights that generated a group and those that replay it"
    )
    priority: Literal["uniform", "recent", "signal"] = Field(
        "uniform",
        description="weight of a group in the draw: 1; 1 / steps since it was trained on; its mean absolute advantage",
    )

    def groups(self, fresh: int) -> int:
        """Return the number of groups that a step with `fresh` fresh groups replays if enough are stored."""
        return round(self.share / (1 - self.share) * fresh)


#: The column of images that a recipe with `video_key` and without `image_key` gets.
IMAGES_BESIDE = "images"


class DataConfig(Section):
    """The source of prompts."""

    train_files: list[str] = Field(
        default_factory=list,
        description="jsonl, json, csv, parquet files, folders, hub names org/name[:config]@split, pkg.mod:fn, "
        "or text:<the prompt itself>",
    )
    val_files: list[str] = Field(default_factory=list, description="sources of held-out prompts, in the same forms")
    val_split: float | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="hold out prompts of train_files in place of val_files: a share of the different prompts (below "
        "1), or a number of prompts. A hash of the prompt decides, so that a prompt is never on both sides, whatever "
        "the order of rows or trainer.seed. Preference pairs without a column of prompts are hashed as a whole",
    )
    prompt_key: str = Field(
        "prompt",
        description="column of the prompt: text or chat messages. Dots name a field inside a column (extra.question)",
    )
    answer_key: str | None = Field(
        "answer",
        description="column of the reference answer, with dots as in prompt_key "
        "(reward_model.ground_truth); null: none",
    )
    image_key: str | None = Field(
        None,
        description="column of a prompt's images: path, bytes, {bytes, path}, or a list of these; each replaces one "
        "<image> in the prompt. Only for vision-language models; null: prompts are text",
    )
    image_dir: str | None = Field(None, description="folder that paths of images are relative to")
    min_pixels: PositiveInt | None = Field(
        None, description="images with fewer pixels are enlarged; null: the model's own limit"
    )
    max_pixels: PositiveInt | None = Field(
        None, description="images with more pixels are reduced; null: the model's own limit"
    )
    video_key: str | None = Field(
        None,
        description="column of a prompt's videos, a list: each a list of frames, {frames, fps}, {path, fps}, or the "
        "path of a .npy or .gif file; each replaces one <video> in the prompt. Without image_key it becomes images, "
        "a column that rows need not have; null: no videos",
    )
    video_fps: PositiveFloat = Field(2.0, description="frames per second of videos that do not name theirs")
    max_frames: PositiveInt | None = Field(
        None, description="longer videos are reduced to this many frames at equal distances; null: all frames"
    )
    video_min_pixels: PositiveInt | None = Field(
        None,
        description="videos with fewer pixels are enlarged; pixels of a frame (Qwen2-VL, Qwen2.5-VL) or of all frames "
        "(Qwen3-VL, Qwen3.5); null: the model's own limit",
    )
    video_max_pixels: PositiveInt | None = Field(
        None, description="videos with more pixels are reduced, as video_min_pixels; null: the model's own limit"
    )
    limit_images: PositiveInt | None = Field(
        None, description="maximum images in a prompt or in a whole episode; null: any number"
    )
    format_prompt: str | None = Field(
        None,
        description="Jinja template of the prompt, or a file that holds one; it can use `content` and the row's "
        "columns",
    )
    system_prompt: str | None = Field(
        None,
        description="system message for prompts that have none, in training, validation, eval and generate",
    )
    chat_template: bool | Literal["auto"] = Field(
        "auto",
        description="wrap prompts in the tokenizer's chat template. true: refuse a tokenizer without a template; "
        "auto: use the template where there is one, unless model.path is named as a base model, such as Qwen3-8B-Base",
    )
    override_chat_template: str | None = Field(
        None, description="Jinja chat template that replaces the tokenizer's, or a file that holds one"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    date: Annotated[str, BeforeValidator(_as_text), AfterValidator(_date)] | None = Field(
        None,
        description="YYYY-MM-DD for chat templates that write the date (`strftime_now`); null: the day on which the "
        "run starts, which resumed runs and eval keep",
    )
    max_prompt_tokens: PositiveInt = Field(512, description="prompts longer than this are overlong, in tokens")
    overlong: Literal["filter", "error"] = Field(
        "filter", description="what happens to overlong prompts: filter drops and counts them, error stops the run"
    )
    batch_size: PositiveInt = Field(32, le=1_000_000_000, description="prompts per training step over all ranks")
    val_batch_size: PositiveInt | None = Field(None, description="prompts per validation round; null: all at once")
    max_val_samples: PositiveInt | None = Field(
        None, description="use only the first N held-out prompts in validation; null: all"
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="draw prompts by past success in place of epochs in a fixed order; null: off"
    )
    experts: ExpertsConfig | None = Field(
        None, description="expert responses to training prompts beside the policy's own; null: none"
    )
    replay: ReplayConfig | None = Field(
        None, description="train on groups of earlier steps again, beside the fresh ones; null: off"
    )
    shuffle: bool = Field(True, description="shuffle each epoch by seed and epoch number")
    loader_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of pkg.mod:fn sources, by argument name"
    )
    loader_workers: NonNegativeInt = Field(
        0,
        le=256,
        description="threads per rank that read the next batch's images beside the step; 0: the step reads its own",
    )

    @property
    def shows(self) -> tuple[str, str | None]:
        """The recipe key that adds images or videos to prompts, for messages, and its column; None: prompts are text
        only."""
        if self.video_key is not None and self.image_key in (None, IMAGES_BESIDE):
            return "data.video_key", self.video_key
        return "data.image_key", self.image_key

    @property
    def held_out(self) -> list[str]:
        """The sources of held-out prompts: `val_files`, or the training files with `val_split`."""
        return self.val_files if self.val_split is None else self.train_files


class RewardPartConfig(Section):
    """One of several rewards, whose weighted sum is the score."""

    name: str = Field(description="function of this reward, in the forms of reward.name")
    weight: float = Field(
        1.0,
        ge=-1e6,
        le=1e6,
        description="factor of this score in the sum; 0: the score is only measured",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    mode: Literal["batch", "sequential"] | None = Field(
        None, description="as reward.mode; null: the value of reward.mode"
    )


#: Name of the reward that the role `reward_model` computes.
BY_MODEL = "reward_model"


class RewardConfig(Section):
    """How responses are scored."""

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
    mode: Literal["batch", "sequential"] = Field(
        "batch", description="what the function is called with: a batch as lists, or one sample at a time"
    )
    skip_special_tokens: bool = Field(
        True,
        description="leave special tokens out of the texts that functions get; false: `response` and `transcript` are "
        "the texts of all tokens, end token and stop string included",
    )
    workers: PositiveInt = Field(
        1,
        le=1024,
        description="processes that score per data-parallel rank; with 1 a thread scores instead, for built-in "
        "rewards except math and classifier",
    )
    timeout_s: Seconds = Field(300.0, description="deadline for one batch of rewards")
    sample_timeout_s: Seconds = Field(
        60.0, description="deadline of one sample, for built-in functions and functions that get one sample at a time"
    )
    on_error: Annotated[float, annotated_types.Ge(-1e15), annotated_types.Le(1e15)] | Literal["raise"] = Field(
        "raise", description="what a failing sample does: stop the run and name the sample, or get this score"
    )

    @property
    def functions(self) -> dict[str, RewardConfig]:
        """A `reward` section for each part of the reward, by the part's name; without parts, this section under the
        empty name.
        """
        if not self.parts:
            return {"": self}
        return {label: self.with_function(part.name, part.kwargs, part.mode) for label, part in self.parts.items()}

    def with_function(
        self, name: str, kwargs: dict[str, Any], mode: Literal["batch", "sequential"] | None
    ) -> RewardConfig:
        """Return a copy of this section with another reward function and no parts; None keeps the section's mode."""
        return self.model_copy(update={"name": name, "kwargs": kwargs, "mode": mode or self.mode, "parts": {}})

    @property
    def of_model(self) -> str | None:
        """Name of the part that the role `reward_model` scores; empty for the whole reward, None if there is none."""
        return next((label for label, section in self.functions.items() if section.name == BY_MODEL), None)

    @property
    def described(self) -> str:
        """The names of the functions that score, joined by ` + ` for messages."""
        return " + ".join(section.name for section in self.functions.values())
