"""`megarl bench --compare`: rounds, history, verdicts and the page."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.benchmarks import history, sources, throughput
from megarl.benchmarks.throughput import add_arguments, add_compare_arguments
from megarl.system.errors import UserError


def result(seconds: float, nproc: int = 2, gpus: tuple[str, ...] = ()) -> dict[str, Any]:
    phases = {"rollout": 0.4 * seconds, "actor_train": 0.5 * seconds, "other": 0.1 * seconds}
    step = {"wall_s": seconds, "cpu_s": 2 * seconds, "phases": phases}
    machine = {"processor": "A CPU", "cores": 2, "gpus": list(gpus), "packages": {"torch": "2.13.0"}}
    numbers = {"wall_s": seconds, "cpu_s": 2 * seconds, "floor_s": 0.5, "tokens_per_s": 100 * nproc / seconds}
    layout = {"nproc": nproc, "threads": 1}
    case = {"case": "mini", "dtype": "fp32", "overrides": [], "layout": layout, "others_share": 0.1, "gpus": len(gpus)}
    return {**case, "machine": machine, "steps": [step], "summary": numbers}


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_compare_arguments(parser)
    return parser.parse_args(["--case", "mini", "--compare", "--history", str(folder / "history.jsonl"), *more])


class Measured:
    """Rounds that take `seconds`, those of the other package `then`; each a little longer or shorter than the last."""

    def __init__(self, seconds: float, then: float = 1.0, nproc: int = 2, gpus: tuple[str, ...] = ()) -> None:
        self.seconds, self.then, self.nproc, self.gpus = seconds, then, nproc, gpus
        self.asked: list[Path | None] = []

    def __call__(self, package: Path | None, shape: Any) -> dict[str, Any]:
        self.asked.append(package)
        is_base = package is not None and package.name == "base"
        noise = 1 + 0.004 * (len(self.asked) % 5)
        return result(noise * (self.then if is_base else self.seconds), self.nproc, self.gpus)


def test_sessions_are_held_against_the_last_and_the_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "commit_now", lambda: ("abc", False))
    assert history.compare(arguments(tmp_path, "--set-baseline"), Measured(1.0)) == 0
    for _ in range(10):
        assert history.compare(arguments(tmp_path), Measured(1.0)) == 0
    capsys.readouterr()
    assert history.compare(arguments(tmp_path), Measured(1.1)) == 1
    said = capsys.readouterr().out
    assert said.count("SLOWER") == 2
    assert "last (abc)" in said
    assert "baseline (abc)" in said
    assert history.compare(arguments(tmp_path), Measured(1.1)) == 1  # as fast as the last, slower than the baseline
    lines = read_jsonl(tmp_path / "history.jsonl")
    assert len(lines) == 13
    assert [line["baseline"] for line in lines] == [True] + [False] * 12
    assert {"commit", "machine", "versions", "rounds", "floor_s", "host", "time"} <= set(lines[0])
    assert len(lines[0]["rounds"]) == 5


def test_another_layout_dtype_or_machine_is_not_compared(tmp_path):
    assert history.compare(arguments(tmp_path), Measured(1.0)) == 0
    assert history.compare(arguments(tmp_path), Measured(9.0, nproc=4)) == 0
    assert history.compare(arguments(tmp_path), Measured(9.0, gpus=("NVIDIA H100",))) == 0
    assert history.compare(arguments(tmp_path), Measured(9.0)) == 1


def test_a_commit_is_measured_in_turn(tmp_path, monkeypatch, capsys):
    class Package:
        def __init__(self, commit: str | None) -> None:
            self.path = Path("base" if commit else "now")

        def __enter__(self) -> Path:
            return self.path

        def __exit__(self, *details: object) -> None:
            pass

    monkeypatch.setattr(history, "package_of", Package)
    measured = Measured(1.1)
    assert history.compare(arguments(tmp_path, "--base", "main", "--rounds", "10"), measured) == 1
    assert [path.name for path in measured.asked[:4] if path] == ["now", "base", "base", "now"]
    assert "commit main, in turn" in capsys.readouterr().out
    assert history.compare(arguments(tmp_path / "same", "--base", "main", "--rounds", "10"), Measured(1.0)) == 0


def test_the_page_has_bars_floor_scaling_and_history(tmp_path):
    for nproc, seconds in ((1, 2.0), (2, 1.0), (2, 1.05)):
        history.compare(arguments(tmp_path), Measured(seconds, nproc=nproc))
    text = (tmp_path / "history.html").read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)
    bars, scaling, past = pictures
    assert all(name in bars for name in ("rollout", "actor_train", "step", "floor of a step, 0.5 s"))
    assert bars.count("<rect") == 8  # four phases, now and before
    assert "1 processes" in scaling
    assert "2 processes" in scaling
    assert past.count("<circle") == 2
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_noise_needs_rounds(tmp_path):
    with pytest.raises(UserError, match="3 or more"):
        history.compare(arguments(tmp_path, "--rounds", "2"), Measured(1.0))


@pytest.mark.parametrize(
    ("more", "where"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "-1"], "--rounds"),
        (["--steps", "0"], "--steps"),
        (["--limit-s", "0"], "--limit-s"),
    ],
)
def test_nothing_is_measured_with_nothing_of_it(tmp_path, more, where):
    with pytest.raises(UserError, match=f"{where}: the value must be positive"):
        throughput.run(arguments(tmp_path, *more))


def test_a_base_is_for_a_verdict(tmp_path):
    given = arguments(tmp_path, "--base", "main")
    given.compare = False
    with pytest.raises(UserError, match="--base: --base has an effect only in a comparison"):
        throughput.run(given)


def test_an_unknown_commit_is_told(monkeypatch, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    with pytest.raises(UserError, match="unknown commit"), sources.package_of("0123456"):
        pass
