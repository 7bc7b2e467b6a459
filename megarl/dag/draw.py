"""Task graphs as text and SVG."""

from __future__ import annotations

from html import escape

from megarl.dag.graph import TaskGraph
from megarl.dag.layout import Drawing, Point, lay_out
from megarl.dag.stage import Role

# Fill and line per role; one pair for light and one for dark pages. Text takes the page's text colour.
_COLOURS = {
    Role.DEFAULT: ("#eef1f5", "#8a94a3", "#2a2f37", "#7d8796"),
    Role.ACTOR: ("#dbe9ff", "#3b78d8", "#1c304f", "#6ea3f5"),
    Role.ADVANTAGE: ("#e6f6e9", "#3c9a54", "#1b3824", "#67c681"),
    Role.CRITIC: ("#efe4fd", "#8450c9", "#33234b", "#b48cf0"),
    Role.ROLLOUT: ("#fff0d6", "#cf8a12", "#43300f", "#efb955"),
    Role.REFERENCE: ("#e3eef0", "#4f8792", "#1d3337", "#83bcc7"),
    Role.TEACHER: ("#e8ecd9", "#7c8f3a", "#2a3019", "#b1c46c"),
    Role.REWARD: ("#ffe3e3", "#cc4b4b", "#472020", "#f08d8d"),
    Role.DYNAMIC_SAMPLING: ("#fbe6f3", "#b9488f", "#431f36", "#e68ac3"),
}

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


def as_text(graph: TaskGraph) -> str:
    """A line of flow, nodes that may run at the same time in brackets, and a table of all nodes."""
    flow = " -> ".join(row[0] if len(row) == 1 else f"[{' | '.join(row)}]" for row in graph.layers())
    head = ("node", "role", "type", "after", "reads", "writes")
    rows: list[tuple[str, ...]] = [head]
    edges = graph.direct()
    for id in graph.order():
        node = graph[id]
        lists = ([parent for parent, child in edges if child == id], node.reads, node.writes)
        kinds = (node.role.name.lower(), node.kind.name.lower())
        rows.append((id, *kinds, *(", ".join(names) or "-" for names in lists)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [f"{graph.id}: {graph.description}".rstrip(": "), f"  {flow}", ""]
    for row in rows:
        lines.append(
            "  " + "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        )
    lines.insert(4, "  " + "  ".join("-" * w for w in widths) + "  ------")
    return "\n".join(lines)


def as_svg(graph: TaskGraph) -> str:
    """A self-contained SVG, left to right, that follows the reader's light or dark theme."""
    plan = lay_out(graph)
    roles = list(dict.fromkeys(graph[id].role for id in graph.order()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plan.width:.0f} {plan.height:.0f}" '
        f'width="{plan.width:.0f}" height="{plan.height:.0f}" role="img" class="megarl-dag" '
        f'aria-label="Task graph {escape(graph.id, quote=True)}">',
        f"<style>{_styles(roles)}</style>",
        f'<text x="24" y="32" class="title">{escape(graph.id)}</text>',
        f'<text x="24" y="50" class="note">{escape(graph.description)}</text>',
    ]
    parts += [_edge(route) for route in plan.routes]
    parts += [_box(graph, id, plan) for id in graph.order()]
    parts += _legend(roles, plan.height - 26)
    return "\n".join([*parts, "</svg>"])


def _styles(roles: list[Role]) -> str:
    light = _LIGHT | {f".{r.value}": f"fill: {_COLOURS[r][0]}; stroke: {_COLOURS[r][1]}" for r in roles}
    dark = _DARK | {f".{r.value}": f"fill: {_COLOURS[r][2]}; stroke: {_COLOURS[r][3]}" for r in roles}

    def rules(styles: dict[str, str]) -> str:
        return " ".join(f".megarl-dag {selector} {{ {style} }}" for selector, style in styles.items())

    return f"{rules(light)} @media (prefers-color-scheme: dark) {{ {rules(dark)} }}"


def _edge(route: list[Point]) -> str:
    """Horizontal at both ends, through all points of the route, with an arrow head."""
    (x, y), *rest = route
    path = [f"M {x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        bend = (next_x - x) * 0.5
        path.append(f"C {x + bend:.1f} {y:.1f} {next_x - bend:.1f} {next_y:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    tip = f'<path class="tip" d="M {x + 1:.1f} {y:.1f} l -9 -4.5 l 0 9 z"/>'
    return f'<path class="edge" d="{" ".join(path)}"/>{tip}'


def _box(graph: TaskGraph, id: str, plan: Drawing) -> str:
    node, (x, y), (width, height) = graph[id], plan.boxes[id], plan.sizes[id]
    hover = f"{id} ({node.kind.name})\n{node.func_name}"
    hover += f"\nreads: {', '.join(node.reads) or '-'}\nwrites: {', '.join(node.writes) or '-'}"
    return (
        f"<g><title>{escape(hover)}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="9" class="{node.role.value}"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 22:.1f}" text-anchor="middle" class="name">{escape(id)}</text>'
        f'<text x="{x + width / 2:.1f}" y="{y + 39:.1f}" text-anchor="middle" class="note">'
        f"{escape(plan.captions[id])}</text></g>"
    )


def _legend(roles: list[Role], y: float) -> list[str]:
    parts, x = [], 24.0
    for role in roles:
        label = role.name.lower().replace("_", " ")
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" rx="3" class="{role.value}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y + 10:.0f}" class="note">{label}</text>')
        x += 34 + 6.2 * len(label)
    return parts
