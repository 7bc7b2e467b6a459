"""Drawings say everything, and boxes do not overlap."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.dag.draw import as_svg, as_text
from megarl.dag.layout import lay_out
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Contract, Role


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
    line = next(line for line in text.splitlines() if line.strip().startswith("reward"))
    assert line.split() == ["reward", "reward", "compute", "rollout", "response_ids", "score"]


def test_svg_is_well_formed_scoped_and_themed():
    svg = as_svg(demo())
    root = ET.fromstring(svg)
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rollout", "reward", "old<logp>", "train"} <= set(texts)
    assert "prefers-color-scheme: dark" in svg
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text
    assert all(".megarl-dag" in rule for rule in style.replace("{ .", "{\n.").split("\n") if "fill" in rule)


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1)), min_size=n, max_size=n)))
@settings(max_examples=50, deadline=None)
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
