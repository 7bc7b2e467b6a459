"""Edges that follow from what the stages declare."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megarl.dag.graph import TaskGraph
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, Kind, Role


def same(worker, batch):
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
    g = graph(asks=asks, other=does(role=Role.CRITIC), trains=trains, later=asks, again=trains)
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


FIELDS = st.lists(st.sampled_from("xyz"), unique=True, max_size=2).map(tuple)
STAGES = st.lists(st.builds(Contract, optional=FIELDS, writes=FIELDS, resamples=st.booleans()), min_size=1, max_size=7)


def seen_by(g: TaskGraph, order: list[str]) -> dict[str, dict[str, str]]:
    """What every node finds in the fields that it uses, in a walk in `order`: who wrote them."""
    board, seen = dict.fromkeys("xyz", "entry"), {}
    for id in order:
        contract = g[id].declared
        seen[id] = {name: board[name] for name in (*contract.optional, *(board if contract.resamples else ()))}
        board |= dict.fromkeys(board if contract.resamples else contract.writes, id)
    return seen


@given(STAGES, st.randoms(use_true_random=False))
def test_any_order_that_the_edges_allow_gives_every_node_what_the_listed_order_gives(contracts, rng: random.Random):
    g = graph("x y z", **{f"n{i}": contract for i, contract in enumerate(contracts)})
    order: list[str] = []
    while len(order) < len(g):
        order.append(rng.choice([id for id in g.nodes if id not in order and {*g.parents(id)} <= {*order}]))
    assert seen_by(g, order) == seen_by(g, list(g.nodes))
    assert g.order() == list(g.nodes)
