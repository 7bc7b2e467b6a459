"""Read rows of data from files, folders, hub datasets and Python functions; each row keeps its place of origin."""

from __future__ import annotations

import collections
import contextlib
import csv
import inspect
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.pipes import is_special
from megarl.config.data import DataConfig
from megarl.data.rows import MAX_DEPTH, PROMPT, Row, make_row, without_nulls
from megarl.system.errors import (
    ConfigError,
    DataError,
    UserError,
    close_files,
    close_matches,
    describe,
    encoding_fix,
    relative_path_fix,
    text_of,
)
from megarl.system.imports import import_module

if TYPE_CHECKING:
    import pyarrow


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FORMS = (
    "a .jsonl, .json, .csv or .parquet file, a folder of them, folder@split, a hub name org/name@split or "
    "org/name:config@split, pkg.mod:fn, or text:<the prompt itself>"
)
TEXT = "text:"
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # column separators of tables that are not csv
#: Metadata files that the `datasets` package writes beside the data.
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json")
#: Suffixes of data files that are not supported.
_OTHER_FORMS = (".ndjson", ".jsonlines", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xls", ".pkl")
_AT_ONCE = 1024  # rows of a parquet file that are converted together
_ROWS_ASKED = 200  # maximum number of training rows, from the first on, whose system messages are compared
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
#: The name of a data set on the hub.
HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>.+))?")
_SPLIT_IN_NAME = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?:[^a-z]|$)")


def load_rows(source: str, kwargs: Mapping[str, Any] | None = None) -> list[Row]:
    """Read all rows of one source, in order.

    Args:
        source: any form of data.train_files, see FORMS. Csv values are text; other forms keep numbers, lists and dicts.
        kwargs: keyword arguments for a pkg.mod:fn source; arguments that the function does not take are left out.
    """
    rows = list(_rows(source, kwargs or {}))
    if not rows:
        raise DataError("the source has no rows", where=source, fix="write rows to it, or name another source")
    return rows


def first_rows(source: str, count: int, kwargs: Mapping[str, Any] | None = None) -> list[Row]:
    """Read the first `count` rows of one source like `load_rows`, or all if it has fewer; none is no error. The rest
    of a .jsonl, .csv or .parquet file is not read.
    """
    return list(itertools.islice(_rows(source, kwargs or {}), count))


def _rows(source: str, kwargs: Mapping[str, Any]) -> Iterable[Row]:
    if source.startswith(TEXT):
        # invalid UTF-8 on the command line becomes surrogates
        named = source[:80].encode("utf-8", "backslashreplace").decode()
        return [make_row({"prompt": source.removeprefix(TEXT), "data_source": "text"}, named, 1, PROMPT)]
    path = Path(source).expanduser()
    folder, _, split = source.rpartition("@")
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_file(path)
    if _FUNCTION.fullmatch(source):
        return _call(source, kwargs)
    if folder and Path(folder).expanduser().is_dir():
        return _read_dataset(source, str(Path(folder).expanduser()), None, split)
    if path.suffix.lower() not in SUFFIXES and (match := HUB.fullmatch(source)):
        return _read_dataset(source, match["name"], match["config"], match["split"] or "train")
    raise _missing(path)


def as_prompts(data: DataConfig, texts: Sequence[str]) -> DataConfig:
    """Return the settings with `texts` as the held-out prompts, without reference answers."""
    changes = {"val_files": [TEXT + text for text in texts], "prompt_key": "prompt", "answer_key": None}
    changes["val_split"] = None
    return data.model_copy(update={**changes, "max_val_samples": None})


def system_messages(data: DataConfig) -> set[str]:
    """Return the distinct system messages of the first training rows; "" stands for a row without one.

    Return an empty set for data from the hub, which would have to be downloaded, and for unreadable data.
    """
    for source in data.train_files[:1]:
        with contextlib.suppress(UserError):
            if is_function(source) or Path(source).expanduser().exists():
                messages = set()
                for row in first_rows(source, _ROWS_ASKED, {**data.loader_kwargs, "split": "train"}):
                    prompt = row.column(data.prompt_key, "data.prompt_key")
                    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else {}
                    messages.add(str(first.get("content", "")) if first.get("role") in ("system", "developer") else "")
                return messages
    return set()


