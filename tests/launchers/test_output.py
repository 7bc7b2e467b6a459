"""A console that nobody reads, a terminal that is gone, and a disk that is full hold up no run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import pytest

from megarl import cli
from megarl.commands import job
from megarl.launchers import output
from megarl.launchers.output import OutputLog
from megarl.system.processes import Stopped, signals_raise


class Stream:
    """Standard output on a file of its own."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def fileno(self) -> int:
        return self._handle

    def flush(self) -> None:
        pass


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "CONSOLE_S", 0.2)
    return OutputLog(tmp_path / "log.txt")


def test_control_characters_reach_neither_the_file_nor_messages_of_the_launcher(log, tmp_path, capsys):
    log.write(1, "a\x1b[31mred\x1b[0m \x1bc\u202e\x9b2J\tb\n".encode() + b"\xff\n")
    log.say("rank 1: \x1b]0;title\x07")
    assert capsys.readouterr().err == "rank 1: \\x1b]0;title\\x07\n"
    assert (tmp_path / "log.txt").read_bytes() == (
        b"[rank 1] ared \\x1bc\\u202e\\x9b2J\tb\n[rank 1] \xff\n[launcher] rank 1: \\x1b]0;title\\x07\n"
    )


def test_a_console_that_is_not_read_is_waited_for_once(log, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", Stream(writer))
    begun = time.monotonic()
    for _ in range(50):
        log.write(0, b"x" * 9999 + b"\n")
    assert time.monotonic() - begun < 20, "not a wait for each"
    assert (tmp_path / "log.txt").read_bytes().count(b"\n") == 50
    while os.read(reader, 1 << 20) and len(output._silent):
        log.write(0, b"y\n")  # somebody reads again
    assert output._silent == set()
    os.close(reader)
    log.write(0, b"z\n")
    os.close(writer)
    log.write(0, b"z\n")
    assert (tmp_path / "log.txt").read_bytes().endswith(b"z\n")


def test_a_terminal_that_is_gone_does_not_end_the_copying_of_what_workers_print(log, tmp_path, monkeypatch):
    screen, terminal = os.openpty()
    monkeypatch.setattr(sys, "stdout", Stream(terminal))
    reader, writer = os.pipe()
    copying = output.pump(os.fdopen(reader, "rb", buffering=0), 0, log)
    os.write(writer, b"before\n")
    assert os.read(screen, 99) == b"before\r\n"
    os.close(screen)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(terminal, b"?")
    for _ in range(3):
        os.write(writer, b"after\n")
    os.close(writer)
    copying.join(30)
    os.close(terminal)
    assert (tmp_path / "log.txt").read_text().splitlines() == ["[rank 0] before", *["[rank 0] after"] * 3]


def test_a_full_disk_ends_neither_the_output_nor_the_launcher(log, monkeypatch, capsys):
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    log._file.close()
    monkeypatch.setattr(log, "_file", Full())
    log.write(1, b"line\n")
    log.say("ended")
    log.close()
    assert "ended" in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [True, False])
def test_a_terminal_that_hangs_up_ends_no_run_that_nohup_started(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with pytest.raises(Stopped) if not ignored else contextlib.nullcontext(), signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_there_are_workers_ends_the_command_with_a_word(number, monkeypatch, tmp_path, capsys):
    """The default of the kernel would end it without one, and the first process of a container not at all."""

    def lasts(config, kind):
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(job, "_check_inputs", lasts)
    before = signal.getsignal(number)
    code = cli.main(["train", "grpo_quickstart", "--run-dir", str(tmp_path / "run")])
    assert (code, capsys.readouterr().err) == (128 + number, f"megarl: stopped by {number.name}\n")
    assert signal.getsignal(number) == before
    assert not (tmp_path / "run").exists()


def test_json_lines_go_to_standard_output_and_all_else_to_the_error_output(tmp_path, capfd):
    log = OutputLog(tmp_path / "log.txt", split=True)
    log.write(0, b'train: 8 prompts\n{"step": 1, "stage"')
    log.write(0, b': "train"}\nreport: here\n')
    log.write(1, b'{"step": 1}\n')
    log.close()
    out, err = capfd.readouterr()
    assert out == '{"step": 1, "stage": "train"}\n'
    assert err == "train: 8 prompts\nreport: here\n"
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 4


def test_a_message_and_the_file_do_not_go_on_in_the_line_of_a_progress_bar(tmp_path, capfd):
    log = OutputLog(tmp_path / "log.txt")
    log.write(0, b"step 4\n\x1b[?25l\r\x1b[2Ktrain 4/30 0:00:40\r\x1b[2Ktrain 5/30 0:00:33")
    log.write(1, b"half")
    log.say("megarl: stopped by SIGINT")
    log.say("more")
    log.close()
    assert capfd.readouterr().out.endswith("train 5/30 0:00:33\x1b[?25h\n")
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "[rank 0] step 4",
        "[launcher] megarl: stopped by SIGINT",
        "[launcher] more",
        "[rank 1] half",
    ]
