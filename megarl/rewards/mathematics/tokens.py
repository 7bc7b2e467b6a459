"""Tokens of an answer, and its normalised text, by one pass of one regular expression."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megarl.rewards.mathematics import words
from megarl.rewards.mathematics.tree import UnreadError

Kind = Literal["number", "based", "letter", "word", "command", "mark", "begin", "end"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer's text, such as a number, a letter, a LaTeX command or a bracket.

    Attributes:
        kind: type of the token; a `word` is a run of letters that is not a product of single letters.
        text: normalised text.
        spaced: white space stands before the token.
        value: exact value of a number.
        places: decimal places of a number written as a decimal.
        base: base of a number that is written with a base.
    """

    kind: Kind
    text: str
    spaced: bool = False
    value: Fraction = Fraction(0)
    places: int | None = None
    base: int | None = None


_MAX_DIGITS = 400  # characters; a longer number is compared as text
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207d\u207e\u207f\u2071\u02e3]+")
_LOWERED = re.compile("[\u2080-\u2089\u2099\u1d62\u2096]+")
_REVERSED = re.compile(r"(?:\\left)?([\[\]])([^\[\](){};]{1,200})(?:\\right)?([\[\]])")
_BASE = (
    r"_(?:(?P<plain>\d{1,2})(?!\d)|\{\s*\(?(?P<braced>\d{1,2})\)?\s*\}|"
    r"\{?\\(?:text|mathrm)\{\s*(?P<named>[a-z]+)\s*\}\}?)"
)
_BLOCK = r"\\(?:overline|bar|dot|widebar)\s*(?:\{\s*(?P<block>\d+)\s*\}|(?P<single>\d))|\((?P<round>\d+)\)"
_END_OF_REPETITION = r"\\[lc]?dots(?![A-Za-z])|\.\.\."
_TOKEN = re.compile(
    rf"""
      (?P<space>(?:\s|~)+)
    | (?P<begin>\\begin\s*\{{(?P<opened>[A-Za-z]+)\*?\}}(?:\s*\{{[clr|@\s]*\}}|\s*\[[a-z]\])?)
    | (?P<end>\\end\s*\{{(?P<closed>[A-Za-z]+)\*?\}})
    | (?P<command>\\(?:[A-Za-z]+|.))
    | (?P<based>(?<![A-Za-z0-9.,])(?=[A-Z]*\d)[0-9A-Z]+{_BASE})
    | (?P<repeating>\d*\.(?P<head>\d*)(?:{_BLOCK}))
    | (?P<dotted>\d*\.(?P<digits>\d+)\s*(?:{_END_OF_REPETITION}))
    | (?P<scientific>(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{{1,4}}(?![\dA-Za-z]))
    | (?P<grouped>[1-9]\d{{0,2}}(?P<by>,\\!|,|\{{,\}}|\\[,:;! ]|~|\ )\d{{3}}(?:(?P=by)\d{{3}})*(?!\d)(?:\.\d+)?)
    | (?P<number>\d+(?:\.\d+)?|\.\d+)
    | (?P<letters>[A-Za-z]+)
    | (?P<other>[^\W\d_])
    | (?P<mark>\*\*|<=|>=|(?<!\d)!=|==|->|:=|\.\.\.|.)  # 5!=120 is a factorial, x!=3 none
    """,
    re.VERBOSE | re.DOTALL,
)
_BRACE_OF_ROWS = re.compile(
    r"\\left\s*\\(?:\{|lbrace)\s*\\begin\s*\{(array|aligned|matrix|gathered|alignedat)\}(?:\s*\{[clr|@\s\d]*\})?"
)
_END_OF_ROWS = re.compile(r"\\end\s*\{(?:array|aligned|matrix|gathered|alignedat)\}\s*\\right\s*\.")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_DAYTIME = re.compile(r"\b([AaPp])\.?\s?[Mm]\b\.?")
_ABBREVIATED = re.compile(r"\b(sq|cu|ft|in|yd|hr|min|sec|lb|oz)\.(?!\d)")
_SAID = re.compile(
    r"(?:\\text\s*\{\s*)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\b\s*:?|:)\s*\}?(?=[^}]*$|[^{}]*\{)",
    re.IGNORECASE,
)
# R or Z after \mathbb: the sets of real numbers and integers
_BOLD_SET = re.compile(r"\{\s*[RZ]\s*\}|[RZ](?![A-Za-z])")
_PROSE = frozenset({".", ",", "-", "'", "or", "and"})
_CHOSEN = frozenset({"yes", "no", "true", "false"})