def check_loader_kwargs(config: DataConfig, more: Sequence[str] = ()) -> None:
    """Raise an error for data.loader_kwargs that no pkg.mod:fn source takes, since they would be ignored.

    Args:
        more: further sources that get the same arguments, such as sft.train_files.
    """
    if not config.loader_kwargs:
        return
    known: dict[str, None] = {}
    for source in dict.fromkeys([*config.train_files, *config.val_files, *more]):
        if is_function(source):
            parameters = inspect.signature(_import(source)).parameters.values()
            if any(p.kind is p.VAR_KEYWORD for p in parameters):
                return
            known.update(dict.fromkeys(p.name for p in parameters))
    for name in config.loader_kwargs:
        if name not in known:
            near = close_matches(name, known)
            raise ConfigError(
                "no data source takes this argument",
                where=f"data.loader_kwargs.{name}",
                allowed=known or "nothing: no source is a pkg.mod:fn with arguments",
                fix=f"did you mean {near[0]!r}?"
                if near
                else "remove it; loader_kwargs: !replace {} removes those of the recipe that yours extends",
            )


def is_function(source: str) -> bool:
    """Return whether a source has the form `pkg.mod:fn`."""
    return not source.startswith(TEXT) and _FUNCTION.fullmatch(source) is not None and not Path(source).exists()


# -- files -------------------------------------------------------------------------------------------------------


def close_sources(path: Path) -> list[str]:
    """Return the names of data files and folders beside a missing `path` that are similar to its name."""
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    return close_files(path.name, [file.name for file in siblings if file.suffix.lower() in SUFFIXES or file.is_dir()])


def special_source(source: str, where: str) -> DataError:
    """Return the error for a pipe or device as a source of rows."""
    return DataError(
        "a pipe, socket or device cannot be a source of rows",
        where=where,
        found=source,
        allowed=FORMS,
        fix="write the rows to a file: they are read more than once",
    )


def _missing(path: Path) -> DataError:
    if is_special(path):
        return special_source(str(path), str(path))
    near = close_sources(path)
    return DataError(
        "file or folder not found",
        where=str(path),
        allowed=FORMS,
        fix=f"did you mean {path.parent / near[0]}?"
        if near
        else "check the path"
        if path.is_absolute()
        else relative_path_fix(),
    )


def _read_file(path: Path) -> Iterator[Row]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            "unknown kind of data file",
            where=str(path),
            found=path.suffix,
            allowed=SUFFIXES,
            fix=unknown_form_fix(path),
        )
    try:
        kind = None if reader is _read_parquet else foreign_kind(path)
        if kind is not None:
            raise DataError(f"the file is {kind[0]}, not {path.suffix.lower()} data", where=str(path), fix=kind[1])
        yield from reader(path)
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            where=str(path),
            fix="check that the file exists on this machine and that you may read it",
        ) from error


def files_of_folder(folder: Path) -> list[Path]:
    """Return the data files in a folder and its subfolders, sorted, without hidden files and folders.

    Editors and download tools keep copies in hidden folders, such as `.ipynb_checkpoints/train-checkpoint.jsonl`.
    """
    return [file for file in visible_files(folder) if file.suffix.lower() in SUFFIXES and file.name not in _ABOUT_DATA]


def other_forms(folder: Path, where: str) -> DataError | None:
    """Return the error for a folder with unsupported data files, such as `b.jsonl.gz`; None if it has none.

    Args:
        where: the place that the error names.
    """
    packed = (*SUFFIXES, *_OTHER_FORMS, ".tar")
    others = [
        str(file.relative_to(folder))
        for file in (() if is_saved_set(folder) else visible_files(folder))
        if file.suffix.lower() in _OTHER_FORMS
        or (file.suffix.lower() in _PACKED and file.with_suffix("").suffix.lower() in packed)
    ]
    if not others:
        return None
    return DataError(
        "the folder has data files of unsupported formats",
        where=where,
        found=f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}",
        allowed=SUFFIXES,
        fix="unpack or convert these files, move them out of the folder, or name the files to read one by one",
    )


def is_saved_set(folder: Path) -> bool:
    """Return whether the `datasets` package wrote the folder (`save_to_disk`)."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, without hidden files; links to folders are followed."""
    files, known = list[Path](), set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in known:  # a link leads to a folder that was read before
            folders.clear()
            continue
        known.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if not is_special(file))


