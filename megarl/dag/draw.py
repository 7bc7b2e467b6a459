"""Drawings of task graphs as text and SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from megarl.dag.graph import TaskGraph
from megarl.dag.layout import Drawing, Point, lay_out
from megarl.dag.placement import Placement
from megarl.dag.stage import Role

_WIDTH = 80  # number of columns at which the lines of the graph as text are wrapped
# Fill and line per role; one pair for light and one for dark pages. Text takes the page's text colour.
_COLOURS = {
    Role.DEFAULT: ("#eef1f5", "#8a94a3", "#2a2f37", "#7d8796"),
    Role.ACTOR: ("#dbe9ff", "#3b78d8", "#1c304f", "#6ea3f5"),
    Role.ADVANTAGE: ("#e6f6e9", "#3c9a54", "#1b3824", "#67c681"),
    Role.CRITIC: ("#efe4fd", "#8450c9", "#33234b", "#b48cf0"),
    Role.ROLLOUT: ("#fff0d6", "#cf8a12", "#43300f", "#efb955"),
    Role.REFERENCE: ("#e3eef0", "#4f8792", "#1d3337", "#83bcc7"),
    Role.TEACHER: ("#e8ecd9", "#7c8f3a", "#2a3019", "#b1c46c"),
    Role.REWARD_MODEL: ("#fbe9df", "#b8653a", "#40281b", "#e39a72"),
    Role.REWARD: ("#ffe3e3", "#cc4b4b", "#472020", "#f08d8d"),
    Role.DYNAMIC_SAMPLING: ("#fbe6f3", "#b9488f", "#431f36", "#e68ac3"),
}
_OF_FURTHER = ("#e0f2f5", "#2f8ea0", "#16343a", "#62c0d1")

# Every rule is scoped: inside a web page an SVG's style would otherwise reach the whole page.
_LIGHT = {
    "": "font-family: ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    "text": "fill: #1d2430",
    ".note": "fill: #5b6675; font-size: 11px",
    ".name": "font-size: 14px; font-weight: 600",
    ".title": "font-size: 16px; font-weight: 700",
    ".edge": "fill: none; stroke: #8a94a3; stroke-width: 1.6",
    ".tip": "fill: #8a94a3",
    "rect": "stroke-width: 1.5",
}
_DARK = {"text": "fill: #e8ecf2", ".note": "fill: #a3aebd", ".edge": "stroke: #7d8796", ".tip": "fill: #7d8796"}

_LIGHT_TEAMS = {
    "rect.outline": "fill: none; stroke-width: 2.5; stroke-dasharray: 7 3",
    ".queue .edge": "stroke-dasharray: 4 3",
    ".bars": "stroke: #8a94a3; stroke-width: 2.2",
}
_DARK_TEAMS = {".bars": "stroke: #7d8796"}
_OUTLINES = (
    ("#1f6feb", "#79b0ff"),
    ("#b3540a", "#f0a35e"),
    ("#1a7f37", "#63c77c"),
    ("#8250df", "#c09bff"),
    ("#bf3989", "#f285c1"),
)


def as_text(graph: TaskGraph, placement: Placement | None = None, sizes: Mapping[str, float] | None = None) -> str:
    """Draw the graph as text in 80 columns: the flow, with parallel nodes in brackets, and a table of all nodes.

    Below a node's row are the fields that it reads and writes. With several teams, the table has a column with the team
    of each node, and a second table lists the transfers between teams.

    Args:
        placement: placement of the graph; None: one team.
        sizes: bytes per step of each handover, by its key, if known.
    """
    placement = placement if placement is not None and placement.separate else None
    flow = " -> ".join(row[0] if len(row) == 1 else f"[{' | '.join(row)}]" for row in graph.layers())
    rows: list[tuple[str, ...]] = [("node", *(("team",) if placement else ()), "role", "type", "after")]
    edges = graph.direct()
    for id in graph.order():
        node = graph[id]
        after = ", ".join(parent for parent, child in edges if child == id) or "-"
        team = (placement.of_node(id).name,) if placement else ()
        rows.append((id, *team, node.role.name.lower(), node.kind.name.lower(), after))
    head, rule, *nodes = _table(rows)
    lines = [f"{graph.id}: {graph.description}".rstrip(": "), *_wrapped(f"  {flow}", "    "), "", head, rule]
    for id, line in zip(graph.order(), nodes, strict=True):
        row = _wrapped(line, " " * head.index("after"))
        lines += [*row, *_fields("reads", graph[id].reads), *_fields("writes", graph[id].writes)]
    return "\n".join([*lines, "", *_handovers(graph, placement, sizes or {})] if placement else lines)


def _fields(verb: str, names: Sequence[str]) -> list[str]:
    """Return the lines that list the fields that a node reads or writes; none if there are no fields."""
    return _wrapped(f"      {verb + ':':<8}{', '.join(names)}", " " * 14) if names else []


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the table `rows` as text with aligned columns and an underlined first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    return [lines[0], "  " + "  ".join("-" * w for w in [*widths, len(rows[0][-1])]), *lines[1:]]


def _handovers(graph: TaskGraph, placement: Placement, sizes: Mapping[str, float]) -> list[str]:
    """Return a table of the transfers between teams in a step, in the order of the graph."""
    rows: list[tuple[str, ...]] = [("after", "from", "to", "MB (about)")]
    contents: list[Sequence[str]] = []
    for handover in placement.handovers:
        size = f"{sizes[handover.key] / 1e6:.3g}" if handover.key in sizes else "?"
        rows.append((handover.node, handover.giver, ", ".join(handover.takers), size))
        contents.append(handover.fields)
    rollout = placement.of_role(Role.ROLLOUT)
    for role in (Role.ACTOR, *graph.policies):
        team = placement.of_role(role)
        if team is not None and rollout is not None and team != rollout:
            rows.append(("the step", team.name, rollout.name, "-"))
            contents.append([f"the {role.value}'s weights"])
    head, rule, *transfers = _table(rows)
    lines = ["handed over in every step:", head, rule]
    for line, fields in zip(transfers, contents, strict=True):
        lines += [line, *_fields("fields", fields)]
    return lines


def as_svg(graph: TaskGraph, placement: Placement | None = None) -> str:
    """Draw the graph as a self-contained SVG, left to right, for light and dark themes.

    With several teams, boxes have an outline in their team's colour, and edges between teams show a queue.
    """
    placement = placement if placement is not None and placement.separate else None
    plan = lay_out(graph)
    roles = list(dict.fromkeys(graph[id].role for id in graph.order()))
    teams = [team.name for team in placement.teams] if placement else []
    outlines = {f"outline team{number}": f"team {team}" for number, team in enumerate(teams)}
    width = max(plan.width, 24 + sum(map(_label_width, outlines.values())))
    height = plan.height + (20 if teams else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" class="megarl-dag" '
        f'aria-label="Task graph {escape(graph.id, quote=True)}">',
        f"<style>{_styles(roles, len(teams))}</style>",
        f'<text x="24" y="32" class="title">{escape(graph.id)}</text>',
        f'<text x="24" y="50" class="note">{escape(graph.description)}</text>',
    ]
    crosses = {edge: _crossing(edge, placement) for edge in graph.direct()} if placement else {}
    for edge, route in zip(graph.direct(), plan.routes, strict=True):
        parts.append(_edge(route, crosses.get(edge)))
    parts += [_box(graph, id, plan, placement) for id in graph.order()]
    parts += _legend({role.value: role.name.lower().replace("_", " ") for role in roles}, plan.height - 26)
    parts += _legend(outlines, plan.height - 6)
    return "\n".join([*parts, "</svg>"])


def _crossing(edge: tuple[str, str], placement: Placement) -> str | None:
    """Describe the transfer along an edge between teams; None within a team."""
    source, target = edge
    giver, taker = placement.of_node(source).name, placement.of_node(target).name
    if giver == taker:
        return None
    fields = [name for given in placement.given(source) if taker in given.takers for name in given.fields]
    return f"{giver} to {taker}: {', '.join(fields) or 'the order of the nodes'}"


def _styles(roles: list[Role], teams: int) -> str:
    colours = {role.value: _COLOURS.get(role, _OF_FURTHER) for role in roles}
    light = _LIGHT | {f".{name}": f"fill: {fill}; stroke: {line}" for name, (fill, line, *_) in colours.items()}
    dark = _DARK | {f".{name}": f"fill: {fill}; stroke: {line}" for name, (*_, fill, line) in colours.items()}
    if teams:
        light |= _LIGHT_TEAMS | {f".team{i}": f"stroke: {_outline(i)[0]}" for i in range(teams)}
        dark |= _DARK_TEAMS | {f".team{i}": f"stroke: {_outline(i)[1]}" for i in range(teams)}

    def rules(styles: dict[str, str]) -> str:
        return " ".join(f".megarl-dag {selector} {{ {style} }}" for selector, style in styles.items())

    return f"{rules(light)} @media (prefers-color-scheme: dark) {{ {rules(dark)} }}"


def _edge(route: list[Point], crosses: str | None) -> str:
    """Draw an edge through the points of its route, horizontal at both ends, with an arrow head.

    An edge between teams shows a queue whose tooltip is `crosses`.
    """
    (x, y), *rest = route
    path = [f"M {x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        bend = (next_x - x) * 0.5
        path.append(f"C {x + bend:.1f} {y:.1f} {next_x - bend:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    tip = f'<path class="tip" d="M {x + 1:.1f} {y:.1f} l -9 -4.5 l 0 9 z"/>'
    line = f'<path class="edge" d="{" ".join(path)}"/>{tip}'
    if crosses is None:
        return line
    bars = " ".join(f"M {x - 17 - 5 * i:.1f} {y - 6:.1f} v 12" for i in range(3))
    return f'<g class="queue"><title>{escape(crosses)}</title>{line}<path class="bars" d="{bars}"/></g>'


def _box(graph: TaskGraph, id: str, plan: Drawing, placement: Placement | None) -> str:
    node, (x, y), (width, height) = graph[id], plan.boxes[id], plan.sizes[id]
    hover = f"{id} ({node.kind.name})\n{node.func_name}"
    hover += f"\nreads: {', '.join(node.reads) or '-'}\nwrites: {', '.join(node.writes) or '-'}"
    outline = ""
    if placement is not None:
        team = placement.of_node(id)
        hover += f"\nteam: {team.name}"
        given = placement.given(id)
        hover += "".join(f"\nto {', '.join(handover.takers)}: {', '.join(handover.fields)}" for handover in given)
        outline = (
            f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="{width + 8:.1f}" height="{height + 8:.1f}" rx="12" '
            f'class="outline team{placement.teams.index(team)}"/>'
        )
    return (
        f"<g><title>{escape(hover)}</title>{outline}"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="9" class="{node.role.value}"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 22:.1f}" text-anchor="middle" class="name">{escape(id)}</text>'
        f'<text x="{x + width / 2:.1f}" y="{y + 39:.1f}" text-anchor="middle" class="note">'
        f"{escape(plan.captions[id])}</text></g>"
    )


def _legend(labels: Mapping[str, str], y: float) -> list[str]:
    """Return a row of boxes with labels; `labels` has the label of each CSS class."""
    parts, x = [], 24.0
    for style, label in labels.items():
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" rx="3" class="{style}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y + 10:.0f}" class="note">{escape(label)}</text>')
        x += _label_width(label)
    return parts


def _outline(team: int) -> tuple[str, str]:
    """Return the colours of a team on light and dark pages; they repeat after the last one."""
    return _OUTLINES[team % len(_OUTLINES)]


def _label_width(label: str) -> float:
    return 34 + 6.2 * len(label)
