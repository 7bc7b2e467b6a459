"""Draw a task graph: columns of nodes from left to right, few crossing edges, and long edges around nodes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from megarl.dag.graph import TaskGraph

Point = tuple[float, float]

_BOX_HEIGHT, _GAP_X, _GAP_Y = 52.0, 54.0, 22.0
_LANE = 14.0  # height of the lane in which a long edge passes a layer
_LEFT, _TOP, _BOTTOM = 24.0, 74.0, 52.0
_SWEEPS = 24


@dataclass
class Drawing:
    """Coordinates of a drawing, in pixels."""

    width: float = 0.0
    height: float = 0.0
    boxes: dict[str, Point] = field(default_factory=dict)  # top left corner of each node
    sizes: dict[str, Point] = field(default_factory=dict)  # width and height of each node
    captions: dict[str, str] = field(default_factory=dict)  # second line of each box
    # points of each edge, from the right side of one box to the left side of another
    routes: list[list[Point]] = field(default_factory=list)


@dataclass(frozen=True)
class _Lane:
    """The place in a layer where an edge passes that begins and ends in other layers."""

    source: str
    target: str
    layer: int


def lay_out(graph: TaskGraph) -> Drawing:
    """Compute the layout (Sugiyama): longest-path layers, lanes for long edges, barycentre order, straightened rows."""
    layers: list[list[str | _Lane]] = [list(row) for row in graph.layers()]
    depth = {id: number for number, row in enumerate(graph.layers()) for id in row}
    chains: list[list[str | _Lane]] = []
    for source, target in graph.direct():
        lanes = [_Lane(source, target, k) for k in range(depth[source] + 1, depth[target])]
        for lane in lanes:
            layers[lane.layer].append(lane)
        chains.append([source, *lanes, target])
    links = [pair for chain in chains for pair in itertools.pairwise(chain)]
    _order(layers, links)
    plan = Drawing()
    for node in graph:
        # the first fields that the node writes, or its kind of work if it writes none
        shown = [*node.writes[:2], *([f"+{len(node.writes) - 2}"] if len(node.writes) > 2 else [])]
        plan.captions[node.id] = ", ".join(shown) or node.kind.value.replace("_", " ")
        width = max(8.6 * len(node.id), 6.0 * len(plan.captions[node.id])) + 28
        plan.sizes[node.id] = (max(width, 92.0), _BOX_HEIGHT)
    centres = _rows(layers, links)
    spans = _columns(layers, plan)
    for number, layer in enumerate(layers):
        for item in layer:
            if isinstance(item, str):
                left, right = spans[number]
                width = plan.sizes[item][0]
                plan.boxes[item] = ((left + right - width) / 2, centres[item] - _BOX_HEIGHT / 2)
    plan.routes = [_route(chain, plan, centres, spans) for chain in chains]
    plan.width = max(spans[-1][1] + _LEFT, 24 + 6.4 * len(graph.description) + 24, 320.0)
    plan.height = max(y + _BOX_HEIGHT for _, y in plan.boxes.values()) + _BOTTOM
    return plan


def _order(layers: list[list[str | _Lane]], links: list[tuple]) -> None:
    """Sort each layer by the mean position of its neighbours, forwards and backwards, for some sweeps."""
    before: dict = {}
    after: dict = {}
    for a, b in links:
        before.setdefault(b, []).append(a)
        after.setdefault(a, []).append(b)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            place = {item: i for row in layers for i, item in enumerate(row)}
            near = before if forward else after
            layer.sort(key=lambda x: sum(place[n] for n in near[x]) / len(near[x]) if near.get(x) else place[x])


def _rows(layers: list[list[str | _Lane]], links: list[tuple]) -> dict:
    """Return the vertical centre of every box and edge segment, near its neighbours and without overlap."""
    height = {item: _BOX_HEIGHT if isinstance(item, str) else _LANE for layer in layers for item in layer}
    centre: dict = {}
    for layer in layers:
        y = 0.0
        for item in layer:
            centre[item] = y + height[item] / 2
            y += height[item] + _GAP_Y
    near: dict = {}
    for a, b in links:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wish = {x: sum(centre[n] for n in near[x]) / len(near[x]) if near.get(x) else centre[x] for x in layer}
            _settle(layer, wish, height, centre)
    top = min(centre[x] - height[x] / 2 for x in centre)
    return {item: y - top + _TOP for item, y in centre.items()}


def _settle(layer: list, wish: dict, height: dict, centre: dict) -> None:
    """Set the vertical centres of a layer's items: as wished, moved down where they would overlap, then shifted
    together so that their mean is the mean of the wishes."""
    bottom = None
    for item in layer:
        y = wish[item]
        if bottom is not None:
            y = max(y, bottom + _GAP_Y + height[item] / 2)
        centre[item] = y
        bottom = y + height[item] / 2
    shift = sum(wish[x] - centre[x] for x in layer) / len(layer)
    for item in layer:
        centre[item] += shift


def _columns(layers: list[list[str | _Lane]], plan: Drawing) -> list[Point]:
    """Return the x coordinates of the left and right edges of every column of nodes in the drawing, in order."""
    spans: list[Point] = []
    x = _LEFT
    for layer in layers:
        width = max(plan.sizes[item][0] for item in layer if isinstance(item, str))
        spans.append((x, x + width))
        x += width + _GAP_X
    return spans


def _route(chain: list[str | _Lane], plan: Drawing, centres: dict, spans: list[Point]) -> list[Point]:
    source, *lanes, target = chain
    assert isinstance(source, str), "edges begin at nodes"
    assert isinstance(target, str), "edges end at nodes"
    points = [(plan.boxes[source][0] + plan.sizes[source][0], centres[source])]
    for lane in lanes:
        assert isinstance(lane, _Lane), "between two nodes there are lanes"
        left, right = spans[lane.layer]
        points += [(left, centres[lane]), (right, centres[lane])]
    return [*points, (plan.boxes[target][0] - 1, centres[target])]
