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
