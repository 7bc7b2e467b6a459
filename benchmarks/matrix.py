"""A matrix of `megarl bench`: every combination of named settings, one of each axis.

    rounds: 3                          # of every combination, in turn; --rounds replaces it
    steps: 5                           # counted steps; null: the case's; --steps replaces it
    limit_s: 7200                      # seconds after which a run has failed; null: six hours; --limit-s replaces it
    axes:
      model:  {S: {case: S}}           # name: what it sets
      layout:
        data parallel: {nproc: 2}
        tensor parallel: {nproc: 2, actor.parallel.tp: 2}
      dtype:  {fp32: {dtype: fp32}, bf16: {dtype: bf16}}

A name sets `case`, `dtype`, `nproc` and `threads`, as the arguments of `megarl bench`, and keys of the recipe; one axis
sets the case of every combination, and no two axes set the same key. Combinations that the recipe's checks refuse are
left out with the reason before anything runs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.benchmarks.throughput import MATRICES, matrix_names
from megarl.config.yamlio import read_yaml
from megarl.system.errors import ConfigError, UserError, close_matches

_WORDS = ("case", "dtype", "nproc", "threads")
_KEYS = ("rounds", "steps", "limit_s", "axes")
_ROUNDS = 3


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        labels: names by axis; empty for a case without a matrix.
        shape: arguments of `megarl bench` that measure it.
        refused: why it cannot run; None: the checks found no problem.
    """

    shape: Sequence[str]
    labels: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None

    @property
    def name(self) -> str:
        """The names of its settings."""
        return ", ".join(self.labels.values())


@dataclass(frozen=True)
class Matrix:
    """The content of a matrix file.

    Attributes:
        rounds: rounds of every combination.
        steps: counted steps; None: the case's own.
        limit_s: seconds of a run, at most; None: `run_case`'s own.
        axes: settings by name, by axis.
    """

    name: str
    rounds: int
    steps: int | None
    limit_s: float | None
    axes: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def cells(self, overrides: Sequence[str] = (), options: Sequence[str] = (), *, starts: bool) -> list[Cell]:
        """Return all combinations, the last axis fastest.

        Args:
            overrides: `key.path=value` of all of them, over their own.
            options: further arguments of a round.
            starts: they run on this machine; otherwise its hardware is not checked.
        """
        made = []
        for names in itertools.product(*self.axes.values()):
            labels = dict(zip(self.axes, names, strict=True))
            settings: dict[str, Any] = {}
            for axis, name in labels.items():
                settings |= self.axes[axis][name]
            words = {word: settings[word] for word in _WORDS if word in settings}
            keys = [f"{key}={_as_text(value)}" for key, value in settings.items() if key not in words]
            keys += overrides
            refused = refusal(words, keys, starts=starts)
            arguments = [text for word, value in words.items() for text in (f"--{word}", str(value))]
            made.append(Cell([*arguments, *options, *keys], labels, refused))
        return made


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def refusal(words: Mapping[str, Any], overrides: Sequence[str], *, starts: bool) -> str | None:
    """Return the reason why the checks refuse a run with these settings, in one line; None: they do not."""
    from megarl.benchmarks.measure import settle
    from megarl.checks.recipe import check_config
    from megarl.system.machine import this_machine

    try:
        config, _ = settle(overrides=overrides, **words)
        checked = check_config(config, launcher=config.launch.launcher, machine=this_machine(), starts=starts)
    except UserError as error:
        return _one_line(error)
    failed = [check.problem() for check in checked.items if check.status == "fail"]
    return _one_line(failed[0]) if failed else None


def _one_line(error: UserError) -> str:
    value = "" if error.found is None else f" (found {error.found!r})"
    return " ".join(f"{error.where}: {error.what}{value}".split())


def read_matrix(name: str) -> Matrix:
    """Return a shipped matrix, or that of a file.

    Raises:
        UserError: `name` is neither a shipped matrix nor a file, or the file is invalid.
    """
    shipped = matrix_names()
    path = MATRICES / f"{name}.yaml" if name in shipped else Path(name)
    if not path.is_file():
        near = close_matches(name, shipped)
        raise UserError(
            "unknown matrix",
            where="--matrix",
            found=name,
            allowed=f"{', '.join(shipped)}, or a file",
            fix=f"did you mean {near[0]}?" if near else None,
        )
    data = read_yaml(path).data
    if unknown := [key for key in data if key not in _KEYS]:
        raise ConfigError("unknown key of a matrix", where=str(path), found=unknown[0], allowed=_KEYS)
    axes = data.get("axes")
    if not isinstance(axes, dict) or not axes:
        raise ConfigError(
            "the matrix has no axes", where=f"{path}: axes", found=axes, allowed="settings by name, by axis"
        )
    for axis, named in axes.items():
        _check_axis(f"{path}: axes.{axis}", named)
    _check_together(path, axes)
    rounds, steps, limit_s = data.get("rounds", _ROUNDS), data.get("steps"), data.get("limit_s")
    for key, value in (("rounds", rounds), ("steps", steps), ("limit_s", limit_s)):
        if not (_is_count(value) or (value is None and key != "rounds")):
            raise ConfigError(f"invalid {key}", where=f"{path}: {key}", found=value, allowed="an integer of at least 1")
    return Matrix(path.stem, rounds, steps, limit_s, axes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_together(path: Path, axes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Check that every combination has a case, and that no setting replaces that of another axis."""
    keys = {axis: {key for settings in named.values() for key in settings} for axis, named in axes.items()}
    for first, second in itertools.combinations(axes, 2):
        for key, again in itertools.product(sorted(keys[first]), sorted(keys[second])):
            if key == again or key.startswith(f"{again}.") or again.startswith(f"{key}."):
                where = f"{path}: axes.{second}"
                fix = "set it in one axis only, with a name for each value"
                raise ConfigError(f"axis {first} sets {key} as well", where=where, found=again, fix=fix)
    with_case = [axis for axis in axes if "case" in keys[axis]]
    if not with_case:
        raise ConfigError(
            "no axis sets a case",
            where=f"{path}: axes",
            fix="add `case` to the settings of one axis, such as `S: {case: S}`",
        )
    for name, settings in axes[with_case[0]].items():
        if "case" not in settings:
            where = f"{path}: axes.{with_case[0]}.{name}"
            raise ConfigError(
                "these settings have no case, but others of the axis have one", where=where, fix="add `case: ...`"
            )


def _check_axis(where: str, named: Any) -> None:
    if not isinstance(named, dict) or not named:
        raise ConfigError("the axis has no settings by name", where=where, found=named, allowed="{name: {KEY: VALUE}}")
    for name, settings in named.items():
        if not isinstance(name, str):
            raise ConfigError("the name of these settings is not text", where=where, found=name, fix="put it in quotes")
        if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
            allowed = f"{{KEY: VALUE}} with the keys {', '.join(_WORDS)} and those of a recipe"
            raise ConfigError(
                "the settings are not a mapping of keys", where=f"{where}.{name}", found=settings, allowed=allowed
            )
        for word in _WORDS:
            is_text = word in ("case", "dtype")
            if word in settings and not (isinstance(settings[word], str) if is_text else _is_count(settings[word])):
                allowed = "text" if is_text else "an integer of at least 1"
                raise ConfigError(
                    f"invalid {word}", where=f"{where}.{name}.{word}", found=settings[word], allowed=allowed
                )
