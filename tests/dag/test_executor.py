"""One worker's walk: data reaches everybody, failures are retried, located and contained."""

from __future__ import annotations

import pytest
import torch

from megarl.dag.executor import Executor, NodeError
from megarl.dag.node import Role, Status
from megarl.dag.pipeline import Pipeline
from megarl.data.batch import Batch, Jagged
from megarl.errors import ConfigError
from megarl.phase import drain, failed_at


def prompts(n: int = 3) -> Batch:
    return Batch(
        {"prompt_ids": Jagged.from_list([[i] * (i + 1) for i in range(n)])}, {"uid": [f"p{i}" for i in range(n)]}
    )


def adds(name: str, value: float = 1.0):
    def func(worker, batch):
        batch.set(name, torch.full((len(batch),), value))
        return batch

    return func


def one(worker, batch):
    return batch


def run(pipeline: Pipeline, batch: Batch | None = None, **kwargs) -> tuple[Batch, Executor]:
    executor = Executor(pipeline.build(), **kwargs)
    return executor.run("worker", prompts() if batch is None else batch), executor


def test_every_consumer_gets_the_data_and_exits_are_merged():
    p = Pipeline("p").add_node("a", adds("x"))
    p.add_node("b", adds("y"), ["a"]).add_node("c", adds("z"), ["a"]).add_node("d", adds("w"), ["b", "c"])
    p.add_node("e", adds("v"), ["a"])
    out, executor = run(p)
    assert set(out.names()) == {"prompt_ids", "uid", "x", "y", "z", "w", "v"}
    assert set(executor.statuses.values()) == {Status.COMPLETED}


def test_a_sibling_does_not_see_what_another_adds_in_place():
    seen = {}

    def look(worker, batch):
        seen["names"] = batch.names()
        return batch

    run(Pipeline("p").add_node("a", one).add_node("b", adds("y"), ["a"]).add_node("c", look, ["a"]))
    assert "y" not in seen["names"]


def test_the_callers_batch_is_left_alone():
    batch = prompts()
    run(Pipeline("p").add_node("a", adds("x")), batch)
    assert "x" not in batch


def test_different_values_under_one_name_name_both_producers():
    p = Pipeline("p").add_node("a", adds("x", 1)).add_node("b", adds("x", 2)).add_node("c", one, ["a", "b"])
    with pytest.raises(NodeError, match="nodes 'a' and 'b' hand on different values of 'x'"):
        run(p)


def test_nan_equals_nan_when_merging():
    nan = float("nan")
    p = Pipeline("p").add_node("a", adds("x", nan)).add_node("b", adds("x", nan)).add_node("c", one, ["a", "b"])
    assert run(p)[0]["x"].isnan().all()


def test_different_samples_cannot_be_merged():
    def more(worker, batch):
        return batch.repeat(2)

    p = Pipeline("p").add_node("a", one).add_node("b", more, role=Role.ROLLOUT).add_node("c", one, ["a", "b"])
    with pytest.raises(NodeError, match=r"hand on different samples \(3 and 6"):
        run(p)


def test_same_count_but_other_samples():
    def named(prefix):
        def func(worker, batch):
            batch.set("sample_id", [f"{prefix}{i}" for i in range(len(batch))])
            return batch

        return func

    p = Pipeline("p").add_node("a", named("a")).add_node("b", named("b")).add_node("c", one, ["a", "b"])
    with pytest.raises(NodeError, match="number 0 is 'a0' and 'b0'"):
        run(p)


@pytest.mark.parametrize(("failures", "limit", "works"), [(2, 2, True), (2, 1, False), (1, 0, False), (0, 0, True)])
def test_retry_limit_is_kept(failures, limit, works):
    calls = []

    def flaky(worker, batch):
        calls.append(batch.names())
        batch.set("half_done", torch.ones(len(batch)))
        if len(calls) <= failures:
            raise OSError("environment went away")
        return batch

    p = Pipeline("p").add_node("a", flaky, retry_limit=limit)
    if works:
        run(p)
        assert len(calls) == failures + 1
    else:
        with pytest.raises(NodeError, match=rf"node 'a' .* attempt {limit + 1} of {limit + 1}: OSError: environment"):
            run(p)
    assert all("half_done" not in names for names in calls)


def test_failure_skips_descendants_and_is_located():
    def broken(worker, batch):
        raise RuntimeError("no luck")

    p = Pipeline("p").add_node("ok", one).add_node("bad", broken, ["ok"]).add_node("after", one, ["bad"])
    p.add_node("last", one, ["after"]).add_node("apart", one, ["ok"])
    executor = Executor(p.build())
    with pytest.raises(NodeError, match="node 'bad'") as caught:
        executor.run("worker", prompts())
    assert executor.statuses == {
        "ok": Status.COMPLETED,
        "bad": Status.FAILED,
        "after": Status.SKIPPED,
        "last": Status.SKIPPED,
        "apart": Status.READY,
    }
    assert failed_at(caught.value) == "bad"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_errors_of_this_package_keep_their_type():
    def broken(worker, batch):
        raise ConfigError("wrong key")

    with pytest.raises(ConfigError) as caught:
        run(Pipeline("p").add_node("bad", broken))
    assert "node 'bad'" in caught.value.__notes__[0]


def test_a_second_walk_starts_afresh():
    calls = []

    def once(worker, batch):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError
        return batch

    executor = Executor(Pipeline("p").add_node("a", once).add_node("b", one, ["a"]).build())
    with pytest.raises(NodeError):
        executor.run("w", prompts())
    assert len(executor.run("w", prompts())) == 3
    assert executor.statuses == {"a": Status.COMPLETED, "b": Status.COMPLETED}


def test_undeclared_change_of_samples_is_refused():
    def drop(worker, batch):
        return batch.select([0])

    with pytest.raises(NodeError, match="returned 1 samples for 3"):
        run(Pipeline("p").add_node("a", drop))
    assert len(run(Pipeline("p").add_node("a", drop, role=Role.DYNAMIC_SAMPLING))[0]) == 1


def test_promised_fields_must_be_written():
    with pytest.raises(NodeError, match=r"declares writes=\['score'\] but did not write"):
        run(Pipeline("p").add_node("a", one, writes=["score"]))


def test_forgotten_return():
    with pytest.raises(NodeError, match="returned None"):
        run(Pipeline("p").add_node("a", lambda worker, batch: None))


def test_filter_and_config():
    def scale(worker, batch, factor):
        batch.set("x", torch.full((len(batch),), float(factor)))
        return batch

    def long_ones(worker, batch):
        return batch["prompt_ids"].lengths > 1

    p = Pipeline("p").add_node("a", scale, config={"factor": 7}, filter=long_ones)
    out, _ = run(p)
    assert out["uid"] == ["p1", "p2"]
    assert out["x"].tolist() == [7, 7]


def test_phases_seconds_and_hook():
    drain()
    ended = []
    p = Pipeline("p").add_node("a", one).add_node("b", one, ["a"])
    _, executor = run(p, on_node_end=lambda node, status, out, seconds: ended.append((node.id, status, len(out))))
    assert [e.path for e in drain()] == ["a", "b"]
    assert ended == [("a", Status.COMPLETED, 3), ("b", Status.COMPLETED, 3)]
    assert all(s >= 0 for s in executor.seconds.values())


def test_worker_is_passed():
    def who(worker, batch):
        assert worker == "worker"
        return batch

    run(Pipeline("p").add_node("a", who))


def test_every_node_needs_a_layout():
    with pytest.raises(ValueError, match="without a layout"):
        Executor(Pipeline("p").add_node("a", one).build(), layouts={})