def _read_folder(folder: Path) -> Iterable[Row]:
    if is_saved_set(folder):
        return _read_dataset(str(folder), str(folder), None, None)
    if (error := other_forms(folder, str(folder))) is not None:
        raise error
    files = files_of_folder(folder)
    if not files:
        raise DataError("the folder has no data file", where=str(folder), allowed=SUFFIXES)
    named = {match[1] for p in files if (match := _SPLIT_IN_NAME.search(str(p.relative_to(folder)).lower()))}
    if len(named) > 1:
        # Refuse to read all files of the folder, because the run might train on its validation or test rows.
        raise DataError(
            "the folder has several splits",
            where=str(folder),
            found=", ".join(sorted(named)),
            fix=f"name one split ({folder}@{min(named, key=lambda n: n != 'train')}) or one file",
        )
    return itertools.chain.from_iterable(map(_read_file, files))


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                value = _parse_json(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise _not_utf8(error, path) from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"broken JSON: {_json_trouble(error)}",
                    where=f"{path}:{number}",
                    found=raw[:80].decode("utf-8", "replace").rstrip("\n"),
                    allowed="one JSON object per line",
                    fix="repair or delete the line",
                ) from error
            if text.strip():
                yield make_row(value, str(path), number, "line")


def _read_json(path: Path) -> Iterator[Row]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, path) from error
    try:
        values = _parse_json(text)
    except json.JSONDecodeError as error:
        fix = "name a file with one object per line .jsonl" if error.msg == "Extra data" else "repair this line"
        raise DataError(f"broken JSON: {error.msg}", where=f"{path}:{error.lineno}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"broken JSON: {_json_trouble(error)}", where=f"{path} row {_failing_row(text)}", fix="repair the row"
        ) from error
    if not isinstance(values, list):
        raise DataError(
            "the JSON file is not a list of rows",
            where=str(path),
            found=type(values).__name__,
            allowed="[{...}, {...}]",
            fix="write a list of objects, or name a file with one object per line .jsonl",
        )
    for number, value in enumerate(values, 1):
        yield make_row(value, str(path), number, "row")


