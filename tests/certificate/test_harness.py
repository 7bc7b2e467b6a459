"""Sections in processes of their own: what became of them, what is kept, and what a failed one leaves."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.certificate import harness
from megarl.certificate.command import chosen
from megarl.certificate.findings import worst
from megarl.certificate.harness import CertificateSection, certify, read_result
from megarl.certificate.report import bug_report, page, write_reports
from megarl.cli import main
from megarl.system.errors import UserError
from tests.certificate import planted


def section(run: Any, deadline_s: float = 60.0) -> CertificateSection:
    function = f"{run.__module__}:{run.__name__}"
    return CertificateSection(run.__name__, f"a section that {run.__name__}", deadline_s, deadline_s, function)


def one(run: Any, folder: Path, **limits: float) -> Any:
    (result,) = certify([section(run, **limits)], folder, tell=lambda line: None)
    return result


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    """A tree without changes: of one with changes nothing is kept."""
    monkeypatch.setattr(harness, "commit_now", lambda: ("abc", False))


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (planted.passes, "passed", ""),
        (planted.fails, "failed", "two"),
        (planted.raises, "failed", "its process ended with exit code 1, after one"),
        (planted.dies, "failed", "its process ended with signal SIGKILL, out of memory?, after one"),
        (planted.is_skipped, "skipped", "section: no GPU"),
    ],
)
def test_what_became_of_a_section(run, status, reason, tmp_path):
    result = one(run, tmp_path)
    assert (result.status, result.reason) == (status, reason)
    assert read_result(tmp_path / run.__name__) == result


def test_a_section_that_hangs_ends_at_its_deadline_with_all_it_started_and_says_where(tmp_path, monkeypatch):
    class Process(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            """The deadline counts from where it hangs: the start takes what the machine needs."""
            while timeout == 4.0 and self.poll() is None and not (tmp_path / "child").exists():
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    result = one(planted.hangs, tmp_path, deadline_s=4.0)
    assert result.reason == "not done within 4 s, after one"
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert "in hangs" in (tmp_path / "hangs" / "log.txt").read_text()


def test_what_has_passed_is_kept_and_what_failed_is_run_again(tmp_path):
    sections = [section(planted.passes), section(planted.fails)]
    told: list[str] = []
    for again in (False, False, True):
        results = certify(sections, tmp_path, again=again, tell=told.append)
        assert [one.status for one in results] == ["passed", "failed"]
    assert (tmp_path / "runs").read_text() == "xx"
    assert sum("a section that fails" in line for line in told) == 3


def test_nothing_is_kept_of_a_tree_with_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "commit_now", lambda: ("abc", True))
    for _ in range(2):
        certify([section(planted.passes)], tmp_path, tell=lambda line: None)
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_section_that_dies_leaves_nothing_running(tmp_path):
    one(planted.dies_with_a_child, tmp_path)
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_result_of_another_machine_is_not_kept(tmp_path):
    one(planted.passes, tmp_path)
    file = tmp_path / "passes" / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"machine": result["machine"] | {"gpus": ["another one"]}}))
    one(planted.passes, tmp_path)
    assert (tmp_path / "runs").read_text() == "xx"


def test_a_failed_section_leaves_what_a_report_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    result = one(planted.raises, tmp_path)
    text = bug_report(result, tmp_path)
    for part in (
        "megarl doctor gpu --only raises",
        "no such kernel",
        "NCCL_DEBUG=INFO",
        "torch ",
        "SGLANG_API_KEY=***",
    ):
        assert part in text, part
    assert "secret" not in text


def test_the_page_and_the_file_hold_every_finding(tmp_path):
    results = certify([section(planted.passes), section(planted.fails)], tmp_path, tell=lambda line: None)
    (tmp_path / "fails" / "bug.txt").write_text("versions & <more>")
    write_reports(results, tmp_path)
    text = (tmp_path / "certificate.html").read_text()
    assert text == page(results, tmp_path, json.loads((tmp_path / "certificate.json").read_text())["made"])
    for part in ("2 GB/s, 50% of 4 (data sheet)", "versions &amp; &lt;more&gt;", "nan, at most 1"):
        assert part in text, part
    saved = json.loads((tmp_path / "certificate.json").read_text())["sections"]
    assert [one["status"] for one in saved] == ["passed", "failed"]


def test_sections_are_chosen_by_name_in_their_own_order():
    names = ["a", "b", "c", "d"]
    assert chosen(names, ["c,a"], []) == ["a", "c"]
    assert chosen(names, [], ["b", "d"]) == ["a", "c"]
    with pytest.raises(UserError, match="--only"):
        chosen(names, ["e"], [])


def test_the_command_reports_what_ran_and_what_was_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "SECTIONS", (section(planted.passes), section(planted.fails)))
    assert main(["doctor", "gpu", "--only", "passes", "--out", str(tmp_path)]) == 0
    assert main(["doctor", "gpu", "--skip", "passes", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "== fails failed ==" in text
    assert "failed       two: nan, at most 1" in (tmp_path / "fails" / "bug.txt").read_text()
    saved = json.loads((tmp_path / "certificate.json").read_text())["sections"]
    assert [one["section"] for one in saved] == ["passes", "fails"]


def test_nan_is_the_worst_of_errors():
    assert math.isnan(worst([0.1, math.nan, 0.2]))
    assert worst([0.1, math.inf, 0.2]) == math.inf
