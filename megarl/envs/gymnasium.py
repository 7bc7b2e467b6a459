"""Environments of the package gymnasium as text: the policy writes actions and reads observations.

<action>right</action>  -> Discrete: 2  -> env.step(2) -> the rendered text, or the observation as JSON
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal

from pydantic import Field

from megarl.envs.answers import AnswerSettings, action_text, how_to_answer, invalid_step, shown
from megarl.envs.protocol import Action, Environment, Observation, Services, Step
from megarl.system.errors import ConfigError, describe

_DIGITS = 6  # decimals of numbers in observations
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")


class GymnasiumSettings(AnswerSettings):
    """The keys of the section `env` that only the environment `gymnasium` has."""

    id: str = Field(description="name of the environment, as in gymnasium.make: FrozenLake-v1, or my_package:MyGame-v0")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="further arguments of gymnasium.make")
    observation: Literal["auto", "render", "value"] = Field(
        "auto",
        description="what the policy reads. render: the text that the render mode `ansi` draws; value: the "
        "observation, text as it is and numbers as JSON; auto: render where the environment has that mode",
    )
    actions: dict[str, Any] = Field(
        default_factory=dict, description="words for actions, such as {left: 0, right: 2}; others are then invalid"
    )


class Gymnasium(Environment):
    """Plays an episode of an environment of gymnasium."""

    Settings = GymnasiumSettings
    replayable: ClassVar[bool] = True  # an episode whose replay gives other replies begins again

    _game: Any = None

    @classmethod
    def check(cls, settings: GymnasiumSettings) -> None:
        """Make the environment once, and check that text can name all of its actions."""
        game = _make(settings)
        try:
            _check_space(game.action_space)
            for word, value in settings.actions.items():
                if _converted(game.action_space, value) is None:
                    raise ConfigError(
                        "the environment has no such action",
                        where=f"env.actions.{word}",
                        found=value,
                        allowed=str(game.action_space),
                        fix="correct the value",
                    )
        finally:
            game.close()

    @classmethod
    def open_with(cls, settings: GymnasiumSettings, services: Services | None) -> bool:
        """Return whether observations are messages."""
        return services is not None and services.template is not None

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin an episode with the row's `seed`, if it has one."""
        self._game = _make(self.settings)
        value, _ = self._game.reset(seed=int(row.get("seed", seed)) % 2**31)
        form = (
            f"one of {', '.join(self.settings.actions)}"
            if self.settings.actions
            else action_form(self._game.action_space)
        )
        instructions = how_to_answer(self.settings, form)
        return shown(self._view(value) + (f"\n\n{instructions}" if instructions else ""), self.shared)

    def step(self, action: Action) -> Step:
        """Act. A turn without a valid action changes nothing."""
        text = action_text(action.text, self.settings.tag)
        value = None if text is None else self._action(text)
        if value is None:
            return invalid_step(self.settings, self.shared)
        seen, reward, terminated, truncated, _ = self._game.step(value)
        info = {"invalid": 0.0, "terminated": float(terminated), "truncated": float(truncated)}
        if terminated or truncated:
            self.discard()
            return Step(None, float(reward), True, info)
        return Step(shown(self._view(seen), self.shared), float(reward), False, info)

    def discard(self) -> None:
        """Close the environment."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _action(self, text: str) -> Any:
        """Return the action that a text names; None: it names no action."""
        if self.settings.actions:
            words = {word.lower(): value for word, value in self.settings.actions.items()}
            return _converted(self._game.action_space, words[text.lower()]) if text.lower() in words else None
        if type(self._game.action_space).__name__ == "Text":
            return text if self._game.action_space.contains(text) else None
        try:
            return _converted(self._game.action_space, json.loads(text))
        except (ValueError, RecursionError):
            return None

    def _view(self, value: Any) -> str:
        """Return an observation as text for the policy."""
        how = self.settings.observation
        if how == "auto":
            how = "render" if self._game.render_mode == "ansi" else "value"
        if how == "value":
            return value if isinstance(value, str) else json.dumps(_plain(value))
        drawn = self._game.render()
        return _without_colours(drawn if isinstance(drawn, str) else drawn.getvalue()).strip("\n")


def _make(settings: GymnasiumSettings) -> Any:
    """Return a new environment. Raise ConfigError if it cannot be made."""
    try:
        import gymnasium  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"the package gymnasium cannot be imported: {error}", where="env.name", fix="pip install '.[gymnasium]'"
        ) from error
    try:
        game = gymnasium.make(settings.id, **settings.kwargs)
        if settings.observation == "value" or game.render_mode == "ansi":
            return game
        if game.render_mode is None and "ansi" in game.metadata.get("render_modes", ()):
            game.close()
            return gymnasium.make(settings.id, render_mode="ansi", **settings.kwargs)
    except Exception as error:  # gymnasium's own errors, and whatever the constructor raises
        raise ConfigError(
            f"gymnasium cannot make this environment: {describe(error)}",
            where="env.id",
            found=settings.id,
            fix="correct env.id or env.kwargs, or install the package that registers it",
        ) from error
    if settings.observation == "render":
        # A game that can draw text does so, unless `env.kwargs` chooses another render mode.
        chosen = "ansi" in game.metadata.get("render_modes", ())
        raise ConfigError(
            "this environment draws no text",
            where="env.observation",
            found="render",
            allowed="auto, value, or an environment with the render mode ansi",
            fix=f"set env.observation=value{', or remove render_mode from env.kwargs' if chosen else ''}",
        )
    return game


def _check_space(space: Any) -> None:
    """Raise ConfigError for a space whose actions cannot be written as JSON."""
    kind = type(space).__name__
    if kind in ("Tuple", "Dict"):
        for part in space.spaces.values() if kind == "Dict" else space.spaces:
            _check_space(part)
    elif kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text"):
        raise ConfigError(
            "actions of this space cannot be written as text",
            where="env.id",
            found=str(space),
            allowed="Discrete, Box, MultiDiscrete, MultiBinary, Text, and Tuple and Dict of them",
            fix="wrap the environment in a class derived from megarl.envs.Environment, and name it in env.name",
        )


def action_form(space: Any) -> str:
    """Return a description of the space's actions for the policy."""
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    return "a text" if kind == "Text" else f"JSON of {space}"