def _parse_json(text: str) -> Any:
    """Parse JSON; unlike in `json.loads`, a repeated name in an object is an error.

    Raises:
        ValueError: broken JSON, a repeated name or a number with too many digits.
        RecursionError: lists and objects are nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError(f"{', '.join(map(repr, _repeated(name for name, _ in pairs)))} is repeated in one object")
    return values


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in collections.Counter(names).items() if count > 1]


def _json_trouble(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"lists and objects nested more than {MAX_DEPTH} levels deep"
    if "integer string conversion" in str(error):  # Python limits digits, since int() takes quadratic time
        return f"a number of more than {sys.get_int_max_str_digits()} digits; write it as text"
    return str(error)


def _failing_row(text: str) -> int:
    """Return the number, from 1, of the first element of a JSON list that cannot be parsed."""
    decoder, gap = json.JSONDecoder(object_pairs_hook=_object), re.compile(r"[\s,]*")
    number, at = 0, text.find("[") + 1
    while True:
        number += 1
        try:
            _, at = decoder.raw_decode(text, gap.match(text, at).end())  # type: ignore[union-attr]  # always matches
        except (ValueError, RecursionError):
            return number


def _not_utf8(error: UnicodeDecodeError, path: Path) -> DataError:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                raw.decode()
            except UnicodeDecodeError as first:
                return DataError(
                    f"not UTF-8 text: {first.reason}",
                    where=f"{path}:{number}",
                    found=raw[max(0, first.start - 20) : first.start + 20],
                    allowed="UTF-8",
                    fix=encoding_fix(raw, str(path)),
                )
    return DataError(f"not UTF-8 text: {error}", where=str(path), fix="convert the file to UTF-8")


def _read_csv(path: Path) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than a long document
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(reader, path)
            for values in reader:
                if None in values or None in values.values():
                    count = len(values) - 1 + len(values[None]) if None in values else None
                    missing = next((name for name, value in values.items() if value is None), None)
                    raise DataError(
                        "the line has too many or too few values",
                        where=f"{path}:{reader.line_num}",
                        found=f"{count} values" if count else f"no value for {missing!r}",
                        allowed=f"{len(reader.fieldnames or [])} values: {', '.join(reader.fieldnames or [])}",
                        fix="quote values that contain commas or line breaks",
                    )
                yield Row(values, str(path), reader.line_num, "line")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, path) from error
    except csv.Error as error:
        raise DataError(f"broken csv: {error}", where=f"{path}:{reader.line_num + 1}", fix="repair the line") from error
    finally:
        csv.field_size_limit(limit)


def _check_header(reader: csv.DictReader[str], path: Path) -> None:
    """Raise an error for a csv header with repeated names, without names, or with separators other than commas."""
    if reader.fieldnames is None:  # an empty file, which has no rows
        return
    names = list(reader.fieldnames)
    separator = next((sign for sign in _SEPARATORS if len(names) == 1 and sign in names[0]), None)
    if separator is not None:
        raise DataError(
            f"the columns are separated by {_SEPARATORS[separator]}, not by commas",
            where=f"{path}:{reader.line_num}",
            found=names[0],
            allowed="a comma between columns",
            fix="save the file with commas, or as .jsonl",
        )
    repeated = _repeated(names)
    if repeated or not reader.fieldnames:
        raise DataError(
            "the header repeats a column name" if repeated else "the header is empty",
            where=f"{path}:{reader.line_num}",
            found=", ".join(map(repr, repeated)) or None,
            allowed="a first line with one name per column, each once",
            fix="rename or delete the columns" if repeated else "delete the empty line, or write the header",
        )


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            repeated = _repeated(file.schema_arrow.names)
            if repeated:
                raise DataError(
                    "two columns have the same name",
                    where=str(path),
                    found=", ".join(repeated),
                    fix="rename one of them",
                )
            for batch in file.iter_batches(_AT_ONCE):
                for value in _values(batch, path, number):
                    number += 1
                    yield _row_of_table(value, str(path), number)
    except (pyarrow.ArrowException, OSError) as error:
        kind = foreign_kind(path)
        raise DataError(
            f"the parquet file cannot be read: {error}",
            where=str(path),
            found=None if kind is None else kind[0],
            fix="write the file again; name text files .jsonl, .json or .csv" if kind is None else kind[1],
        ) from error


def _values(batch: pyarrow.RecordBatch, path: Path, before: int) -> list[dict[str, Any]]:
    """Return the rows of a part of a table as Python values; `before` rows of the table precede them."""
    import pyarrow

    try:
        return batch.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # text that is not UTF-8, dates before year 1
        column, number = _unreadable_cell(batch)
        raise DataError(
            f"column {column!r} cannot be read: {error}",
            where=f"{path} row {before + number}",
            fix="correct the value, or drop the column",
        ) from error


def _row_of_table(value: Mapping[str, Any], source: str, number: int) -> Row:
    """Make a row from a table's values without the null arguments that tables add to tool calls."""
    return make_row({name: _own_arguments(item) for name, item in value.items()}, source, number, "row")


def _own_arguments(column: Any) -> Any:
    if not isinstance(column, list):
        return column
    return [
        {**message, "tool_calls": without_nulls(message["tool_calls"])}
        if isinstance(message, Mapping) and "tool_calls" in message
        else message
        for message in column
    ]


def _unreadable_cell(table: pyarrow.RecordBatch) -> tuple[str, int]:
    """Return the column and row (from 1) of the first cell that cannot be converted to a Python value."""
    for column in table.schema.names:
        for number, cell in enumerate(table[column], 1):
            try:
                cell.as_py()
            except Exception:  # as_py raises many types of errors
                return column, number
    raise AssertionError(
        f"pyarrow cannot convert the table to rows, although it can convert each cell of columns {table.schema.names}"
    )


# -- datasets and functions --------------------------------------------------------------------------------------


def _read_dataset(source: str, name: str, config: str | None, split: str | None) -> list[Row]:
    """Read rows with the `datasets` package, from a hub name, a folder in hub layout or a folder of `save_to_disk`."""
    import datasets

    try:
        if is_saved_set(Path(name)):
            data = datasets.load_from_disk(name)
            data = data[split] if split else data
        else:
            data = datasets.load_dataset(name, config, split=split)
        values = [] if isinstance(data, dict) else data.to_list()
    except Exception as error:  # the package raises whatever its readers and the network raise
        from megarl.data.hub import advice

        raise DataError(
            f"the dataset cannot be loaded: {type(error).__name__}: {str(error).strip()[:300]}",
            where=source,
            allowed=FORMS,
            fix=advice("datasets", source, "check name, configuration and split"),
        ) from error
    if isinstance(data, dict):
        raise DataError(
            "the dataset consists of splits, and the source names none",
            where=source,
            found=list(data),
            fix=f"name one: {name}@{next(iter(data))}",
        )
    return [_row_of_table(value, source, number) for number, value in enumerate(values, 1)]


