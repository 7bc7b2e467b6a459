"""Files beside a model's weights: those of its tokenizer, and generation_config.json. Read without transformers."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.errors import ConfigError

#: Names of the files that a tokenizer may consist of.
TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "*.model", "tekken.json", "tokenization*.py"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*.jinja"),
)
# One of these holds the tokens, or names the code that builds them.
_TOKENS = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")


def check_tokenizer_files(folder: Path, key: str) -> None:
    """Refuse a folder without a tokenizer, for which transformers would invent one with a few tokens. `key` names it.

    Raises:
        ConfigError: names the folder.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENS):
        raise ConfigError(
            "there are no files of a tokenizer in this folder",
            where=key,
            found=str(folder),
            allowed="a folder with tokenizer.json, or another form of a tokenizer that transformers reads",
            fix="copy them from the model that it was made of, or set model.tokenizer to that model",
        )


GENERATION_CONFIG = "generation_config.json"


def end_token_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of the file in `folder` as a list; empty if it or the file is missing.

    Raises:
        ConfigError: the file cannot be read, or the value has another type.
    """
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the model's {GENERATION_CONFIG} cannot be read: {error}",
            where=str(file),
            fix="correct it, or copy or download the model again",
        ) from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0]:
        raise ConfigError(
            "an end token is no token id",
            where=f"{file}: eos_token_id",
            found=wrong[0],
            allowed="an integer >= 0, or a list of them",
            fix="correct it",
        )
    return list(ids)
