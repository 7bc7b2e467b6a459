"""The tokens that end a response: the tokenizer's end token, those of the model's generation_config.json, and the one
that the chat template writes after a turn. Inference engines that serve the model stop at the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.facts import is_hub_name, local_folder
from megarl.artifacts.model_files import GENERATION_CONFIG, end_token_ids
from megarl.config.data import DataConfig
from megarl.config.model import ModelConfig
from megarl.data.render import uses_chat
from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.turns import after_turn
from megarl.system.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER, _TEMPLATE = "the tokenizer", "the chat template"


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end a response."""

    sources: dict[int, list[str]]  # token id -> where it comes from; the tokenizer's end token is first
    notes: tuple[str, ...] = ()  # further messages for the user, a line each

    @property
    def ids(self) -> list[int]:
        """All end tokens; the tokenizer's is first."""
        return list(self.sources)

    def describe(self, token: Callable[[int], str]) -> str:
        """Return one line with the text, the id and the sources of every token."""
        parts = [f"{token(number)} ({number}: {', '.join(names)})" for number, names in self.sources.items()]
        return f"a response ends at {' or '.join(parts)}"


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig) -> EndTokens:
    """Return the tokens that end a response of `model`.

    A token of generation_config.json counts if the tokenizer is the model's own or the token is special in it: in
    another tokenizer the number may mean a letter.
    """
    sources, notes = {int(tokenizer.eos_token_id): [_TOKENIZER]}, list[str]()
    models_own = model.tokenizer in (None, model.path)
    for number in _of_generation_config(model.path):
        if number < len(tokenizer) and (models_own or is_special(tokenizer, number)):
            sources.setdefault(number, []).append(GENERATION_CONFIG)
        else:
            why = "is not special in model.tokenizer" if number < len(tokenizer) else "is not in the tokenizer"
            notes.append(f"{GENERATION_CONFIG} ends a response at token {number}, which {why}: the token is not used")
    if uses_chat(data, bool(tokenizer.chat_template)):
        turn, text = turn_end(tokenizer, data)
        if turn is not None:
            sources.setdefault(turn, []).append(_TEMPLATE)
        elif text is not None:
            notes.append(
                f"WARNING: the chat template ends a turn with {text[:40]!r}, which begins with no special token: no "
                "response ends there. To end responses there, add the ids of such tokens to "
                "rollout.sampling.stop_token_ids"
            )
    return EndTokens(sources, tuple(notes))


def turn_end(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> tuple[int | None, str | None]:
    """Return the special token that the chat template writes after the assistant's turn, and the text that begins with
    it. (None, text): the text begins with no special token. (None, None): the template cannot write the example
    conversation, or changes its text."""
    render = chat_renderer(tokenizer, data.override_chat_template, more=data.chat_template_kwargs, date=data.date)
    try:
        text = after_turn(lambda messages: render(messages, Row({}, "an example", 0)))
    except DataError:  # raised by a template that accepts only one question
        return None, None
    if text is None:
        return None, None
    # Llama 2's template writes a space before the end token.
    ids: list[int] = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"]
    return (ids[0] if ids and is_special(tokenizer, ids[0]) else None), text


def is_special(tokenizer: PreTrainedTokenizerBase, number: int) -> bool:
    """Return whether the token is special in the tokenizer."""
    added: Any = tokenizer.added_tokens_decoder.get(number)
    return number in tokenizer.all_special_ids or bool(getattr(added, "special", False))


def _of_generation_config(path: str | None) -> list[int]:
    if path is None:
        return []
    folder = local_folder(path)
    if folder is not None and (folder / GENERATION_CONFIG).is_file():
        return end_token_ids(folder)
    if not is_hub_name(path) or (folder is not None and any(folder.glob("*.safetensors"))):
        return []  # a folder with the weights would also have this file, if the model had one
    from huggingface_hub import hf_hub_download

    try:
        return end_token_ids(Path(hf_hub_download(path, GENERATION_CONFIG)).parent)
    except OSError:  # errors of the hub are OSErrors, too: the model has no such file, or the hub cannot be reached
        return []
