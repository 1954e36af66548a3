"""Can the living model be trusted? Everything in docs/trust-measured.md that is measured on CUB-200.

    python benchmarks/trust_cub.py --data cub200=cub200.zip --json trust.json --features cub.npz

CUB-200's own training and test images, the embedded drawings (80 + 20 per class) and textures made here, all with the
embedded backbone at 224 px. Parts:

- choose: how settings of `check` do on training images alone, those in use and the best; of CUB-200 the first half of
  the classes (weights for the unknown: quality.py --parts choose)
- quality: accuracy, shrinkage, percentages; on test images
- unknown: the score for the unknown against its rivals; on test images
- labels, strangers, copies: what `check` finds of faults put in; all of CUB-200, and the second half of its classes,
  which have no part in `choose`
- pixels: what `check` finds of bad photographs, scans and screenshots among photographs, and its false alarms; a small
  folder, the images shown to the network at 112 px
- growth: time and memory of `check` after the backbone

--features keeps the features of CUB-200, and takes them from there next time.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import check
import numpy as np
import quality
from common import make_parser, write_json
from PIL import Image
from quality import Images, Unknown, half_known

from vqprompt import Model
from vqprompt.core.data.decode import decode
from vqprompt.product.check import copies, doubts

SIZE = 224
TRAINING = 80  # drawings per class
PARTS = ("choose", "quality", "unknown", "labels", "strangers", "copies", "pixels", "growth")
Rows = Iterable[dict[str, Any]]


class Cub:
    """The archive's images; the first `most` of each class and each of train and test."""

    def __init__(self, path: Path, most: int | None) -> None:
        self.archive = zipfile.ZipFile(path)
        names = sorted(n for n in self.archive.namelist() if n.lower().endswith(".jpg"))
        folders = [n.rsplit("/", 1)[0] for n in names]
        places = np.concatenate([np.arange(folders.count(f)) for f in dict.fromkeys(folders)])
        self.names = [n for n, place in zip(names, places, strict=True) if most is None or place < most]
        kinds = [n.split("/")[-2] for n in self.names]
        self.y = np.unique(kinds, return_inverse=True)[1]
        self.test = np.array([n.split("/")[-3] == "test" for n in self.names])

    def image(self, row: int) -> Image.Image:
        return decode(self.archive.read(self.names[row]), self.names[row])

    def embedded(self, model: Model, kept: Path | None) -> Images:
        if kept is not None and kept.is_file():
            held = np.load(kept)
            found = dict(zip(held["names"].tolist(), held["x"], strict=True))
            return Images(quality.last_two_blocks(np.stack([found[n] for n in self.names])), self.y, self.test)
        rows = range(len(self.names))
        with ThreadPoolExecutor() as pool:
            parts = [model.embed(list(pool.map(self.image, rows[i : i + 512]))) for i in range(0, len(rows), 512)]
        x = np.concatenate(parts)
        if kept is not None:
            np.savez(kept, x=x, y=self.y, test=self.test, names=np.array(self.names))
        return Images(x, self.y, self.test)


