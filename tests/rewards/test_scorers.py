import sys
import time
from fractions import Fraction

import pytest

from megarl.rewards.exact_match import exact_match
from megarl.rewards.format import format_reward, last_boxed
from megarl.rewards.gsm8k import gsm8k
from megarl.rewards.math import math
from megarl.rewards.numbers import find_numbers, parse_number
from megarl.rewards.numeric import numeric


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24", 24),
        (" 24.0 ", 24),
        ("24.", 24),
        (".5", Fraction(1, 2)),
        ("-3", -3),
        ("\u22123", -3),
        ("+7", 7),
        ("1,000", 1000),
        ("12,345,678.5", Fraction(24691357, 2)),
        ("1/3", Fraction(1, 3)),
        ("-1/4", Fraction(-1, 4)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("$18", 18),
        ("-$5", -5),
        ("50%", Fraction(1, 2)),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("007", 7),
        ("0.1", Fraction(1, 10)),
    ],
)
def test_parse_number_reads(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "abc", "1 2", "1,00", "1/0", "24 apples", "--3", "1.2.3", "9" * 100, "1e999", "."]
)
def test_parse_number_refuses(text):
    assert parse_number(text) is None


def test_find_numbers_sees_operators_and_full_stops():
    assert find_numbers("He had 7-3 = 4 apples, so $1,234.50 and -2.") == ["7", "3", "4", "$1,234.50", "-2"]


@pytest.mark.parametrize(
    ("response", "method", "score"),
    [
        ("so 9 * 2 = 18\n#### 18", "strict", 1.0),
        ("#### 17\n#### $18.00", "strict", 1.0),
        ("the answer is 18", "strict", 0.0),
        ("the answer is 18.", "flexible", 1.0),
        ("18 or 19", "flexible", 0.0),
        ("#### eighteen", "strict", 0.0),
        ("", "flexible", 0.0),
        ("#### 18%", "strict", 1.0),
        (r"#### 18\%", "strict", 1.0),
        ("it is 18%.", "flexible", 1.0),
        ("#### 17 #### 18", "strict", 1.0),
        ("#### 18 #### 17", "strict", 0.0),
        ("#### 18\n####", "strict", 1.0),
        ("#### 18\n#### \n\n", "strict", 1.0),
        ("####\n18", "strict", 1.0),
        ("####", "strict", 0.0),
        ("#### 1800%", "strict", 1.0),  # 1800% is 18, as ever
        ("#### - 18", "strict", 0.0),
    ],
)
def test_gsm8k(response, method, score):
    for answer in ("18", "She makes 9 * 2 = 18.\n#### 18"):
        assert gsm8k({"response": response, "answer": answer}, method=method)["overall"] == score


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ("- 3", 1),
        ("-3", 1),
        ("-$ 3", 1),
        ("$- 3$", 1),
        ("\u2212 3", 1),
        ("x = - 3", 1),
        ("5 - 3", 0),
        ("x - 3", 0),
        ("3", 0),
    ],
)
def test_gsm8k_reads_a_minus_with_white_space_after_it(line, score):
    assert gsm8k({"response": f"#### {line}", "answer": "-3"})["overall"] == score
    assert gsm8k({"response": "#### -3", "answer": f"a solution\n#### {line}"})["overall"] == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("20%", "20%", 1.0),
        ("20", "20%", 1.0),
        ("0.2", "20%", 1.0),
        ("20%", "0.2", 1.0),
        ("20%", "0.2%", 0.0),
        ("20", "0.2", 0.0),
        ("20%", "2000", 0.0),
    ],
)
def test_gsm8k_takes_a_percent_sign_for_a_unit(response, answer, score):
    assert gsm8k({"response": f"#### {response}", "answer": answer})["overall"] == score


def test_gsm8k_votes_agree_with_and_without_a_percent_sign():
    assert {gsm8k({"response": f"#### {r}", "answer": "20"})["extracted"] for r in ("20%", "20", "20.0 %")} == {"20"}


def test_gsm8k_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="no number"):
        gsm8k({"response": "1", "answer": "#### none"})


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [("24", "24.0", 1.0), ("24.1", "24", 0.0), (".3333333", "1/3", 1.0), ("1,000", "1000", 1.0), ("24 24", "24", 0.0)],
)
def test_numeric(response, answer, score):
    assert numeric({"response": response, "answer": answer})["overall"] == score


def test_numeric_tolerance_and_extraction():
    assert numeric({"response": "3.33", "answer": "10/3"}, tolerance=0.01)["overall"] == 1.0
    assert numeric({"response": "0.009", "answer": "0"}, tolerance=0.01)["overall"] == 1.0
    assert numeric({"response": "1 then 24", "answer": "24"}, extract="last")["overall"] == 1.0
    assert numeric({"response": "24 then 1", "answer": "24"}, extract="first")["overall"] == 1.0
    with pytest.raises(ValueError, match="cannot be read as a number"):
        numeric({"response": "1", "answer": "one"})


def test_numeric_can_refuse_to_be_answered_with_the_question():
    assert numeric({"response": "48/2", "answer": "24"})["overall"] == 1.0
    for response, score in (("48/2", 0.0), (r"\frac{48}{2}", 0.0), ("24", 1.0)):
        assert numeric({"response": response, "answer": "24"}, evaluated=True)["overall"] == score


def test_numeric_votes_agree_across_spellings():
    votes = {numeric({"response": r, "answer": "1"})["extracted"] for r in ("0.5", ".50", "1/2", r"\frac12", "2/4")}
    assert votes == {"1/2", ""}


