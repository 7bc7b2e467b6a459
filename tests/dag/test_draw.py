"""Drawings say everything, and boxes do not overlap."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.draw import as_svg, as_text
from megarl.dag.layout import lay_out
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import Handover, Placement, TeamPlan, place, together
from megarl.dag.stage import Contract, Role
from megarl.recipes.build import build_task_graph

SVG = "{http://www.w3.org/2000/svg}"
ONE_OF_EACH = ["outline team0", "outline team1"]  # in the legend


def same(worker, batch):
    return batch


def demo():
    p = Pipeline("demo", 'scores & "log-probs"').add(
        same, "rollout", contract=Contract(role=Role.ROLLOUT, writes=("response_ids",))
    )
    p.add(
        same,
        "reward",
        deps=["rollout"],
        contract=Contract(role=Role.REWARD, reads=("response_ids",), writes=("score",)),
    )
    p.add(same, "old<logp>", deps=["rollout"], contract=Contract(role=Role.ACTOR))
    return p.add(
        same, "train", deps=["reward", "old<logp>", "rollout"], contract=Contract(role=Role.ACTOR, reads=("score",))
    ).build()


def test_text_shows_flow_and_contracts():
    text = as_text(demo())
    assert "rollout -> [reward | old<logp>] -> train" in text
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("reward"))
    assert [line.split() for line in lines[place : place + 3]] == [
        ["reward", "reward", "compute", "rollout"],
        ["reads:", "response_ids"],
        ["writes:", "score"],
    ]


@pytest.mark.parametrize("recipe", ["ppo_quickstart", "grpo_async_quickstart"])
def test_text_has_80_columns(recipe):
    config = load_config(recipe)
    graph = build_task_graph(config)
    assert max(map(len, as_text(graph, place(graph, config)).splitlines())) <= 80


def teams() -> Placement:
    """Of `demo`: the scorer's team draws and scores, the other one trains."""
    train = TeamPlan("train", (Role.ACTOR,), 2, 0, ParallelConfig(), ("old<logp>", "train"))
    draw = TeamPlan("draw", (Role.ROLLOUT,), 1, 2, ParallelConfig(), ("rollout", "reward"))
    scores = Handover("reward", "draw", ("score",), ("train",), "rollout")
    return Placement((train, draw), (scores,))


def test_text_shows_teams_and_what_goes_between_them():
    text = as_text(demo(), teams(), {"reward>train": 2.5e6})
    lines = [line.split() for line in text.splitlines()]
    assert ["old<logp>", "train", "actor", "compute", "rollout"] in lines
    assert lines[lines.index(["reward", "draw", "train", "2.5"]) + 1] == ["fields:", "score"]
    assert lines[lines.index(["the", "step", "train", "draw", "-"]) + 1] == ["fields:", "the", "actor's", "weights"]
    assert as_text(demo(), together(RunConfig(name="case"))) == as_text(demo())


def test_svg_outlines_teams_and_draws_queues_where_they_meet():
    svg = as_svg(demo(), teams())
    root = ET.fromstring(svg)
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "queue"]
    assert [g.find(f"{SVG}title").text for g in groups] == [
        "draw to train: the order of the nodes",
        "draw to train: score",
    ]
    outlines = [e.get("class") for e in root.iter(f"{SVG}rect") if "outline" in e.get("class")]
    assert outlines == ["outline team1", "outline team1", "outline team0", "outline team0", *ONE_OF_EACH]
    assert {"team train", "team draw"} <= {e.text for e in root.iter(f"{SVG}text")}
    assert as_svg(demo(), together(RunConfig(name="case"))) == as_svg(demo())
    assert "queue" not in as_svg(demo())


@pytest.mark.parametrize("placement", [None, teams()])
def test_svg_is_well_formed_scoped_and_themed(placement):
    svg = as_svg(demo(), placement)
    root = ET.fromstring(svg)
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rollout", "reward", "old<logp>", "train"} <= set(texts)
    assert "prefers-color-scheme: dark" in svg
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text
    assert all(".megarl-dag" in rule for rule in style.replace("{ .", "{\n.").split("\n") if "fill" in rule)


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
@settings(max_examples=13, deadline=None)
def test_boxes_never_overlap_and_edges_go_right(deps):
    p = Pipeline("random")
    for i, before in enumerate(deps):
        p.add(same, f"node{i}", deps=[f"node{j}" for j in before if j < i])
    g = p.build()
    plan = lay_out(g)
    boxes = [(*plan.boxes[id], *plan.sizes[id]) for id in g.nodes]
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(boxes, 2):
        assert x + w <= u or u + s <= x or y + h <= v or v + t <= y
    assert all(x >= 0 and y >= 0 and x + w <= plan.width and y + h <= plan.height for x, y, w, h in boxes)
    assert len(plan.routes) == len(g.direct())
    assert all(a[0] < b[0] for route in plan.routes for a, b in itertools.pairwise(route))