_LINE_END = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_TENS = "(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)"
_BELOW_TEN = "(?:one|two|three|four|five|six|seven|eight|nine)"
_BELOW_HUNDRED = (
    rf"(?:{_TENS}(?:[\s-]+{_BELOW_TEN})?|{_BELOW_TEN}|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen)"
)
_BELOW_THOUSAND = rf"(?:{_BELOW_TEN}\s+hundred(?:\s+(?:and\s+)?{_BELOW_HUNDRED})?|{_BELOW_HUNDRED})"
_NUMERALS = re.compile(
    rf"(?<![\w-])(?:{_BELOW_THOUSAND}\s+million\b(?:\s+(?=[a-z]))?)?"
    rf"(?:{_BELOW_THOUSAND}\s+thousand\b(?:\s+(?:and\s+)?(?=[a-z]))?)?"
    rf"(?:{_BELOW_THOUSAND})?(?<=[a-z])(?![\w-])",
    re.IGNORECASE,
)
_TRAILING = re.compile(r"(?<![\\,;])[,;]+\Z")
_STOP_IN_TEXT = re.compile(r"(?<=[A-Za-z]{2})\.\s*\}\Z")
_ABOUT = re.compile(r"(?:\\approx(?![A-Za-z])|=)\s*(?=\S)")


def clean(text: str) -> str:
    """Return an answer as ASCII LaTeX, without marks around it (dollars, asterisks, a full stop)."""
    text = _cases(text)
    text = _LINE_END.sub(r"\\\\", text)
    text = _RAISED.sub(lambda match: "^{" + match.group().translate(words.RAISED) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + match.group().translate(words.LOWERED) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(words.CHARACTERS)).translate(words.CHARACTERS).strip()
    for _ in range(8):
        bare = _unwrapped(text)
        if bare == text:
            break
        text = bare
    text = _dollars(text)
    text = _cases(text)
    text = _NUMERALS.sub(_numerals, text)
    text = _DAYTIME.sub(lambda match: match.group(1).lower() + "m", _ABBREVIATED.sub(r"\1", text))
    return _REVERSED.sub(_interval, text)


def _cases(text: str) -> str:
    if "\\right" not in text or not _BRACE_OF_ROWS.search(text):
        return text
    return _END_OF_ROWS.sub(r"\\end{cases}", _BRACE_OF_ROWS.sub(r"\\begin{cases}", text))


def _numerals(match: re.Match[str]) -> str:
    """Return digits for a numeral: `twenty-five` is 25."""
    total = value = 0
    spelled = re.split(r"[\s-]+", match.group().lower())
    if len(spelled) == 1:
        return match.group()
    for word in spelled:
        scale = words.MULTIPLIERS.get(word, 0)
        if scale == 100:
            value *= scale
        elif scale:
            total, value = total + value * scale, 0
        else:
            value += words.NUMERALS.get(word, 0)
    return str(total + value)


def _unwrapped(text: str) -> str:
    introduction = _SAID.match(text)
    text = text[introduction.end() :].strip() if introduction is not None else text.strip()
    about = _ABOUT.match(text)
    text = text[about.end() :] if about is not None else text
    for left, right in (
        ("**", "**"),
        ("__", "__"),
        ("$$", "$$"),
        ("$", "$"),
        ("\\(", "\\)"),
        ("\\[", "\\]"),
        ("`", "`"),
        ('"', '"'),
    ):
        inner = text[len(left) : len(text) - len(right)]
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right) and left not in inner:
            return inner.strip()
    if text.endswith((".", "\\.")) and not text.endswith(("..", "\\ldots.")):
        return text[:-1].removesuffix("\\").rstrip()
    return _STOP_IN_TEXT.sub("}", _TRAILING.sub("", text))


def _dollars(text: str) -> str:
    """Remove dollars in pairs, which enclose formulas; a single one before a number is money."""
    bare = text.replace("\\$", "")
    count = bare.count("$")
    if count and count % 2 == 0 and not re.search(r"\$\s*\d[^$]*[,;&]\s*(?:and\s+)?\$\s*\d[^$]*$", bare):
        return re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text)


