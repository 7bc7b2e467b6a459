"""Tables of NumPy columns of equal length, and their form on the wire.

On the wire a set of tables is one .npz file in memory, written and read without pickle, so that a process without
megarl can write and read it: `numpy.savez_compressed` of arrays that are called `TABLE.COLUMN`.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

INSTEAD = "set sync.transport=distributed (on the trainer's GPUs tensor, or disk if servers span machines)"
"""What to do if updates from shard to shard are not possible, for errors."""
Array = NDArray[Any]
T = TypeVar("T", bound="ColumnTable")
S = TypeVar("S", bound="TableSet")


#: For each table class: name of each column, and its dtype and shape without the first dimension.
_COLUMNS: dict[type, dict[str, tuple[str, tuple[int, ...]]]] = {}


def _columns(kind: type) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return for each column of a table class its dtype and its shape without the first dimension, by name."""
    if kind not in _COLUMNS:
        hints = get_type_hints(kind, include_extras=True)
        _COLUMNS[kind] = {name: (hint.__metadata__[0], hint.__metadata__[1:]) for name, hint in hints.items()}
    return _COLUMNS[kind]


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """A frozen dataclass whose fields are columns; the first dimension of each counts the rows.

    The annotation of a column is `Annotated[Array, DTYPE, *TAIL]`: an array of shape [rows, *TAIL]. With the dtype
    `str` it contains texts of any length.

    Raises:
        ValueError: a column has another shape or kind of numbers than its annotation declares.
    """

    def __post_init__(self) -> None:
        rows = None
        for name, (dtype, tail) in _columns(type(self)).items():
            values = np.asarray(getattr(self, name))
            kind = "U" if dtype == "str" else np.dtype(dtype).kind
            fits = not values.size or values.dtype.kind == kind or {kind, values.dtype.kind} <= {"i", "u"}
            rows = len(values) if rows is None and values.ndim else rows
            if not fits or values.shape != (rows, *tail):
                raise ValueError(
                    f"column {name} of {type(self).__name__} has shape {values.shape} and dtype {values.dtype}; "
                    f"expected ({rows}, *{tail}) and {dtype}"
                )
            object.__setattr__(self, name, values.astype(np.str_ if kind == "U" else dtype, copy=False))

    def __len__(self) -> int:
        return len(getattr(self, next(iter(_columns(type(self))))))

    def take(self: T, rows: Array) -> T:
        """Return a table of the given rows: int [n], or bool for each row."""
        return type(self)(**{name: getattr(self, name)[rows] for name in _columns(type(self))})

    def replace(self: T, **columns: Array) -> T:
        """Return the table with some columns replaced."""
        return type(self)(**{name: getattr(self, name) for name in _columns(type(self))} | columns)

    @classmethod
    def joined(cls: type[T], tables: list[T]) -> T:
        """Return one table with the rows of all `tables`, in order."""
        if not tables:
            return cls.empty()
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in _columns(cls)})

    @classmethod
    def empty(cls: type[T]) -> T:
        """Return a table without rows."""
        columns = _columns(cls).items()
        return cls(**{name: np.zeros((0, *tail), np.str_ if kind == "str" else kind) for name, (kind, tail) in columns})

    @property
    def memory_bytes(self) -> int:
        """Bytes of all columns in memory."""
        return sum(getattr(self, name).nbytes for name in _columns(type(self)))

    def arrays(self, name: str) -> dict[str, Array]:
        """Return the columns by the names under which they are sent, `name.COLUMN`."""
        return {f"{name}.{key}": getattr(self, key) for key in _columns(type(self))}

    @classmethod
    def of_arrays(cls: type[T], name: str, arrays: Mapping[str, Array]) -> T:
        """Return the table called `name` from the result of `arrays`.

        Raises:
            ValueError: a column is missing, or has another shape or kind of numbers.
        """
        missing = [key for key in _columns(cls) if f"{name}.{key}" not in arrays]
        if missing:
            raise ValueError(
                f"table {name} of a weight update lacks the columns {missing}; use the same version of megarl for the "
                "trainer and its servers"
            )
        return cls(**{key: arrays[f"{name}.{key}"] for key in _columns(cls)})


@dataclass(frozen=True, eq=False)
class TableSet:
    """A frozen dataclass whose fields are tables. On the wire it is one .npz file with the arrays `FIELD.COLUMN`."""

    def arrays(self) -> dict[str, Array]:
        """Return all columns by their names on the wire."""
        tables = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {key: column for name, table in tables for key, column in table.arrays(name).items()}

    def encode(self) -> bytes:
        """Return the tables as bytes for a store."""
        return pack(self.arrays())

    @classmethod
    def decode(cls: type[S], data: bytes) -> S:
        """Return the tables from bytes that `encode`, or a process without megarl, made.

        Raises:
            ValueError: `data` has another form; the message names the table and the column.
        """
        return cls.of_arrays(unpack(data))

    @classmethod
    def of_arrays(cls: type[S], arrays: Mapping[str, Array]) -> S:
        """Return the tables that `arrays` gave.

        Raises:
            ValueError: as `ColumnTable.of_arrays`.
        """
        return cls(**{name: kind.of_arrays(name, arrays) for name, kind in get_type_hints(cls).items()})

    @property
    def digest(self) -> str:
        """Hash of all tables, equal on all machines."""
        return digest(self.arrays())


def pack(arrays: Mapping[str, Array]) -> bytes:
    """Return the bytes of a .npz file with these arrays."""
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # the stub takes **arrays for allow_pickle
    return out.getvalue()


def unpack(data: bytes, most: int = 1 << 30) -> dict[str, Array]:
    """Return the arrays of a .npz file that came over the network; nothing is unpickled.

    Raises:
        ValueError: `data` is not an .npz file, or its arrays have more than `most` bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            size = sum(info.file_size for info in file.infolist())
        if size > most:
            raise ValueError(f"the tables of a weight update have {size} bytes; allowed: at most {most}; {INSTEAD}")
        with np.load(io.BytesIO(data)) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"the tables of a weight update are not an .npz file: {error}") from error


def digest(arrays: Mapping[str, Array]) -> str:
    """Return a hash of the arrays' names, shapes and values: 32 hexadecimal digits, equal on all machines."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        values = arrays[name]
        if values.dtype.kind == "U":
            content = "\0".join(values.ravel().tolist()).encode()
        else:
            content = np.ascontiguousarray(values.astype("<i8" if values.dtype.kind in "iub" else "<f8")).tobytes()
        sha.update(f"{name} {values.shape} {len(content)}\n".encode() + content)
    return sha.hexdigest()[:32]
