"""Which prompts the test images of each task use, and how that changes as later tasks are learned."""

from __future__ import annotations

from vqprompt.research.report import figures
from vqprompt.research.results.result import PromptUse


def shares(use: PromptUse, block: int, after: int = -1) -> list[list[float]]:
    """Shares of the choices of each task's test images [tasks][prompts] in a block, after learning a task.

    block: its position in `use.blocks`.
    """
    total = len(use.counts[0][block])
    return [
        [task[block].get(n, 0) / max(sum(task[block].values()), 1) for n in range(total)] for task in use.test[after]
    ]


def in_use(use: PromptUse, after: int = -1) -> list[int]:
    """How many different prompts the test images of all tasks use, in each block."""
    return [len({n for task in use.test[after] for n in task[b]}) for b in range(len(use.blocks))]


def kept(use: PromptUse) -> list[float]:
    """For each task, the share of its test images that still use the prompt most of them used when it was new (mean
    over the blocks), after the last task."""
    shares_kept = []
    for number, last in enumerate(use.test[-1]):
        first = use.test[number][number]
        pairs = [(max(then, key=lambda n: then[n]), now) for then, now in zip(first, last, strict=True)]
        shares_kept.append(sum(now.get(best, 0) / max(sum(now.values()), 1) for best, now in pairs) / len(pairs))
    return shares_kept


def cells(use: PromptUse, after: int = -1) -> list[list[str]]:
    """For each task and block, which prompts its test images use, the most used first: `3: 88 %, 7: 12 %`."""

    def shown(block: dict[int, int]) -> str:
        images, order = max(sum(block.values()), 1), sorted(block, key=lambda n: (-block[n], n))
        first = ", ".join(f"{n + 1}: {100 * block[n] / images:.0f} %" for n in order[:3])
        return first + (f" and {len(order) - 3} more" if len(order) > 3 else "")

    return [[shown(block) for block in task] for task in use.test[after]]


def markdown(use: PromptUse, after: int = -1) -> str:
    """`cells` as a table."""
    headings = ["images of task", *(f"block {block}" for block in use.blocks)]
    rows = [headings, ["---"] * len(headings)]
    rows += [[str(number), *row] for number, row in enumerate(cells(use, after), start=1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def chart(use: PromptUse, block: int, after: int = -1) -> str:
    """An SVG: one row per task, one column per prompt, darker where more of the task's test images use it."""
    of_tasks = shares(use, block, after)
    number = len(use.test[after])
    title = f"Block {use.blocks[block]}: prompts of the test images of each task, after task {number}"
    return figures.prompt_use_chart(of_tasks, max(map(max, of_tasks)) or 1, f"tested{block}", title)
