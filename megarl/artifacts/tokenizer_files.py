"""Names of the files that a tokenizer consists of. No transformers."""

from __future__ import annotations

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
