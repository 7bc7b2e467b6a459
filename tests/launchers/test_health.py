"""Heartbeats, failures and the watch over them, without processes."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.load import dump_config
from megarl.config.run import RunConfig
from megarl.runtime import health, worker
from megarl.runtime.health import Heartbeat, RankFailure, Watch, failure_of, read_beat, read_errors, write_error
from megarl.system import tracing
from megarl.system.errors import DataError, MegarlError
from megarl.system.imports import import_callable
from megarl.system.processes import oom_kills


@pytest.fixture(autouse=True)
def _no_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_on_change", [])
    monkeypatch.setattr(tracing, "step_now", 0)


def failure(rank: int = 0, type: str = "RuntimeError", message: str = "x", at: float = 0.0) -> RankFailure:
    return RankFailure(rank, "train", 1, type, message, "", at, 1)


def test_a_beat_follows_the_phase(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 3)
    first = read_beat(tmp_path, 3)
    tracing.set_step(5)
    with tracing.phase("rollout"), tracing.phase("decode"):
        inside = read_beat(tmp_path, 3)

    assert first is not None
    assert inside is not None
    assert (first.phase, inside.phase, inside.step) == ("idle", "rollout/decode", 5)
    assert inside.changes == first.changes + 2


def test_a_rank_that_has_not_started_has_no_beat(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 0) is None


def test_a_deleted_heartbeat_is_made_again_but_not_the_run_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(health, "_LOOK_S", -1.0)
    writer = Heartbeat(tmp_path / "run", 0)
    before = read_beat(tmp_path / "run", 0)
    shutil.rmtree(tmp_path / "run" / "heartbeats")
    writer.beat("rollout")
    after = read_beat(tmp_path / "run", 0)
    assert before is not None
    assert after is not None
    assert (after.phase, after.changes > before.changes) == ("rollout", True)

    shutil.rmtree(tmp_path / "run")
    writer.beat("rollout")
    failed = health.report(tmp_path / "run", OSError("of whatever"), 0)
    assert not (tmp_path / "run").exists()
    assert (failed.user_error, failed.repeats) == (True, True)
    assert "the run has ended because its folder was deleted or moved" in failed.message


def test_a_beat_costs_microseconds(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 0)
    started = time.process_time()
    for _ in range(2000):
        beat.beat("rollout/decode")
    assert (time.process_time() - started) / 2000 < 500e-6  # about 10 of them on one core


def test_a_reader_never_sees_half_a_beat(tmp_path: Path) -> None:
    writer, done = Heartbeat(tmp_path, 0), threading.Event()

    def write() -> None:
        while not done.is_set():
            for name in ("a" * 10, "b" * 300):
                writer.beat(name)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        beats = [read_beat(tmp_path, 0) for _ in range(300)]
    finally:
        done.set()
        thread.join()
    assert {beat.phase for beat in beats if beat} <= {"idle", "a" * 10, "b" * 300}


def test_a_long_phase_is_cut_not_an_error(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat("x" * 2000)
    beat = read_beat(tmp_path, 0)
    assert beat is not None
    assert set(beat.phase) == {"x"}


def test_watch_names_ranks_that_never_came(tmp_path: Path) -> None:
    watch = Watch(tmp_path, range(3), timeout_s=60, start_timeout_s=0.01)
    Heartbeat(tmp_path, 1)
    time.sleep(0.05)
    assert watch.check([0, 1, 2]) == "ranks 0, 2 did not report in within 0.01 s (cluster.start_timeout_s)"


def test_watch_counts_phase_changes_as_progress(tmp_path: Path) -> None:
    beat, watch = Heartbeat(tmp_path, 0), Watch(tmp_path, [0], timeout_s=0.3, start_timeout_s=60)
    for _ in range(5):
        time.sleep(0.1)
        beat.beat("train")
        assert watch.check([0]) is None
    time.sleep(0.4)
    assert watch.check([0]) == "rank 0 made no progress for 0.3 s (cluster.timeout_s)"
    assert watch.check([]) is None  # it has ended since


def test_long_work_inside_a_phase_is_no_hang(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0)
    watch = Watch(tmp_path, [0], timeout_s=0.3, start_timeout_s=60)
    with tracing.phase("generate"):
        for _ in range(5):
            time.sleep(0.1)
            tracing.beat()
            assert watch.check([0]) is None


def test_a_download_beats_in_the_background_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Heartbeat(tmp_path, 0)

    def changes() -> int:
        beat = read_beat(tmp_path, 0)
        assert beat is not None
        return beat.changes

    clock = itertools.count()
    monkeypatch.setattr(tracing, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with tracing.keep_beating(limit_s=4.0, every_s=0.01):
        (beating,) = (one for one in threading.enumerate() if one.name == "keep-beating")
        beating.join(60)
        assert not beating.is_alive()
    assert changes() == 1 + 3  # the first one, and those before the fourth second


def test_a_failure_keeps_its_phase_and_exit_code(tmp_path: Path) -> None:
    tracing.set_step(4)
    with pytest.raises(DataError) as caught, tracing.phase("load"):
        raise DataError("broken JSON", where="a.jsonl:3")
    write_error(tmp_path, failure_of(caught.value, rank=2))

    found = read_errors(tmp_path)[2]
    assert (found.phase, found.step, found.type, found.exit_code, found.user_error) == ("load", 4, "DataError", 2, True)
    assert json.loads((tmp_path / "errors" / "rank_2.json").read_text())["message"] == "a.jsonl:3: broken JSON"


@pytest.mark.parametrize(
    ("type", "message", "expected"),
    [
        ("RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:60820", True),
        ("RuntimeError", "Timed out waiting 3000ms for recv operation to complete", True),
        ("DistBackendError", "NCCL error", True),
        ("HandoverError", "team 'a' rank 0: the bytes of x cannot be had: The object's owner has exited.", True),
        ("HandoverError", "the buffer 'x' is gone: The actor died unexpectedly before finishing this task.", True),
        ("NodeError", "node 'x' failed: OwnerDiedError: The object's owner has exited.", True),
        ("HandoverError", "this rank has already handed over its groups", False),
        ("RuntimeError", "loss is NaN", False),
    ],
)
def test_errors_that_only_say_another_rank_is_gone(type: str, message: str, expected: bool) -> None:
    assert failure(type=type, message=message).peer_lost is expected


@pytest.mark.parametrize(
    ("type", "message", "expected"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes", True),
        ("MemoryError", "", True),
        ("NodeError", "node 'reward' failed: MemoryError: ", True),
        ("RuntimeError", "shapes do not match", False),
    ],
)
def test_out_of_memory_in_its_many_words(type: str, message: str, expected: bool) -> None:
    assert failure(type=type, message=message).out_of_memory is expected


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/", "sys/fs/cgroup/memory.events"),
        ("0::/user/job", "sys/fs/cgroup/user/job/memory.events"),
        ("0::/of/the/host", "sys/fs/cgroup/memory.events"),
        ("0::/uncounted", "sys/fs/cgroup/memory.events"),
        ("3:cpu:/\n4:memory:/box\n0::/", "sys/fs/cgroup/memory/box/memory.oom_control"),
    ],
)
def test_out_of_memory_kills_are_counted_on_the_machine_and_in_the_cgroup(
    tmp_path: Path, cgroup: str, counter: str
) -> None:
    texts = {"proc/vmstat": "pgfault 9\noom_kill 2\n", "proc/self/cgroup": cgroup, counter: "oom 5\noom_kill 3\n"}
    (tmp_path / "sys/fs/cgroup/uncounted").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == 5
    assert oom_kills(tmp_path / "nowhere") == 0


def test_only_errors_without_a_cause_explain_themselves() -> None:
    own, wrapped = MegarlError("own"), MegarlError("wrapped")
    wrapped.__cause__ = ValueError("the cause")
    found = [failure_of(error, 0).explained for error in (own, wrapped, ValueError("other"))]
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("line", "repeats"),
    [
        ("{}['score']", True),
        ("torch.ones(2) @ torch.ones(3)", True),
        ("json.loads('x')", False),  # a library raises
        ("open('/nowhere/file')", False),  # a disk may come back
        ("raise MemoryError", False),
    ],
)
def test_what_a_line_of_the_user_raises_would_come_again(tmp_path: Path, line: str, repeats: bool) -> None:
    (tmp_path / "my_loss.py").write_text(f"import json\nimport torch\n\n\ndef loss():\n    {line}\n")
    own = import_callable(f"{tmp_path}/my_loss.py:loss", where="algorithm.loss.name")
    wrapped = MegarlError("node 'actor_train' failed")
    with pytest.raises(Exception, match="") as caught:
        own()
    wrapped.__cause__ = caught.value
    assert failure_of(wrapped, 0).repeats is repeats


def test_an_earlier_attempt_is_forgotten(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0)
    write_error(tmp_path, failure())
    health.forget(tmp_path)
    assert read_errors(tmp_path) == {}
    assert read_beat(tmp_path, 0) is None


def test_ranks_that_start_again_have_their_time_to_report_in_again(tmp_path: Path) -> None:
    watch = Watch(tmp_path, [0, 1], timeout_s=1.0, start_timeout_s=60)
    beats = [Heartbeat(tmp_path, rank) for rank in (0, 1)]
    watch.check([0, 1])
    time.sleep(1.2)
    beats[1].beat("train")
    assert watch.check([0, 1]) == "rank 0 made no progress for 1 s (cluster.timeout_s)"
    assert watch.stuck == [0]
    write_error(tmp_path, failure())
    assert health.set_aside(tmp_path, [0], 2) == [tmp_path / "errors" / "restart_2_rank_0.json"]
    watch.begin_again([0])
    beats[1].beat("train")
    assert watch.check([0, 1]) is None
    assert (watch.stuck, read_errors(tmp_path), read_beat(tmp_path, 0)) == ([], {}, None)


def test_every_module_that_is_imported_is_a_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may take minutes for a library, and a rank that makes no beats is ended as hung."""
    (tmp_path / "slow_entry.py").write_text(
        "from megarl.runtime.health import read_beat\n"
        "def work(config, run_dir):\n"
        "    before = read_beat(run_dir, 0).changes\n"
        "    import slow_library\n"
        "    assert read_beat(run_dir, 0).changes == before + 2\n"
    )
    (tmp_path / "slow_library.py").write_text("import slow_part")
    (tmp_path / "slow_part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(worker, "raise_descriptor_limit", lambda: None)
    (tmp_path / "config.yaml").write_text(dump_config(RunConfig(name="x")))
    assert worker.run("slow_entry:work", tmp_path / "config.yaml") == 0
