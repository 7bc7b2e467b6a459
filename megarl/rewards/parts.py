"""Several rewards at once: the score of a sample is the weighted sum of its parts.

    reward:
      parts:
        accuracy: {name: math, weight: 0.9}
        form: {name: format, weight: 0.1}

Each function has its own runner, as if the recipe named only that function, and all functions score at the same time. A
recipe with `reward.name` has one function, whose results are returned unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.base import ConfigErrors
from megarl.config.data import BY_MODEL
from megarl.rewards.registry import REWARDS
from megarl.rewards.runner import RESERVED_PARTS, RewardHandle, RewardRunner
from megarl.rewards.scoring import ERROR_KEY, EXTRACTED_KEY, Result, Sample
from megarl.rewards.signatures import IMAGES
from megarl.system.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megarl.config.data import RewardConfig
    from megarl.config.run import RunConfig

_SECTION = "reward"
_LABEL = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
#: Keys of a result with a fixed meaning, which cannot be names of parts.
_MEANINGS = frozenset({"overall", "acc", EXTRACTED_KEY})


@REWARDS.register(BY_MODEL)
def reward_model(sample: Sample) -> float:
    """Placeholder that is never called: the nodes `model_score` and `total_reward` compute this score."""
    raise AssertionError("reward_model is scored by graph nodes and must not be called as a function")


@dataclass(frozen=True, eq=False)
class Submitted:
    """A batch that is being scored: one handle per part, and the number of samples."""

    handles: Mapping[str, RewardHandle]
    samples: int

    def done(self) -> bool:
        """Return whether all scores of the batch are available."""
        return all(handle.done() for handle in self.handles.values())


class Rewards:
    """Scores batches with the functions of a recipe.

    Args:
        cfg: the `reward` section.

    Raises:
        ConfigError: a function cannot be found or loaded, or does not accept its arguments; the error names the part.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        raise_part_problems(cfg)
        self._cfg = cfg
        self._runners: dict[str, RewardRunner] = {}
        try:
            for label, function in cfg.functions.items():
                if label == cfg.of_model:
                    continue
                with located(place_of_part(label)):
                    self._runners[label] = RewardRunner(function)
        except BaseException:
            self.close()
            raise

    @property
    def uses_images(self) -> bool:
        """Whether a function uses the images of samples."""
        return any(runner.uses_images for runner in self._runners.values())

    def submit(self, samples: list[Sample], images: Sequence[list[str]] | None = None) -> Submitted:
        """Start scoring a batch with every function; `images`: the images of each sample. The list must not change."""
        seen = samples
        if images is not None:
            seen = [{**sample, IMAGES: pictures} for sample, pictures in zip(samples, images, strict=True)]
        runners = self._runners.items()
        handles = {label: runner.submit(seen if runner.uses_images else samples) for label, runner in runners}
        return Submitted(handles, len(samples))

    def result(self, handle: Submitted) -> list[Result]:
        """Wait for a batch; return one dict per sample with the weighted sum as `overall`, and the parts.

        A part's score has the part's name; further values that its function returns are called `part/name`. `acc` and
        `extracted`, which validation reads, come from the first part. A sample for which a part failed has the score
        `reward.on_error`. `with_model_scores` adds the part that the role `reward_model` scores.
        """
        by_part = {}
        for label, runner in self._runners.items():
            with located(place_of_part(label)):
                by_part[label] = runner.result(handle.handles[label])
        if not by_part:
            return [{} for _ in range(handle.samples)]
        return [self._sum(dict(zip(by_part, results, strict=True))) for results in zip(*by_part.values(), strict=True)]

    def _sum(self, results: dict[str, Result]) -> Result:
        if any(ERROR_KEY in result for result in results.values()):
            return {"overall": float(self._cfg.on_error), ERROR_KEY: 1.0}
        first, parts = next(iter(results.values())), self._cfg.parts
        if not parts:
            return first
        total: Result = {"overall": sum(parts[label].weight * result["overall"] for label, result in results.items())}
        total["acc"] = next(first[name] for name in ("acc", "accuracy", "overall") if name in first)
        if EXTRACTED_KEY in first:
            total[EXTRACTED_KEY] = first[EXTRACTED_KEY]
        for label, result in results.items():
            total[label] = result["overall"]
            names = [name for name in result if name not in ("overall", EXTRACTED_KEY)]
            total |= {f"{label}/{name}": result[name] for name in names}
        return total

    def close(self) -> None:
        """Stop all threads and processes."""
        for runner in self._runners.values():
            runner.close()


