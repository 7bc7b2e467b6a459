"""Held-out accuracy over steps, or over whatever was spent, as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_COLOURS = ("#444444", "#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98")


def curves(arms: Mapping[str, Sequence[Sequence[tuple[float, float]]]], width: int = 720, height: int = 320) -> str:
    """One line for each run; the runs of an arm have one colour.

    Args:
        arms: by name: of each run pairs of step (or another number that grows) and accuracy, 0 to 1.
        width: in pixels.
        height: in pixels.
    """
    last = max(step for runs in arms.values() for run in runs for step, _ in run) or 1
    low = min(value for runs in arms.values() for run in runs for _, value in run)
    low = max(0.0, round(low - 0.05, 1))
    left, right, top, bottom = 50, 190, 20, 35

    def place(step: float, value: float) -> str:
        x = left + (width - left - right) * step / last
        y = top + (height - top - bottom) * (1 - (value - low) / (1 - low))
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for tick in range(round(low * 10), 11):
        x, y = map(float, place(0, tick / 10).split(","))
        parts.append(f'<path d="M{place(0, tick / 10)} L{place(last, tick / 10)}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick * 10}%</text>')
    for step in range(0, int(last) + 1, max(1, int(last) // 6)):
        x = float(place(step, low).split(",")[0])
        parts.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{step}</text>')
    for number, (name, runs) in enumerate(arms.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for run in runs:
            path = " L".join(place(*point) for point in run)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        down = top + 18 * number + 10
        parts.append(f'<text x="{width - right + 12}" y="{down}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
