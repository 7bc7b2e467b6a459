import json

from megarl.phase import PhaseEvent
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
