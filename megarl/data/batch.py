"""`Batch`, the container of samples: tensors, jagged sequences and plain columns, with one entry per sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.data.fields import current_name
from megarl.data.jagged import Index, Jagged, as_index, gather_plan
from megarl.data.wire import Block, Packer, Parts, Span, gather, open_block, pack
from megarl.system.compat import torch_compile
from megarl.system.errors import close_matches

__all__ = ["Batch", "Jagged"]

with torch_compile.untraced():
    from tensordict import TensorDict


class Batch:
    """A batch of B samples. Fields are tensors [B, ...] or Jagged; columns are lists of B plain JSON values. A column
    may also have handles of pending work, which cannot be sent to another process.

    Tensors live in a TensorDict. Operations return new batches that may share memory with the old one; only `set`
    changes a batch in place.

    >>> b = Batch({"x": Jagged.from_list([[1], [2, 3]])}, {"uid": ["a", "b"]})
    >>> [len(part) for part in b.repeat(2).split([1, 3])], b.select([1])["x"].values.tolist()
    ([1, 3], [2, 3])
    """

    def __init__(
        self,
        fields: Mapping[str, Tensor | Jagged] | None = None,
        columns: Mapping[str, list] | None = None,
        *,
        size: int | None = None,
    ) -> None:
        """Build from fields and columns of equal length; `size` is only needed without fields and columns."""
        fields, columns = dict(fields or {}), dict(columns or {})
        lengths = {name: len(value) for name, value in itertools.chain(fields.items(), columns.items())}
        if size is None:
            size = next(iter(lengths.values()), 0)
        wrong = {name: n for name, n in lengths.items() if n != size}
        if wrong:
            raise ValueError(f"fields or columns do not have {size} entries, as the batch does: {wrong}")
        both = fields.keys() & columns.keys()
        if both:
            raise ValueError(f"a name must not be both a field and a column: {sorted(both)}")
        self._size = size
        self._td = TensorDict({}, batch_size=[size])
        self._jagged: dict[str, Jagged] = {}
        self._columns: dict[str, list] = {}
        for name, value in itertools.chain(fields.items(), columns.items()):
            Batch.set(self, name, value)

    # -- access --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: str) -> bool:
        return self._value(name) is not None

    def __getitem__(self, name: str) -> Any:
        """Return the tensor, Jagged or list of that name."""
        if (value := self._value(name)) is not None:
            return value
        near = close_matches(name, self.names())
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"the batch has no {name!r}; it has {', '.join(self.names()) or 'nothing'}{hint}")

    def _value(self, name: str) -> Tensor | Jagged | list | None:
        """Return the field or column called `name`; None: the batch has none."""
        for values in (self._columns, self._jagged, self._td):
            if (value := values.get(name, None)) is not None:
                return value
        return None

    def set(self, name: str, value: Tensor | Jagged | list) -> None:
        """Add or replace a field (Tensor [B, ...], Jagged) or a column (list of B)."""
        if isinstance(value, Tensor) and value.ndim == 0:
            raise ValueError(f"the field {name!r} needs one entry per sample, not a scalar tensor")
        if len(value) != self._size:
            raise ValueError(f"{name!r} has {len(value)} entries for {self._size} samples")
        if not isinstance(value, Tensor | Jagged | list):
            raise ValueError(f"{name!r} must be a Tensor, Jagged or list, not {type(value).__name__}")
        for values in (self._jagged, self._td, self._columns):
            values.pop(name, None)
        if isinstance(value, Jagged):
            self._jagged[name] = value
        elif isinstance(value, Tensor):
            self._td.set(name, value)
        else:
            self._columns[name] = value

    def with_values(self, values: Mapping[str, Tensor | Jagged | list]) -> Batch:
        """Return a batch with these fields and columns added; a name that the batch has already is replaced."""
        return self._like(*by_kind({**self.fields, **self._columns, **values}), self._size)

    def names(self) -> list[str]:
        """Return the names of all fields, then of all columns."""
        return [*self.fields, *self._columns]

    @property
    def fields(self) -> dict[str, Tensor | Jagged]:
        """Tensor and jagged fields by name."""
        return {**self._jagged, **{str(name): value for name, value in self._td.items()}}

    @property
    def columns(self) -> dict[str, list]:
        """Plain columns by name; the lists are shared with this batch."""
        return dict(self._columns)

    def _map(
        self, fn: Callable[[Tensor | Jagged], Tensor | Jagged], column: Callable[[list], list], size: int
    ) -> Batch:
        fields = {name: fn(value) for name, value in self.fields.items()}
        return self._like(fields, {name: column(value) for name, value in self._columns.items()}, size)

    def _like(self, fields: Mapping[str, Tensor | Jagged], columns: Mapping[str, list], size: int) -> Batch:
        """Return a batch of the same kind as this one."""
        return Batch(fields, columns, size=size)

    def alike(self, other: Batch) -> Batch:
        """Return the samples of `other` as a batch of this batch's class, with the same restrictions on its fields."""
        return self._like(other.fields, other._columns, len(other))

    def copy(self) -> Batch:
        """Return a new batch that shares the fields and has copies of the column lists; `set` on it does not change
        this batch."""
        return self._map(lambda value: value, list, self._size)

    def select(self, index: Index) -> Batch:
        """Return the samples at `index` (positions or bool mask), in that order, repeats allowed."""
        picked = as_index(index, self._size, torch.device("cpu"))
        where = picked.tolist()
        moved: dict[torch.device, Tensor] = {}
        plans: dict[int, tuple[Tensor, Tensor]] = {}

        def take(value: Tensor | Jagged) -> Tensor | Jagged:
            place = moved.setdefault(value.device, picked.to(value.device))
            if not isinstance(value, Jagged):
                return value.index_select(0, place)
            # Fields over the same tokens usually share one offsets tensor; the gather is planned once per such tensor.
            if id(value.offsets) not in plans:
                plans[id(value.offsets)] = gather_plan(value.offsets, place)
            places, offsets = plans[id(value.offsets)]
            return Jagged(value.values.index_select(0, places), offsets)

        return self._map(take, lambda column: [column[i] for i in where], len(where))

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Split the batch into consecutive parts of these sizes, whose fields are views; the sizes must add up to all
        samples."""
        if sum(sizes) != self._size or any(size < 0 for size in sizes):
            raise ValueError(f"sizes must be 0 or more and add up to {self._size} samples, got {list(sizes)}")
        ends = list(itertools.accumulate(sizes))
        return [
            self._like(*_cut(self.fields, self._columns, end - size, end))
            for size, end in zip(sizes, ends, strict=True)
        ]

    def repeat(self, n: int) -> Batch:
        """Return a batch with each sample n times in a row: a, a, b, b for n = 2."""
        return self.select(torch.arange(self._size).repeat_interleave(n))

    def drop(self, names: Iterable[str]) -> Batch:
        """Return the batch without these fields and columns; missing names are ignored."""
        gone = set(names)
        return self._like(
            {name: value for name, value in self.fields.items() if name not in gone},
            {name: value for name, value in self._columns.items() if name not in gone},
            self._size,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its fields on `device`; columns stay Python lists."""
        return self._map(lambda value: value.to(device), lambda column: column, self._size)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Join the samples of `batches`, in order.

        Raises:
            ValueError: `batches` is empty, or names, kinds, dtypes or inner shapes differ; the message names them.
        """
        return _joined([(batch.fields, batch._columns, len(batch)) for batch in batches])

    # -- bytes ---------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Serialise the batch to a safetensors file that contains the columns as JSON; no pickle.

        Raises:
            ValueError: a column has a value that JSON would change.
        """
        return pack((self.fields, self._columns, self._size)).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        """Restore a batch from `to_bytes`, bit for bit, on the CPU. Fields get their present names."""
        opened = open_block(Block((np.frombuffer(data, dtype=np.uint8),)))
        fields, columns, size = gather([(opened, 0, opened.head["size"])])
        return cls({current_name(name): value for name, value in fields.items()}, columns, size=size)

    def to_blocks(self, parts: Sequence[Sequence[int]], together: Sequence[int] = ()) -> Iterator[Span]:
        """Serialise parts of the batch to blocks, each with the bytes that `to_bytes` gives for its samples, as views.

        The batch must not change until the blocks are sent.

        Args:
            parts: positions of the samples of each part.
            together: a label per part; parts with the same label share blocks, up to a size limit. Empty: one block
                per part.

        Yields:
            The span of each part in its block, in order; a block is written with its first part.
        """
        return Packer((self.fields, self._columns, self._size)).spans(parts, together)

    @staticmethod
    def from_blocks(spans: Sequence[Span]) -> Batch:
        """Join the samples of spans from `to_blocks`, in order, into a new batch, as `concat` does; copies them."""
        opened = {block: open_block(block) for block in dict.fromkeys(span.block for span in spans)}
        kinds = [block.kinds for block in opened.values()]
        if not kinds or any(kind != kinds[0] for kind in kinds):
            # The blocks have different fields, or none were given: `_joined` raises an error that names the difference.
            return _joined([gather([(block, 0, block.head["size"])]) for block in opened.values()])
        fields, columns, size = gather([(opened[block], start, stop) for block, start, stop in spans])
        return Batch(fields, columns, size=size)

    def __repr__(self) -> str:
        parts = [f"{name}: {_kind(value)}" for name, value in self.fields.items()]
        return f"Batch({self._size}; {', '.join(parts + [f'{name}: column' for name in self._columns])})"


