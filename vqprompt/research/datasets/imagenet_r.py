"""ImageNet-R: renditions (art, cartoons, tattoos, toys …) of 200 ImageNet classes, 30,000 images (Hendrycks et al.).

Reads imagenet-r.tar or its folder (<wnid>/…), train/<wnid>/… + test/<wnid>/…, and the hub's parquet. It has no official
split. Papers use the file lists of CODA-Prompt, 24,000 and 6,000 images; they are used if they are beside the images.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vqprompt.core.data.parquet import parquet_files
from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import ImageError
from vqprompt.core.progress import Report, ignore
from vqprompt.core.words import shorten
from vqprompt.research.datasets.common import (
    Expected,
    Listing,
    Origin,
    Remote,
    archive_or_folder,
    list_images,
    locate,
    make_dataset,
    ordered,
)
from vqprompt.research.datasets.parquet import list_parquet
from vqprompt.research.datasets.wnids import IMAGENET_R

LISTS = {"train": "imagenet-r_train.yaml", "test": "imagenet-r_test.yaml"}
CODA = "https://raw.githubusercontent.com/GT-RIPL/CODA-Prompt/main/dataloaders/splits"
EXPECTED = Expected(classes=200, images=30_000, train=24_000, names=IMAGENET_R)
ORIGIN = Origin(
    files=(
        Remote(
            "imagenet-r.tar",
            "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
            "a61312130a589d0ca1a8fca1f2bd3337",
        ),
        Remote(LISTS["train"], f"{CODA}/{LISTS['train']}", "b90d9c763369c87dbd9becb80abd83b3", optional=True),
        Remote(LISTS["test"], f"{CODA}/{LISTS['test']}", "3ea5a3aa2e96578874254d4ee87321b3", optional=True),
    ),
    hub="axiong/imagenet-r",
)


def open_imagenet_r(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    path = locate("imagenet-r", source, ORIGIN, progress)
    if parquet_files(path):
        listing = list_parquet(path, ["wnid", "label"])
    else:
        listing = list_images(archive_or_folder(path))
    listing.classes = ordered(listing.classes, IMAGENET_R)
    listing = apply_lists(listing, path if path.is_dir() else path.parent)
    return make_dataset("imagenet-r", listing, side, seed, progress, EXPECTED)


def apply_lists(listing: Listing, folder: Path) -> Listing:
    """The split and the order of classes that CODA-Prompt's lists prescribe, if both lists are there."""
    lists = {split: folder / name for split, name in LISTS.items() if (folder / name).is_file()}
    if len(lists) < len(LISTS):
        missing = "only one of them is" if lists else "they are not"
        listing.notes.append(
            f"papers use the split of CODA-Prompt, {' and '.join(LISTS.values())}; {missing} in {folder}"
        )
        return listing
    wanted: dict[str, tuple[str, int]] = {}
    for split, file in lists.items():
        wanted |= {name: (split, target) for name, target in read_list(file).items()}
    by_name = {"/".join(entry.path.split("/")[-2:]): entry for entry in listing.entries}
    lost = [name for name in wanted if name not in by_name]
    if lost:
        raise ImageError(
            f"{listing.path}: {len(lost)} of the {len(wanted)} images in {' and '.join(LISTS.values())} are not there "
            f"({shorten(lost)}); get them, or take the lists away to split 80/20"
        )
    chosen = {name: entry for name, entry in by_name.items() if name in wanted}
    if len(chosen) < len(listing.entries):
        listing.notes.append(f"left out {len(listing.entries) - len(chosen)} images that no list names")
    entries = [replace(entry, split=wanted[name][0]) for name, entry in chosen.items()]
    number = {entry.label: wanted[name][1] for name, entry in chosen.items()}
    listing.notes.append(f"split by {' and '.join(LISTS.values())}")
    return replace(listing, entries=entries, classes=sorted(number, key=lambda label: number[label]))


def read_list(path: Path) -> dict[str, int]:
    """`<wnid>/<image>` to class number. The lists are YAML of the simplest kind, `data:` and `targets:` with one
    `- value` per line; nothing else is accepted."""
    parts: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        text = line.strip()
        if text in ("data:", "targets:"):
            current = parts.setdefault(text[:-1], [])
        elif text.startswith("- ") and current is not None:
            current.append(text[2:].strip().strip("'\""))
        elif text and not text.startswith("#"):
            raise ImageError(f"{path}, line {number}: {line!r} is not of a list of data: and targets:; get it again")
    names, targets = parts.get("data", []), parts.get("targets", [])
    if not names or len(names) != len(targets) or not all(t.isdecimal() for t in targets):
        raise ImageError(f"{path}: needs as many numbers under targets: as paths under data:; get it again")
    return {"/".join(name.split("/")[-2:]): int(target) for name, target in zip(names, targets, strict=True)}