def test_exact_match():
    assert exact_match({"response": " New  York\n", "answer": "New York"})["overall"] == 1.0
    assert exact_match({"response": "new york", "answer": "New York"})["overall"] == 0.0
    assert exact_match({"response": "new york", "answer": "New York"}, ignore_case=True)["overall"] == 1.0
    assert exact_match({"response": "24", "answer": 24})["overall"] == 1.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\fbox {x}", "x"),
        (r"\boxed{}", ""),
        ("no box", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think> \\boxed{1}", 1.0),
        ("<think> </think> \\boxed{1}", 0.0),
        ("<think>a</think><think>b</think>\\boxed{1}", 0.0),
        ("<think>\\boxed{1}</think> done", 0.0),
        ("a</think>\\boxed{1}", 0.0),
        ("x <think>a</think>\\boxed{1}", 0.0),
        ("<think>a</think>\\boxed{}", 0.0),
    ],
)
def test_format(response, score):
    assert format_reward({"response": response}) == score


def test_format_parts_can_be_turned_off():
    assert format_reward({"response": "\\boxed{1}"}, think=False) == 1.0
    assert format_reward({"response": "<think>a</think>b"}, boxed=False) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{x+1}", "x+2", 0.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        ("0.5", "1/2", 0.0),
        (r"\boxed{}", "1/2", 0.0),
        (r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}", 1.0),
        (r"\boxed{100 dollars}", "100", 1.0),
        (r"\boxed{$50$ dollars}", "50", 1.0),
        (r"\boxed{50}", "$50$ dollars", 1.0),
        (r"\boxed{$\frac{1}{2}$ cups}", "0.5", 1.0),
        (r"\boxed{5 US dollars}", "5 dollars", 1.0),
        (r"\boxed{5 dollars}", "5 euros", 0.0),
        (r"\boxed{50 dollars}", "60", 0.0),
        (r"\boxed{2 pi}", "2", 0.0),
        (r"\boxed{$50$ or $60$}", "50", 0.0),
        (r"\boxed{$50$ miles per hour}", "50", 1.0),
        (r"\boxed{$3$ square meters}", "3", 1.0),
        # words that change the value
        (r"\boxed{$2$ pi}", "2", 0.0),
        (r"\boxed{2}", "$2$ pi", 0.0),
        (r"\boxed{$3$ million}", "3", 0.0),
        (r"\boxed{$1$ dozen}", "1", 0.0),
        (r"\boxed{$2$ squared}", "2", 0.0),
        (r"\boxed{$x$ factorial}", "x", 0.0),
        (r"\boxed{$5$ i}", "5", 0.0),
        (r"\boxed{$3$ x}", "3", 0.0),
        (r"\boxed{$50$ percent}", "0.5", 1.0),
    ],
)
def test_math_strict(response, answer, score):
    assert math({"response": response, "answer": answer})["overall"] == score


def test_math_flexible_reads_unboxed_answers():
    assert math({"response": "so the answer is $\\frac{3}{6}$.", "answer": "1/2"}, method="flexible")["overall"] == 1.0


def test_math_gives_up_in_time_and_says_so(monkeypatch):
    monkeypatch.setattr("megarl.rewards.math.equal", lambda *answers: spend(5))
    result = math({"response": r"\boxed{2}", "answer": "1"}, timeout_s=0.05)
    assert result["overall"] == 0.0
    assert result["timeout"] == 1.0


def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_math_that_gives_up_inside_a_finaliser_says_so_too(monkeypatch):
    reported = []
    monkeypatch.setattr("sys.unraisablehook", report := lambda lost: reported.append(lost.exc_type))

    class Broken:
        def __del__(self):
            raise KeyError

    class Slow:
        def __del__(self):
            spend(0.1)  # the limit is reached in here, where Python drops what is raised

    def compare(*answers):
        Broken()
        Slow()
        spend(5)

    monkeypatch.setattr("megarl.rewards.math.equal", compare)
    assert math({"response": r"\boxed{2}", "answer": "1"}, timeout_s=0.05)["timeout"] == 1.0
    assert reported == [KeyError]  # the limit itself is no error
    assert sys.unraisablehook is report


def test_numeric_can_refuse_an_expression_that_was_not_worked_out():
    assert numeric({"response": "48/2", "answer": "24"})["overall"] == 1.0
    assert numeric({"response": "48/2", "answer": "24"}, evaluated=True)["overall"] == 0.0
    assert numeric({"response": "24.0", "answer": "24"}, evaluated=True)["overall"] == 1.0


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("<user>1+1<assistant><think>\n", "one and one\n</think>\n\\boxed{2}", 1.0),
        ("<user>1+1<assistant><think>", "one and one</think>2", 0.0),
        ("<user>1+1<assistant><think>\n", " \n</think>\\boxed{2}", 0.0),
        ("<user>1+1<assistant><think>\n", "<think>again</think>\\boxed{2}", 0.0),
        ("<user>1+1<assistant><think>\n</think>", "\\boxed{2}", 0.0),
        ("<user>think in <think> tags<assistant>", "so</think>\\boxed{2}", 0.0),
        ("<user>1+1<assistant>", "<think>so</think>\\boxed{2}", 1.0),
    ],
)
def test_thinking_may_be_opened_by_the_prompt(prompt, response, expected):
    assert format_reward({"prompt": prompt, "response": response}) == expected
