"""What build() accepts, what it refuses and how it says so, and the queries."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, contract_of, stage
from megarl.system.errors import UserError


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
    p = Pipeline("diamond").add(same, "a").add(same, "b", deps=["a"]).add(same, "c", deps=["a"])
    return p.add(same, "d", deps=["c", "b"]).add(same, "x").add(same, "e", deps=["d", "x"]).build()


def refusal(pipeline: Pipeline, *fields) -> str:
    with pytest.raises(UserError) as caught:
        pipeline.build(*fields)
    return str(caught.value)


def test_queries():
    g = diamond()
    assert g.order() == ["a", "b", "c", "d", "x", "e"]
    assert g.parents("d") == ["b", "c"]
    assert g.upstream("e") == ["a", "b", "c", "d", "x"]
    assert g.layers() == [["a", "x"], ["b", "c"], ["d"], ["e"]]


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
def test_order_respects_every_dependency(deps):
    """Any graph whose nodes depend only on earlier ones builds, in any order of declaration."""
    p = Pipeline("random")
    for i in reversed(range(len(deps))):
        p.add(same, f"n{i}", deps=[f"n{j}" for j in sorted(deps[i]) if j < i])
    g = p.build()
    place = {id: k for k, id in enumerate(g.order())}
    assert all(place[dep] < place[node.id] for node in g for dep in node.deps)
    assert all(set(g.upstream(b)) >= {a} | set(g.upstream(a)) for node in g for b in [node.id] for a in node.deps)


def test_direct_leaves_out_shortcuts():
    p = Pipeline("s").add(same, "a").add(same, "b", deps=["a"]).add(same, "c", deps=["b", "a"])
    assert p.build().direct() == [("a", "b"), ("b", "c")]


def test_unknown_dependency_names_the_nearest():
    text = refusal(Pipeline("p").add(same, "rollout").add(same, "reward", deps=["rolout"]))
    assert "'reward' depends on 'rolout', which does not exist" in text
    assert "did you mean 'rollout'" in text


def test_cycle_is_written_out_in_the_direction_of_data():
    p = Pipeline("p").add(same, "in").add(same, "a", deps=["c", "in"]).add(same, "b", deps=["a"])
    assert "cycle: a -> b -> c -> a" in refusal(p.add(same, "c", deps=["b"]).add(same, "out", deps=["c"]))


def test_self_cycle():
    assert "cycle: a -> a" in refusal(Pipeline("p").add(same, "a", deps=["a"]))


def test_duplicate_id_is_refused_at_once():
    with pytest.raises(UserError, match="two nodes have the id 'a'"):
        Pipeline("p").add(same, "a").add(same, "a")


@pytest.mark.parametrize("id", ["", "a/b"])
def test_id_must_be_a_plain_word(id):
    with pytest.raises(UserError, match="without '/'"):
        Pipeline("p").add(same, id)


def test_deps_given_as_a_string():
    with pytest.raises(UserError, match="list of node ids"):
        Pipeline("p").add(same, "a", deps="b")


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
    text = refusal(Pipeline("p").add(path, "a"))
    assert "node 'a', func" in text
    assert message in text


@pytest.mark.parametrize("path", ["tests.dag.test_graph:same", "tests.dag.test_graph.same"])
def test_func_by_path(path):
    assert Pipeline("p").add(path, "a").build()["a"].func("w", "batch") == "batch"


def test_method_by_path_takes_the_worker_as_self():
    g = Pipeline("p").add("tests.dag.test_graph:Worker.step", "a").build()
    assert g["a"].func(Worker(), "batch") == "batch"


def test_config_must_fit_the_signature():
    assert "got an unexpected keyword argument 'k'" in refusal(Pipeline("p").add(same, "a", config={"k": 1}))


def test_func_must_take_context_and_batch():
    assert "(context, batch)" in refusal(Pipeline("p").add(lambda batch: batch, "a"))


def test_missing_field_names_node_field_and_who_would_write_it():
    text = refusal(Pipeline("p").add(rollout).add(advantage).add(reward))
    assert "node 'advantage' reads 'score', which no node before it writes" in text
    assert "nodes before it: rollout" in text
    assert "'reward' writes it but is listed after 'advantage'; list it first" in text


def test_missing_field_that_was_consumed():
    eats = stage(reads=[], consumes=["score"], writes=[])(lambda worker, batch: batch)
    text = refusal(Pipeline("p").add(rollout).add(reward).add(eats, "eats").add(advantage))
    assert "'eats' has consumed it; list 'advantage' before that" in text


def test_missing_field_nobody_writes():
    assert "no node writes it" in refusal(Pipeline("p").add(advantage, "advantage"))
    p = Pipeline("p").add(same, "a", contract=Contract(writes=("scores",))).add(advantage)
    assert "did you mean 'scores'" in refusal(p)


def test_initial_fields_can_be_given():
    Pipeline("p").add(advantage, "advantage").build(["score"])


def test_node_may_override_the_declared_contract():
    g = Pipeline("p").add(advantage, "a", contract=Contract(reads=(), writes=("x",))).build()
    assert (g["a"].reads, g["a"].writes) == ((), ("x",))
    assert contract_of(advantage) == Contract(("score",), ("advantages",))


def test_a_stage_is_called_as_its_function_unless_the_node_has_a_name():
    p = Pipeline("p").add(same).add(same, "again").add("tests.dag.test_graph:Worker.step")
    assert p.build().order() == ["same", "again", "step"]


def test_fields_that_follow_from_the_settings():
    @stage(reads=[], optional=["values"], writes=[], needs=lambda config: config["reads"], gives=lambda c: c["writes"])
    def flexible(worker, batch):
        return batch

    (node,) = Pipeline("p", config={"reads": ["values"], "writes": ["x"]}).add(flexible).build(["values"])
    assert (node.reads, node.writes, node.declared.optional) == (("values",), ("x",), ())
    assert "reads 'values'" in refusal(Pipeline("p", config={"reads": ["values"], "writes": []}).add(flexible))
    assert "Pipeline(id, description, config)" in refusal(Pipeline("p").add(flexible))


def test_graph_modules_need_neither_torch_nor_ray():
    modules = [
        "node",
        "pipeline",
        "graph",
        "stage",
        "edges",
        "draw",
        "executor",
        "layout",
        "placement",
    ]
    code = (
        f"import sys; [__import__('megarl.dag.' + m) for m in {modules}]; print({{'torch', 'ray'}} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert out.stdout.strip() == "set()"
