import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megarl.artifacts.jsonl import JsonlWriter, read_jsonl, rewrite_jsonl


def test_round_trip_and_missing_file(tmp_path):
    path = tmp_path / "a" / "metrics.jsonl"
    assert read_jsonl(path) == []
    writer = JsonlWriter(path)
    writer.write({"step": 1, "x": float("nan"), "y": [float("inf"), 2.5], "text": "line\nbreak ü"})
    assert read_jsonl(path) == [{"step": 1, "x": None, "y": [None, 2.5], "text": "line\nbreak ü"}]


def test_floats_survive_bit_for_bit(tmp_path):
    value = 0.1 + 0.2
    JsonlWriter(tmp_path / "m").write({"x": value})
    assert read_jsonl(tmp_path / "m")[0]["x"] == value


def test_partial_last_line_is_skipped_by_readers_and_cut_by_writers(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]
    JsonlWriter(path).write({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_file_that_is_one_partial_line_is_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"x" * 200_000)
    assert read_jsonl(path) == []
    JsonlWriter(path).write({"step": 1})
    assert read_jsonl(path) == [{"step": 1}]


DAMAGED = [b"{broken", b"3", b"", b"\0" * 50, b"\xff\xfe{}", b"[" * 100_000, b'{"stage": "train"}', b'{"step": true}']


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_costs_itself_alone_and_is_told_once(tmp_path, caplog, line):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    for _ in range(2):
        assert read_jsonl(path, needs={"step": int}) == [{"step": 1}, {"step": 3}]
    assert len(caplog.messages) == 1
    assert f"{path}: line 2 is damaged and left out" in caplog.text
    rewrite_jsonl(path, lambda record: True, needs={"step": int})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == line + b"\n"


def test_a_line_after_zero_bytes_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 4096 + b'{"step": 2}\n')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_folder_in_place_of_a_file_is_set_aside(tmp_path):
    path = tmp_path / "m.jsonl"
    path.mkdir()
    assert read_jsonl(path) == []
    JsonlWriter(path).write({"step": 1})
    assert read_jsonl(path) == [{"step": 1}]
    assert (tmp_path / "m.jsonl.damaged-1").is_dir()


def test_rewrite_keeps_what_it_is_told_to(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(json.dumps({"step": i}).encode() + b"\n" for i in range(5)) + b"{")
    rewrite_jsonl(path, lambda line: line["step"] <= 2)
    assert [line["step"] for line in read_jsonl(path)] == [0, 1, 2]
    rewrite_jsonl(tmp_path / "absent.jsonl", lambda line: True)


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    path, record = tmp_path / "s.jsonl", {"step": 1, "response": "caf\ud83d", "\ude00": "é"}
    JsonlWriter(path).write(record)
    assert read_jsonl(path) == [record]
    rewrite_jsonl(path, lambda line: True)
    assert read_jsonl(path) == [record]


@pytest.mark.procs
def test_kill_9_loses_no_line_that_write_returned_for(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from pathlib import Path; from megarl.artifacts.jsonl import JsonlWriter\n"
        "w = JsonlWriter(Path(sys.argv[1])); i = 0\n"
        "while True:\n    i += 1; w.write({'step': i, 'pad': 'x' * 5000}); print(i, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    last = 0
    while last < 50 and time.monotonic() < deadline:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    last = max([last, *(int(line) for line in process.stdout.read().splitlines() if line)])
    process.wait()
    steps = [line["step"] for line in read_jsonl(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= last >= 50


def test_a_file_that_is_deleted_meanwhile_is_made_again(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2, 3):
        writer.write({"step": step})
        if step == 1:
            path.unlink()
    assert [line["step"] for line in read_jsonl(path)] == [2, 3]
