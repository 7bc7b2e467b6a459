import json

from megarl.system.tracing import PhaseEvent
from megarl.tracking.trace import TraceWriter, merge_trace

MS = 1_000_000


def test_merged_trace_has_named_ranks_nested_phases_and_steps(tmp_path):
    for rank in (0, 1, 10):
        writer = TraceWriter(tmp_path, rank)
        writer.write([PhaseEvent("step/rollout", 5 * MS, 8 * MS, 1), PhaseEvent("step", 5 * MS, 9 * MS, 1)])
        writer.write([PhaseEvent("step", 9 * MS + rank, 12 * MS, 2)])
        writer.close()
    trace = json.loads(merge_trace(tmp_path).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 10: "rank 10"}
    phases = [e for e in trace if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in phases] == [
        ("rollout", 0.0, 3000.0, 1),
        ("step", 0.0, 4000.0, 1),
        ("step", 4000.001, 2999.999, 2),
    ]
    steps = [(e["name"], e["ts"], e["s"]) for e in trace if e["ph"] == "i"]
    assert steps == [("step 1", 0.0, "g"), ("step 2", 4000.0, "g")]


def test_partial_lines_of_killed_ranks_are_skipped(tmp_path):
    writer = TraceWriter(tmp_path, 0)
    writer.write([PhaseEvent("a", 0, MS, 0)])
    with open(tmp_path / "trace" / "rank_0.jsonl", "ab") as file:
        file.write(b'{"rank": 0, "pa')
    assert len([e for e in json.loads(merge_trace(tmp_path).read_text())["traceEvents"] if e["ph"] == "X"]) == 1


def test_nothing_to_merge(tmp_path):
    assert merge_trace(tmp_path) is None


def write_teams(folder):
    """Two ranks draw, one trains: it waits for samples, then they wait for weights."""
    rows = {
        0: ("train", [("step/take/wait", 0, 7, "draw"), ("step/update", 7, 9, ""), ("step/publish", 9, 11, "")]),
        1: ("draw", [("step/rollout", 0, 4, ""), ("step/give", 4, 5, ""), ("step/await_weights", 5, 10, "train")]),
        2: ("draw", [("step/rollout", 0, 6, ""), ("step/give", 6, 8, "")]),
    }
    for rank, (team, events) in rows.items():
        writer = TraceWriter(folder, rank, f"worker {rank} ({team})", team)
        writer.write([PhaseEvent(path, a * MS, b * MS, 1, waits_for) for path, a, b, waits_for in events])
        writer.close()


def test_teams_have_rows_and_an_arrow_comes_to_every_wait_from_what_ended_it(tmp_path):
    write_teams(tmp_path)
    trace = json.loads(merge_trace(tmp_path).read_text())["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert rows == {0: "worker 0 (train)", 1: "worker 1 (draw)", 2: "worker 2 (draw)"}
    assert [e["args"].get("waits_for") for e in trace if e["ph"] == "X" and e["pid"] == 1] == [None, None, "train"]
    starts, ends = ({e["id"]: (e["pid"], e["ts"]) for e in trace if e["ph"] == kind} for kind in "sf")
    assert starts == {0: (2, 6999.0), 1: (0, 9999.0)}, "the last gift before the end; what train began last"
    assert ends == {0: (0, 6999.0), 1: (1, 9999.0)}
    for flows, kind in ((starts, "s"), (ends, "f")):  # a viewer ties an arrow to the slice that is there then
        for pid, ts in flows.values():
            assert any(e["ph"] == "X" and e["pid"] == pid and e["ts"] <= ts < e["ts"] + e["dur"] for e in trace), (
                f"{kind} at {ts} in row {pid}"
            )


def test_a_wait_for_a_team_that_has_left_nothing_has_no_arrow(tmp_path):
    writer = TraceWriter(tmp_path, 0, team="train")
    writer.write([PhaseEvent("step/take/wait", 0, MS, 1, "draw")])
    writer.close()
    assert {e["ph"] for e in json.loads(merge_trace(tmp_path).read_text())["traceEvents"]} == {"M", "X", "i"}


def write_steps(folder, rank, steps, per_step=10):
    writer = TraceWriter(folder, rank)
    for step in range(1, steps + 1):
        at = step * 100 * MS
        writer.write(
            [PhaseEvent(f"step/{name}", at + name * MS, at + (name + 1) * MS, step) for name in range(per_step)]
        )
        writer.write([PhaseEvent("step", at, at + 50 * MS, step)])
    writer.close()


def shown(folder, most_bytes):
    events = json.loads(merge_trace(folder, most_bytes).read_text())["traceEvents"]
    steps = {rank: {} for rank in (0, 1)}
    for event in (event for event in events if event["ph"] == "X"):
        steps[event["pid"]].setdefault(event["args"]["step"], []).append(event["name"])
    return steps


def test_of_large_traces_the_last_whole_steps_are_shown_the_same_of_every_rank(tmp_path, caplog):
    write_steps(tmp_path, 0, 40)
    write_steps(tmp_path, 1, 40, per_step=20)  # has fewer steps in as many bytes
    steps = shown(tmp_path, 40_000)
    assert list(steps[0]) == list(steps[1]) == [*range(min(steps[0]), 41)]
    assert 1 < min(steps[0]) < 40
    assert {len(names) for names in steps[0].values()} == {11}, "no step in part"
    assert {len(names) for names in steps[1].values()} == {21}
    assert "trace.json shows the last" in caplog.text
    assert len(shown(tmp_path, 10_000_000)[0]) == 40


def test_a_step_larger_than_the_limit_is_shown_in_part(tmp_path):
    write_steps(tmp_path, 0, 1, per_step=200)
    assert 0 < len(shown(tmp_path, 5_000)[0][1]) < 200


def test_damaged_lines_of_a_trace_are_left_out(tmp_path, caplog):
    write_steps(tmp_path, 0, 2)
    file = tmp_path / "trace" / "rank_0.jsonl"
    first, *lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, b"\0" * 99 + b"\n", b"[]\n", *lines]))
    assert len(shown(tmp_path, 10_000_000)[0]) == 2
    assert "2 damaged lines are left out of trace.json" in caplog.text


def test_a_disk_that_takes_no_trace_ends_the_trace_alone(tmp_path, caplog, monkeypatch):
    writer = TraceWriter(tmp_path, 0)

    def full(record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._writer, "write", full)
    for _ in range(2):
        writer.write([PhaseEvent("a", 0, MS, 0)])
    assert len(caplog.messages) == 1