def drawings(model: Model, most: int | None) -> Images:
    with (files("vqprompt.assets") / "quickdraw50.npz").open("rb") as file:
        sheets = np.load(file)["images"]
    place = np.arange(sheets.shape[1])
    if most is not None:  # as many to learn, a quarter as many to test
        place = place[(place < most) | ((place >= TRAINING) & (place < TRAINING + max(most // 4, 1)))]
    chosen = sheets[:, place].reshape(-1, 28, 28)
    y = np.repeat(np.arange(len(sheets)), len(place))
    return Images(model.embed(list(chosen)), y, np.tile(place >= TRAINING, len(sheets)))


def textures(model: Model, count: int = 36, side: int = 128) -> Images:
    """Twelve patterns at any angle, scale and colour, under noise: a folder unlike birds and drawings."""
    rng = np.random.default_rng(0)
    v, u = np.mgrid[0:side, 0:side] / side

    def blocks(cells: int) -> np.ndarray:
        return np.kron(rng.normal(size=(cells, cells)), np.ones((side // cells, side // cells)))

    def pattern(kind: int) -> np.ndarray:
        angle, scale, phase = rng.uniform(0, np.pi), 2 * np.pi * rng.uniform(4, 14), rng.uniform(0, 6)
        a, b = np.cos(angle) * u + np.sin(angle) * v, np.cos(angle) * v - np.sin(angle) * u
        waves, across = np.sin(scale * a + phase), np.sin(scale * b + phase)
        makers: list[Callable[[], np.ndarray]] = [
            lambda: waves, lambda: np.sign(waves), lambda: waves * across, lambda: np.sign(waves * across),
            lambda: np.sin(scale * np.hypot(u - 0.5, v - 0.5) + phase), lambda: blocks(16), lambda: blocks(side),
            lambda: blocks(32), lambda: np.sin(scale * (a + 0.1 * np.sin(6 * np.pi * b))), lambda: np.abs(waves) ** 8,
            lambda: np.maximum(np.abs(waves), np.abs(across)) ** 12,
            lambda: np.cos(8 * np.arctan2(v - 0.5, u - 0.5) + phase),
        ]  # fmt: skip
        return makers[kind]()

    def image(kind: int) -> np.ndarray:
        drawn = pattern(kind)
        grey = drawn / np.abs(drawn).max() + rng.uniform(0.1, 0.5) * rng.normal(size=(side, side))
        coloured = rng.uniform(60, 180) + 60 * grey[..., None] * rng.uniform(0.3, 1, 3)
        return np.clip(coloured, 0, 255).astype(np.uint8)

    x = model.embed([image(kind) for kind in range(12) for _ in range(count)])
    return Images(x, np.repeat(np.arange(12), count), np.tile(np.arange(count) >= count * 2 // 3, 12))


def blank(model: Model) -> dict[str, np.ndarray]:
    """Features of pictures that show nothing."""
    noise = np.random.default_rng(0)
    plain = {"white": 255, "grey": 128, "black": 0}
    pictures = {name: np.full((256, 256, 3), value, np.uint8) for name, value in plain.items()}
    pictures["almost white"] = np.clip(noise.normal(250, 2, (256, 256, 3)), 0, 255).astype(np.uint8)
    pictures["noise"] = noise.integers(0, 256, (256, 256, 3), dtype=np.uint8)
    return dict(zip(pictures, model.embed(list(pictures.values())), strict=True))


class Everything:
    def __init__(self, model: Model, cub: Cub, kept: Path | None, most: int | None, seeds: list[int]) -> None:
        self.model, self.cub, self.seeds, self.most = model, cub, seeds, most
        self.birds = cub.embedded(model, kept)
        self.first = self.birds.y < (self.birds.y.max() + 1) // 2

    @cached_property
    def drawings(self) -> Images:
        return drawings(self.model, self.most)

    @cached_property
    def textures(self) -> Images:
        return textures(self.model)

    @cached_property
    def blank(self) -> dict[str, np.ndarray]:
        return blank(self.model)

    @cached_property
    def pictures(self) -> check.Pictures:
        return check.Pictures(self.cub.image, self.birds.x)

    # ------------------------------------------------------------------ choices, on training images

    def choose(self) -> Iterator[dict[str, Any]]:
        birds = self.birds.some(self.first & ~self.birds.test)
        drawn = self.drawings.some(~self.drawings.test)
        few = [self._few(drawn, seed) for seed in range(5)]
        found = check.choose_for_labels(
            {"birds": [(birds.x, birds.y)] * 3, "drawings": [(drawn.x, drawn.y)], "10 × 20 drawings": few}
        )
        yield from self._chosen("labels", found, {"unlikely": doubts.UNLIKELY, "support": doubts.SUPPORT})
        found = check.choose_for_strangers(
            {"birds, drawings": (birds.x, birds.y, drawn.x), "drawings, birds": (drawn.x, drawn.y, birds.x)}
        )
        yield from self._chosen("strangers", found, {"far": doubts.FAR})
        rows = np.flatnonzero(self.first & ~self.birds.test)
        found = check.choose_for_copies(self.model, self.pictures.some(rows))
        yield from self._chosen("copies", found, {"alike": copies.ALIKE})

    @staticmethod
    def _few(images: Images, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """20 images of each of ten classes."""
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(np.unique(images.y))[:10]
        rows = np.concatenate([rng.permutation(np.flatnonzero(images.y == c))[:20] for c in chosen])
        return images.x[rows], np.unique(images.y[rows], return_inverse=True)[1]

    @staticmethod
    def _chosen(what: str, rows: list[dict[str, Any]], used: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The best five, and the settings in use with their place."""
        for place, row in enumerate(rows, 1):
            in_use = all(row[name] == value for name, value in used.items())
            if place <= 5 or in_use:
                yield {
                    "settings of": what,
                    "place": f"{place} of {len(rows)}",
                    "in use": "yes" if in_use else "",
                    **row,
                }

    # ------------------------------------------------------------------ measurements

    def quality(self) -> Iterator[dict[str, Any]]:
        for name, images in (("birds", self.birds), ("drawings", self.drawings), ("textures", self.textures)):
            yield {"images": name, **quality.accuracy_and_calibration(images)}

    def unknown(self) -> Iterator[dict[str, Any]]:
        for name, images in (("birds", self.birds), ("drawings", self.drawings), ("textures", self.textures)):
            rows = [half_known(images, seed).measured() for seed in range(3)]
            yield {"known": f"half of the {name}", "unknown": "the other half", **quality.average(rows)}
        for one, other, known, strange in (
            ("birds", "drawings", self.birds, self.drawings),
            ("drawings", "birds", self.drawings, self.birds),
            ("birds", "textures", self.birds, self.textures),
            ("drawings", "textures", self.drawings, self.textures),
        ):
            found = Unknown(known, np.unique(known.y), strange.x[strange.test]).measured()
            yield {"known": one, "unknown": other, **found}
        for name, images in (("birds", self.birds), ("drawings", self.drawings)):
            found = Unknown(images, np.unique(images.y), np.stack(list(self.blank.values())))
            above = found.ours()[-len(self.blank) :] - found.solved.calibration.threshold
            yield {
                "known": name, "unknown": "pictures of nothing", **found.measured(),
                **{f"{what}, above the threshold": float(v) for what, v in zip(self.blank, above, strict=True)},
            }  # fmt: skip

    def _folders(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "all classes", np.flatnonzero(self.first | ~self.first)
        yield "second half of the classes", np.flatnonzero(~self.first)

    def labels(self) -> Iterator[dict[str, Any]]:
        for name, rows in self._folders():
            y = np.unique(self.birds.y[rows], return_inverse=True)[1]
            for told in check.swapped_labels(self.birds.x[rows], y, self.seeds, compare=name == "all classes"):
                yield {"images of": name, **told}

    def strangers(self) -> Iterator[dict[str, Any]]:
        unused = self.drawings.x[self.drawings.test]
        for name, rows in self._folders():
            y = np.unique(self.birds.y[rows], return_inverse=True)[1]
            for told in check.strangers_mixed_in(self.birds.x[rows], y, unused, self.seeds):
                yield {"images of": name, **told}

    def copies(self) -> Iterator[dict[str, Any]]:
        for name, rows in self._folders():
            pictures = self.pictures.some(rows)
            already = check.own_copies(pictures, copies.ALIKE)
            for seed in self.seeds:
                hidden = check.Hidden(self.model, pictures, seed)
                yield {"images of": name, "seed": seed, **hidden.found(copies.ALIKE, already)}
                if name == "all classes" and seed == self.seeds[0]:
                    for a, b in sorted(already):
                        yield {
                            "images of": "CUB-200's own copies",
                            "one": self.cub.names[a],
                            "other": self.cub.names[b],
                        }
                    if (hashed := check.imagehash_finds(hidden)) is not None:
                        yield {"images of": "found by imagehash", "seed": seed, **hashed}

    def pixels(self) -> Iterator[dict[str, Any]]:
        chosen = np.random.default_rng(0).permutation(np.unique(self.birds.y))[:12]
        rows = [np.flatnonzero((self.birds.y == c) & ~self.birds.test)[:15] for c in chosen]
        spare = [np.flatnonzero((self.birds.y == c) & self.birds.test)[0] for c in chosen[:4]]
        photos = [self.cub.image(int(row)) for row in np.concatenate(rows)]
        labels = np.repeat([str(c) for c in chosen], [len(part) for part in rows]).tolist()
        yield from check.bad_pixels(photos, labels, [self.cub.image(int(row)) for row in spare], 112)
        tested = np.flatnonzero(self.birds.test)[::10]
        yield from check.beyond_the_limit([self.cub.image(int(row)) for row in tested])

    def growth(self) -> Iterator[dict[str, Any]]:
        yield from check.growth(self.birds.x, self.birds.y, (2500, 5000, 10000, 20000))


def show(part: str, rows: Rows) -> list[dict[str, Any]]:
    print(f"\n{part}", flush=True)
    kept = []
    for row in rows:
        kept.append(row)
        said = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        print("  " + " | ".join(said), flush=True)
    return kept


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="cub200=ZIP, with train/ and test/ and a folder per class inside")
    parser.add_argument("--features", type=Path, help="npz with the features of CUB-200; made if it does not exist")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--size", type=int, default=SIZE, help="image size in px; small ones for a quick try")
    parser.add_argument("--most", type=int, help="images per class to learn, for a quick try")
    arguments = parser.parse_args()
    started = time.monotonic()
    cub = Cub(Path(arguments.data.removeprefix("cub200=")), arguments.most)
    model = Model(size=arguments.size, device=arguments.device)
    everything = Everything(model, cub, arguments.features, arguments.most, arguments.seeds)
    found: dict[str, Any] = {
        "device": arguments.device, "birds": len(cub.names), "seconds for features": time.monotonic() - started
    }  # fmt: skip
    print(" | ".join(f"{name} {value}" for name, value in found.items()))
    for part in arguments.parts:
        begun = time.monotonic()
        found[part] = show(part, getattr(everything, part)())
        print(f"  {time.monotonic() - begun:.1f} s", flush=True)
        write_json(arguments.json, found)
    print(f"\n{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