def by_kind(
    values: Mapping[str, Tensor | Jagged | list],
) -> tuple[dict[str, Tensor | Jagged], dict[str, list]]:
    """Separate `values` into fields (tensors and Jagged) and columns (lists)."""
    columns = {name: value for name, value in values.items() if isinstance(value, list)}
    return {name: value for name, value in values.items() if not isinstance(value, list)}, columns


def _kind(value: Tensor | Jagged | list) -> str:
    if isinstance(value, list):
        return "column"
    inner = value.values if isinstance(value, Jagged) else value
    shape = "".join(f", {n}" for n in inner.shape[1:])
    return f"{'jagged' if isinstance(value, Jagged) else 'tensor'} {str(inner.dtype)[6:]} [*{shape}]"


def _cut(fields: Mapping[str, Tensor | Jagged], columns: Mapping[str, list], start: int, stop: int) -> Parts:
    """Return the samples `start` to `stop` (exclusive), with fields as views; fields that share offsets still do."""
    shared: dict[int, Jagged] = {}
    cut: dict[str, Tensor | Jagged] = {}
    for name, value in fields.items():
        if isinstance(value, Jagged):
            part = value.slice(start, stop)
            cut[name] = shared.setdefault(id(value.offsets), part).like(part.values)
        else:
            cut[name] = value[start:stop]
    return cut, {name: column[start:stop] for name, column in columns.items()}, stop - start