def _interval(match: re.Match[str]) -> str:
    left, inside, right = match.groups()
    if (left, right) == ("[", "]") or "," not in inside:
        return match.group()
    return {"[": "[", "]": "("}[left] + inside + {"[": ")", "]": "]"}[right]


def tokenize(text: str, grouping: bool = True) -> list[Token]:
    """Split a cleaned answer into tokens; with `grouping`, commas between groups of three digits belong to one number.
    Raise UnreadError if a number is too long."""
    return _Scanner(text, grouping).scan()


class _Scanner:
    def __init__(self, text: str, grouping: bool) -> None:
        self.text, self.grouping = text, grouping
        self.made: list[Token] = []
        self.spaced = False
        # what each open brace belongs to: "{" in a formula, "text" in words, "units" in a text command whose argument
        # is read as a formula, "look" for a dropped style
        self.braces: list[str] = []
        self.only_words = not re.search(r"[\d\\^_=+*/<>|{}]", text)
        self.prose = self.only_words and re.search(r"[A-Za-z]{4,}", text) is not None

    def scan(self) -> list[Token]:
        position, text = 0, self.text
        while position < len(text):
            match = _TOKEN.match(text, position)
            assert match is not None, "the last alternative matches every character"
            kind = match.lastgroup
            if kind not in _READERS:  # `lastgroup` may be a group nested in the group that names the token's kind
                kind = next(name for name in _READERS if match.group(name) is not None)
            position = _READERS[kind](self, match) or match.end()
        if self.braces:
            raise UnreadError("an opening brace has no closing brace")
        return self.made

    def add(
        self, kind: Kind, text: str, value: Fraction = Fraction(0), places: int | None = None, base: int | None = None
    ) -> None:
        self.made.append(Token(kind, text, self.spaced, value, places, base))
        self.spaced = False

    @property
    def in_text(self) -> bool:
        return bool(self.braces) and self.braces[-1] == "text"

    def space(self, match: re.Match[str]) -> None:
        self.spaced = True

    def begin(self, match: re.Match[str]) -> None:
        self.add("begin", match["opened"])

    def end(self, match: re.Match[str]) -> None:
        self.add("end", match["closed"])

    def command(self, match: re.Match[str]) -> int | None:
        text = match.group()
        name = text[1:]
        if text in words.SPACES:
            self.spaced = self.spaced or text != "\\!"
            if name in ("quad", "qquad") and self.made and self.made[-1].kind not in ("mark", "begin"):
                self.add("mark", "quad")
        elif name in words.TEXT_COMMANDS:
            return self._text(match)
        elif name in words.LOOKS:
            return self._look(match)
        else:
            same = words.SAME.get(text, text)
            self.add("command" if same.startswith("\\") and same != "\\\\" else "mark", same)
        return None

    def _after_space(self, position: int) -> int:
        while position < len(self.text) and self.text[position].isspace():
            position += 1
        return position

    def _text(self, match: re.Match[str]) -> int | None:
        start = self._after_space(match.end())
        name = match.group()[1:]
        if self.text[start : start + 1] != "{":
            if self.text[start : start + 1] in ("", "}"):
                self.add("command", match.group())
            return None
        end = self.text.find("}", start)
        inside = self.text[start + 1 : end].strip() if end > start else ""
        if name in ("operatorname", "mathop") and inside in words.FUNCTIONS:
            self.add("command", "\\" + inside)
            return end + 1
        if len(inside) == 1 and (
            (name in ("mathrm", "rm") and inside in "eid") or (name != "mathrm" or not inside.isalpha())
        ):
            # Read one character as mathematics and not as text; of the letters in \mathrm only e, i and d.
            self.braces.append("units")
        elif "_" in inside or "^" in inside or "\\" in inside.replace("\\ ", "").replace("\\%", ""):
            self.braces.append("units")
        else:
            self.braces.append("text")
        return start + 1

    def _look(self, match: re.Match[str]) -> int | None:
        start = self._after_space(match.end())
        name = match.group()[1:]
        if name in ("left", "right", "middle") and self.text[start : start + 1] == ".":
            return start + 1
        if name == "mathbf" and _BOLD_SET.match(self.text, start):
            self.add("command", "\\mathbb")
        if self.text[start : start + 1] == "{" and name not in ("left", "right"):
            self.braces.append("look")
            return start + 1
        return None

    def based(self, match: re.Match[str]) -> int | None:
        digits = match.group().partition("_")[0]
        base = _BASES.get(match["named"], 0) if match["named"] else int(match["plain"] or match["braced"])
        if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits) or len(digits) > _MAX_DIGITS:
            again = re.compile(r"\d+(?:\.\d+)?|[A-Z]+").match(self.text, match.start())
            assert again is not None
            (self._number if again.group()[0].isdigit() else self._run)(again.group())
            return again.end()
        if base == 10:
            self.add("number", digits, Fraction(digits))
            return None
        self.add("based", f"{digits}_{base}", Fraction(int(digits, base)), base=base)
        return None

    def repeating(self, match: re.Match[str]) -> None:
        block = match["block"] or match["single"] or match["round"]
        whole = match.group().partition(".")[0]
        self._repeated(whole, match["head"], block, match.group())

    def _repeated(self, whole: str, head: str, block: str, text: str) -> None:
        if len(text) > _MAX_DIGITS:
            raise UnreadError(f"a number has more than {_MAX_DIGITS} characters")
        value = Fraction(int(whole or 0)) + Fraction(int(head or 0), 10 ** len(head))
        value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(head))
        self.add("number", str(value), value)

    def dotted(self, match: re.Match[str]) -> int | None:
        digits = match["digits"]
        for length in range(1, 7):
            block = digits[-length:]
            if len(digits) >= 3 * length and digits.endswith(block * 3 if length == 1 else block * 2):
                head = digits
                while head.endswith(block):
                    head = head[:-length]
                self._repeated(match.group().partition(".")[0], head, block, match.group())
                return None
        whole = match.group().partition(".")[0] + "." + digits
        self._number(whole)
        return match.start() + len(whole)

    def scientific(self, match: re.Match[str]) -> None:
        mantissa, _, exponent = match.group().lower().partition("e")
        if len(mantissa) > _MAX_DIGITS or abs(int(exponent)) > _MAX_DIGITS:
            raise UnreadError(f"a number has more than {_MAX_DIGITS} characters, or an exponent beyond {_MAX_DIGITS}")
        places = len(mantissa.partition(".")[2]) - int(exponent)
        value = Fraction(mantissa) * Fraction(10) ** int(exponent)
        self.add("number", match.group(), value, places if "." in mantissa or places > 0 else None)

    def grouped(self, match: re.Match[str]) -> int | None:
        if self.grouping or match["by"] not in (",", " "):
            self._number(match.group().replace(match["by"], ""))
            return None
        first = match.group().partition(match["by"])[0]
        self._number(first)
        return match.start() + len(first)

    def number(self, match: re.Match[str]) -> None:
        self._number(match.group())

    def _number(self, text: str) -> None:
        if len(text) > _MAX_DIGITS:
            raise UnreadError(f"a number has more than {_MAX_DIGITS} characters")
        value, decimals = Fraction(text), text.partition(".")[2]
        self.add("number", text, value, len(decimals) if "." in text else None)

    def letters(self, match: re.Match[str]) -> None:
        self._run(match.group())

    def _run(self, run: str) -> None:
        """Read a run of letters: a word, a command spelled without a backslash, or single letters."""
        lower = run.lower()
        if self.in_text or self._is_word(run):
            if lower in words.SEPARATORS and run != "OR":
                self.add("mark", lower)
            else:
                self.add("word", run)
        elif run in words.PLAIN_COMMANDS:
            text = "\\" + run
            self.add("command", words.SAME.get(text, text))
        else:
            for letter in run:
                self.add("letter", letter)

    def _is_word(self, run: str) -> bool:
        """Return whether a run of letters in a formula is a word rather than a product."""
        if run in words.PLAIN_COMMANDS or self.prose:
            return run not in words.PLAIN_COMMANDS
        if self._is_unit(run):
            return True
        if len(run) == 1:
            return False
        if run.lower() == "no" and self.only_words:
            return True
        if self.made and self.made[-1].kind == "word" and self.spaced and run.islower():
            return True
        capital = run.isupper() or (len(run) > 2 and run.istitle())
        return capital or len(run) > 3 or run.lower() in words.SEPARATORS or (self.only_words and len(run) > 2)

    def _is_unit(self, run: str) -> bool:
        if not self.made or (run not in words.UNIT_SPELLINGS and run not in words.SPEEDS):
            return False
        before = self.made[-1]
        if self.braces and self.braces[-1] == "units":
            return self._may_have_unit()
        if before.text == "/":
            return len(self.made) > 1 and self.made[-2].kind == "word"
        if before.kind != "number" and before.text not in ("}", ")", "\\$"):
            return False
        if len(run) == 1:
            return self.spaced and run in words.LETTER_UNITS
        return self.spaced or len(run) > 3 or run in words.COMMON_UNITS or run in words.SPEEDS

    def _may_have_unit(self) -> bool:
        """Return whether the preceding tokens can have a unit: a number, another unit, a bracket."""
        if not self.made:
            return False
        before = self.made[-1]
        if before.text in ("/", "*"):
            return len(self.made) > 1 and self.made[-2].kind == "word"
        return before.kind in ("number", "word") or before.text in ("}", ")", "\\pi")

    def other(self, match: re.Match[str]) -> None:
        self.add("word", match.group())

    def mark(self, match: re.Match[str]) -> None:
        text = match.group()
        if text == "{":
            self.braces.append("text" if self.in_text else "{")
            if self.in_text:
                return
        elif text == "}":
            if not self.braces:
                raise UnreadError("a closing brace has no opening brace")
            if self.braces.pop() != "{":
                return
        elif text == "$" and self.in_text:
            self.braces[-1] = "look"
            return
        same = words.SAME.get(text, text)
        self.add("command" if (same.startswith("\\") and len(same) > 2) or same == "\\$" else "mark", same)


