import inspect
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from megarl.config.data import RewardConfig
from megarl.rewards import REWARDS, reward_metrics
from megarl.rewards import pool as pool_module
from megarl.rewards.pool import ScorerPool
from megarl.rewards.pool_process import PoolProcess
from megarl.rewards.preflight import check_import
from megarl.rewards.runner import RewardRunner
from megarl.runtime.health import failure_of
from megarl.system.errors import ConfigError, RewardError, UserError
from tests.house.test_docs import code_with

HELPERS = """
import ctypes, os, time, math, struct, subprocess, sys

def length(samples, scale=1.0):
    return [{"overall": scale * len(s["response"]), "words": float(len(s["response"].split()))} for s in samples]

def one(sample):
    return len(sample["response"])

def broken(sample):
    if sample["response"] == "bad":
        return 1 / 0
    return 1

def broken_batch(samples):
    return [1 / (s["response"] != "bad") for s in samples]

def only_together(samples):
    assert len(samples) == 1, "no company please"
    return [1.0]

def odd(sample):
    return {"nan": math.nan, "inf": math.inf, "none": None, "str": "1.0", "dict": {"score": 1}, "part": {"overall": 1,
            "x": None}, "ok": 1.0}[sample["response"]]

def short(samples):
    return [1.0] * (len(samples) - 1)

def group_mean(samples):
    assert len({s["uid"] for s in samples}) * 4 == len(samples)
    return [1.0] * len(samples)

def die(sample):
    if sample["response"] == "bad":
        os.kill(os.getpid(), 9)
    return 1

def victim(sample):
    if sample["response"] == "bad" and not os.path.exists(sample["answer"]):
        open(sample["answer"], "x").close()
        os.kill(os.getpid(), 9)
    return 1

def victims(samples):
    assert len({s["uid"] for s in samples}) * 2 == len(samples)
    return [victim(sample) for sample in samples]

def talk(sample):
    print("\\x1b[31m" + sample["response"])
    for _ in range(4):
        os.write(2, b"x" * 99_999 + b"\\n")
    return 1

def hang(sample):
    if sample["response"] == "bad":
        time.sleep(60)
    return 1

def child(sample):
    print(subprocess.Popen(["sleep", "60"]).pid, os.getpid(), file=open(sample["response"], "w"), flush=True)
    time.sleep(60)

ESCAPE = '''
import os, subprocess, sys, time
first = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "~", "w") as note:
            note.write(f"{first} {os.getpid()}")
        os.rename(note.name, sys.argv[1])
        time.sleep(600)
    os._exit(0)
'''

def escape(sample):
    note, then = sample["response"].split()
    subprocess.run([sys.executable, "-c", ESCAPE, note])
    while not os.path.exists(note):
        time.sleep(0.01)
    if then == "leave":
        os._exit(0)
    time.sleep(60)

def hold(sample):
    if sample["response"] == "bad":
        ctypes.PyDLL(None).sleep(60)  # holds Python's lock
    return 1

def wait(sample):
    while not os.path.exists(sample["response"]):
        time.sleep(0.01)
    return 1

def slow_batch(samples):
    time.sleep(0.4)
    return [1.0] * len(samples)

def half_a_message(sample):
    if sample["response"] == "bad":
        os.write(int(sys.argv[1]), struct.pack("<II", 1000, 0) + b"the rest is missing")
        os.kill(os.getpid(), 9)
    return 1

def named(sample):
    return {"overall": 1.0, sample["response"]: 0.0}

def leave(sample):
    raise SystemExit(3)
"""
BOTH = pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.campaign("faults"))])
#: Reward processes are programs, as in a run; in the other tests they are forked (conftest.py).
PROGRAMS = pytest.mark.usefixtures("programs")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(HELPERS)
    return path


def samples(*responses):
    return [{"uid": f"u{i}", "prompt": f"p{i}", "response": r, "answer": "1"} for i, r in enumerate(responses)]


def run(cfg, batch):
    with closing(RewardRunner(cfg)) as runner:
        return runner.result(runner.submit(batch))


def config(name, mode="sequential", **more):
    return RewardConfig(name=str(name), mode=mode, **more)


