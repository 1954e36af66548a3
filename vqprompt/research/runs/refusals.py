"""Refuses, before any work, settings that cannot fit into memory and folders that hold something else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.core.backbones.vit import ViT, ViTConfig
from vqprompt.core.data.stream import StreamKind, read_tasks, tasks_digest
from vqprompt.core.errors import UserError
from vqprompt.core.files import check_writable
from vqprompt.research.datasets import parse_data
from vqprompt.research.learner.checkpoint import INFO
from vqprompt.research.methods import METHODS, find_method
from vqprompt.research.results.config import RESUMABLE_SETTINGS, RunConfig, completed, flatten, read_saved_config

LARGEST_COUNT = 1_000_000  # no count among the settings of a run or a method makes sense beyond this
LARGEST_POOL = 100_000  # some methods make one module per prompt
TASKS = "tasks.json"  # in a run's folder: the file that its stream was read from, as it was
BYTES_PER_PARAMETER = 16  # fp32: the value, its gradient, and AdamW's two moments


def refuse_what_cannot_fit(config: RunConfig) -> None:
    """Raise UserError if counts are absurd, or if the method's own parameters need more memory than the machine has.

    Parameters are counted on torch's meta device, which has shapes but no memory. For a backbone that is given as a
    weights file, the width of ViT-S is assumed.
    """
    tasks = config.tasks if isinstance(config.tasks, int) else len(config.tasks)
    counts = {"tasks": tasks, "epochs": config.epochs, "batch_size": config.batch_size, **config.options}
    for name, value in flatten(counts).items():
        largest = LARGEST_POOL if name == "pool" else LARGEST_COUNT
        if value.isdecimal() and int(value) > largest:
            raise UserError(f"{name}={value[:30]}: too large; give at most {largest:,}")
    if config.kind.name == "file":
        read_tasks(config.kind.file)
    method = find_method(config.method)
    centroids = (config.options.get("rebalancing") or {}).get("centroids", 1)
    if config.kind.returns and not (method.classes_return and centroids == 1):
        able = ", ".join(name for name, method in METHODS.items() if method.classes_return)
        raise UserError(
            f"{config.method} cannot learn --stream {config.stream}, in which classes come back; these can, with "
            f"rebalancing.centroids=1: {able}"
        )
    known = BACKBONES.get(config.backbone)
    try:
        with torch.device("meta"):
            # a weights file may have more blocks than ViT-S: as many as the options name
            depth = min(max([ViTConfig().depth, *(block + 1 for block in config.options.get("blocks") or [])]), 1000)
            vit = ViT(known.config if known else ViTConfig(depth=depth))
            made = method(vit, method.Options(**config.options), tasks)
            parameters = sum(p.numel() for p in made.prompting_parameters())
    except (RuntimeError, OverflowError, MemoryError) as error:
        fault = str(error).partition("\n")[0]
        raise UserError(f"{config.method} cannot be built with these settings ({fault}); choose smaller ones") from None
    needed, available = parameters * BYTES_PER_PARAMETER, psutil.virtual_memory().total
    if config.device.startswith(("auto", "cuda")) and torch.cuda.is_available():
        available = torch.cuda.mem_get_info(config.device if ":" in config.device else None)[1]
    if needed > available:
        large = ", ".join(f"{k}={v}" for k, v in config.options.items() if k in ("pool", "length") and v is not None)
        raise UserError(
            f"{config.method} would have {parameters:,} prompting parameters and need {needed / 2**30:,.0f} GiB to "
            f"train them; {available / 2**30:,.0f} GiB are available. Choose a smaller pool or length ({large})"
        )


def refuse_conflicts(out: Path, config: RunConfig, resume: bool) -> None:
    """Refuse before any work what could lose something: another run's folder, or resuming with other settings."""
    check_writable(out)
    if (out / "config.json").exists():
        if not resume:
            raise UserError(f"--out {out}: already holds a run; add --resume to continue it, or give another folder")
        saved = completed(read_saved_config(out))
        then, now = flatten(by_content(saved, out)), flatten(by_content(config.model_dump(mode="json")))
        # paths of data and weights may change; that their content is the same is checked later
        moved = {*RESUMABLE_SETTINGS, *(["backbone"] if Path(config.backbone).is_file() else [])}
        moved |= {"data"} if parse_data(str(saved.get("data")))[0] == parse_data(config.data)[0] else set()
        changed = sorted(k for k in now.keys() | then.keys() if k not in moved and then.get(k) != now.get(k))
        if changed:
            values = ((k.removeprefix("options."), then.get(k, "unknown"), now.get(k, "unknown")) for k in changed[:4])
            pairs = ", ".join(f"{name}={old} then, {new} now" for name, old, new in values)
            advice = "give the same ones, or another --out"
            raise UserError(f"--resume {out}: the run was started with other settings ({pairs}); {advice}")
    elif (out / INFO).exists():
        raise UserError(f"--out {out}: holds a learner that does not belong to a run; give another folder")


def by_content(config: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Settings whose stream is called by the content of the file that lists its tasks, not by the file's path. folder:
    of a run, which keeps the file."""
    stream = str(config.get("stream", "disjoint"))
    if ".json" in stream:
        with suppress(OSError, UserError):  # a file that is gone, or a kind of another version, is called as it is
            file = StreamKind.parse(stream).file
            kept = folder / TASKS if folder and (folder / TASKS).exists() else Path(file)
            config = {**config, "stream": stream.replace(file, f"tasks with digest {tasks_digest(kept)}")}
    return config
