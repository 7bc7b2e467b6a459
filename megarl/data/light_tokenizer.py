"""The tokenizer for checks before a run, without transformers, whose import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.artifacts.facts import local_folder
from megarl.config.model import ModelConfig
from megarl.data.tokenizer import CHARS, SPECIAL_TOKENS, WORDS

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


class WrittenTokenizer:
    """A tokenizer that a recipe writes out itself: `tokenizer.character_tokenizer` or `word_tokenizer`."""

    bos_token_id, unk_token_id = 1, 3
    has_chat_template = False

    def __init__(self, name: str) -> None:
        kind, _, text = name.partition(":")
        self._split: Callable[[str], Sequence[str]] = str.split if f"{kind}:" == WORDS else list
        self._ids = {token: number for number, token in enumerate(self._split(text), len(SPECIAL_TOKENS))}

    def __call__(self, text: str | Sequence[str], **settings: Any) -> dict[str, Any]:
        """Return `input_ids` of a text, or of each text of a list."""
        if isinstance(text, str):
            return {"input_ids": [self._ids.get(token, self.unk_token_id) for token in self._split(text)]}
        return {"input_ids": [self(part)["input_ids"] for part in text]}


class FileTokenizer:
    """The tokenizer.json of a folder, read by the `tokenizers` package."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        # transformers sets padding and truncation in each call and ignores the file's; by default there is neither.
        self._backend.no_padding()
        self._backend.no_truncation()
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.bos_token_id, self.unk_token_id = (self._id(config.get(f"{kind}_token")) for kind in ("bos", "unk"))
        self.has_chat_template = _has_chat_template(folder)

    def _id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        number: int | None = self._backend.token_to_id(text) if isinstance(text, str) else None
        return number

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **settings: Any
    ) -> dict[str, Any]:
        """Return `input_ids` of a text, or of each text of a list."""
        if isinstance(text, str):
            return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}
        batch = self._backend.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in batch]}


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))


def chat_template_of(model: ModelConfig) -> str | None:
    """Return the text of a local model's chat templates, joined; None if the model is not on this machine or only
    transformers can read its templates."""
    folder = local_folder(model.tokenizer or model.path or "")
    if folder is None or (folder / "additional_chat_templates").exists():
        return None
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        file = next(f for name in ("chat_template.json", "tokenizer_config.json") if (f := folder / name).is_file())
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        return template if isinstance(template, str) else "".join(each["template"] for each in template)
    # the workers read the whole tokenizer and report its errors
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return None


LightTokenizer = WrittenTokenizer | FileTokenizer


def light_tokenizer(model: ModelConfig) -> LightTokenizer | None:
    """Return the tokenizer of `model`; None if it is not on this machine, or only transformers can read it."""
    name = model.tokenizer or model.path
    if name is None or model.trust_remote_code:
        return None
    if name.startswith((CHARS, WORDS)):
        return WrittenTokenizer(name)
    folder = local_folder(name)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        return FileTokenizer(folder)
    except Exception:  # the package raises plain exceptions; the workers report the error
        return None


def brings_chat_template(model: ModelConfig) -> bool | None:
    """Return whether the tokenizer of `model` has a chat template; None if its files are not on this machine or cannot
    be read."""
    name = model.tokenizer or model.path
    if name is None:
        return None
    if name.startswith((CHARS, WORDS)):
        return False
    folder = local_folder(name)
    try:
        return None if folder is None else _has_chat_template(folder)
    except (OSError, ValueError, AttributeError):  # a broken tokenizer_config.json: the workers report the error
        return None
