"""SRPO's scores in plain Python: its own standardisation, clustering, distances and mappings, one number at a time."""

from __future__ import annotations

import math


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def standardised(rows):
    centre = mean(rows)
    spread = [math.sqrt(sum((row[k] - c) ** 2 for row in rows) / len(rows)) for k, c in enumerate(centre)]
    return [[(x - c) / (s or 1.0) for x, c, s in zip(row, centre, spread, strict=True)] for row in rows]


def dbscan(rows, eps, min_samples=2):
    """Cluster of each row, None for noise: textbook DBSCAN, where a row is its own neighbour."""
    near = [[j for j, b in enumerate(rows) if distance(a, b) <= eps] for a in rows]
    label, clusters = [None] * len(rows), 0
    for start in range(len(rows)):
        if label[start] is not None or len(near[start]) < min_samples:
            continue
        waiting = [start]
        while waiting:
            place = waiting.pop()
            if label[place] is None:
                label[place] = clusters
                if len(near[place]) >= min_samples:
                    waiting += near[place]
        clusters += 1
    return label, clusters


def knee(rows):
    curve = sorted(min(distance(a, b) for j, b in enumerate(rows) if i != j) for i, a in enumerate(rows))
    first, last, count = curve[0], curve[-1], len(curve)
    below = [first + (last - first) * i / (count - 1) - x for i, x in enumerate(curve)]
    best = max(range(count), key=lambda i: (below[i], -i))
    return (curve[best] if below[best] > 0.1 * last else last) * 1.1 + 1e-12


def centres(successes, radius, eps):
    if len(successes) < 2:
        return [mean(successes)], 0
    rows = standardised(successes)
    reach = {"fixed": eps, "scaled": eps * math.sqrt(len(rows[0])), "k_distance": knee(rows)}[radius]
    label, clusters = dbscan(rows, reach)
    if not clusters:
        return [mean(successes)], 0
    return [mean([row for row, of in zip(successes, label, strict=True) if of == c]) for c in range(clusters)], clusters


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mapped(distances, mapping, weight):
    low, high, middle = min(distances), max(distances), sum(distances) / len(distances)
    spread = math.sqrt(sum((d - middle) ** 2 for d in distances) / len(distances))
    if mapping == "z_score":
        share = 0.8 if weight is None else weight
        return [share * sigmoid((middle - d) / spread if spread >= 1e-6 else 0.0) for d in distances]
    share = 0.6 if weight is None else weight
    place = [(d - low) / (high - low) if high - low >= 1e-6 else 0.5 for d in distances]
    return [share * sigmoid(10 * (0.5 - d)) for d in place]


def usable(row):
    return all(math.isfinite(x) for x in row) and any(x != 0 for x in row)


def scores(embeddings, success, task, *, radius, mapping, eps=0.5, weight=None, bank=None):
    """(score of each episode, clusters of each task with a reference); `bank`: embeddings of each task."""
    result, clusters = [1.0 if won else 0.0 for won in success], {}
    for name in set(task):
        rows = [i for i, t in enumerate(task) if t == name and usable(embeddings[i])]
        references = [*(bank or {}).get(name, []), *(embeddings[i] for i in rows if success[i])]
        failures = [i for i in rows if not success[i]]
        if not references:
            continue
        places, clusters[name] = centres(references, radius, eps)
        if failures:
            nearest = [min(distance(embeddings[i], c) for c in places) for i in failures]
            for i, score in zip(failures, mapped(nearest, mapping, weight), strict=True):
                result[i] = score
    return result, clusters
