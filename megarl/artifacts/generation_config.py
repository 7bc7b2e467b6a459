"""generation_config.json of a model: the tokens that end a response, which engines go by. Plain JSON."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.errors import ConfigError

FILE = "generation_config.json"


def end_token_ids(folder: Path) -> list[int]:
    """`eos_token_id` of the file in `folder`: one number or several; empty where it says none, or is not there.

    Raises:
        ConfigError: the file cannot be read, or says something else.
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
