"""Experts in files that stack the matrices of all experts of a layer in one tensor, as for Qwen3-VL's mixtures.

    mlp.experts.gate_up_proj  [experts, hidden, 2 * width]   gate and up side by side, each expert's transposed
    mlp.experts.down_proj     [experts, width, hidden]       transposed

In megarl every expert has its own matrices: `mlp.experts.3.gate_proj.weight` [width, hidden], and so on. transformers 5
also writes the stacks without transposing, and so megarl reads a square matrix. Source: `conversion_mapping.py` in
transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_STACK = re.compile(rf"(.*\.mlp\.experts)\.({GATE_UP}|{DOWN})")
_MATRIX = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Cut(NamedTuple):
    """The place of one expert's matrix in a stack: expert number, first row (first column if transposed), shape."""

    expert: int
    first: int
    shape: tuple[int, int]
    transposed: bool


def cuts_of(name: str, shape: tuple[int, ...], hidden: int) -> dict[str, Cut]:
    """Return the place of each expert's matrix in the tensor `name` of a weight file, by the matrix's name; empty if
    the tensor is not a stack of experts.

    Args:
        hidden: hidden size of the model.
    """
    match = _STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return {}
    count, outer, inner = shape
    if match[2] == DOWN:
        transposed = outer != hidden
        matrix = (hidden, outer if transposed else inner)
        return {f"{match[1]}.{e}.down_proj.weight": Cut(e, 0, matrix, transposed) for e in range(count)}
    transposed = inner != hidden
    width = (inner if transposed else outer) // 2
    return {
        f"{match[1]}.{e}.{part}_proj.weight": Cut(e, number * width, (width, hidden), transposed)
        for e in range(count)
        for number, part in enumerate(("gate", "up"))
    }


class ExpertSlice:
    """One expert's matrix in a stack of an opened safetensors file, with the interface of a tensor in that file."""

    def __init__(self, stack: Any, cut: Cut) -> None:
        self._stack, self._cut = stack, cut

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self._cut.shape)

    def get_dtype(self) -> str:
        """Return the dtype as spelt in the file."""
        return str(self._stack.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        expert, first, shape, transposed = self._cut
        rows, columns = (slice(0, size) for size in shape) if index is ... else index
        rows = slice(rows.start + first, rows.stop + first)
        place = slice(expert, expert + 1)
        if transposed:
            return self._stack[place, columns, rows][0].t()
        return self._stack[place, rows, columns][0]


class Stacks:
    """Collects the experts' matrices of a model into stacks for files.

    Args:
        shapes: all tensors of the model by name, in the order in which they are added.

    Attributes:
        shapes: shapes of the tensors in files.
        names: name in the files for each tensor of the model.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names: dict[str, str] = {}
        self._waiting: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}
        for name, shape in shapes.items():
            match = _MATRIX.fullmatch(name)
            if match is None:
                self.shapes[name], self.names[name] = shape, name
                continue
            stack, expert = _stack_name(match), int(match[2])
            self.names[name] = stack
            rows, columns = shape if match[3] == "down" else (2 * shape[0], shape[1])
            self.shapes[stack] = (expert + 1, *((columns, rows) if rows != columns else (rows, columns)))
            self._left[stack] = self._left.get(stack, 0) + 1

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Add the next tensor; yield the tensors that are now complete, by their names in files."""
        match = _MATRIX.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        stack = _stack_name(match)
        if stack not in self._waiting:
            self._waiting[stack] = tensor.new_empty(self.shapes[stack])
        whole, expert = self._waiting[stack], int(match[2])
        matrix = whole[expert].t() if whole.shape[1] != whole.shape[2] else whole[expert]
        first = len(tensor) if match[3] == "up" else 0
        matrix[first : first + len(tensor)] = tensor
        self._left[stack] -= 1
        if not self._left[stack]:
            yield stack, self._waiting.pop(stack)


def _stack_name(match: re.Match[str]) -> str:
    return f"{match[1]}.{DOWN if match[3] == 'down' else GATE_UP}"
