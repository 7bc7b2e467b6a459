"""Enforces contracts: a node can only read fields that it declares, and only its declared writes are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.dag.node import Node
from megarl.data.batch import Batch, Jagged, by_kind
from megarl.data.fields import known
from megarl.system.errors import MegarlError


class ContractError(MegarlError):
    """A node read or wrote a field that its stage does not declare; the message names node, field and declaration."""

    repeats = True


class GuardedBatch(Batch):
    """The samples with only those fields that one node may read; batches that it derives from them are guarded, too.

    Reading an undeclared field, or checking whether it exists, is an error. If a node resamples, undeclared fields are
    carried along by `select`, `repeat`, `concat` and so on, but still cannot be read. A stage may read fields that it
    has set.
    """

    _node: Node
    _carried: frozenset[str]

    @classmethod
    def of(cls, samples: Batch, node: Node) -> GuardedBatch:
        """Return a view of `samples` for `node`; `set` on it does not change `samples`."""
        contract = node.declared
        if contract.resamples:
            return cls._make(samples.fields, samples.columns, len(samples), node, set(contract.uses))
        visible = {name: samples[name] for name in contract.uses if name in samples}
        fields, columns = by_kind(visible)
        copies = {name: list(column) for name, column in columns.items()}
        return cls._make(fields, copies, len(samples), node, set(visible))

    @classmethod
    def _make(
        cls, fields: Mapping[str, Tensor | Jagged], columns: Mapping[str, list], size: int, node: Node, seen: set[str]
    ) -> GuardedBatch:
        made = cls.__new__(cls)
        made._node, made._carried = node, frozenset()
        Batch.__init__(made, fields, columns, size=size)
        made._carried = frozenset(fields.keys() | columns.keys()) - seen
        return made

    def _like(self, fields: Mapping[str, Tensor | Jagged], columns: Mapping[str, list], size: int) -> GuardedBatch:
        names = fields.keys() | columns.keys()
        return self._make(fields, columns, size, self._node, names - self._carried)

    def __contains__(self, name: str) -> bool:
        self._check(name)
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def set(self, name: str, value: Tensor | Jagged | list) -> None:
        """Set a field of the batch; the stage may then read it."""
        super().set(name, value)
        self._carried -= {name}

    def with_values(self, values: Mapping[str, Tensor | Jagged | list]) -> GuardedBatch:
        """Return a batch with these fields added, as `Batch.with_values` does; the stage may read them."""
        every = {**self.fields, **self.columns, **values}
        unseen = self._carried - values.keys()
        return self._make(*by_kind(every), len(self), self._node, every.keys() - unseen)

    def names(self) -> list[str]:
        """Return the names of the fields that the node may read."""
        return [name for name in super().names() if name not in self._carried]

    def _check(self, name: str) -> None:
        contract = self._node.declared
        if name in self._carried or not (
            super().__contains__(name) or name in contract.uses or name in contract.changes
        ):
            raise ContractError(
                f"node {self._node.id!r} ({self._node.func_name}) reads {name!r}, which it does not declare\n"
                f"  allowed: {', '.join(contract.uses) or 'no field'}\n"
                f"  fix:     add {name!r} to `reads` of its @stage, or to `optional` if the stage also works without it"
            )


def writes_in_place(node: Node, batch: Batch) -> dict[str, int]:
    """Return the number of in-place writes so far to each tensor field that `node` does not declare to write.

    PyTorch does not count writes through `Tensor.numpy()` and to tensors of inference mode.
    """
    contract = node.declared
    allowed = {*contract.writes, *contract.may_write}
    counts = {}
    for name, value in batch.fields.items():
        if name not in allowed:
            tensors = (value.values, value.offsets) if isinstance(value, Jagged) else (value,)
            # a write through a view counts too: it shares its base's counter
            counts[name] = sum(tensor._version for tensor in tensors if not tensor.is_inference())
    return counts


def settle(node: Node, batch: Batch, output: Any, before: Mapping[str, int]) -> Batch:
    """Check that `node` kept to its contract, and return the samples with its writes, or its new samples.

    Args:
        batch: the samples before the node.
        before: result of `writes_in_place` before the node ran.

    Raises:
        ContractError: the node returned no batch, different samples or undeclared fields, lacks a declared field, or
            wrote to a tensor in place.
    """
    name = f"node {node.id!r} ({node.func_name})"
    contract = node.declared
    touched = [field for field, count in writes_in_place(node, batch).items() if count != before[field]]
    if touched:
        raise ContractError(
            f"{name} writes into the tensor of {', '.join(map(repr, touched))} in place, which it does not declare\n"
            "  fix:     work on a clone, and add the field to `writes` of its @stage if other nodes need the result"
        )
    if not isinstance(output, Batch):
        returned = "None" if output is None else type(output).__name__
        raise ContractError(
            f"{name} returned {returned}, but a stage must return a batch\n  fix:     end the stage with `return batch`"
        )
    made = {**output.fields, **output.columns}
    lost = [field for field in contract.writes if field not in made]
    if lost:
        raise ContractError(
            f"{name} declares writes={lost} but did not write them\n"
            "  fix:     set them in every step, or declare them in `may_write`"
        )
    allowed = {*contract.writes, *contract.may_write}
    new = [field for field in made if field not in batch and field not in allowed]
    if new:
        raise ContractError(
            f"{name} writes {', '.join(map(repr, new))}, which it does not declare\n"
            "  fix:     add it to `writes` of its @stage, or to `may_write` if it does so in some steps only"
        )
    _check_forms(name, {field: value for field, value in made.items() if field in allowed})
    if contract.resamples:
        remaining = {field: value for field, value in made.items() if field not in contract.consumes}
        return Batch(*by_kind(remaining), size=len(output))
    if len(output) != len(batch):
        raise ContractError(
            f"{name} returned {len(output)} samples for {len(batch)} samples; only a stage with `resamples=True` may "
            "change the number of samples"
        )
    other = [
        field for field in made if field in batch and field not in allowed and not _same(batch[field], made[field])
    ]
    if other:
        raise ContractError(
            f"{name} changes {', '.join(map(repr, other))}, which it does not declare\n"
            "  fix:     add it to `writes` of its @stage; a stage that reorders samples declares `resamples=True`"
        )
    for field in allowed & made.keys():
        batch.set(field, made[field])
    return batch.drop(contract.consumes) if contract.consumes else batch


def _check_forms(name: str, written: Mapping[str, Tensor | Jagged | list]) -> None:
    """Raise an error if a built-in field was written with another dtype or shape than `megarl.data.fields` lists."""
    for field, value in written.items():
        expected = known(field)
        if expected is not None and (form := expected.misfit(value)):
            raise ContractError(
                f"{name} sets {field!r} to a value of the wrong form\n"
                f"  found:   {form}\n"
                f"  allowed: {expected.form}: {expected.meaning}\n"
                "  fix:     convert it, or choose another name for your field"
            )


def _same(a: Tensor | Jagged | list, b: Tensor | Jagged | list) -> bool:
    if isinstance(a, Jagged) and isinstance(b, Jagged):
        return _same_tensor(a.offsets, b.offsets) and _same_tensor(a.values, b.values)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    # repr, because NaN inside a column is not equal to itself.
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))