_READERS = {
    name: getattr(_Scanner, name)
    for name in (
        "space", "begin", "end", "command", "based", "repeating", "dotted", "scientific", "grouped", "number",
        "letters", "other", "mark",
    )
}  # fmt: skip


def canonical(tokens: list[Token]) -> str:
    """Return one text for all spellings of the same tokens: no braces around one token, one spelling of numbers.

    >>> canonical(tokenize(r"\\text{May } 5")), canonical(tokenize("May  5"))
    ('may 5', 'may 5')
    """
    bare, spaced = _without_braces(tokens)
    prose = all(token.kind == "word" or token.text in _PROSE for token in bare)
    parts: list[str] = []
    before: Token | None = None
    for token, space in zip(bare, spaced, strict=True):
        text = _spelled(token, prose)
        joined = before is not None and _alphanumeric(before) and _alphanumeric(token)
        if parts and ((before is not None and before.kind == "command" and text[:1].isalnum()) or (joined and space)):
            parts.append(" ")
        parts.append(text)
        before = token
    return "".join(parts)


def _without_braces(tokens: list[Token]) -> tuple[list[Token], list[bool]]:
    dropped, opened = set(), []
    for index, token in enumerate(tokens):
        if token.text == "{" and token.kind == "mark":
            opened.append(index)
        elif token.text == "}" and token.kind == "mark" and opened:
            start = opened.pop()
            if index - start <= 1 or (index - start == 2 and (tokens[start + 1].kind != "word")):
                dropped |= {start, index}  # keep braces around a word: \\overline{CD} is not \\overline{C}D
    bare: list[Token] = []
    spaced: list[bool] = []
    space = apart = False  # `apart`: whether a dropped brace or a \quad stood before the token
    for index, token in enumerate(tokens):
        space = space or token.spaced
        if index in dropped or token.text == "quad":
            apart = True
            continue
        numbers = bool(bare) and bare[-1].kind == token.kind == "number"
        bare.append(token)
        spaced.append(space or (apart and numbers))
        space = apart = False
    return bare, spaced


def _alphanumeric(token: Token) -> bool:
    return token.kind in ("number", "based", "letter", "word") or token.text in ("or", "and")


def _spelled(token: Token, prose: bool) -> str:
    if token.kind == "number":
        if token.places is not None:
            return token.text.rstrip("0").rstrip(".")
        padded = token.text.startswith("0") and len(token.text) > 1  # for example the minutes of 12:05
        return token.text if padded or token.value.denominator != 1 else str(token.value)
    if token.kind == "word":
        short = len(token.text) <= 4 and token.text.isupper() and token.text.lower() not in _CHOSEN
        as_written = short or (not prose and len(token.text) < 3 and token.text.lower() not in _CHOSEN)
        return token.text if as_written else token.text.lower()
    return token.text
