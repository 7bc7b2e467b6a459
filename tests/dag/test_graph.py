"""What build() accepts, what it refuses and how it says so, and the queries."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.dag.node import NodeType, Role
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, contract_of, stage
from megarl.errors import UserError


def same(worker, batch):
    return batch


@stage(reads=["prompt_ids"], writes=["response_ids"])
def rollout(worker, batch):
    return batch


@stage(reads=["response_ids"], writes=["score"])
def reward(worker, batch):
    return batch


@stage(reads=["score"], writes=["advantages"])
def advantage(worker, batch):
    return batch


class Worker:
    def step(self, batch):
        return batch


def diamond():
    """a -> (b, c) -> d -> e, and an entry x -> e."""
    p = Pipeline("diamond").add_node("a", same).add_node("b", same, ["a"]).add_node("c", same, ["a"])
    return p.add_node("d", same, ["c", "b"]).add_node("x", same).add_node("e", same, ["d", "x"]).build()


def refusal(pipeline: Pipeline, *fields) -> str:
    with pytest.raises(UserError) as caught:
        pipeline.build(*fields)
    return str(caught.value)


def test_queries():
    g = diamond()
    assert g.order() == ["a", "b", "c", "d", "x", "e"]
    assert g.entries() == ["a", "x"]
    assert g.exits() == ["e"]
    assert g.parents("d") == ["c", "b"]
    assert g.children("a") == ["b", "c"]
    assert g.upstream("e") == ["a", "b", "c", "d", "x"]
    assert g.downstream("b") == ["d", "e"]
    assert g.layers() == [["a", "x"], ["b", "c"], ["d"], ["e"]]


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
def test_order_respects_every_dependency(deps):
    """Any graph whose nodes depend only on earlier ones builds, in any order of declaration."""
    p = Pipeline("random")
    for i in reversed(range(len(deps))):
        p.add_node(f"n{i}", same, [f"n{j}" for j in sorted(deps[i]) if j < i])
    g = p.build()
    place = {id: k for k, id in enumerate(g.order())}
    assert all(place[dep] < place[node.id] for node in g for dep in node.deps)
    assert all(set(g.upstream(b)) >= {a} | set(g.upstream(a)) for node in g for b in [node.id] for a in node.deps)


def test_direct_leaves_out_shortcuts():
    p = Pipeline("s").add_node("a", same).add_node("b", same, ["a"]).add_node("c", same, ["b", "a"])
    assert p.build().direct() == [("a", "b"), ("b", "c")]


def test_unknown_dependency_names_the_nearest():
    text = refusal(Pipeline("p").add_node("rollout", same).add_node("reward", same, ["rolout"]))
    assert "'reward' depends on 'rolout', which does not exist" in text
    assert "did you mean 'rollout'" in text


def test_cycle_is_written_out_in_the_direction_of_data():
    p = Pipeline("p").add_node("in", same).add_node("a", same, ["c", "in"]).add_node("b", same, ["a"])
    assert "cycle: a -> b -> c -> a" in refusal(p.add_node("c", same, ["b"]).add_node("out", same, ["c"]))


def test_self_cycle():
    assert "cycle: a -> a" in refusal(Pipeline("p").add_node("a", same, ["a"]))


def test_duplicate_id_is_refused_at_once():
    with pytest.raises(UserError, match="two nodes are called 'a'"):
        Pipeline("p").add_node("a", same).add_node("a", same)


@pytest.mark.parametrize("id", ["", "a/b"])
def test_id_must_be_a_plain_word(id):
    with pytest.raises(UserError, match="without '/'"):
        Pipeline("p").add_node(id, same)


def test_deps_given_as_a_string():
    with pytest.raises(UserError, match="list of node ids"):
        Pipeline("p").add_node("a", same, "b")


def test_empty_pipeline():
    assert "no node" in refusal(Pipeline("p"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:fn", "module 'no_such_module_here' does not import: ModuleNotFoundError"),
        ("tests.dag.test_graph:sume", "did you mean same"),
        ("tests.dag.test_graph:Worker.stop", "'Worker' has no 'stop'"),
        ("justaname", "not an import path"),
        ("sys:path", "not callable"),
    ],
)
def test_func_that_does_not_import(path, message):
    text = refusal(Pipeline("p").add_node("a", path))
    assert "node 'a', func" in text
    assert message in text


@pytest.mark.parametrize("path", ["tests.dag.test_graph:same", "tests.dag.test_graph.same"])
def test_func_by_path(path):
    assert Pipeline("p").add_node("a", path).build()["a"].func("w", "batch") == "batch"


def test_method_by_path_takes_the_worker_as_self():
    g = Pipeline("p").add_node("a", "tests.dag.test_graph:Worker.step").build()
    assert g["a"].func(Worker(), "batch") == "batch"


def test_config_must_fit_the_signature():
    assert "got an unexpected keyword argument 'k'" in refusal(Pipeline("p").add_node("a", same, config={"k": 1}))


def test_func_must_take_worker_and_batch():
    assert "(worker, batch)" in refusal(Pipeline("p").add_node("a", lambda batch: batch))


def test_missing_field_names_node_field_and_who_would_write_it():
    p = Pipeline("p").add_node("rollout", rollout).add_node("reward", reward, ["rollout"])
    text = refusal(p.add_node("advantage", advantage, ["rollout"]))
    assert "node 'advantage' reads 'score', which none of its ancestors writes" in text
    assert "node 'reward' writes it; add that to deps of 'advantage'" in text


def test_missing_field_written_too_late():
    p = Pipeline("p").add_node("advantage", advantage).add_node("reward", same, ["advantage"], writes=["score"])
    assert "'reward' writes it but runs after 'advantage'" in refusal(p)


def test_missing_field_nobody_writes():
    assert "no node writes it" in refusal(Pipeline("p").add_node("advantage", advantage))
    p = Pipeline("p").add_node("a", same, writes=["scores"]).add_node("advantage", advantage, ["a"])
    assert "did you mean 'scores'" in refusal(p)


def test_initial_fields_can_be_given():
    Pipeline("p").add_node("advantage", advantage).build(["score"])


def test_node_may_override_the_declared_contract():
    g = Pipeline("p").add_node("a", advantage, reads=[], writes=["x"]).build()
    assert (g["a"].reads, g["a"].writes) == ((), ("x",))
    assert contract_of(advantage) == Contract(("score",), ("advantages",))


def test_training_node_cannot_be_forward_only():
    p = Pipeline("p").add_node("a", same, type=NodeType.MODEL_TRAIN, role=Role.ACTOR, only_forward=True)
    assert "cannot be only_forward" in refusal(p)


def test_negative_retry_limit():
    assert "retry_limit is negative" in refusal(Pipeline("p").add_node("a", same, retry_limit=-1))


def test_graph_modules_need_neither_torch_nor_ray():
    modules = ["node", "pipeline", "graph", "stage", "split", "schedule", "draw", "executor", "exchange", "layout"]
    code = (
        f"import sys; [__import__('megarl.dag.' + m) for m in {modules}]; print({{'torch', 'ray'}} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "set()"
