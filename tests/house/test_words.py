"""Documentation, comments, docstrings and messages are written in the plain English of the field."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.test_repository import ROOT, tracked

#: What stands for a word in a text -> what to write instead.
TEXT = {
    r"\banew\b": "again",
    r"\bafresh\b": "again",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bbesides\b": "also, in addition to, other than",
    r"\bin vain\b": "without success, or what happened: it timed out",
    # What lags is behind; so is what a proxy hides.
    r"(?<!lag )(?<!lags )(?<!fall )(?<!falls )(?<!fell )\bbehind\b(?! an? (firewall|proxy))": "after, past, of",
    # Nothing else is there: "is alone", "alone in its group"; the marker of tests and what is called after it: `alone`.
    r"(?<![`.])(?<!is )(?<!are )(?<!or )\balone\b(?!`|:| in )": "only, by itself",
}
#: The same for a part of an identifier.
IDENTIFIER = {"anew": "again", "mend": "fix", "mended": "fixed", "besides": "also", "behind": "after"}
PATTERN = {re.compile(text, re.IGNORECASE): instead for text, instead in TEXT.items()}
#: A line of every complaint matches it; to divide the other files into tokens takes seconds.
ANY = re.compile("|".join([*TEXT, rf"(?<![a-z])({'|'.join(IDENTIFIER)})(?![a-z])"]), re.IGNORECASE)
#: The same without regular expressions, which look at every character.
WORDS = ("anew", "afresh", "mend", "besides", "in vain", "behind", "alone")
#: Other projects' words, and this list.
EXCEPT = {"tests/house/test_words.py", "LICENSE"}
FILES = [
    path
    for path in tracked("*.py", "*.md", "*.yaml", "*.toml", "*.txt", "Makefile")
    if str(path.relative_to(ROOT)) not in EXCEPT
]


def phrases(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line, text, identifier or None): of Python the comments, the strings of several words, and the identifiers."""
    source = path.read_text(encoding="utf-8")
    lowered = source.lower()
    if not any(word in lowered for word in WORDS) or not ANY.search(source):
        return
    if path.suffix != ".py":
        for number, line in enumerate(source.splitlines(), 1):
            yield number, line, None
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], "", token.string
        elif token.type == tokenize.COMMENT or " " in token.string.strip():
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield number, line, None


def complaints(text: str, identifier: str | None) -> list[str]:
    if identifier is not None:
        return [f"{part}: {IDENTIFIER[part]}" for part in identifier.lower().split("_") if part in IDENTIFIER]
    return [
        f"{found[0]}: {instead}" for pattern, instead in PATTERN.items() for found in [pattern.search(text)] if found
    ]


def test_texts_use_the_words_of_the_field() -> None:
    assert len(FILES) > 500, "the files were not found"
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {complaint}"
        for path in FILES
        for number, text, identifier in phrases(path)
        for complaint in complaints(text, identifier)
    ]
    assert wrong == []


def test_a_word_is_found_where_it_says_something_else() -> None:
    wrong = [
        "it is tried anew",
        "Mend it",
        "all besides this",
        "the cause behind it",
        "rank 0 alone asks",
        "left alone",
    ]
    right = [
        "servers fell behind",
        "behind a proxy",
        "marked `alone`",
        "this one is alone",
        "a sample alone in its group",
    ]

    assert [text for text in wrong if not complaints(text, None)] == []
    assert [text for text in right if complaints(text, None)] == []
    assert complaints("", "left_behind") != []
    assert complaints("", "recommended") == []
