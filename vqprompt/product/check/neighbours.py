"""The nearest rows of a matrix, in time and memory that grow as n·log n.

A few random trees halve the rows again and again until `LEAF` are left. Within a leaf, one matrix product compares all
rows. Up to `LEAF` rows the result is exact. With more, each tree misses neighbours across its cuts, but another tree
usually finds them; near copies are almost never separated.

Why not a library: in 768 dimensions scikit-learn's trees visit almost all rows, and its brute force compares all pairs,
so both take n² (benchmarks/trust_cub.py prints the times). faiss and hnswlib would work, but they are compiled
dependencies, and this takes thirty lines on top of NumPy's matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LEAF = 512
TREES = 6


def nearest(rows: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most similar other rows of each [n, count], best first, and their similarity [n, count].

    rows: float32 [n, D] of length 1. If there are fewer other rows, the rest is -1, with similarity -inf.
    """
    n = len(rows)
    neighbours = np.full((n, count), -1, np.int64)
    similar = np.full((n, count), -np.inf, np.float32)
    rng = np.random.default_rng(seed)
    for _ in range(1 if n <= LEAF else TREES):
        for leaf in _leaves(rows, np.arange(n), rng):
            _join(rows, leaf, neighbours, similar)
    order = np.argsort(-similar, axis=1, kind="stable")
    return np.take_along_axis(neighbours, order, 1), np.take_along_axis(similar, order, 1)


def _leaves(rows: np.ndarray, chosen: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    waiting = [chosen]
    while waiting:
        part = waiting.pop()
        if len(part) <= LEAF:
            yield part
            continue
        one, other = rows[rng.choice(part, 2, replace=False)]
        along = rows[part] @ (one - other) if not np.array_equal(one, other) else rng.random(len(part))
        order = np.argsort(along, kind="stable")
        half = len(part) // 2
        waiting += [part[order[:half]], part[order[half:]]]


def _join(rows: np.ndarray, leaf: np.ndarray, neighbours: np.ndarray, similar: np.ndarray) -> None:
    """Enter what a leaf shows into the tables of neighbours."""
    count = min(neighbours.shape[1], len(leaf) - 1)
    if count < 1:
        return
    table = rows[leaf] @ rows[leaf].T
    np.fill_diagonal(table, -np.inf)
    best = np.argpartition(-table, count - 1, axis=1)[:, :count]
    places = np.concatenate([neighbours[leaf], leaf[best]], axis=1)
    values = np.concatenate([similar[leaf], np.take_along_axis(table, best, 1)], axis=1)
    # the same row from two trees counts once: sort by row number and drop repetitions
    order = np.argsort(places, axis=1, kind="stable")
    places, values = np.take_along_axis(places, order, 1), np.take_along_axis(values, order, 1)
    again = np.concatenate([np.zeros((len(leaf), 1), bool), places[:, 1:] == places[:, :-1]], axis=1)
    values[again] = -np.inf
    best = np.argpartition(-values, neighbours.shape[1] - 1, axis=1)[:, : neighbours.shape[1]]
    places, values = np.take_along_axis(places, best, 1), np.take_along_axis(values, best, 1)
    neighbours[leaf], similar[leaf] = np.where(np.isfinite(values), places, -1), values
