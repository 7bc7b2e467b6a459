"""`megarl simulate` as a user types it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megarl import cli

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "tests" / "simulation" / "recorded" / "synchronous")


def run(capsys, *arguments):
    """(exit code, what was printed, what was complained about)."""
    code = cli.main(["simulate", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_table_for_each_what_if_is_readable_in_80_columns(capsys):
    what_if = "async={max_staleness: 1, order: in_order}"
    code, shown, _ = run(capsys, RUN, "--steps", "20", "--what-if", what_if, "--gpus", "2,4")
    assert code == 0
    assert what_if in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r" +[24] ", line)]
    assert [row[0] for row in rows] == ["2", "4", "2", "4"]
    assert {len(row) for row in rows} == {12}
    assert max(map(len, shown.splitlines())) <= 80


def test_what_a_run_does_not_tell_of_more_devices_is_said(capsys):
    _, shown, _ = run(capsys, RUN, "--run", RUN, "--steps", "20", "--gpus", "2,4")
    assert "for any number of devices: a decoding step, actor_train" in " ".join(shown.split())
    for arguments in (["--run", RUN], ["--gpus", "2,4"]):  # one number of devices; formulas, which all follow it
        _, shown, _ = run(capsys, RUN, "--steps", "20", *arguments)
        assert "any number" not in shown


def test_quotes_around_a_setting_are_the_shells(capsys):
    code, shown, _ = run(capsys, RUN, "--steps", "6", "--what-if", "'async={max_staleness: 1}' \"link_times=2\"")
    assert code == 0
    assert "async={max_staleness: 1} link_times=2" in shown


def test_efficiency_is_beside_the_recipe_as_it_is(capsys):
    _, shown, _ = run(capsys, RUN, "--steps", "20", "--what-if", "link_times=1", "--gpus", "2,4")
    rows = [line.split() for line in shown.splitlines() if re.match(r" +[24] ", line)]
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]
    assert rows[0][5] == "100%"
    assert rows[1][5] != "100%"


CASE = str(ROOT / "benchmarks" / "cases" / "llama31_8b_h100x16_ahead.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([RUN, "--run", RUN, "--what-if", "train_mfu=0.3"], "this assumption is taken from the run with --run"),
        ([RUN, "--run", RUN, "--assume", "step_s=3"], "this assumption is taken from the run with --run"),
        (
            ["grpo_qwen3_8b_8gpu", "cluster.nproc=80", "actor.parallel.tp=1", "actor.parallel.pp=80"],
            "actor.parallel.pp",
        ),
        (["grpo_qwen3_8b_8gpu", "--what-if", "actor.parallel.tp=3"], "tp 3 does not divide"),
        (["grpo_qwen3_8b_8gpu", "rollout.sglang.servers=16"], "set rollout.sglang.servers=8"),
        (["grpo_qwen3_8b_8gpu", "rollout.sampling.max_new_tokens=65536"], "40960 positions"),
        ([CASE, "--run", RUN], "without old_logp, rollout_correction, ref_logp"),
        ([CASE, "--assume", "mean_tokens=5000"], "up to rollout.sampling.max_new_tokens=3968"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, said, capsys):
    code, _, complaint = run(capsys, *arguments)
    assert code == 2
    assert said in complaint


def test_another_model_than_the_runs_is_said(capsys):
    keys = ["model.hf_config.hidden_size=128", "--run", RUN, "--steps", "6"]
    _, shown, _ = run(capsys, RUN, *keys)
    assert "the seconds come from a run whose model differs" in shown
    _, shown, _ = run(capsys, RUN, "--run", RUN, "--steps", "6")
    assert "run's model" not in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "sets nothing"),
        ("async={max_staleness:", "not closed"),
        ("async.max_staleness:1", "'async.max_staleness:1' is not of the form KEY=VALUE"),
        ("link_times=2 fast", "'fast' is not of the form KEY=VALUE"),
        ("link_times='2", "not closed"),
    ],
)
def test_what_if_names_what_cannot_be_read(text, said, capsys):
    code, _, complaint = run(capsys, "grpo_quickstart", "--what-if", text)
    assert code == 2
    assert "--what-if" in complaint
    assert said in complaint


def commands():
    """Those of the docs that need no run folder."""
    text = (ROOT / "docs" / "simulating.md").read_text()
    case = re.search(r"^CASE=(\S+)", text, re.MULTILINE)
    found = re.findall(r"^megarl simulate (?!RE|RUN)(.+)$", text, re.MULTILINE)
    return [line.replace("$CASE", str(ROOT / case[1])) for line in found]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_docs_work(line, capsys):
    arguments = re.sub(r"(?<=--gpus )(\d+)[,\d]*", r"\1", line)  # the first of several numbers
    assert run(capsys, *shlex.split(arguments, comments=True), "--steps", "6")[0] == 0