def _joined(every: Sequence[Parts]) -> Batch:
    """Return the batch for `Batch.concat`; each part is (fields, columns, number of samples)."""
    if not every:
        raise ValueError("cannot concatenate an empty list of batches: the names of the fields are unknown")
    first, columns, _ = every[0]
    for number, other in enumerate(every[1:], 1):
        _check_alike(every[0], other, number)
    fields: dict[str, Tensor | Jagged] = {}
    shared: dict[tuple[int, ...], Jagged] = {}
    for name, value in first.items():
        parts: list[Any] = [tensors[name] for tensors, _, _ in every]
        if isinstance(value, Jagged):
            joined = Jagged.concat(parts)
            fields[name] = shared.setdefault(tuple(id(p.offsets) for p in parts), joined).like(joined.values)
        else:
            fields[name] = torch.cat(parts)
    chained = {name: list(itertools.chain.from_iterable(lists[name] for _, lists, _ in every)) for name in columns}
    return Batch(fields, chained, size=sum(size for _, _, size in every))


def _check_alike(first: Parts, other: Parts, number: int) -> None:
    values, others = ({**fields, **columns} for fields, columns, _ in (first, other))
    if values.keys() != others.keys():
        raise ValueError(
            f"batches 0 and {number} do not have the same names: only in 0: {sorted(values.keys() - others.keys())}, "
            f"only in {number}: {sorted(others.keys() - values.keys())}"
        )
    for name in values:
        kinds = _kind(values[name]), _kind(others[name])
        if kinds[0] != kinds[1]:
            raise ValueError(f"{name!r} is {kinds[0]} in batch 0 and {kinds[1]} in batch {number}")
