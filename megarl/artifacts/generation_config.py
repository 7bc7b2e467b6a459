"""generation_config.json of a model, plain JSON: the tokens that end a response in all engines."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.errors import ConfigError

FILE = "generation_config.json"


def end_token_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of the file in `folder` as a list; empty if it or the file is missing.

    Raises:
        ConfigError: the file cannot be read, or the value has another type.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        said = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the model's {FILE} cannot be read: {error}",
            where=str(file),
            fix="correct it, or copy or download the model again",
        ) from error
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0]:
        raise ConfigError(
            "an end token is no token id",
            where=f"{file}: eos_token_id",
            found=wrong[0],
            allowed="an integer >= 0, or a list of them",
            fix="correct it",
        )
    return list(ids)