def with_model_scores(cfg: RewardConfig, results: Sequence[Result], scores: Sequence[float]) -> list[Result]:
    """Return the samples' results (empty dicts when there are none) with the scores of the role `reward_model` added.
    NaN marks a failed sample, which gets `reward.on_error`."""
    label = cfg.of_model
    assert label is not None, "the recipe must name the reward reward_model"
    totals = []
    for result, score in zip(results, scores, strict=True):
        if ERROR_KEY in result:
            totals.append(result)
        elif math.isnan(score):
            assert cfg.on_error != "raise", "the reward model cannot score the sample"
            totals.append({"overall": float(cfg.on_error), ERROR_KEY: 1.0})
        elif not label:
            totals.append({"overall": score})
        else:
            total = result.get("overall", 0.0) + cfg.parts[label].weight * score
            first = {"acc": score} if label == next(iter(cfg.parts)) else {}
            totals.append({**result, **first, "overall": total, label: score})
    return totals


def raise_part_problems(cfg: RewardConfig) -> None:
    """Raise ConfigError for parts whose names are invalid in metrics, for several parts that name the reward model, and
    for a recipe with both `reward.name` or `reward.kwargs`, and parts."""
    for label in cfg.parts:
        if not _LABEL.fullmatch(label) or label in RESERVED_PARTS | _MEANINGS:
            raise ConfigError(
                "a part of the reward cannot have this name",
                where="reward.parts",
                found=label,
                allowed="1 to 64 letters, digits, `_`, `-` and `.`, with a letter of A to Z or a digit first; not "
                f"{', '.join(sorted(RESERVED_PARTS | _MEANINGS))}",
                fix="name it for what it measures, such as accuracy",
            )
    models = [label for label, function in cfg.functions.items() if function.name == BY_MODEL]
    if len(models) > 1:
        raise ConfigError(
            "several parts name the reward model, but a run has only one",
            where="reward.parts",
            found=", ".join(models),
            allowed=f"one part with name: {BY_MODEL}",
            fix="keep one of them, or serve the other model and use the reward http",
        )
    default = type(cfg).model_fields["name"].default
    if cfg.parts and (cfg.name != default or cfg.kwargs):
        key = "name" if cfg.name != default else "kwargs"
        raise ConfigError(
            f"the recipe has both reward.{key} and reward.parts",
            where=f"reward.{key}",
            found=getattr(cfg, key),
            allowed="reward.name and reward.kwargs, or reward.parts",
            fix="move it into a part; on the command line, reward='!replace {parts: {...}}' removes the recipe's",
        )


def place_of_part(label: str) -> str:
    """Return the recipe's section with the reward function of the part `label`: `reward.parts.LABEL`, or `reward` if
    the label is empty because the reward has no parts."""
    return f"{_SECTION}.parts.{label}" if label else _SECTION


def functions_of(config: RunConfig) -> dict[str, RewardConfig]:
    """Return the settings of each reward function of the recipe in the form of the section `reward`, by the section
    that names the function: `reward`, `reward.parts.NAME` or `policies.NAME.reward`."""
    functions = {place_of_part(label): section for label, section in config.reward.functions.items()}
    return functions | {f"policies.{name}.reward": section for name, section in config.policy_rewards.items()}


@contextmanager
def located(place: str) -> Iterator[None]:
    """Relocate the ConfigErrors that the block raises: keys of `reward` in them become keys of the section `place`."""
    try:
        yield
    except ConfigError as error:
        if place == _SECTION:
            raise
        raise _relocated(error, place) from error


def _relocated(error: UserError, place: str) -> ConfigError:
    if isinstance(error, ConfigErrors):
        return ConfigErrors([_relocated(problem, place) for problem in error.problems])
    parts = (error.what, error.where, error.allowed, error.fix)
    problem, where, allowed, fix = (
        text and re.sub(r"(?<!\.)\breward\.(name|kwargs|mode)\b", rf"{place}.\1", text) for text in parts
    )
    return ConfigError(problem or "", where=where, found=error.found, allowed=allowed, fix=fix)