@PROGRAMS
@BOTH
def test_batch_function_with_kwargs_keeps_order_and_parts(file, workers):
    results = run(config(f"{file}:length", "batch", workers=workers, kwargs={"scale": 2}), samples("a", "b c", "ddd"))
    assert results == [
        {"overall": 2.0, "words": 1.0},
        {"overall": 6.0, "words": 2.0},
        {"overall": 6.0, "words": 1.0},
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_sequential_function_many_samples(file, workers):
    batch = samples(*["x" * (i % 7) for i in range(200)])
    assert [r["overall"] for r in run(config(f"{file}:one", workers=workers), batch)] == [i % 7 for i in range(200)]


@BOTH
@pytest.mark.parametrize(("function", "mode"), [("broken", "sequential"), ("broken_batch", "batch")])
def test_raising_names_the_sample_and_the_line(file, workers, function, mode):
    with pytest.raises(RewardError) as caught:
        run(config(f"{file}:{function}", mode, workers=workers), samples("good", "good", "bad", "good"))
    message = str(caught.value)
    for part in ("sample 2 of 4", "'u2'", "'p2'", "'bad'", "ZeroDivisionError", "my_reward.py:", "1 / ", function):
        assert part in message


@BOTH
@pytest.mark.parametrize(("function", "mode"), [("broken", "sequential"), ("broken_batch", "batch")])
def test_on_error_scores_only_the_failing_sample_and_counts_it(file, workers, function, mode):
    results = run(
        config(f"{file}:{function}", mode, workers=workers, on_error=-1.0), samples("good", "bad", "good", "bad")
    )
    assert [r["overall"] for r in results] == [1.0, -1.0, 1.0, -1.0]
    metrics = reward_metrics(results).result()
    assert metrics == {"reward/errors": 2.0, "reward/overall": 0.0}


def test_a_batch_that_fails_only_as_a_whole_is_said_to(file):
    with pytest.raises(RewardError, match="no single sample, only this batch of 2"):
        run(config(f"{file}:only_together", "batch"), samples("a", "b"))


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("none", "returned None"),
        ("str", "'1.0', which is not a number"),
        ("dict", "without 'overall'"),
        ("part", "None for part 'x'"),
    ],
)
def test_results_that_are_no_rewards_are_refused(file, response, reason):
    with pytest.raises(RewardError) as caught:
        run(config(f"{file}:odd"), samples("ok", response))
    assert "sample 1 of 2" in str(caught.value)
    assert reason in str(caught.value)


@BOTH
def test_wrong_count_is_refused(file, workers):
    with pytest.raises(RewardError, match="results for"):
        run(config(f"{file}:short", "batch", workers=workers), samples("a", "b", "c", "d"))


@BOTH
def test_system_exit_is_a_failure_not_an_exit(file, workers):
    with pytest.raises(RewardError, match="SystemExit"):
        run(config(f"{file}:leave", workers=workers), samples("a"))


def test_batches_are_split_between_groups_only(file):
    batch = [{"uid": f"u{i // 4}", "prompt": "", "response": "", "answer": ""} for i in range(40)]
    assert len(run(config(f"{file}:group_mean", "batch", workers=3), batch)) == 40


@PROGRAMS
def test_dead_process_is_recognised_and_replaced(file):
    with closing(RewardRunner(config(f"{file}:die", workers=2))) as runner:
        with pytest.raises(RewardError) as caught:
            runner.result(runner.submit(samples("ok", "bad", "ok")))
        assert "sample 1 of 3" in str(caught.value)
        assert "SIGKILL" in str(caught.value)
        assert runner.result(runner.submit(samples("ok", "ok"))) == [{"overall": 1.0}] * 2


def test_samples_that_kill_their_process_have_the_value_of_on_error(file):
    results = run(config(f"{file}:die", workers=1, on_error=0), samples("ok", "bad", "ok", "bad"))
    assert [r["overall"] for r in results] == [1, 0, 1, 0]


