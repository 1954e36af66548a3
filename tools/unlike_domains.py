"""Write a zip of unlike domains, photographs of birds and drawings, to see which prompts they use.

    python tools/unlike_domains.py cub200.zip unlike.zip
    vqprompt run --data unlike.zip --tasks 6 --seed 0 --method vq-prompt --out runs/unlike

100 classes of CUB-200 and the 50 embedded classes of Quick Draw, in this order of tasks of 25 classes: birds, drawings,
birds, drawings, birds, birds. Class names begin with the number of the task, so that the natural order (--seed 0) keeps
it. CUB-200 is for research only; so is the file that this makes.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

from PIL import Image

from vqprompt.research.datasets import open_quickdraw
from vqprompt.research.datasets.published import PUBLISHED, list_cub200

PER_TASK, SIDE = 25, 28
BIRD_TASKS, DRAWING_TASKS = (0, 2, 4, 5), (1, 3)


def main(cub200: str, target: str) -> None:
    birds, drawings = list_cub200(PUBLISHED["cub200"], Path(cub200)), open_quickdraw(None, SIDE, 0)
    places = {name: _place(BIRD_TASKS, i) for i, name in enumerate(birds.classes[: PER_TASK * len(BIRD_TASKS)])}
    with zipfile.ZipFile(target, "w") as out:
        for entry in birds.entries:
            if entry.label in places:
                out.writestr(
                    f"{entry.split}/{places[entry.label]}-{entry.label}/{Path(entry.path).name}",
                    birds.read_path(entry.path),
                )
        for row, (label, test) in enumerate(zip(drawings.labels, drawings.is_test, strict=True)):
            png = io.BytesIO()
            Image.fromarray(drawings.store.pixels[row, 0]).save(png, "PNG")
            folder = f"{_place(DRAWING_TASKS, int(label))}-{drawings.classes[label]}"
            out.writestr(f"{'test' if test else 'train'}/{folder}/{row}.png", png.getvalue())
    print(f"{target}: {len(places) + len(drawings.classes)} classes")


def _place(tasks: tuple[int, ...], number: int) -> str:
    """The task of the class with this number, as the beginning of its name."""
    return str(tasks[number // PER_TASK])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
