"""How a turn names an action, and how an observation is shown, for environments of other packages."""

from __future__ import annotations

from pydantic import Field

from megarl.envs.protocol import EnvSettings, Observation, Step


class AnswerSettings(EnvSettings):
    """Settings of where in the policy's text an environment of another package finds the action."""

    tag: str | None = Field(
        "action", description="an action is the text in the last `<tag>...</tag>` of a turn; null: the whole turn"
    )
    instructions: str | None = Field(
        None, description="text after the first observation; null: how to write an action; '': nothing"
    )
    invalid_text: str = Field(
        "This is not a valid action.", description="observation after a turn without a valid action"
    )
    invalid_reward: float = Field(
        0.0, description="reward of a turn without a valid action, after which the policy may try again"
    )


def action_text(turn: str, tag: str | None) -> str | None:
    """Return the text of the action in a turn; None: the turn does not have the tags."""
    if tag is None:
        return turn.strip()
    before, closed, _ = turn.rpartition(f"</{tag}>")
    _, opened, text = before.rpartition(f"<{tag}>")
    return text.strip() if closed and opened else None


def how_to_answer(settings: AnswerSettings, form: str) -> str:
    """Return the instructions for the first observation.

    Args:
        form: description of an action, such as `one of left, right`.
    """
    if settings.instructions is not None:
        return settings.instructions
    place = "with nothing but the action" if settings.tag is None else f"with <{settings.tag}>ACTION</{settings.tag}>"
    return f"Answer {place}. An action is {form}."


def invalid_step(settings: AnswerSettings, chat: bool) -> Step:
    """Return the reply to a turn without a valid action."""
    return Step(shown(settings.invalid_text, chat), settings.invalid_reward, False, {"invalid": 1.0})


def shown(text: str, chat: bool) -> Observation:
    """Return an observation: a message of the user where the model has a chat template, else text."""
    return [{"role": "user", "content": text}] if chat else text