@pytest.mark.parametrize(("function", "mode"), [("victim", "sequential"), ("victims", "batch")])
def test_what_a_killed_process_scored_is_scored_once_more(file, tmp_path, function, mode, caplog):
    batch = [sample | {"uid": i // 2} for i, sample in enumerate(samples("ok", "ok", "ok", "bad", "ok", "ok"))]
    batch = [sample | {"answer": str(tmp_path / "killed")} for sample in batch]
    assert run(config(f"{file}:{function}", mode, workers=2), batch) == [{"overall": 1.0}] * 6
    assert "was killed (signal SIGKILL, out of memory?); its samples are scored again, by themselves" in caplog.text


def test_a_sample_that_kills_its_process_twice_is_blamed_with_settings_of_the_reward(file):
    with pytest.raises(RewardError, match="for the second time") as caught:
        run(config(f"{file}:die"), samples("bad"))
    assert "fewer reward.workers" in str(caught.value)
    failure = failure_of(caught.value, 0)
    assert (failure.exit_code, failure.out_of_memory) == (2, False)


def test_what_a_function_prints_has_a_bound_for_each_batch(file, capfd):
    with closing(RewardRunner(config(f"{file}:talk"))) as runner:
        for said in ("first", "second"):
            assert runner.result(runner.submit(samples(said))) == [{"overall": 1.0}]
    printed = capfd.readouterr().out
    assert printed.count("output beyond 65,536 bytes is dropped") == 2
    assert len(printed) < 140_000
    assert "\\x1b[31mfirst" in printed


def test_quiet_processes_as_those_of_tools_have_no_output_and_one_bound_for_their_errors(file, capfd):
    with closing(ScorerPool(f"{file}:talk", "sequential", {}, 1, quiet=True)) as pool:
        for said in ("first", "second"):
            assert pool.score(samples(said), 60, True) == {0: {"overall": 1.0}}
    printed = capfd.readouterr().out
    assert printed.count("x" * 1000) < 70
    assert printed.count("is dropped") == 1
    assert "first" not in printed


def test_process_killed_while_idle_is_replaced(file):
    with closing(RewardRunner(config(f"{file}:one", workers=1))) as runner:
        process = psutil.Process(runner._pool._workers[0].process.pid)
        children = process.children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(children, timeout=120)[1], "the worker, a child, ends a moment after its guardian"
        assert runner.result(runner.submit(samples("abc"))) == [{"overall": 3.0}]


@BOTH
def test_deadline_names_the_function_and_the_sample(file, workers):
    started = time.monotonic()
    with pytest.raises(RewardError) as caught:
        run(config(f"{file}:hang", workers=workers, timeout_s=3), samples("ok", "ok", "bad", "ok"))
    assert time.monotonic() - started < 40  # the function itself takes 60 s
    for part in ("hang", "sample 2 of 4", "timeout_s = 3"):
        assert part in str(caught.value)


def test_deadline_with_on_error_keeps_what_was_scored(file):
    results = run(config(f"{file}:hang", workers=1, timeout_s=3, on_error=-1), samples("ok", "ok", "bad", "ok"))
    assert [r["overall"] for r in results] == [1, 1, -1, -1]


def test_a_process_that_hangs_on_one_sample_is_killed_when_the_scorer_has_a_limit(file):
    pool = ScorerPool(
        f"{file}:hang", "sequential", {}, 2, sample_limit_s=3, limit_result={"overall": 0.0, "timeout": 1.0}
    )
    outcomes = pool.score(samples("ok", "bad", "ok", "bad", *["ok"] * 12), timeout_s=30, stop_at_failure=True)
    pool.close()
    assert [outcomes[i] for i in range(4)] == [{"overall": 1.0}, {"overall": 0.0, "timeout": 1.0}] * 2
    assert len(outcomes) == 16


# -- one limit per sample --------------------------------------------------------------------------------------------


def test_a_sample_over_its_limit_is_named_long_before_the_batch_is_late(file):
    started = time.monotonic()
    with pytest.raises(RewardError) as caught:
        run(config(f"{file}:hang", sample_timeout_s=3), samples("ok", "ok", "bad", "ok"))
    assert time.monotonic() - started < 40  # as above
    for part in ("hang", "sample 2 of 4", "did not finish within reward.sample_timeout_s = 3"):
        assert part in str(caught.value)


def test_a_sample_over_its_limit_costs_that_sample_only(file):
    results = run(
        config(f"{file}:hang", workers=1, sample_timeout_s=3, on_error=-1), samples("ok", "bad", "ok", "bad", "ok")
    )
    assert [r["overall"] for r in results] == [1, -1, 1, -1, 1]


def test_a_sample_that_holds_the_lock_is_over_its_limit_too(file):
    results = run(config(f"{file}:hold", sample_timeout_s=3, on_error=-1), samples("ok", "bad", "ok"))
    assert [r["overall"] for r in results] == [1, -1, 1]


def test_an_included_reward_that_is_late_ends_the_run(file):
    over = threading.Event()
    with closing(RewardRunner(config("numeric", timeout_s=0.3))) as runner:
        assert runner._pool is None
        runner._scorer = replace(runner._scorer, function=lambda sample, **settings: float(over.wait()))
        with pytest.raises(RewardError, match=r"sample 0 of 2(?s:.*)did not finish within reward.timeout_s = 0.3"):
            runner.result(runner.submit(samples("1", "2")))
    over.set()


def test_a_process_that_scored_all_and_says_nothing_more_is_replaced(file):
    pool = ScorerPool(f"{file}:one", "sequential", {}, 1, sample_limit_s=3)
    (worker,) = pool._workers
    worker.chunk, worker.done, worker.since = [0], {0}, worker.since - 60
    batch = pool_module._Batch()
    pool._collect(batch, time.monotonic() + 1)
    assert (batch.outcomes, list(batch.pending), worker in pool._workers) == ({}, [], False)
    pool.close()


def test_a_function_that_gets_all_samples_has_the_limit_of_the_batch_only(file):
    assert len(run(config(f"{file}:slow_batch", "batch", sample_timeout_s=0.1), samples("a", "b"))) == 2


# -- names and connections that break ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["errors", "overlong_penalty", "_error"])
def test_part_names_that_are_taken_are_refused_whatever_on_error_says(file, name):
    with pytest.raises(ConfigError, match=rf"a part called '{name}'(?s:.*)another name"):
        run(config(f"{file}:named", on_error=0), samples("fine", name))


def test_a_process_that_dies_inside_a_message_is_a_failed_sample(file):
    batch = samples("ok", "bad", "ok")
    assert [r["overall"] for r in run(config(f"{file}:half_a_message", workers=1, on_error=-1), batch)] == [1, -1, 1]
    with pytest.raises(RewardError, match=r"sample 1 of 3(?s:.*)SIGKILL"):
        run(config(f"{file}:half_a_message", workers=1), batch)


def test_an_extracted_number_votes_like_its_text(tmp_path):
    (tmp_path / "zero.py").write_text("def f(sample):\n    return {'overall': 1.0, 'extracted': 0}\n")
    assert run(config(f"{tmp_path}/zero.py:f"), samples("a")) == [{"overall": 1.0, "extracted": "0.0"}]


def test_importing_rewards_is_light():
    code = "import sys, megarl.rewards; print([m for m in ('torch', 'mpmath', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_submit_returns_at_once_and_overlaps(file, tmp_path):
    with closing(RewardRunner(config(f"{file}:wait"))) as runner:
        handles = [runner.submit(samples(str(tmp_path / "go"))) for _ in range(3)]
        assert not any(h.done() for h in handles)
        (tmp_path / "go").touch()
        assert [runner.result(h)[0]["overall"] for h in handles] == [1.0] * 3


def test_a_hostile_expression_costs_one_sample_not_the_run():
    hostile = r"\boxed{9^{9^{9^{9}}}}"
    batch = [
        {"uid": "a", "prompt": "", "response": r, "answer": "1/2"} for r in (r"\boxed{0.5}", hostile, r"\boxed{3}")
    ]
    results = run(config("math", kwargs={"timeout_s": 0.5}), batch)
    assert [r["overall"] for r in results] == [1.0, 0.0, 0.0]
    assert results[2]["timeout"] == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("missing.py:f", "file not found: missing.py"),
        ("{file}:lenght", "has no 'lenght'"),
        ("no.such.module:f", "'no.such.module' does not import"),
        (
            "tests.runtime.test_algorithms:on_the_likely",
            "for algorithm.loss.name cannot be used for reward.name",
        ),
        ("{dir}/syntax.py:f", "syntax.py:1"),
        ("{dir}/crash.py:f", "crash.py:3"),
    ],
)
def test_functions_that_cannot_be_loaded(file, name, message):
    (file.parent / "syntax.py").write_text("def f(:\n")
    (file.parent / "crash.py").write_text(
        textwrap.dedent("""
        value = {}
        value["x"]
        """)
        .lstrip("\n")
        .replace("value = {}", "\nvalue = {}")
    )
    with pytest.raises(UserError) as caught:
        RewardRunner(config(name.format(file=file, dir=file.parent)))
    assert message in str(caught.value)


