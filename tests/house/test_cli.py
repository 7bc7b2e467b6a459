"""The command line: quick, light, and with the exit codes it promises."""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl import cli
from megarl.commands import job
from megarl.system.errors import DataError, UserError, WorkerError
from megarl.system.processes import Stopped

HEAVY = ("ray", "sglang", "megatron", "mlflow", "torch", "transformers")


LIGHT = [
    "import megarl",
    "from megarl.cli import build_parser; build_parser()",
    "import megarl.launchers.common",
    "from megarl import cli; assert cli.main(['convert', '/no/such/folder', '/tmp']) == 2",
    "from megarl import cli; assert cli.main(['convert', 'org/model', '/dev/null/here']) == 2",
]


def test_nothing_heavy_is_imported() -> None:
    """One fresh interpreter runs the statements one after the other: what one of them loads stays loaded."""
    loaded = f"print([name for name in {HEAVY} if name in sys.modules])"
    code = "\n".join(["import sys", *(f"{statement}\n{loaded}" for statement in LIGHT)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert dict(zip(LIGHT, done.stdout.splitlines(), strict=True)) == dict.fromkeys(LIGHT, "[]")


def test_help_takes_less_than_half_a_second() -> None:
    """Of processor time: what else the machine does is not counted. On a slower one in proportion to what is imported
    in any case, 0.08 s where this takes 0.3 s."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def is_quick() -> bool:
        taken = seconds("-m", "megarl", "--help")
        return taken < 0.5 or taken < 6 * seconds("-c", "import argparse, pydantic, yaml")

    assert any(is_quick() for _ in range(3))


def test_overrides_may_follow_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(job, "run", lambda arguments: seen.append(arguments) or 0)

    assert cli.main(["train", "r.yaml", "a.b=1", "--launcher", "ray", "c=2"]) == 0
    assert seen[0].overrides == ["a.b=1", "c=2"]


@pytest.mark.parametrize(
    ("command", "found", "fix"),
    [
        (["train", "r.yaml", "--bogus", "a=1"], "'--bogus'", "megarl train --help"),
        (
            ["train", "r.yaml", "--trainer.steps=10"],
            "'--trainer.steps=10'",
            "megarl train --help lists its arguments; keys "
            "of the recipe are written key.path=value; write trainer.steps=10, without dashes",
        ),
        (["train", "r.yaml", "--dryrun"], "'--dryrun'", "did you mean --dry-run?"),
        (["init", "r.yaml", "--dta", "rows.jsonl"], "'--dta rows.jsonl'", "did you mean --data?"),
        (["report", "run", "another", "--bogus"], "'another --bogus'", "megarl report --help"),
    ],
)
def test_an_unknown_argument_is_named(
    command: list[str], found: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert f"megarl: megarl {command[0]}: unknown argument" in shown
    assert f"found:   {found}\n" in shown
    assert f"fix:     {fix}" in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["trian", "x"], ["megarl: unknown command\n", "found:   'trian'", "allowed: train, sft, ", "mean train?"]),
        (["zzz"], ["megarl: unknown command\n", "fix:     megarl --help explains"]),
        (["doctor", "parityy"], ["megarl doctor: unknown check\n", "did you mean parity?"]),
        (["train", "r.yaml", "--launcher", "rey"], ["--launcher has an unknown value\n", "did you mean ray?"]),
    ],
)
def test_a_misspelt_choice_is_told_the_near_one(
    command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "usage" not in shown
    for word in words:
        assert word in shown


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("broken JSON", where="train.jsonl:3"), 2, "megarl: train.jsonl:3: broken JSON\n"),
        (WorkerError("rank 1 is gone"), 1, "megarl: rank 1 is gone\n"),
        (Stopped(signal.SIGINT), 130, "megarl: stopped by SIGINT\n"),
        (ZeroDivisionError("division by zero"), 1, "megarl: ZeroDivisionError: division by zero\n  log: "),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_doctor", fail)
    assert cli.main(["doctor"]) == code
    shown = capsys.readouterr().err
    assert text in shown
    assert "Traceback" not in shown


PLAN = ("plan", "grpo_quickstart", "--hardware", "h100x2x1")


WAYS = [("read", ""), ("unread", "1"), ("read", "1"), ("unread", "")]


@pytest.mark.parametrize(
    ("command", "errors", "unbuffered"),
    [
        *((("--help",), *way) for way in WAYS),
        ((*PLAN, "--json"), *WAYS[3]),
    ],
)
def test_a_command_ends_quietly_when_nobody_reads_its_output(
    command: tuple[str, ...], errors: str, unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *command],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE if errors == "read" else writer,
        text=True,
        check=False,
    )
    os.close(writer)
    swallowed = unbuffered and command == ("--help",)  # by argparse
    assert done.returncode == (0 if swallowed else 141)
    assert all(line.startswith(("megarl: warning: ", "  ")) for line in (done.stderr or "").splitlines()), done.stderr


def test_another_pipe_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise BrokenPipeError("the server is gone")

    monkeypatch.setattr(cli, "_doctor", fail)
    assert cli.main(["doctor"]) == 1
    assert "megarl: BrokenPipeError: the server is gone\n  log: " in capsys.readouterr().err


def test_without_a_command_the_first_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("megarl: no command is named\n\nStart here:\n  megarl doctor ")
    first = [line.strip().split("  ")[0] for line in shown.splitlines() if line.startswith("  megarl ")]
    assert len(first) == 8
    for command in first:  # all of them are commands
        cli.build_parser().parse_args(shlex.split(command)[1:])


def test_arguments_have_one_style(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train"], ["eval"], ["init"], ["keys"], ["convert"], ["report"], ["doctor", "parity"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        usage = capsys.readouterr().out.partition("\n\n")[0].partition(" ".join(command))[2]
        names = re.findall(r"(?<![-\w{,])[a-z_]\w+", re.sub(r"\{[^}]*\}", "", usage))
        assert names == [], command


def test_a_missing_recipe_is_the_users_to_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "no_such_recipe.yaml"]) == 2
    assert "no_such_recipe.yaml" in capsys.readouterr().err


def test_a_missing_run_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "runs/nothing"]) == 2
    shown = capsys.readouterr().err
    assert "'runs/nothing'" in shown
    assert "RUNS/<name>/<stamp>, such as runs/my_run/2" in shown


def test_doctor_lists_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "megatron-core" in shown
    assert "\n  mcp " in shown
    assert "devices" in shown


@pytest.mark.parametrize("stage", ["train", "sft"])
def test_eval_does_not_write_over_a_training_run(stage: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(f'{{"stage": "{stage}"}}')
    with pytest.raises(UserError, match=r"holds a training run(?s:.*)uses the model of that run"):
        job.refuse_trained(tmp_path, "eval")
    (tmp_path / "run.json").write_text('{"stage": "eval"}')
    job.refuse_trained(tmp_path, "eval")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError):
        job.refuse_trained(tmp_path, "eval")


def test_a_crash_leaves_its_log_in_a_file_of_its_own_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))

    def crash(arguments: object) -> int:
        raise RuntimeError("cannot reach https://me:secret@host") from ValueError(
            "\ud800"
        )  # which no file takes as it is

    monkeypatch.setattr(cli, "_doctor", crash)
    assert [cli.main(["doctor"]), cli.main(["doctor"])] == [1, 1]

    logs = list(tmp_path.glob("megarl-*.log"))
    assert len(logs) == 2, "two crashes within one second"
    for log in logs:
        assert log.stat().st_mode & 0o777 == 0o600
        assert "RuntimeError: cannot reach https://***@host" in log.read_text()
    assert "secret" not in capsys.readouterr().err


def test_the_command_to_go_on_shows_no_password(tmp_path: Path) -> None:
    arguments = cli.build_parser().parse_args(["train", "r.yaml", "tracking.mlflow_uri=https://me:secret@host"])
    shown = job.continue_command(arguments, tmp_path, "auto", begun=True)
    assert "'tracking.mlflow_uri=https://***@host'" in shown


def test_a_command_runs_outside_of_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli.main, ["convert", "/nowhere", "/elsewhere"]).result() == 2
    assert "main thread" not in capsys.readouterr().err


def test_options_of_which_one_is_needed_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", "grpo_quickstart"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "megarl launch: one of these options is required" in text
    assert "--slurm (by sbatch)" in text
    assert "usage:" not in text
