"""Judgement of a pre-flight's results: the failing nodes, with reasons."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any


def failed_checks(result: dict[str, Any]) -> str:
    """Explain, from a node's own results, why it may not be used; empty: it may."""
    return "; ".join(f"{name}: {check['reason']}" for name, check in result["checks"].items() if not check["ok"])


def odd_versions(versions: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the nodes with another version of anything than most nodes have."""
    bad = {}
    for package in sorted({name for own in versions.values() for name in own}):
        most = Counter(own.get(package, "none") for own in versions.values()).most_common(1)[0][0]
        for node, own in versions.items():
            if own.get(package, "none") != most:
                bad[node] = f"versions: {package} {own.get(package, 'none')}, and {most} on other nodes"
    return bad


def wrong_clocks(offsets: dict[str, float], limit_s: float) -> dict[str, str]:
    """Return the nodes whose clock is too far from the median, from the seconds that each is ahead of one of them."""
    if not offsets:
        return {}
    middle = statistics.median_low(offsets.values())
    return {
        node: f"clock: {at - middle:+.2f} s from the median, launch.preflight_clock_s = {limit_s:g}"
        for node, at in offsets.items()
        if abs(at - middle) > limit_s
    }


def slow_nodes(edges: list[dict[str, Any]], share: float) -> dict[str, str]:
    """Return nodes that reach none of their neighbours, or whose best link is far slower than the median of all nodes'.

    The best neighbour counts: a slow node makes both its pairs slow, which must not blame its neighbours. Two nodes
    have no median.
    """
    best: dict[str, float] = {}
    errors: dict[str, str] = {}
    for edge in edges:
        for node in edge["nodes"]:
            best[node] = max(best.get(node, 0.0), edge.get("gb_per_s", 0.0))
            other = next(name for name in edge["nodes"] if name != node)
            if "error" in edge:
                errors[node] = f"all-reduce with {other}: {edge['error']}"
    bad = {node: errors[node] for node, speed in best.items() if not speed}
    if len(best) > 2:
        middle = statistics.median(best.values())
        for node, speed in best.items():
            if node not in bad and speed < share * middle:
                bad[node] = f"all-reduce: {speed:g} GB/s with its best neighbour, the median is {middle:g}"
    return bad


def link_faults(found: dict[str, Any], nodes: list[str], clock_s: float, share: float) -> dict[str, str]:
    """Return the nodes that links.json blames; if no other node joined the first one, that one is blamed."""
    present = found["nodes"]
    if len(present) == 1 and len(nodes) > 2:
        return {present[0]: "links: no other node reaches it"}
    absent = {node: f"links: it did not reach {nodes[0]} in time" for node in nodes if node not in present}
    return {**slow_nodes(found["edges"], share), **wrong_clocks(found["clocks"], clock_s), **absent}
