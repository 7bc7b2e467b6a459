"""Experts in files that hold the matrices of all experts of a layer as one tensor, as those of Qwen3-VL's mixture do.

    mlp.experts.gate_up_proj  [experts, hidden, 2 * width]   gate beside up, each of an expert's transposed
    mlp.experts.down_proj     [experts, width, hidden]       transposed

Here every expert has matrices of its own: `mlp.experts.3.gate_proj.weight` [width, hidden], and so on. transformers 5
also writes the stacks without transposing, and takes a square matrix for such a one. Source: `conversion_mapping.py` in
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
    """The place of one expert's matrix in a stack: its number, its first row if nothing is transposed, its shape."""

    expert: int
    first: int
    shape: tuple[int, int]
    transposed: bool


def cuts_of(name: str, shape: tuple[int, ...], hidden: int) -> dict[str, Cut]:
    """Return the matrices of the experts in the tensor `name` of a file, by their names; none: it is no stack.

    Args:
        hidden: width of the model.
    """
    found = _STACK.fullmatch(name)
    if found is None or len(shape) != 3:
        return {}
    count, outer, inner = shape
    if found[2] == DOWN:
        transposed = outer != hidden
        matrix = (hidden, outer if transposed else inner)
        return {f"{found[1]}.{e}.down_proj.weight": Cut(e, 0, matrix, transposed) for e in range(count)}
    transposed = inner != hidden
    width = (inner if transposed else outer) // 2
    return {
        f"{found[1]}.{e}.{part}_proj.weight": Cut(e, number * width, (width, hidden), transposed)
        for e in range(count)
        for number, part in enumerate(("gate", "up"))
    }


class ExpertSlice:
    """One expert's matrix in a stack of an opened safetensors file, with the interface of a tensor there."""

    def __init__(self, stack: Any, cut: Cut) -> None:
        self._stack, self._cut = stack, cut

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self._cut.shape)

    def get_dtype(self) -> str:
        """Return the dtype as the file spells it."""
        return str(self._stack.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        expert, first, shape, transposed = self._cut
        rows, columns = (slice(0, size) for size in shape) if index is ... else index
        rows = slice(rows.start + first, rows.stop + first)
        one = slice(expert, expert + 1)
        if transposed:
            return self._stack[one, columns, rows][0].t()
        return self._stack[one, rows, columns][0]


class Stacks:
    """The experts' matrices of a model on their way into files that hold stacks.

    Args:
        shapes: every tensor of the model by name, in the order in which they come.

    Attributes:
        shapes: those of the files.
        names: the name in the files of each tensor of the model.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names: dict[str, str] = {}
        self._waiting: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}
        for name, shape in shapes.items():
            found = _MATRIX.fullmatch(name)
            if found is None:
                self.shapes[name], self.names[name] = shape, name
                continue
            stack, expert = _stack_name(found), int(found[2])
            self.names[name] = stack
            rows, columns = shape if found[3] == "down" else (2 * shape[0], shape[1])
            self.shapes[stack] = (expert + 1, *((columns, rows) if rows != columns else (rows, columns)))
            self._left[stack] = self._left.get(stack, 0) + 1

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take the next tensor; yield what is now complete, by its name in files."""
        found = _MATRIX.fullmatch(name)
        if found is None:
            yield name, tensor
            return
        stack = _stack_name(found)
        if stack not in self._waiting:
            self._waiting[stack] = tensor.new_empty(self.shapes[stack])
        whole, expert = self._waiting[stack], int(found[2])
        matrix = whole[expert].t() if whole.shape[1] != whole.shape[2] else whole[expert]
        first = len(tensor) if found[3] == "up" else 0
        matrix[first : first + len(tensor)] = tensor
        self._left[stack] -= 1
        if not self._left[stack]:
            yield stack, self._waiting.pop(stack)


def _stack_name(found: re.Match[str]) -> str:
    return f"{found[1]}.{DOWN if found[3] == 'down' else GATE_UP}"
