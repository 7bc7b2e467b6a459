"""What can be known about the rows of a run before its workers start: files are read, columns are looked for.

Only local files of moderate size are read, in the launcher, where an error costs a second instead of a start-up.
Everything else (hub names, functions, large files, token counts) is checked by the workers.
"""

from __future__ import annotations

from pathlib import Path

from megarl.config.checks_files import trains_supervised
from megarl.config.run import RunConfig
from megarl.data.sources import SUFFIXES, TEXT, load_rows

_READ_BYTES = 32 << 20  # per source; about a second of JSON


def check_rows(config: RunConfig, job: str) -> None:
    """Read the rows that `job` (train, sft, eval, generate) needs, and look for the columns that are asked for.

    Raises:
        DataError: a broken file, no rows, or a missing column; file and line are named.
    """
    data = config.data
    columns = [("data.prompt_key", data.prompt_key)]
    if data.answer_key is not None:
        columns.append(("data.answer_key", data.answer_key))
    _check(data.val_files, columns)
    if job in ("eval", "generate"):
        return
    supervised, examples = trains_supervised(config, job), config.sft.train_files
    answered = [*columns, ("sft.response_key", config.sft.response_key)]
    _check(data.train_files, answered if supervised and not examples else columns)
    if supervised and examples:
        _check(examples, answered)


def _check(sources: list[str], columns: list[tuple[str, str]]) -> None:
    for source in sources:
        if _is_readable_here(source):
            for row in load_rows(source):
                for key, name in columns:
                    row.column(name, key)


def _is_readable_here(source: str) -> bool:
    """True for a file, or a folder of files, that is read quickly."""
    if source.startswith(TEXT):
        return True
    path = Path(source).expanduser()
    if path.is_file():
        return path.stat().st_size <= _READ_BYTES
    if not path.is_dir() or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return False
    files = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
    return sum(file.stat().st_size for file in files) <= _READ_BYTES
