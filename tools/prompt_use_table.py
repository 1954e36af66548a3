"""Print how much of the pool the held-out images use, and how accurate that is, from results/prompt-use.json.

    python tools/prompt_use_table.py

"in use": prompts that at least 1 % of the images get, mean over blocks. "as if": the number of equally used prompts
with the same entropy. Both after the last task, over the images of all tasks. "shared by birds and drawings": how much
the two domains' choices overlap, from 0 (no prompt in common) to 1 (the same choices), mean over blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parents[1] / "results" / "prompt-use.json"
DRAWINGS = (1, 3)  # tasks of the stream of unlike domains, see unlike_domains.py


def counts_of(run: dict[str, Any]) -> np.ndarray:
    """Held-out images per task, block and prompt [T, M, N], after the last task."""
    last = run["prompt_use"]["test"][-1]
    found = np.zeros((len(last), len(last[0]), run["config"]["options"]["pool"]))
    for task, blocks in enumerate(last):
        for block, chosen in enumerate(blocks):
            for prompt, count in chosen.items():
                found[task, block, int(prompt)] = count
    return found


def row(run: dict[str, Any]) -> str:
    config, counts = run["config"], counts_of(run)
    spread = config["options"]["spread"]
    shares = counts.sum(0) / counts.sum((0, 2))[:, None]
    entropy = -(shares * np.log(shares.clip(1e-12))).sum(-1)
    overlap = "–"
    if config["data"] == "unlike":
        drawn = counts[list(DRAWINGS)].sum(0)
        birds = counts.sum(0) - drawn
        alike = np.minimum(drawn / drawn.sum(-1, keepdims=True), birds / birds.sum(-1, keepdims=True))
        overlap = f"{alike.sum(-1).mean():.2f}"
    keys, balance = spread["keys"], f"{spread['balance']:g}"
    used = f"{(shares >= 0.01).sum(-1).mean():.1f} | {np.exp(entropy).mean():.1f}"
    stream = "CUB-200" if config["data"] == "cub200" else "birds and drawings"
    return f"| {stream} | {config['method']} | {keys} | {balance} | {used} | {overlap} | {run['faa']:.1f} |"


if __name__ == "__main__":
    print("| stream | method | keys | balance | in use | as if | shared by birds and drawings | FAA |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    print("\n".join(sorted(row(run) for run in json.loads(RESULTS.read_text()))))
