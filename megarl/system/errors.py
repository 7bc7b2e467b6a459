"""Errors that reach the user: one message with the problem, its place, the allowed values and the fix."""

from __future__ import annotations

import difflib
import errno
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from megarl.system.credentials import hide, mask

T = TypeVar("T")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|failed to map segment|bad_alloc"
    r"|\bMemoryError\b",
    re.IGNORECASE,
)


class MegarlError(Exception):
    """The base of all errors that this package raises on purpose. `exit_code` is the exit code of the command.

    `repeats` means that a resumed run would raise the error again, so the run is not restarted.
    """

    exit_code = 1
    repeats = False

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))


class UserError(MegarlError):
    """An error in the user's input. The message is built from the arguments, so that no part of it is forgotten.

    Args:
        what: the problem in one sentence.
        where: file, line, or dotted configuration key.
        found: the offending value.
        allowed: the legal values, or a sentence that describes them.
        fix: a remedy.
    """

    exit_code = 2
    repeats = True

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        allowed: str | Iterable[object] | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.found, self.fix = what, where, found, fix
        self.allowed = allowed if allowed is None or isinstance(allowed, str) else ", ".join(str(a) for a in allowed)
        lines = [f"{where}: {what}" if where else what]
        if found is not None:
            key = (where or "").rpartition(".")[2]
            shown = hide({key: found})[0][key]
            # Booleans are written as in YAML: true, not True.
            lines.append(f"  found:   {str(shown).lower() if isinstance(shown, bool) else repr(shown)}")
        if self.allowed is not None:
            lines.append(f"  allowed: {self.allowed}")
        if fix is not None:
            lines.append(f"  fix:     {fix}")
        super().__init__(mask("\n".join(lines)))


def relative_path_fix() -> str:
    """Return the fix for a path that does not exist; it names the folder that relative paths start from."""
    return f"check the path; relative paths start at {Path.cwd()}"


class ConfigError(UserError):
    """A configuration key, value, or combination of values is wrong."""


class UnavailableError(ConfigError):
    """A configured resource is missing (devices, memory, a port, a cluster), and may become available again."""

    repeats = False


class DataError(UserError):
    """A data file, row or column is wrong; `where` names file and line."""


class RewardError(UserError):
    """A reward function raised or returned something that is not a finite number; the message names the sample."""


class WorkerError(MegarlError):
    """A worker process failed. The message names rank and phase."""


class ServerError(MegarlError):
    """A generation server could not be reached, was too slow, or rejected a call.

    Args:
        server: the server's name.
        url: the address that was called; empty if the server has no address yet.
        phase: phase of the call.
        reason: the error, in one clause.
        status: the HTTP status when there was a reply.
    """

    def __init__(self, server: str, url: str, phase: str, reason: str, *, status: int | None = None) -> None:
        self.server, self.url, self.phase, self.reason, self.status = server, url, phase, reason, status
        super().__init__(mask(f"{server}{f' at {url}' if url else ''}: {phase}: {reason}"))


def describe(error: BaseException) -> str:
    """Return type and text of an exception, even when a user's exception has a `__str__` that raises.

    >>> describe(ValueError("no")), describe(ValueError())
    ('ValueError: no', 'ValueError')
    """
    return f"{type(error).__name__}: {text_of(error)}".rstrip(": ")


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even when its `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"its text cannot be shown, because its __str__ raises {type(broken).__name__}"


def is_full(error: BaseException) -> bool:
    """Return whether an error only means that a disk, or the user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def means_out_of_memory(kind: str, message: str) -> bool:
    """Return whether an exception of class `kind` with this message means that host or device memory ran out.

    >>> means_out_of_memory("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), means_out_of_memory("A", "")
    (True, False)
    """
    return kind in {"MemoryError", "OutOfMemoryError"} or _OUT_OF_MEMORY.search(message) is not None


def no_room(run_dir: Path) -> UserError:
    """Return the error for a full disk to which the run writes."""
    free = {folder: shutil.disk_usage(folder).free / 1e9 for folder in (run_dir, Path(tempfile.gettempdir()))}
    return UserError(
        "a disk to which the run writes is full",
        where=str(run_dir),
        found=", ".join(f"{size:.3g} GB free in {folder}" for folder, size in free.items()),
        fix="free some space, then start the same command with this --run-dir: the run continues from its newest "
        "checkpoint",
    )


def close_matches(word: str, options: Iterable[str], n: int = 1, cutoff: float = 0.75) -> list[str]:
    """Return up to `n` options that a misspelt `word` may stand for, best first; empty when no option is close.

    One wrong, missing or swapped letter in four is close. Others are not returned, because a wrong guess is worse than
    none.

    >>> close_matches("gpro", ["grpo", "ppo"]), close_matches("mean", ["max", "min"])
    (['grpo'], [])
    """
    return difflib.get_close_matches(word, list(options), n, cutoff)


def shortened(text: str, limit: int = 120) -> str:
    """Return a text, cut to `limit` characters.

    >>> shortened("x" * 10, 8)
    'xxxxx...'
    """
    return text if len(text) <= limit else text[: limit - 3] + "..."


_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]")


def printable(text: str) -> str:
    """Return a text for a terminal, with control characters and changes of the writing direction as escapes.

    >>> print(printable("a\\x1b[31mb\\u202e\\n"), end="")
    a\\x1b[31mb\\u202e
    """
    return _CONTROLS.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> count(1, "process"), count(2, "process"), count(0, "rank")
    ('1 process', '2 processes', '0 ranks')
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return a duration in at most six characters.

    >>> [duration(x) for x in (7, 125, 5000, 200_000)]
    ['7 s', '2 min', '1h23', '2d07h']
    """
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def choose(table: Mapping[str, T], name: str, what: str, *, where: str) -> T:
    """Return the entry of `table` called `name`. Raise ConfigError with the problem `what` at the dotted key `where` if
    the table does not have it.

    >>> choose({"half": 0.5}, "half", "unknown number", where="a.b")
    0.5
    """
    if name in table:
        return table[name]
    near = close_matches(str(name), table)
    raise ConfigError(what, where=where, found=name, allowed=table, fix=f"did you mean {near[0]!r}?" if near else None)


def close_files(name: str, siblings: Iterable[str]) -> list[str]:
    """Return the file that a misspelt `name` may stand for. Suffixes are not compared: many files share them.

    >>> close_files("trian.jsonl", ["train.jsonl", "b.jsonl"]), close_files("a.jsonl", ["b.jsonl"])
    (['train.jsonl'], [])
    """
    # Leave out a file of exactly this name: it exists but cannot be used, such as a pipe.
    by_stem = {Path(sibling).stem: sibling for sibling in siblings if sibling != Path(name).name}
    return [by_stem[stem] for stem in close_matches(Path(name).stem, by_stem)]


def encoding_fix(content: bytes, name: str) -> str:
    """Return the fix for the file `name`, which is not UTF-8; `content`: its first or its invalid bytes.

    >>> encoding_fix("a".encode("utf-16"), "t.csv")
    'it looks like UTF-16: iconv -f UTF-16 -t UTF-8 t.csv > t.utf8.csv, or save it as UTF-8'
    """
    if content.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        encoding = "UTF-32"
    elif content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in content:
        encoding = "UTF-16"
    else:
        encoding = "WINDOWS-1252"
    path = Path(name)
    other = path.with_name(f"{path.stem}.utf8{path.suffix}")
    kind = "Latin-1 or Windows-1252" if encoding == "WINDOWS-1252" else encoding
    return f"it looks like {kind}: iconv -f {encoding} -t UTF-8 {name} > {other}, or save it as UTF-8"
