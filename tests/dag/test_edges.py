"""Edges that follow from what the stages declare."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megarl.dag.graph import TaskGraph
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, Kind, Role
from megarl.system.errors import UserError


def same(worker, batch):
    return batch


def trained(c, batch, *, actor):
    return batch


def graph(entry: str = "", **contracts: Contract) -> TaskGraph:
    p = Pipeline("p")
    for id, contract in contracts.items():
        p.add(same, id, contract=contract)
    return p.build(entry.split())


def does(reads: str = "", writes: str = "", **more) -> Contract:
    return Contract(tuple(reads.split()), tuple(writes.split()), **more)


def test_a_reader_waits_for_the_last_writer_before_it():
    g = graph(a=does("", "x"), b=does("x", "x"), c=does("", "y"), d=does("x y"))
    assert g.parents("d") == ["b", "c"]


def test_fields_of_the_entry_need_no_edge():
    assert graph("x", a=does("x"), b=does("x")).parents("b") == []


def test_an_optional_read_is_an_edge_where_there_is_a_writer():
    reader = does(optional=("x",))
    assert graph(a=does("", "x"), b=reader).parents("b") == ["a"]
    assert graph(a=does("", "y"), b=reader).parents("b") == []


def test_who_writes_again_waits_for_the_readers_of_the_old_value():
    g = graph(first=does("", "x"), reader=does("x"), again=does("", "x"), last=does("x"))
    assert g.parents("again") == ["first", "reader"]
    assert g.parents("last") == ["again"]
    assert graph("x", reader=does("x"), again=does("", "x")).parents("again") == ["reader"]


def test_who_resamples_stands_between_what_is_before_and_what_is_after():
    g = graph(a=does("", "x"), b=does(), c=does(resamples=True), d=does("x"), e=does())
    assert g.parents("c") == ["a", "b"]
    assert g.parents("d") == g.parents("e") == ["c"]


def test_a_model_is_trained_after_those_that_ask_it_and_before_those_that_ask_it_later():
    asks, trains = does(role=Role.ACTOR), does(role=Role.ACTOR, kind=Kind.MODEL_TRAIN)
    p = Pipeline("p").add(same, "asks", contract=asks).add(same, "other", contract=does(role=Role.CRITIC))
    p.add(trained, "trains", contract=trains).add(same, "later", contract=asks).add(trained, "again", contract=trains)
    g = p.build([])
    assert [g.parents(id) for id in ("asks", "other", "trains", "later", "again")] == [
        [],
        [],
        ["asks"],
        ["trains"],
        ["trains", "later"],
    ]


def test_a_dependency_without_data_is_added():
    p = Pipeline("p").add(same, "a").add(same, "b").add(same, "c", deps=["a"])
    assert [p.build().parents(id) for id in "abc"] == [[], [], ["a"]]


def test_who_writes_what_was_consumed_waits_for_who_consumed_it():
    g = graph("x", takes=does(consumes=("x",)), again=does("", "x"), reader=does("x"))
    assert (g.parents("again"), g.parents("reader")) == (["takes"], ["again"])


def test_who_can_do_without_a_field_is_not_given_one_that_is_written_later():
    assert graph(looks=does(optional=("x",)), writes=does("", "x")).parents("writes") == ["looks"]


def test_what_is_written_in_some_steps_only_is_not_there_for_who_needs_it():
    perhaps = does(may_write=("x",))
    with pytest.raises(UserError, match="no node before it writes") as caught:
        graph(perhaps=perhaps, needs=does("x"))
    assert "'perhaps' writes it in some steps only; read it as `optional`" in str(caught.value)
    assert graph(perhaps=perhaps, looks=does(optional=("x",))).parents("looks") == ["perhaps"]
    assert graph("x", perhaps=perhaps, needs=does("x")).parents("needs") == ["perhaps"]


FIELDS = st.lists(st.sampled_from("xyz"), unique=True, max_size=2).map(tuple)
ONE = st.lists(st.sampled_from("xyz"), max_size=1).map(tuple)
CONTRACTS = st.builds(
    Contract, reads=ONE, optional=FIELDS, writes=FIELDS, may_write=ONE, consumes=ONE, resamples=st.booleans()
)
STAGES = st.lists(CONTRACTS, min_size=1, max_size=7)


def seen_by(g: TaskGraph, order: list[str], lazy: set[str]) -> dict[str, dict[str, str]]:
    """What every node finds in the fields that it uses, in a walk in `order`: who wrote them.

    Nodes in `lazy` write only what they must.
    """
    batch, seen = {"x": "entry"}, {}
    for id in order:
        contract = g[id].declared
        names = {*contract.uses, *(batch if contract.resamples else ())}
        seen[id] = {name: batch[name] for name in sorted(names & batch.keys())}
        assert {*contract.reads, *contract.consumes} <= batch.keys()
        if contract.resamples:
            batch = dict.fromkeys(batch, id)
        made = {*contract.writes, *(() if id in lazy else contract.may_write)}
        batch = {name: who for name, who in batch.items() if name not in contract.consumes} | dict.fromkeys(made, id)
    return seen


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(STAGES, st.randoms(use_true_random=False), st.sets(st.integers(0, 6)))
def test_any_order_that_the_edges_allow_gives_every_node_what_the_listed_order_gives(
    contracts, rng: random.Random, lazy
):
    listed = {f"n{i}": c for i, c in enumerate(contracts) if not {*c.consumes} & {*c.writes, *c.may_write}}
    try:
        g = graph("x", **listed)
    except UserError:
        reject()  # a node needs what is not there
    order: list[str] = []
    while len(order) < len(g):
        order.append(rng.choice([id for id in g.nodes if id not in order and {*g.parents(id)} <= {*order}]))
    lazy = {f"n{i}" for i in lazy}
    assert seen_by(g, order, lazy) == seen_by(g, list(g.nodes), lazy)
    assert g.order() == list(g.nodes)
