"""Parser of one expression: sums, products, powers, functions, units."""

from __future__ import annotations

from fractions import Fraction

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.quantities import (
    is_differential,
    is_proper,
    is_unit,
    known_words,
    letter,
    product,
    with_signs,
)
from megarl.rewards.mathematics.reading import TokenReader
from megarl.rewards.mathematics.tokens import Token, canonical
from megarl.rewards.mathematics.tree import Apply, Compound, Node, Number, Symbol, UnreadError

_MAX_DEPTH = 40
_MAX_PHRASE = 4  # words of a unit: `miles per square hour`
_CLOSING = {"(": ")", "[": "]"}
_CALLED = frozenset("fghFGHP")  # `f(x)` is a value of a function, `x(y+1)` a product
_LOGARITHMS = frozenset({"ln", "log", "lg"})
_SUPERSCRIPTS = frozenset({"\\circ", "\\degrees"})
#: Opening bracket -> closing bracket, and the function that the pair applies to its content.
_PAIRS = {"|": ("|", "abs"), "\\|": ("\\|", "norm"), "\\lfloor": ("\\rfloor", "floor"), "\\lceil": ("\\rceil", "ceil")}
_OPENING = frozenset({"(", "[", "{", "\\{", "\\langle", *_PAIRS})
_VALUES = frozenset(
    {"\\frac", "\\sqrt", "\\cbrt", "\\binom", "\\infty", "\\emptyset", "\\dots", "\\angle", "\\triangle",
     "\\measuredangle",
     "\\$", "\\partial", "\\circ", "\\square", "\\checkmark", "\\top", "\\bot", "\\pi", "\\imath", "\\Re", "\\Im"}
    | {"\\" + name for name in words.FUNCTIONS | words.GREEK | words.ACCENTS | words.ALPHABETS}
)  # fmt: skip
#: Functions whose notation shows where the value ends, so that a number right after it is a factor: `5!3!`, `2^3 3^2`.
_CLOSED = frozenset({"!", "!!", "^", "binom", "root"})
_MONEY = frozenset(["\\$", "€", "£", "¥", "₹"])
ONE = Number(Fraction(1))


