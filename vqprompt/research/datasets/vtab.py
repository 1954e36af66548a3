"""VTAB, cross-domain: ten classes of each of five sets, one set per task (Zhou et al., RevisitingCIL / LAMDA-PILOT).

Reads their release: vtab/train/<number>/… and vtab/test/<number>/…, where ten consecutive numbers are one domain, in
this order: aerial photographs (RESISC45), textures (DTD), pets, satellite images (EuroSAT), flowers.
"""

from __future__ import annotations

from dataclasses import replace

from vqprompt.core.data.stream import Dataset
from vqprompt.core.errors import ImageError
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.common import (
    Expected,
    Origin,
    archive_or_folder,
    list_images,
    locate,
    make_dataset,
    natural,
)

DOMAINS = ("resisc45", "dtd", "pets", "eurosat", "flowers")
EXPECTED = Expected(classes=50)
ORIGIN = Origin(
    by_hand="Fetch vtab.zip by hand\n  from https://drive.google.com/file/d/1xUiwlnx4k0oDhYi26KL5KwrCAya-mvJ_\n"
    "       (VTAB under https://github.com/sun-hailong/LAMDA-PILOT#datasets)",
)


def open_vtab(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    path = locate("vtab", source, ORIGIN, progress)
    listing = list_images(archive_or_folder(path))
    if listing.entries[0].split is None:
        raise ImageError(
            f"{path}: no train/ and test/ folders in it; expected vtab/train/<class>/… and vtab/test/<class>/…"
        )
    classes = sorted(listing.classes, key=natural)
    domain = {name: DOMAINS[i * len(DOMAINS) // len(classes)] for i, name in enumerate(classes)}
    full = {name: f"{domain[name]}/{name}" for name in classes}  # numbers do not tell a reader much
    listing.entries = [replace(entry, label=full[entry.label]) for entry in listing.entries]
    listing.classes = [full[name] for name in classes]
    groups = tuple(tuple(full[name] for name in classes if domain[name] == d) for d in DOMAINS)
    return make_dataset("vtab", listing, side, seed, progress, EXPECTED, groups)
