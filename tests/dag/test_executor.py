"""One worker's walk: data reaches everybody, contracts are kept, failures are located and contained."""

from __future__ import annotations

import pytest
import torch

from megarl.dag.executor import Executor, NodeError
from megarl.dag.guard import ContractError
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, stage
from megarl.data.batch import Batch, Jagged
from megarl.system.device import ProcessState
from megarl.system.errors import ConfigError, UserError
from megarl.system.tracing import drain, failed_at


def prompts(n: int = 3) -> Batch:
    return Batch(
        {"prompt_ids": Jagged.from_list([[i] * (i + 1) for i in range(n)])}, {"uid": [f"p{i}" for i in range(n)]}
    )


def adds(name: str, value: float = 1.0):
    @stage(reads=[], writes=[name])
    def func(worker, batch):
        batch.set(name, torch.full((len(batch),), value))
        return batch

    return func


def one(worker, batch):
    return batch


def run(pipeline: Pipeline, batch: Batch | None = None, more=None) -> tuple[Batch, Executor]:
    executor = Executor(pipeline.build())
    return executor.run("worker", prompts() if batch is None else batch, more), executor


def test_what_all_nodes_write_is_there_at_the_end():
    p = Pipeline("p").add(adds("x"), "a")
    p.add(adds("y"), "b", deps=["a"]).add(adds("z"), "c", deps=["a"]).add(adds("w"), "d", deps=["b", "c"])
    p.add(adds("v"), "e", deps=["a"])
    out, _ = run(p)
    assert set(out.names()) == {"prompt_ids", "uid", "x", "y", "z", "w", "v"}


def test_a_sibling_does_not_see_what_another_adds_in_place():
    seen = {}

    def look(worker, batch):
        seen["names"] = batch.names()
        return batch

    run(Pipeline("p").add(one, "a").add(adds("y"), "b", deps=["a"]).add(look, "c", deps=["a"]))
    assert "y" not in seen["names"]


def test_the_callers_batch_is_left_alone():
    batch = prompts()
    run(Pipeline("p").add(adds("x"), "a"), batch)
    assert "x" not in batch


def test_the_last_writer_before_a_reader_wins():
    @stage(reads=["x"], writes=["y"])
    def look(worker, batch):
        batch.set("y", batch["x"] + 1)
        return batch

    p = Pipeline("p").add(adds("x", 1), "a").add(adds("x", 2), "b").add(look).add(adds("x", 5), "c")
    out, _ = run(p)
    assert (out["y"].tolist(), out["x"].tolist()) == ([3] * 3, [5] * 3)


def test_who_resamples_carries_fields_that_it_may_not_read():
    @stage(reads=["uid"], writes=[], resamples=True)
    def twice(worker, batch):
        assert batch.names() == ["uid"]
        with pytest.raises(ContractError, match="reads 'x', which it does not declare"):
            batch.repeat(2)["x"]
        return batch.repeat(2)

    out, _ = run(Pipeline("p").add(adds("x"), "a").add(twice).add(adds("y"), "b"))
    assert out["uid"] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert len(out["x"]) == len(out["y"]) == 6


def test_a_refill_is_the_next_prompts_after_all_nodes_before():
    @stage(reads=["uid", "x"], writes=[], resamples=True, refills=True)
    def fill(worker, batch, more):
        return Batch.concat([batch, more(), more()])

    p = Pipeline("p").add(adds("x", 3.0), "a").add(fill)
    out, _ = run(p, more=(prompts(n) for n in (1, 2, 9)))
    assert out["uid"] == ["p0", "p1", "p2", "p0", "p0", "p1"]
    assert out["x"].tolist() == [3.0] * 6
    with pytest.raises(NodeError, match="requests more prompts, but only a training step can load more"):
        run(p)


def test_what_is_consumed_is_gone():
    p = Pipeline("p").add(adds("x"), "a").add(one, contract=Contract(consumes=("x",)))
    assert "x" not in run(p)[0]


def test_failure_skips_descendants_and_is_located():
    ran = []

    def noted(worker, batch, name):
        ran.append(name)
        return batch

    def broken(worker, batch):
        raise RuntimeError("no luck")

    p = Pipeline("p").add(noted, "ok", config={"name": "ok"}).add(broken, "bad", deps=["ok"])
    p.add(noted, "after", deps=["bad"], config={"name": "after"})
    with pytest.raises(NodeError, match="node 'bad'") as caught:
        Executor(p.build()).run("worker", prompts())
    assert ran == ["ok"]
    assert failed_at(caught.value) == "bad"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_errors_of_this_package_keep_their_type():
    def broken(worker, batch):
        raise ConfigError("wrong key")

    with pytest.raises(ConfigError) as caught:
        run(Pipeline("p").add(broken, "bad"))
    assert "node 'bad'" in caught.value.__notes__[0]


def test_a_second_walk_starts_afresh():
    calls = []

    def once(worker, batch):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError
        return batch

    executor = Executor(Pipeline("p").add(once, "a").add(one, "b", deps=["a"]).build())
    with pytest.raises(NodeError):
        executor.run("w", prompts())
    assert len(executor.run("w", prompts())) == 3


def test_undeclared_change_of_samples_is_refused():
    def drop(worker, batch):
        return batch.select([0])

    with pytest.raises(ContractError, match="returned 1 samples for 3 samples"):
        run(Pipeline("p").add(drop))
    assert len(run(Pipeline("p").add(drop, contract=Contract(resamples=True)))[0]) == 1


