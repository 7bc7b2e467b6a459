"""Parser of a whole answer: lists, relations, sets, matrices and systems."""

from __future__ import annotations

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.expressions import ExpressionReader
from megarl.rewards.mathematics.tokens import Token
from megarl.rewards.mathematics.tree import Apply, Compound, Node, Relation, UnreadError

_MAX_TOKENS = 1500  # a longer answer is compared as text
_SETS = {"\\cup": "cup", "\\cap": "cap", "\\setminus": "\\"}


def read(tokens: list[Token]) -> Node:
    """Return the tree of an answer, with all of its tokens in it. Raise UnreadError if it is not mathematics, or a part
    of it is not."""
    if len(tokens) > _MAX_TOKENS:
        raise UnreadError(f"the answer has more than {_MAX_TOKENS} tokens")
    reader = AnswerReader(list(tokens))
    node = reader.listing()
    if reader.peek() is not None:
        raise UnreadError(f"the answer cannot be read from token {reader.at} on")
    return node


class AnswerReader(ExpressionReader):
    """A reader of lists of statements, and of LaTeX environments."""

    def listing(self) -> Node:
        """Read statements separated by commas, semicolons, line ends, `and` and `or`."""
        items, marks = [self.statement()], []
        while (mark := self._separator()) is not None:
            marks.append(mark)
            items.append(self.statement())
        return _joined(items, marks)

    def _separator(self) -> str | None:
        marks: list[str] = []
        while self.next_is(",", ";", "and", "or", "quad", "\\\\"):
            if len(marks) > 2:
                raise UnreadError("the list has more than three separators in a row")
            mark = self.step().text
            marks.append(mark if mark in ("and", "or") else ",")
        if not marks:
            return None
        if self.peek() is None and marks == [","]:
            raise UnreadError("the list ends with a separator")
        named = [mark for mark in marks if mark != ","]
        return f",{named[0]}" if named and "," in marks else named[0] if named else ","

    def statement(self) -> Node:
        """Read an expression or a set, or a chain of relations between them."""
        sides, ops = [self._ratio()], []
        while self.next_is(*words.RELATIONS):
            ops.append(self.step().text)
            if ops == ["\\to"] and self.peek() is None:
                raise UnreadError("nothing follows an arrow")
            sides.append(self._ratio())
        modulus = self._modulus()
        if not ops and modulus is None:
            return sides[0]
        return Relation(tuple(sides), tuple(ops), modulus)

    def _modulus(self) -> Node | None:
        if self.take("\\pmod", "\\mod", "\\bmod"):
            return self.argument() if self.next_is("{") else self.expression()
        if self.next_is("(") and self.at_modulus():
            self.at += 2 if self.next_is("\\mod", "\\bmod", ahead=1) else 4
            node = self.expression()
            self.expect(")")
            return node
        return None

    def _ratio(self) -> Node:
        parts = [self._sets()]
        while self.next_is(":") and not self.in_set:
            self.at += 1
            following = self.peek()
            if following is not None and following.text.startswith("0") and following.kind == "number":
                raise UnreadError("a part of a ratio begins with the digit 0, as in a time of day")
            parts.append(self._sets())
        return parts[0] if len(parts) == 1 else Compound("ratio", tuple(parts))

    def _sets(self) -> Node:
        node = self.expression()
        while self.next_is(*_SETS):
            name, right = _SETS[self.step().text], self.expression()
            if isinstance(node, Apply) and node.name == name and name != "\\":
                node = Apply(name, (*node.args, right))
            else:
                node = Apply(name, (node, right))
        return node

    def rows(self, environment: str) -> Node:
        """Read what follows `\\begin{...}` up to its `\\end{...}`: rows of cells; aligned lines are a list."""
        self.depth += 4
        if self.depth > 40:
            raise UnreadError("parts of the answer are nested too deeply")
        bars, in_set, self.bars, self.in_set = self.bars, self.in_set, 0, False
        rows: list[Node] = []
        while not self._at_end(environment):
            if self.peek() is None:
                raise UnreadError(f"the LaTeX environment {environment!r} has no \\end")
            rows.append(self._row(environment))
            if not self.take("\\\\") and not self._at_end(environment):
                raise UnreadError(f"a row of the LaTeX environment {environment!r} has no \\\\ or \\end of it after it")
        self.at += 1
        self.bars, self.in_set, self.depth = bars, in_set, self.depth - 4
        if not rows:
            raise UnreadError(f"the LaTeX environment {environment!r} is empty")
        if environment in words.LINES:
            return _joined(rows, [","] * (len(rows) - 1))
        return Compound("rows", tuple(rows), environment.removesuffix("*"))

    def _at_end(self, name: str) -> bool:
        token = self.peek()
        return token is not None and token.kind == "end" and token.text == name

    def _row(self, environment: str) -> Node:
        if environment in words.LINES:
            end = self.at
            while end < len(self.tokens) and self.tokens[end].text not in ("\\\\",) and self.tokens[end].kind != "end":
                end += 1
            self.tokens[self.at : end] = [t for t in self.tokens[self.at : end] if t.text != "&"]
            return self.statement()
        cells = [self._cell(environment)]
        while self.take("&"):
            cells.append(self._cell(environment))
        return Compound("row", tuple(cells))

    def _cell(self, environment: str) -> Node:
        if environment == "cases":
            while (token := self.peek()) is not None and (
                token.text == "," or token.text.lower() in ("if", "for", "when", "where")
            ):
                self.at += 1
        if self.next_is("&", "\\\\") or self._at_end(environment):
            raise UnreadError(f"a cell of the LaTeX environment {environment!r} is empty")
        items, marks = [self.statement()], []
        while self.next_is(",", "and", "or"):
            mark = self.step().text
            if self.next_is("&", "\\\\") or self._at_end(environment):
                break
            following = self.peek()
            if following is not None and following.text in ("if", "for", "when"):
                self.at += 1
            marks.append(mark)
            items.append(self.statement())
        return _joined(items, marks)


def _joined(items: list[Node], marks: list[str]) -> Node:
    """Join statements by the words between them, `marks`; return a single statement as it is. In `x=1, y=2 or x=3, y=4`
    each side of `or` becomes a list of its own."""
    if not marks:
        return items[0]
    kinds = {mark.lstrip(",") or "," for mark in marks}
    if "or" in kinds and len(kinds) > 1 and all(isinstance(item, Relation) for item in items) and ",or" not in marks:
        groups: list[list[Node]] = [[items[0]]]
        for mark, item in zip(marks, items[1:], strict=True):
            groups.append([item]) if mark == "or" else groups[-1].append(item)
        made = [group[0] if len(group) == 1 else Compound("list", tuple(group), "and") for group in groups]
        return Compound("list", tuple(made), "or")
    return Compound("list", tuple(items), "or" if "or" in kinds else "and" if "and" in kinds else ",")
