"""Measure which answers the reward `math` accepts: answers with one wrong character, and right answers in other forms.

    python -m megarl.benchmarks.mutations python -m megarl.benchmarks.mutations --json FOLDER
    python -m megarl.benchmarks.mutations --show            # every answer that was judged wrongly

`answers.txt` beside this file holds answers of all kinds, and for each the forms that equal it, listed by hand. A
mutant is a reference with one character changed: every character in turn, but white space, becomes two others of its
class (digits, small and capital letters, signs, relations, brackets, marks). It is a wrong answer unless the list has
it as an equal form of that reference or as an equal mutant (ignoring white space, and `;` separates as `,` does); the
list does not depend on the reward. Seconds are CPU time of one process. Growth is the factor by which the time grows
when answers are twice as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.benchmarks.scorers import HOSTILE, hostile

ANSWERS = Path(__file__).with_name("answers.txt")
#: Bars: share of mutants and of equal forms that are accepted, seconds of one pair, time of twice the length.
MOST_WRONG, LEAST_EQUAL, MOST_SECONDS, MOST_GROWTH = 0.003, 0.97, 1.0, 3.0
_CLASSES = (
    "0123456789",
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "+-*/^_",
    "<>=",
    "()[]{}",
    ".,;:!?'|&",
    "\\/%#@",
)
_STEPS = (1, 3)  # each character becomes the characters this many places after it in its class
_LENGTHS = ((500, 1_000), (4_000, 8_000))  # pairs of answer lengths in characters whose times are compared
_GROWING = {
    "a sum": ("1", "+x", ""),
    "a product": ("x", "(x+1)", ""),
    "a list": ("1", ", 2", ""),
    "a set": (r"\{1", ", 2", r"\}"),
    "powers": ("9", "^9", ""),
    "roots": ("", r"\sqrt{", "2"),
    "brackets": ("", "(", "1"),
    "a fraction of fractions": ("", r"\frac{1}{", "1"),
    "words": ("", "word ", ""),
    "text": ("", r"\text{a} ", ""),
    "absolute values": ("", "|x", ""),
    "factorials": ("3", "!", ""),
    "a matrix": (r"\begin{pmatrix}1", r"&1", r"\end{pmatrix}"),
    "rows": (r"\begin{cases}x=1", r"\\x=1", r"\end{cases}"),
    "unions": ("(1,2)", r"\cup(1,2)", ""),
    "signs": ("", "-", "1"),
    "plus or minus": ("1", r"\pm1", ""),
    "functions": ("", r"\sin ", "x"),
    "subscripts": ("x", "_x", ""),
    "primes": ("y", "'", ""),
    "decimals": ("0.", "3", ""),
    "units": ("5", r"\text{ m}", ""),
}


@dataclass(frozen=True)
class Answer:
    """One reference answer in answers.txt, and the other forms and the mutants that are equal to it."""

    kind: str
    reference: str
    forms: tuple[str, ...]
    mutants: frozenset[str]


def load(path: Path = ANSWERS) -> list[Answer]:
    """Return the answers of a file."""
    answers, kind = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]") and "|||" not in line:
            kind = line[1:-1]
        elif line.strip() and not line.startswith("#"):
            equal, *mutants = line.split(" ~~~ ")
            reference, *forms = equal.split(" ||| ")
            answers.append(Answer(kind, reference, tuple(forms), frozenset(mutants)))
    return answers


def mutants(reference: str) -> Iterator[str]:
    """Yield the reference with one character changed, each in turn, to two others of its class."""
    for position, character in enumerate(reference):
        if character.isspace():
            continue
        kind = next((kind for kind in _CLASSES if character in kind), "?!")
        place = kind.find(character)
        for step in dict.fromkeys(step % len(kind) for step in _STEPS):
            other = kind[(place + step) % len(kind)]
            if other != character:
                yield reference[:position] + other + reference[position + 1 :]


def wrong_mutants(answer: Answer) -> list[str]:
    """Return the mutants of an answer that do not equal it."""
    equal = {_plain(form) for form in (answer.reference, *answer.forms, *answer.mutants)}
    return [mutant for mutant in mutants(answer.reference) if _plain(mutant) not in equal]


def _plain(answer: str) -> str:
    """Remove white space, and use one separator of lists."""
    return "".join(answer.split()).replace(";", ",")


def judge(answers: list[Answer]) -> dict[str, Any]:
    """Count the wrong and equal answers that the reward accepts, and its CPU seconds."""
    from megarl.rewards.math import math

    seconds: list[float] = []

    def accepted(reference: str, answer: str) -> bool:
        start = time.process_time()
        score = math({"response": rf"\boxed{{{answer}}}", "answer": reference})["overall"]
        seconds.append(time.process_time() - start)
        return bool(score == 1.0)

    math({"response": r"\boxed{1+x}", "answer": "x+1"})  # untimed, because the first sample imports packages
    wrong: list[tuple[str, str]] = []
    missed: list[tuple[str, str]] = []
    kinds: dict[str, dict[str, int]] = {}
    for answer in answers:
        planted = wrong_mutants(answer)
        paid = [mutant for mutant in planted if accepted(answer.reference, mutant)]
        refused = [form for form in answer.forms if not accepted(answer.reference, form)]
        counts = kinds.setdefault(answer.kind, {"answers": 0, "mutants": 0, "paid": 0, "forms": 0, "refused": 0})
        for name, count in (
            ("answers", 1), ("mutants", len(planted)), ("paid", len(paid)), ("forms", len(answer.forms)),
            ("refused", len(refused)),
        ):  # fmt: skip
            counts[name] += count
        wrong += [(answer.reference, mutant) for mutant in paid]
        missed += [(answer.reference, form) for form in refused]
    totals = {name: sum(counts[name] for counts in kinds.values()) for name in next(iter(kinds.values()))}
    return {
        "totals": totals,
        "wrong_accepted": totals["paid"] / totals["mutants"],
        "equal_accepted": 1 - totals["refused"] / totals["forms"],
        "mean_s": sum(seconds) / len(seconds),
        "worst_s": max(seconds),
        "kinds": kinds,
        "paid": wrong,
        "refused": missed,
    }


def growing(name: str, length: int) -> str:
    """Return a boxed answer of about `length` characters."""
    begin, unit, end = _GROWING[name]
    return begin + unit * (length // len(unit)) + end


def pair_seconds(reference: str, answer: str, rounds: int = 3, least_s: float = 0.03) -> float:
    """Return the CPU seconds of one comparison: the minimum over several rounds of at least `least_s` seconds each."""
    from megarl.rewards.math import math

    seconds = []
    for _ in range(rounds):
        start, count = time.process_time(), 0
        while not count or time.process_time() - start < least_s:
            math({"response": rf"\boxed{{{answer}}}", "answer": reference})
            count += 1
        seconds.append((time.process_time() - start) / count)
    return min(seconds)


def growth() -> dict[str, Any]:
    """Measure long answers by kind: how the time grows with the length, and how long the longest responses take."""
    kinds: dict[str, Any] = {}
    for name in _GROWING:
        spent = {n: pair_seconds(growing(name, n) + "+1", growing(name, n)) for pair in _LENGTHS for n in pair}
        ratios = [spent[long] / max(spent[short], 1e-3) for short, long in _LENGTHS]
        kinds[name] = {"seconds": spent, "ratio": max(ratios)}
    texts = [hostile(name) for name in HOSTILE] + [growing(name, 100_000) for name in _GROWING]
    return {
        "lengths": _LENGTHS,
        "kinds": kinds,
        "ratio": max(numbers["ratio"] for numbers in kinds.values()),
        "longest_s": max(pair_seconds("18", text, 1, 0.0) for text in texts),
        "slowest_s": max(max(numbers["seconds"].values()) for numbers in kinds.values()),
    }


def verdict(result: dict[str, Any]) -> dict[str, bool]:
    """Return whether each bar is met, by its name."""
    return {
        "wrong accepted": result["wrong_accepted"] <= MOST_WRONG,
        "equal forms accepted": result["equal_accepted"] >= LEAST_EQUAL,
        "worst time": max(result["worst_s"], result["growth"]["slowest_s"], result["growth"]["longest_s"])
        <= MOST_SECONDS,
        "growth": result["growth"]["ratio"] <= MOST_GROWTH,
    }


def describe(result: dict[str, Any], show: bool) -> str:
    """Return the numbers as text."""
    totals, grown = result["totals"], result["growth"]
    lines = [f"{'kind':<18} answers mutants  paid forms refused"]
    for kind, counts in [*result["kinds"].items(), ("all", totals)]:
        lines.append(
            f"{kind:<18} {counts['answers']:>7} {counts['mutants']:>7} {counts['paid']:>5} {counts['forms']:>5} "
            f"{counts['refused']:>7}"
        )
    lines += [
        f"wrong answers accepted: {result['wrong_accepted']:.2%} (at most {MOST_WRONG:.1%})",
        f"equal forms accepted: {result['equal_accepted']:.1%} (at least {LEAST_EQUAL:.0%})",
        f"CPU seconds of a pair: {result['mean_s'] * 1e3:.2f} ms on average, {result['worst_s'] * 1e3:.0f} ms at most",
        f"answers of up to {_LENGTHS[-1][-1]} characters: {grown['slowest_s'] * 1e3:.0f} ms at most, of twice the "
        f"length {grown['ratio']:.1f} times as much at most; of 100000: {grown['longest_s'] * 1e3:.0f} ms at most",
    ]
    if show:
        lines += [f"paid:    {reference}  <-  {mutant}" for reference, mutant in result["paid"]]
        lines += [f"refused: {reference}  <-  {form}" for reference, form in result["refused"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and save; the exit code is 1 where a bar is missed."""
    from megarl.benchmarks.report import result_file, save
    from megarl.system.machine import machine_info

    parser = argparse.ArgumentParser(
        prog="python -m megarl.benchmarks.mutations", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="another list")
    parser.add_argument("--json", type=Path, help="write the numbers to this file or folder, too")
    parser.add_argument("--show", action="store_true", help="print every answer that was judged wrongly")
    arguments = parser.parse_args(argv)
    result = {**judge(load(arguments.answers)), "growth": growth()}
    result["met"] = verdict(result)
    print(describe(result, arguments.show))
    if arguments.json is not None:
        machine = machine_info()
        save({"machine": machine, **result}, result_file(arguments.json, "mutations", machine))
    missed = [name for name, met in result["met"].items() if not met]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