def test_unknown_kwargs_are_refused_before_the_run():
    with pytest.raises(ConfigError, match="tolerence"):
        RewardRunner(config("numeric", kwargs={"tolerence": 1}))


@pytest.fixture
def documented(tmp_path):
    """The reward that docs/tracking.md shows; tests/runtime/test_algorithms.py trains with it."""
    (tmp_path / "my_rewards.py").write_text(code_with("def nearness(", "tracking.md"))
    return f"{tmp_path}/my_rewards.py:nearness"


@BOTH
def test_a_reward_declares_its_settings(documented, workers):
    batch = [{**sample, "answer": "12"} for sample in samples("12", "7", "x")]
    results = run(config(documented, "batch", workers=workers, kwargs={"width": 20}), batch)
    assert [result["overall"] for result in results] == [1.0, 0.75, 0.0]
    assert run(config(documented, "batch", workers=workers), batch)[1]["overall"] == 0.5


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"witdh": 20}, ["unknown key reward.kwargs.witdh", "allowed: width", "did you mean reward.kwargs.width?"]),
        ({"width": 0}, ["reward.kwargs.width is out of range", "number > 0"]),
        ({"width": "wide"}, ["reward.kwargs.width has a wrong type"]),
    ],
)
def test_what_is_no_setting_of_a_reward_is_refused(documented, kwargs, words):
    for workers, refuse in ((1, RewardRunner), (2, RewardRunner), (1, partial(check_import, limit_s=60))):
        with pytest.raises(ConfigError) as caught:
            refuse(config(documented, "batch", workers=workers, kwargs=kwargs))
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", REWARDS.names())
def test_settings_of_an_included_reward_are_parameters_of_its_function(name):
    _, *parameters = inspect.signature(REWARDS.get(name)).parameters.values()
    if [p.kind for p in parameters] == [inspect.Parameter.VAR_KEYWORD]:
        return  # it makes its settings of them
    fields = REWARDS.spec(name).settings.model_fields
    assert {p.name: p.default for p in parameters} == {key: info.default for key, info in fields.items()}