def test_undeclared_change_of_the_order_is_refused():
    @stage(reads=["uid"], writes=[])
    def backwards(worker, batch):
        return batch.select([2, 1, 0])

    with pytest.raises(ContractError, match="changes 'uid'"):
        run(Pipeline("p").add(backwards))


@pytest.mark.parametrize("declared", [{"optional": ("x",)}, {"reads": ("uid",)}, {"resamples": True}])
def test_undeclared_reads_are_errors(declared):
    """Also of a field that is not there, and of one in what the stage makes of its samples."""

    def looks(worker, batch):
        assert "x" not in batch or "optional" not in declared
        return batch.set("y", []) if "prompt_text" in batch.select([0]) else batch

    with pytest.raises(ContractError, match=r"node 'looks' .* reads .*, which it does not declare") as caught:
        run(Pipeline("p").add(looks, contract=Contract(**declared)))
    assert "to `reads` of its @stage, or to `optional`" in str(caught.value)


def test_a_stage_may_read_what_it_has_set():
    @stage(reads=["uid"], writes=["x"])
    def sets(worker, batch):
        batch.set("own", [1, 2, 3])
        assert batch.select([1])["own"] == [2]
        batch.set("x", torch.ones(3))
        return batch.drop(["own"])

    assert run(Pipeline("p").add(sets))[0]["x"].tolist() == [1, 1, 1]


def test_undeclared_writes_are_errors():
    with pytest.raises(ContractError, match="writes 'x', which it does not declare"):
        run(Pipeline("p").add(adds("x"), "a", contract=Contract()))

    @stage(reads=["uid"], writes=[])
    def renames(worker, batch):
        batch.set("uid", ["other"] * 3)
        return batch

    with pytest.raises(ContractError, match="changes 'uid', which it does not declare"):
        run(Pipeline("p").add(renames))
    sometimes = Contract(may_write=("x",))
    assert "x" in run(Pipeline("p").add(adds("x"), "a", contract=sometimes))[0]
    assert "x" not in run(Pipeline("p").add(one, contract=sometimes))[0]


@pytest.mark.parametrize("resamples", [False, True])
def test_writes_into_the_storage_of_a_field_are_errors(resamples):
    def scribbles(worker, batch):
        batch["prompt_ids"].unbind()[1].add_(1)
        return batch

    contract = Contract(reads=("prompt_ids",), resamples=resamples)
    with pytest.raises(ContractError, match="writes into the tensor of 'prompt_ids' in place"):
        run(Pipeline("p").add(scribbles, contract=contract))
    declared = Contract(reads=("prompt_ids",), writes=("prompt_ids",))
    assert run(Pipeline("p").add(scribbles, contract=declared))[0]["prompt_ids"].unbind()[1].tolist() == [2, 2]


def test_promised_fields_must_be_written():
    with pytest.raises(ContractError, match=r"declares writes=\['score'\] but did not write"):
        run(Pipeline("p").add(one, "a", contract=Contract(writes=("score",))))


def test_forgotten_return():
    with pytest.raises(ContractError, match="returned None"):
        run(Pipeline("p").add(lambda worker, batch: None, "a"))


def test_config():
    @stage(reads=[], writes=["x"])
    def scale(worker, batch, factor):
        batch.set("x", torch.full((len(batch),), float(factor)))
        return batch

    assert run(Pipeline("p").add(scale, config={"factor": 7}))[0]["x"].tolist() == [7, 7, 7]


def test_phases():
    drain()
    run(Pipeline("p").add(one, "a").add(one, "b"))
    assert [e.path for e in drain()] == ["a", "b"]


def test_worker_is_passed():
    def who(worker, batch):
        assert worker == "worker"
        return batch

    run(Pipeline("p").add(who, "a"))


def test_new_samples_are_exchanged_before_anybody_else_sees_them():
    @stage(reads=["uid"], writes=["n"], resamples=True)
    def draw(worker, batch):
        twice = batch.repeat(2)
        twice.set("n", torch.arange(len(twice)))
        return twice

    asked = []

    def reverse(context, node, batch):
        asked.append(node.id)
        return batch.select(list(reversed(range(len(batch)))))

    seen = []

    def look(worker, batch):
        seen.append(batch["n"].tolist())
        return batch

    p = Pipeline("p").add(draw).add(look, contract=Contract(reads=("n",)))
    batch = Executor(p.build(), exchange=reverse).run("worker", prompts())
    assert seen == [[5, 4, 3, 2, 1, 0]]
    assert batch["uid"] == ["p2", "p2", "p1", "p1", "p0", "p0"]
    assert asked == ["draw"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "set_default_dtype(torch.float64)"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "set_num_threads("),
        (lambda: torch.use_deterministic_algorithms(True), "use_deterministic_algorithms(True)"),
    ],
)
def test_what_a_stage_changes_in_the_whole_process_is_put_right_and_named(change, found):
    def careless(worker, batch):
        change()
        return batch

    before = ProcessState.now()
    with pytest.raises(UserError, match=r"node 'a' \(.*careless\) changes torch settings") as caught:
        run(Pipeline("p").add(careless, "a"))
    assert found in str(caught.value)
    assert ProcessState.now() == before
