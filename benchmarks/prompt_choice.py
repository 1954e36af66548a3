"""Why few prompts are chosen: what VQ-Prompt's selection makes of real queries, before and after its own losses.

    python benchmarks/prompt_choice.py                        # the embedded drawings
    python benchmarks/prompt_choice.py --features FILE.npz    # queries [n, D] as `x`, classes [n] as `y`

No image passes through a prompted network here: only queries, keys, pools and the two VQ losses. It takes seconds.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqprompt.research.methods.prompts import PromptPool


def drawings() -> tuple[Tensor, Tensor]:
    """Queries and classes of 20 drawings per class."""
    from vqprompt import Learner, Stream, Training, open_dataset

    stream = Stream(open_dataset("quickdraw50", size=70), tasks=1, seed=0, train_per_class=20)
    learner = Learner("vit-s14", size=70, device="cpu", training=Training(test_crop=0.0, augment="none"))
    task = next(iter(stream))
    return learner.queries(task.train), task.train.labels


def alpha(pool: PromptPool, queries: Tensor, tau: float) -> Tensor:
    """Weights of the soft selection [n, M, N]."""
    keys = F.normalize(pool.keys, dim=-1)
    return torch.softmax(torch.einsum("bd,mnd->bmn", queries, keys) / tau, dim=-1)


def used(choice: Tensor) -> float:
    """Different prompts that images [n, M] choose, mean over the blocks."""
    return sum(len(column.unique()) for column in choice.unbind(1)) / choice.shape[1]


def share_of_first(choice: Tensor) -> float:
    """Share of the images that choose a block's most chosen prompt, mean over the blocks."""
    return sum(float(column.bincount().max()) / len(column) for column in choice.unbind(1)) / choice.shape[1]


def train(pool: PromptPool, queries: Tensor, tau: float, vq: float, commitment: float, steps: int = 80) -> None:
    """The two VQ losses alone, AdamW at prompts' rate (5 × 0.0025), batches of 128."""
    optimizer = torch.optim.AdamW(pool.parameters(), lr=0.0125, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = queries[torch.randperm(len(queries), generator=generator)[:128]]
        found = pool.quantize(pool.soft(batch, tau))
        optimizer.zero_grad()
        (vq * found.vq + commitment * found.commitment).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", help="a .npz file with queries `x` and classes `y`")
    arguments = parser.parse_args()
    if arguments.features:
        file = np.load(arguments.features)
        queries, labels = torch.from_numpy(file["x"]).float(), torch.from_numpy(file["y"])
    else:
        queries, labels = drawings()
    center = queries.mean(0)
    task = queries[labels < 20]
    print(f"{len(queries)} queries of {len(labels.unique())} classes, norm {queries.norm(dim=1).mean():.1f}")
    print(f"share of the mean in their energy: {float(center.square().sum() / queries.square().sum(1).mean()):.2f}")
    print(f"mean cosine of two queries: {float(F.normalize(queries, dim=1).mean(0).square().sum()):.2f}")
    print("\nPools of ten as drawn, then after 80 steps of the two VQ losses; 20 classes, mean over five blocks.")
    columns = ["queries", "τ", "λ_q, λ_c"]
    columns += [f"{name}, {when}" for when in ("drawn", "after") for name in ("prompts", "first's share", "its α")]
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for name, shown in (("as they are", task), ("less their mean", task - center)):
        for tau in (1.0, 5.0):
            for vq, commitment in ((0.4, 0.1), (0.1, 0.4), (0.4, 0.0)):
                torch.manual_seed(1)
                pool = PromptPool(5, 10, 8, queries.shape[1])
                line = [name, f"{tau:g}", f"{vq}, {commitment}", *described(pool, shown, tau)]
                train(pool, shown, tau, vq, commitment)
                print("| " + " | ".join([*line, *described(pool, shown, tau)]) + " |")


@torch.no_grad()
def described(pool: PromptPool, queries: Tensor, tau: float) -> list[str]:
    """Prompts chosen, share of the most chosen one, and the weight α of the chosen one."""
    weights, choice = alpha(pool, queries, tau), pool.nearest(pool.soft(queries, tau))
    own = float(weights.gather(-1, choice[..., None]).mean())
    return [f"{used(choice):.1f}", f"{share_of_first(choice):.2f}", f"{own:.2f}"]


if __name__ == "__main__":
    main()
