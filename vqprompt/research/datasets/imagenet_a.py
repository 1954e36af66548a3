"""ImageNet-A: natural photographs that fool ImageNet classifiers, 200 classes, 7,500 images (Hendrycks et al., 2021).

Reads imagenet-a.tar or its folder (<wnid>/…), train/<wnid>/… + test/<wnid>/… (LAMDA-PILOT's), and the hub's parquet.
It has no official split: without those folders a fifth of each class is held out.
"""

from __future__ import annotations

from vqprompt.core.data.parquet import parquet_files
from vqprompt.core.data.stream import Dataset
from vqprompt.core.progress import Report, ignore
from vqprompt.research.datasets.common import (
    Expected,
    Origin,
    Remote,
    archive_or_folder,
    list_images,
    locate,
    make_dataset,
    ordered,
)
from vqprompt.research.datasets.parquet import list_parquet
from vqprompt.research.datasets.wnids import IMAGENET_A

EXPECTED = Expected(classes=200, images=7_500, names=IMAGENET_A)
ORIGIN = Origin(
    files=(
        Remote(
            "imagenet-a.tar",
            "https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar",
            "c3e55429088dc681f30d81f4726b6595",
        ),
    ),
    hub="barkermrl/imagenet-a",
)


def open_imagenet_a(source: str | None, side: int, seed: int, progress: Report = ignore) -> Dataset:
    path = locate("imagenet-a", source, ORIGIN, progress)
    if parquet_files(path):
        listing = list_parquet(path, ["wnid", "label"])
    else:
        listing = list_images(archive_or_folder(path))
    listing.classes = ordered(listing.classes, IMAGENET_A)
    return make_dataset("imagenet-a", listing, side, seed, progress, EXPECTED)
