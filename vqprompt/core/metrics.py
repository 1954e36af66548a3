"""The accuracy matrix A_ij and the numbers that are computed from it (the paper's appendix).

`accuracy[i][j]` is the accuracy (in percent) on task i after learning task j; None where j < i, before task i was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float | None]]


def _column(accuracy: Matrix, j: int) -> list[float]:
    """Accuracies on the tasks 0..j right after learning task j."""
    column = [row[j] for row in accuracy[: j + 1]]
    if any(a is None for a in column):
        raise ValueError(f"accuracy after task {j + 1} is incomplete: {column}")
    return [a for a in column if a is not None]


def average_accuracies(accuracy: Matrix) -> list[float]:
    """Mean accuracy over the tasks seen so far, after each task: the curve that papers plot."""
    return [sum(column) / len(column) for column in (_column(accuracy, j) for j in range(len(accuracy)))]


def final_average_accuracy(accuracy: Matrix) -> float:
    """FAA: mean over tasks of A_iT."""
    return average_accuracies(accuracy)[-1]


def cumulative_average_accuracy(accuracy: Matrix) -> float:
    """CAA: mean over j of the average accuracy after task j."""
    averages = average_accuracies(accuracy)
    return sum(averages) / len(averages)


def forgetting_per_task(accuracy: Matrix) -> list[float]:
    """How far each task but the last has fallen from its best accuracy (Chaudhry et al. 2018)."""
    last = len(accuracy) - 1
    drops = []
    for row in accuracy[:last]:
        before = [a for a in row[:last] if a is not None]
        final = row[last]
        if not before or final is None:
            raise ValueError(f"forgetting needs accuracies before and after the last task; got {list(row)}")
        drops.append(max(before) - final)
    return drops


def forgetting(accuracy: Matrix) -> float:
    """Mean of `forgetting_per_task`; 0 for a single task, because nothing came after it."""
    drops = forgetting_per_task(accuracy)
    return sum(drops) / len(drops) if drops else 0.0
