"""Measure how much of this project has to be read: `python tools/reading.py [--no-steps]`

    a first reading                     files that docs/architecture.md walks through, and their lines
    a GRPO step, an asynchronous step   a small run is traced: files of which step 2 calls a function, in any process of
                                        the run, their lines, and the lines of the functions that it calls
    megarl/runtime                      imports between its files (arrows), and groups of files that import each other
                                        in a circle
    the product                         lines of all files that are installed, and files of less than 60 lines
    habits                              how often each habit of tools/habits.py stands in the product

It counts the tree that it stands in, so that an earlier commit is counted by a copy of this file in a clone of it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import habits

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megarl", "launchers", "recipes", "kernels", "benchmarks")
SMALL = (
    *("trainer.steps=3", "trainer.save_every=0", "trainer.export_hf=false", "tracking.mlflow=false"),
    *(
        "tracking.report=false",
        "validation.every=0",
        "data.batch_size=8",
        "sft.steps=2",
        "sft.eval_every=0",
        "sft.stop_at_accuracy=null",
    ),
    *("data.loader_kwargs={low: 1, high: 6, held_out: 8}", "model.hf_config.num_hidden_layers=2"),
    "model.hf_config.hidden_size=64",
)
STEPS = {
    "a GRPO step": ("grpo_quickstart", "cluster.nproc=1"),
    "an asynchronous step": ("grpo_async_quickstart",),
}
# Code that each process imports first; it records each function of the product that step 2 calls.
TRACER = """
import os, sys, threading
ROOTS = tuple(os.path.join(os.environ["READING_ROOT"], name) + os.sep for name in os.environ["READING_FOLDERS"].split())
seen, state = set(), {"on": False}
def called(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    if code.co_name == "set_step" and code.co_filename.endswith("megarl/system/tracing.py"):
        state["on"] = frame.f_locals[code.co_varnames[0]] == 2
    if state["on"] and code not in seen and code.co_filename.startswith(ROOTS):
        seen.add(code)
        with open(os.path.join(os.environ["READING_OUT"], str(os.getpid())), "a") as file:
            file.write(f"{code.co_filename}\\t{code.co_firstlineno}\\n")
sys.setprofile(called)
threading.setprofile(called)
"""


def calls_of_step(arguments: Iterable[str]) -> dict[Path, set[int]]:
    """Return the files that step 2 of a run calls functions of, with the first lines of these functions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "out").mkdir()
        (folder / "sitecustomize.py").write_text(TRACER)
        environment = os.environ | {
            "PYTHONPATH": name,
            "READING_ROOT": str(ROOT),
            "READING_FOLDERS": " ".join(FOLDERS),
            "READING_OUT": str(folder / "out"),
        }
        command = [sys.executable, "-m", "megarl", "train", *arguments, *SMALL, "--run-dir", str(folder / "run")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        lines_by_file: dict[Path, set[int]] = {}
        for file in (folder / "out").iterdir():
            for line in file.read_text().splitlines():
                path, first = line.split("\t")
                lines_by_file.setdefault(Path(path), set()).add(int(first))
    return lines_by_file


def lines_of(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def walks() -> dict[str, list[Path]]:
    """Map the title of each walk in docs/architecture.md to the files that its table lists."""
    sections = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## ")
    return {
        section.partition("\n")[0]: [ROOT / name for name in re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)]
        for section in sections
        if section.startswith("The walk of")
    }


def function_lines(path: Path, firsts: set[int]) -> int:
    """Return the lines of those functions of a file that begin in one of the lines `firsts`; nested ones count once."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in firsts:
                inside |= set(range(first, (node.end_lineno or first) + 1))
    return len(inside)


def imports_between(folder: Path) -> dict[str, set[str]]:
    """Map each file of a folder to the other files of it that it imports, wherever in it the import stands."""
    package = ".".join(folder.relative_to(ROOT).parts)
    names = {path.stem for path in folder.glob("*.py")}
    imports: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        names_of_file = imports.setdefault(path.stem, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                tail = (node.module or "").removeprefix(package).removeprefix(".").partition(".")[0]
                names_of_file |= ({tail} if tail else {alias.name for alias in node.names}) & names
        names_of_file.discard(path.stem)
    return imports


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of more than one file in which each imports each other one, directly or not."""

    def reached(start: str) -> set[str]:
        reached, left = set(), [start]
        while left:
            for neighbour in arrows[left.pop()] - reached:
                reached.add(neighbour)
                left.append(neighbour)
        return reached

    reach = {name: reached(name) for name in arrows}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in arrows if name in reach[name]
    }
    return [set(group) for group in groups]


def main() -> int:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-steps", action="store_true", help="run nothing")
    parser.add_argument("--files", action="store_true", help="name the files of the steps")
    wanted = parser.parse_args()
    for name, arguments in {} if wanted.no_steps else STEPS.items():
        calls = calls_of_step(arguments)
        total = sum(map(lines_of, calls))
        inside = sum(function_lines(path, firsts) for path, firsts in calls.items())
        print(f"{name}: {len(calls)} files, {total} lines, {inside} of functions that it calls")
        if wanted.files:
            for path in sorted(calls):
                print(f"    {path.relative_to(ROOT)} {lines_of(path)}")
    for title, files in walks().items():
        print(f"{title[0].lower()}{title[1:]}: {len(files)} files, {sum(map(lines_of, files))} lines")
    arrows = imports_between(ROOT / "megarl" / "runtime")
    print(
        f"megarl/runtime: {len(arrows)} files, {sum(map(len, arrows.values()))} arrows, {len(circles(arrows))} circles"
    )
    listed = subprocess.check_output(["git", "ls-files", *(f"{name}/*.py" for name in FOLDERS)], cwd=ROOT, text=True)
    lines = [lines_of(ROOT / name) for name in listed.splitlines()]
    print(f"product: {len(lines)} files, {sum(lines)} lines, {sum(count < 60 for count in lines)} files under 60 lines")
    for habit, places in habits.counts().items():
        print(f"{habit}: {len(places)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