def _converted(space: Any, value: Any) -> Any:
    """Return JSON data as an action of the space; None: the data is no action of the space."""
    import numpy

    kind = type(space).__name__
    action: Any
    try:
        if kind == "Discrete":
            whole = isinstance(value, int) and not isinstance(value, bool)
            action = int(value) if whole and space.start <= value < space.start + space.n else None
        elif kind == "Dict":
            parts = {key: _converted(part, value[key]) for key, part in space.spaces.items()}
            action = None if any(part is None for part in parts.values()) or len(value) != len(parts) else parts
        elif kind == "Tuple":
            pieces = tuple(_converted(part, item) for part, item in zip(space.spaces, value, strict=True))
            action = None if any(piece is None for piece in pieces) else pieces
        elif kind == "Text":
            action = value
        else:
            given = numpy.asarray(value)
            fits = given.shape == space.shape and given.dtype.kind in ("iuf" if kind == "Box" else "iu")
            action = given.astype(space.dtype) if fits else None
            if fits and space.dtype.kind in "iu" and not numpy.array_equal(action, given):
                action = None  # the cast has wrapped or cut off a number
        return action if action is not None and space.contains(action) else None
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def _plain(value: Any) -> Any:
    """Return an observation as JSON data, with numbers rounded to six decimals."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def _without_colours(text: str) -> str:
    """Return drawn text with `[...]` in place of a background colour, which marks a place, and without other codes."""
    pieces, marked, last = [], False, 0
    for code in _COLOUR.finditer(text):
        pieces.append(text[last : code.start()])
        last = code.end()
        background = any(part[:1] == "4" and part[1:].isdigit() for part in code[1].split(";"))
        if background != marked:
            pieces.append("[" if background else "]")
            marked = background
    return "".join(pieces) + text[last:]
