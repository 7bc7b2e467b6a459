"""Scorers read hostile text in linear time, and read it as the plain regular expressions of this file do.

Models under reinforcement learning write endless white space, digits, braces and unclosed tags, and a regular
expression that backtracks over such text stops training for hours with Python's lock held.
"""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.benchmarks.scorers import HOSTILE, LENGTH, hostile, scorers
from megarl.rewards.format import format_reward, last_boxed
from megarl.rewards.math import math
from megarl.rewards.mathematics import boxed
from megarl.rewards.numbers import find_numbers, parse_number


@pytest.mark.parametrize("name", HOSTILE)
def test_a_quarter_of_a_million_characters_take_no_time(name):
    text = hostile(name, 4 * LENGTH)
    for reader, read in (scorers() | {"math": as_math, "box": boxed}).items():
        start = time.process_time()
        read(text)
        # 0.25 s of CPU at most on one core; what grows with the square of the length takes minutes.
        assert time.process_time() - start < 5.0, reader


def as_math(text):
    return math({"response": text, "answer": "18"}, timeout_s=0.5)


# -- the same as plain regular expressions ------------------------------------------------------------------------

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,2}})?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?)\s*\$?\s*(?P<num>{_UNSIGNED})(?:\s*/\s*(?P<den>{_UNSIGNED}))?\s*(?P<pct>\\?%)?"
)
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_THINK = re.compile(r"\s*<think>(.*?\S.*?)</think>(.*)", re.DOTALL)


def numbers_by_regex(text):
    found, plain = [], _FRAC.sub(r"\1/\2", text).strip()
    for match in _NUMBER.finditer(plain):
        before, written = plain[: match.start()], match.group().strip()
        operator = before[-1:].isalnum() or before.rstrip()[-1:] in tuple("0123456789)") or written[1:2] == " "
        if match["sign"] and operator:
            written = written[1:].strip()
        found.append(written.rstrip("."))
    return found


def number_by_regex(text):
    match = _NUMBER.fullmatch(_FRAC.sub(r"\1/\2", text).strip().rstrip(".").strip())
    if match is None or len(match.group()) > 64:
        return None
    value = Fraction(match["num"].replace(",", ""))
    if match["den"]:
        if not Fraction(match["den"].replace(",", "")):
            return None
        value /= Fraction(match["den"].replace(",", ""))
    value /= 100 if match["pct"] else 1
    return -value if match["sign"] in ("-", "\u2212") else value


def box_by_search(text):
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth, escaped = 1, False
        for end in range(match.end(), len(text)):
            if escaped:
                escaped = False
            elif text[end] == "\\":
                escaped = True
            elif text[end] in "{}":
                depth += 1 if text[end] == "{" else -1
                if depth == 0:
                    return text[match.end() : end]
    return None


def format_by_regex(text):
    match = _THINK.fullmatch(text)
    return float(match is not None and text.count("<think>") == text.count("</think>") == 1)


def texts(*pieces):
    return st.lists(st.sampled_from(pieces), max_size=14).map("".join)


NUMERIC = texts(
    *"0127.,-+\u2212$/%)(\\eE", "  ", " ", "\n", "\u00a0", "\u0663", "100", ",000", "a", "=", r"\frac{1}{", "}"
)


@given(NUMERIC)
@settings(max_examples=100, deadline=None)
def test_numbers_are_those_of_the_regular_expression(text):
    assert find_numbers(text) == numbers_by_regex(text)
    assert parse_number(text) == number_by_regex(text)


@given(texts(r"\boxed{", r"\fbox {", r"\box" + "\n{", "{", "}", "\\", r"\{", r"\}", "1", " "))
@settings(max_examples=75, deadline=None)
def test_boxes_are_those_of_a_search_from_every_start(text):
    assert last_boxed(text) == box_by_search(text)


@given(texts("<think>", "</think>", "<think>", "a", " ", "\n", "\x1c", "<", "</"))
@settings(max_examples=75, deadline=None)
def test_thoughts_are_those_of_the_regular_expression(text):
    assert format_reward({"response": text}, boxed=False) == format_by_regex(text)