class ExpressionReader(TokenReader):
    """A reader of expressions; the reader of whole answers extends it."""

    def listing(self) -> Node:
        """Read what brackets contain: one value, or several separated by commas. `AnswerReader` implements it."""
        raise NotImplementedError

    def rows(self, environment: str) -> Node:
        r"""Read the cells between `\begin{...}` and `\end{...}`. `AnswerReader` implements it."""
        raise NotImplementedError

    # -- sums and products

    def expression(self) -> Node:
        """Read a sum with its signs."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UnreadError("parts of the answer are nested too deeply")
        terms = [self._signed_term()]
        while self.next_is("+", "-", "\\pm", "\\mp"):
            terms.append(self._signed_term())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Apply("+", tuple(terms))

    def _signs(self) -> list[str]:
        signs = []
        while self.next_is("+", "-", "\\pm", "\\mp"):
            signs.append(self.step().text)
            if len(signs) > 3:
                raise UnreadError("a value has more than three signs before it")
        return signs

    def _signed_term(self) -> Node:
        signs = self._signs()
        return with_signs(signs, self._term())

    def _term(self) -> Node:
        last = self._factor()  # the last factor that was read, without its sign and not inverted
        factors = [last]
        quantities: list[Node] = []
        while True:
            if self.next_is("*", "/"):
                inverse = self.next_is("/")
                self.at += 1
                signs = self._signs()
                last = self._factor()
                factor = with_signs(signs, last)
                factors.append(Apply("inv", (factor,)) if inverse else factor)
            elif self._starts_number() and is_unit(factors[-1]):
                quantities.append(product(factors))  # for example 5 feet 3 inches
                last = self._factor()
                factors = [last]
            elif self._starts_number() and not (isinstance(last, Apply) and last.name in _CLOSED):
                raise UnreadError("a number follows a value without an operator between them")
            elif self._starts_factor():
                last = self._factor()
                factors.append(last)
            else:
                break
        if not quantities:
            return product(factors)
        return Apply("mixed", (*quantities, product(factors)))

    def _starts_number(self) -> bool:
        token = self.peek()
        return token is not None and token.kind in ("number", "based")

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token is None or token.kind == "end":
            return False
        if token.kind in ("letter", "word", "begin", "number", "based"):
            return True
        if token.text == "|":
            return self.bars == 0 and not self.in_set
        if token.text == "\\|":
            return self.bars == 0
        if token.text == "(" and self.at_modulus():
            return False
        return token.text in _VALUES or token.text in _OPENING or token.text in _MONEY

    def _factor(self) -> Node:
        self.depth += 1
        if self.depth > 2 * _MAX_DEPTH:
            raise UnreadError("parts of the answer are nested too deeply")
        node = self._after(self._primary())
        self.depth -= 1
        return node

    def _after(self, node: Node) -> Node:
        """Read the powers, factorials, percent signs and degrees after a value."""
        for _ in range(_MAX_DEPTH):
            if self.next_is("^") and self._is_degree():
                self.at += 4 if self.next_is("{", ahead=1) else 2
                node = self._degree_unit(node)
            elif self.take("\\degrees"):
                node = self._degree_unit(node)
            elif self.next_is("^") and self.next_is("\\prime", "'", ahead=2 if self.next_is("{", ahead=1) else 1):
                self.at += 1
                start = self.at
                self.skip_braces() if self.next_is("{") else self.take("\\prime", "'")
                primes = sum(token.text in ("\\prime", "'") for token in self.tokens[start : self.at])
                node = self._primed(node, primes)
            elif self.take("^"):
                node = Apply("^", (node, self._exponent()))
            elif self.take("!"):
                node = Apply("!!" if self.take("!") else "!", (node,))
            elif self.take("%"):
                node = Apply("%", (node,))
            elif self.next_is("'", "\\prime", "_"):
                node = self._named(node)
            else:
                return node
        raise UnreadError("the value has too many powers or other postfix signs")

    def _is_degree(self) -> bool:
        return self.next_is(*_SUPERSCRIPTS, ahead=1) or (
            self.next_is("{", ahead=1) and self.next_is(*_SUPERSCRIPTS, ahead=2) and self.next_is("}", ahead=3)
        )

    def _degree_unit(self, node: Node) -> Node:
        token = self.peek()
        if token is not None and token.kind in ("letter", "word") and token.text in ("C", "F"):
            self.at += 1
            return Apply("*", (node, Symbol("deg" + token.text, "unit")))
        return Apply("deg", (node,))

    def _exponent(self) -> Node:
        if self.next_is("'", "\\prime", "*"):
            raise UnreadError("the exponent is a prime or a star, not a value")
        signs = self._signs()
        node = self._enclosed(self.step().text) if self.next_is("{") else self._primary()
        if self.take("^"):
            self.depth += 1
            if self.depth > 2 * _MAX_DEPTH:
                raise UnreadError("parts of the answer are nested too deeply")
            node = Apply("^", (node, self._exponent()))
            self.depth -= 1
        return with_signs(signs, node)

    def _named(self, node: Node) -> Node:
        """Read the primes or subscript after a symbol, and return the symbol that they name: x_1 is not x."""
        if not isinstance(node, Symbol) or node.kind not in ("variable", "constant", "word", "set"):
            raise UnreadError("only a symbol that is no unit may have a subscript or a prime")
        if self.take("_"):
            start = self.at
            if self.next_is("{"):
                self.skip_braces()
            else:
                self.at += 1
            name = canonical(self.tokens[start : self.at])
            if not name:
                raise UnreadError("a subscript is empty")
            inner = name[1:-1] if name.startswith("{") else name
            return self._called(Symbol(f"{node.name}_{inner}", "set" if node.kind == "set" else "variable"))
        self.at += 1
        return self._primed(node, 1)

    def _primed(self, node: Node, count: int) -> Node:
        if not isinstance(node, Symbol) or node.kind != "variable":
            raise UnreadError("only a variable may have primes")
        return self._called(Symbol(node.name + "'" * count))

    # -- values

    def _primary(self) -> Node:
        token = self.peek()
        if token is None:
            raise UnreadError("the answer ends where a value must follow")
        self.at += 1
        if token.kind == "number":
            return self._number(token)
        if token.kind == "based":
            return Number(token.value, None, token.base)
        if token.kind == "letter":
            return self._called(letter(token.text))
        if token.kind == "word":
            return self._word(token)
        if token.kind == "begin":
            return self.rows(token.text)
        if token.kind == "command" or token.text in _OPENING or token.text in _MONEY:
            return self._command(token.text)
        raise UnreadError(f"the token {token.text!r} is not a value")

    def _number(self, token: Token) -> Node:
        number = Number(token.value, token.places)
        if self.numeral_follows():
            raise UnreadError("a number in words follows a number, or the hyphen after one")
        if token.places is not None or token.value.denominator != 1:
            return number
        part = self._proper_fraction()
        return Number(number.value + part) if part is not None else number

    def _proper_fraction(self) -> Fraction | None:
        """Read `\\frac{1}{2}` or ` 1/2` right after a whole number."""
        if self.next_is("\\frac"):
            over, at = self.digits(1)
            if at == 2 and len(over) == 2:
                over, under = over[0], over[1]
            else:
                middle, (under, at) = at, self.digits(at)
                if (middle == 2 and len(over) > 1) or (at == middle + 1 and len(under) > 1):
                    return None  # without braces, as in \frac12, an argument is only one digit
            if not over or not under or not is_proper(Number(Fraction(over)), Number(Fraction(under))):
                return None
            self.at += at
            return Fraction(int(over), int(under))
        top_token, bottom_token = self.peek(), self.peek(2)
        if top_token is None or bottom_token is None or not self.next_is("/", ahead=1):
            return None
        if top_token.kind == bottom_token.kind == "number" and top_token.spaced:
            top, bottom = Number(top_token.value, top_token.places), Number(bottom_token.value, bottom_token.places)
            if is_proper(top, bottom):
                self.at += 3
                return top.value / bottom.value
        return None

    def _called(self, node: Symbol) -> Node:
        if (
            node.name in _CALLED
            and self.next_is("(", ahead=5)
            and canonical(self.tokens[self.at : self.at + 5]) == "^{-1}"
        ):
            self.at += 5
            node = Symbol(f"{node.name}^-1")
        called = (node.name[0] in _CALLED and not self.multiplies(node.name)) or (
            self.next_is(")", ahead=2) and self.next_is("=", ahead=3)
        )  # the left side of a definition such as y(x) = 2x
        if called and node.kind == "variable" and self.next_is("("):
            start = self.at
            self._enclosed(self.step().text)
            return Symbol(node.name + canonical(self.tokens[start : self.at]))
        return node

    def _word(self, token: Token) -> Node:
        """Read a unit or a number in words (the longest run of words that is one); other words become one symbol."""
        start = self.at - 1
        for length in range(_MAX_PHRASE, 0, -1):
            run = self.tokens[start : start + length]
            node = (
                known_words(" ".join(word.text for word in run)) if all(word.kind == "word" for word in run) else None
            )
            if node is not None:
                self.at = start + len(run)
                if isinstance(node, Number) and self.numeral_follows():
                    raise UnreadError("the words for a number are not a valid number")
                return node
        while (more := self.peek()) is not None and more.kind == "word":
            self.at += 1
        run = self.tokens[start : self.at]
        if len(run) == 1 and len(token.text) == 1 and token.text.isascii():
            return letter(token.text)
        return Symbol(canonical(run), "word")

    def _command(self, text: str) -> Node:
        name = text[1:]
        if text in _OPENING:
            return self._enclosed(text)
        if text == "\\frac":
            return self._fraction()
        if text == "\\binom":
            return Apply("binom", (self.argument(), self.argument()))
        if text == "\\cbrt":
            return Apply("root", (self.argument(), Number(Fraction(3))))
        if text == "\\sqrt":
            return self._root()
        if text in _MONEY:
            signs = self._signs()
            amount = with_signs(signs, self._after(self._primary()))
            return Apply("*", (amount, Symbol(words.UNIT_SPELLINGS[text], "unit")))
        if name in words.FUNCTIONS:
            return self._function(name)
        if name in words.ACCENTS or name in words.ALPHABETS:
            return self._decorated(name)
        if text in ("\\angle", "\\triangle", "\\measuredangle"):
            start = self.at
            if self.next_is("{"):
                self.skip_braces()
            while (token := self.peek()) is not None and token.kind in ("letter", "word") and self.at - start < 4:
                self.at += 1
            return Symbol(f"{name} {canonical(self.tokens[start : self.at])}".replace("{", "").replace("}", ""))
        if text in ("\\pi", "\\infty"):
            return Symbol(name, "constant")
        if text == "\\emptyset":
            return Compound("set", ())
        if text == "\\dots":
            return Symbol("dots", "word")
        if text in _VALUES:
            return self._called(Symbol(name))
        raise UnreadError(f"the command {text} is unknown, or is not a value")

    def _enclosed(self, opening: str) -> Node:
        bars, in_set = self.bars, self.in_set
        self.bars, self.in_set = int(opening in ("|", "\\|")), False
        if opening in _PAIRS:
            closing, name = _PAIRS[opening]
            node: Node = Apply(name, (self.listing(),))
            self.expect(closing)
        elif opening == "\\{":
            node = self._set()
        elif opening == "\\langle":
            node = Compound("tuple", _items(self.listing()), "()")
            self.expect("\\rangle")
        elif opening == "{":
            node = self.listing()
            if self.take("\\choose"):
                node = Apply("binom", (node, self.listing()))
            self.expect("}")
        else:
            node = self._bracket(opening)
        self.bars, self.in_set = bars, in_set
        return node

    def _bracket(self, opening: str) -> Node:
        inner = self.listing()
        closing = ")" if self.next_is(")") else "]"
        self.expect(")", "]")
        if isinstance(inner, Compound) and inner.kind == "list" and inner.marks == ",":
            if opening + closing in ("(]", "[)") and len(inner.items) != 2:
                raise UnreadError("the answer has an opening and a closing bracket that do not match")
            return Compound("tuple", inner.items, opening + closing)
        if closing != _CLOSING[opening]:
            raise UnreadError("the answer has an opening and a closing bracket that do not match")
        return inner

    def _set(self) -> Node:
        if self.take("\\}"):
            return Compound("set", ())
        self.in_set = True
        inner = self.listing()
        if self.take("\\mid", "|", ":"):
            condition = self.listing()
            self.expect("\\}")
            return Compound("builder", (inner, condition))
        self.expect("\\}")
        return Compound("set", _items(inner))

    def argument(self) -> Node:
        """Read `{...}`, or one token: a digit, a letter, a command."""
        if self.next_is("{"):
            return self._enclosed(self.step().text)
        token = self.peek()
        if token is not None and token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            digit, rest = token.text[0], token.text[1:]
            self.tokens[self.at] = Token("number", rest, False, Fraction(rest))
            return Number(Fraction(digit))
        if token is None or (token.kind == "mark" and token.text not in ("(", "|")):
            raise UnreadError("a command lacks its argument")
        return self._primary()

    def _fraction(self) -> Node:
        start = self.at
        top, middle = self.argument(), self.at
        bottom = self.argument()
        numerator, denominator = self.tokens[start:middle], self.tokens[middle : self.at]
        if is_differential(numerator) and is_differential(denominator):
            return Symbol(f"{canonical(numerator)}/{canonical(denominator)}".replace(" ", ""))
        return Apply("*", (top, Apply("inv", (bottom,))))

    def _root(self) -> Node:
        if not self.take("["):
            token = self.peek()
            whole = token is not None and token.kind == "number"
            return Apply("root", (self._primary() if whole else self.argument(), Number(Fraction(2))))
        bars, self.bars = self.bars, 0
        degree = self.listing()
        self.expect("]")
        self.bars = bars
        return Apply("root", (self.argument(), degree))

    def _function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.take("_"):
                base = self.argument()
            elif self.take("^"):
                power = self._exponent()
        if base is not None and name != "log":
            raise UnreadError(f"the function {name!r} has a subscript, but only log may have one")
        inverse = f"arc{name}" if power == Apply("neg", (ONE,)) and f"arc{name}" in words.FUNCTIONS else None
        node = Apply(inverse or name, self._function_arguments(divided=name not in _LOGARITHMS))
        if base is not None:
            node = Apply("log", (*node.args, base))
        return node if power is None or inverse else Apply("^", (node, power))

    def _function_arguments(self, divided: bool) -> tuple[Node, ...]:
        """Read a function's arguments. `divided` means that a quotient may follow: `\\sin x/2` is the sine of a half of
        x, but `\\ln x/2` is half a logarithm."""
        if self.next_is("(", "[", "{", "\\{"):
            inner = self._enclosed(self.step().text)
            if isinstance(inner, Compound) and inner.kind in ("tuple", "list", "set"):
                return inner.items
            return (inner,)
        signs = self._signs()
        factors = [self._factor()]
        while self._starts_factor() or (divided and self.next_is("/")):
            token = self.tokens[self.at]
            if (
                token.text[1:] in words.FUNCTIONS
                or token.kind in ("word", "begin", "number")
                or token.text in ("(", "[")
            ):
                break
            if self.take("/"):
                factors.append(Apply("inv", (self._factor(),)))
            else:
                factors.append(self._factor())
        return (with_signs(signs, product(factors)),)

    def _decorated(self, name: str) -> Node:
        start = self.at
        for _ in range(2 if name in ("overset", "underset") else 1):
            if self.next_is("{"):
                self.skip_braces()
            else:
                self.at += 1
        inside = canonical(self.tokens[start : self.at])
        if not any(token.kind == "number" for token in self.tokens[start : self.at]):
            inside = inside.replace(" ", "").replace("{", "").replace("}", "")  # A B means AB
        if not inside:
            raise UnreadError(f"the command \\{name} has no argument, or an empty one")
        if name in words.ALPHABETS:
            return Symbol("bb" + inside if name in ("mathbb", "Bbb") else f"{name} {inside}", "set")
        return self._called(Symbol(f"{name} {inside}"))


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Compound) and node.kind == "list" else (node,)