def test_included_scorers_ignore_batch_mode():
    assert run(config("numeric", "batch"), samples("1", "2")) == [
        {"overall": 1.0, "extracted": "1"},
        {"overall": 0.0, "extracted": "2"},
    ]


def test_math_refuses_a_limit_that_is_none():
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.timeout_s"):
        RewardRunner(config("math", kwargs={"timeout_s": 0}))


@PROGRAMS
def test_package_function(tmp_path, monkeypatch):
    (tmp_path / "scores_pkg.py").write_text("def f(samples):\n    return [True] * len(samples)\n")
    monkeypatch.chdir(tmp_path)
    assert run(config("scores_pkg:f", "batch", workers=1), samples("a")) == [{"overall": 1.0}]


def _is_over(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def _await_end(pids: list[int]) -> bool:
    until = time.monotonic() + 120
    while not all(map(_is_over, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return all(map(_is_over, pids))


def pool_until(note: Path, function: str) -> ScorerPool:
    """A pool whose samples are over their limit as soon as something stands in `note`."""
    pool = ScorerPool(function, "sequential", {}, 1, sample_limit_s=600)
    news = pool._ready_processes

    def look(wait_s: float) -> list[PoolProcess]:
        if note.exists() and note.read_text():
            pool._sample_limit_s = 0
        return news(min(wait_s, 0.05))

    pool._ready_processes = look
    return pool


def test_what_a_function_started_ends_with_its_process(file, tmp_path):
    note = tmp_path / "pids"
    pool = pool_until(note, f"{file}:child")
    pool.score(samples(str(note)), 300, True)
    pool.close()
    assert _await_end([int(pid) for pid in note.read_text().split()])


@PROGRAMS
@pytest.mark.parametrize("then", ["leave", "stay"])
def test_what_left_the_group_and_session_of_its_process_ends_too(file, tmp_path, then):
    note = tmp_path / "pids"
    pool = pool_until(note, f"{file}:escape") if then == "stay" else ScorerPool(f"{file}:escape", "sequential", {}, 1)
    try:
        pool.score(samples(f"{note} {then}"), 300, True)
        assert _await_end([int(pid) for pid in note.read_text().split()])
    finally:
        pool.close()


@PROGRAMS
def test_a_process_that_is_stopped_costs_its_batch_the_deadline_only(file):
    pool = ScorerPool(f"{file}:length", "batch", {}, 1)
    try:
        for child in psutil.Process(pool._workers[0].process.pid).children():
            child.suspend()
        started = time.monotonic()
        outcomes = pool.score(samples("x" * 10_000_000, "b"), 1.0, True)  # more than a socket takes
        assert time.monotonic() - started < 60
        assert outcomes[0].reason == "was still being scored when reward.timeout_s = 1 passed"
        assert pool.score(samples("a"), 60, True)[0]["overall"] == 1.0
    finally:
        pool.close()


@PROGRAMS
def test_processes_end_with_their_parent(file):
    code = (
        "import os, signal\nfrom megarl.rewards.pool import ScorerPool\n"
        f"pool = ScorerPool({f'{file}:die'!r}, 'sequential', {{}}, 1)\n"
        "print(pool._workers[0].process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert _await_end([int(found.stdout)])
