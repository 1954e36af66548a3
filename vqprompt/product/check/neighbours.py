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


def nearest(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most similar other rows of each [n, count], best first, and their similarity [n, count].

    rows: float32 [n, D] of length 1. If there are fewer other rows, the rest is -1, with similarity -inf.
    """
    n, trees, rng = len(rows), 1 if len(rows) <= LEAF else TREES, np.random.default_rng(0)
    neighbours = np.full((n, trees * count), -1, np.int64)
    similar = np.full((n, trees * count), -np.inf, np.float32)
    for start in range(0, trees * count, count):
        for leaf in _leaves(rows, np.arange(n), rng):
            found = np.arange(min(count, len(leaf) - 1))
            table = rows[leaf] @ rows[leaf].T
            np.fill_diagonal(table, -np.inf)
            best = np.argpartition(-table, len(found) - 1, axis=1)[:, found]
            neighbours[leaf[:, None], start + found] = leaf[best]
            similar[leaf[:, None], start + found] = np.take_along_axis(table, best, 1)
    # the same row from two trees counts once: sort by row number and leave out repetitions
    order = np.argsort(neighbours, axis=1, kind="stable")
    neighbours, similar = np.take_along_axis(neighbours, order, 1), np.take_along_axis(similar, order, 1)
    similar[:, 1:][neighbours[:, 1:] == neighbours[:, :-1]] = -np.inf
    order = np.argsort(-similar, axis=1, kind="stable")[:, :count]
    similar = np.take_along_axis(similar, order, 1)
    return np.where(np.isfinite(similar), np.take_along_axis(neighbours, order, 1), -1), similar


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