def _import(source: str) -> Callable[..., Iterable[Mapping[str, Any]]]:
    module_name, _, name = source.partition(":")
    try:
        function = getattr(import_module(module_name), name)
    except Exception as error:  # whatever the module raises
        known = isinstance(error, ImportError | AttributeError)
        raise ConfigError(
            f"the data function cannot be imported: {text_of(error) if known else describe(error)}",
            where="data.train_files / data.val_files",
            found=source,
            allowed="pkg.mod:fn, importable from the working folder or PYTHONPATH",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"the data source names a {type(function).__name__}, not a function",
            where="data.train_files / data.val_files",
            found=source,
            allowed="pkg.mod:fn, a function that returns rows",
            fix=f"name a function of {module_name}",
        )
    return function


def _call(source: str, kwargs: Mapping[str, Any]) -> list[Row]:
    function = _import(source)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ConfigError(
            f"the data function cannot be called with these arguments: {error}",
            where="data.loader_kwargs",
            found=dict(kwargs),
            allowed=f"{source} takes {', '.join(parameters)}",
        ) from error
    try:
        values = list(function(**given))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(inspect.unwrap(function), "__code__", None)
        frame = next((f for f in reversed(frames) if code and f.filename == code.co_filename), frames[-1])
        raise DataError(
            f"the data function raised {describe(error)}",
            where=source,
            found=given,
            fix=f"correct data.loader_kwargs, or the function: {frame.filename}:{frame.lineno} in {frame.name}",
        ) from error
    return [make_row(value, source, number, "row") for number, value in enumerate(values, 1)]


#: First bytes of a file (as its format specifies), kind of the file, and the fix.
_KINDS = (
    (b"PAR1", "a parquet file", "name it {stem}.parquet"),
    (b"ARROW1", "an Arrow file", "write it as parquet"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "name the folder of save_to_disk that it is in, or write it as parquet"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it: gzip -dc {path} > {unpacked}"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstd -dc {path} > {unpacked}"),
    (b"BZh", "compressed with bzip2", "unpack it: bzip2 -dc {path} > {unpacked}"),
    (b"\xfd7zXZ\x00", "compressed with xz", "unpack it: xz -dc {path} > {unpacked}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"PK\x03\x04", "a zip archive (a spreadsheet's .xlsx is one, too)", "unpack it, or save the sheet as csv"),
    (b"\x89HDF", "an HDF5 file", "write its rows as jsonl or parquet"),
    (b"SQLite format 3\x00", "an SQLite database", "write its rows as jsonl or parquet"),
    (b"\x80\x04\x95", "a pickle", "write its rows as jsonl or parquet"),
    (b"\x93NUMPY", "a NumPy array", "write its rows as jsonl or parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file: git lfs pull"),
)
_PACKED = (".gz", ".zst", ".bz2", ".xz")


def foreign_kind(path: Path) -> tuple[str, str] | None:
    """Return the kind of a file by its first bytes, and the fix; None for text, unknown kinds, and parquet files that
    are named .parquet.
    """
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError:  # the caller reads the file next and raises the error
        return None
    for first, kind, fix in _KINDS:
        if head.startswith(first) and not (first == b"PAR1" and path.suffix.lower() == ".parquet"):
            stem = path.with_suffix("")
            unpacked = stem if path.suffix.lower() in _PACKED else path.with_name(f"{path.stem}.unpacked{path.suffix}")
            return kind, fix.format(path=path, stem=stem, unpacked=unpacked)
    return None


def unknown_form_fix(path: Path) -> str:
    """Return the fix for a data file whose suffix is not known."""
    kind = foreign_kind(path)
    if kind is not None:
        return f"it is {kind[0]}: {kind[1]}"
    if path.suffix == ".py":
        return (
            f"to use its function, write {path.stem}:function; {path.stem} must be importable from the working folder"
        )
    return "convert it, or rename it"
