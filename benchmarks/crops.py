"""What random crops lose when they are cut from stored squares instead of the original image, and what a larger store
costs.

    python benchmarks/crops.py cub200.zip --size 112

The reference is what torchvision's RandomResizedCrop makes of the file: Pillow's bilinear resize of the box. Errors are
in grey levels of 255; sharpness is the mean difference of neighbouring pixels, relative to the reference. A size of
half the images' short side stands for 224 px and originals of 448 px.
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.data.source import Source
from vqprompt.core.data.views import random_boxes, render

STORED = (8 / 7, 1.5, 2.0, 2.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder or archive of images")
    parser.add_argument("--size", type=int, default=112, help="side of the crops in px, a multiple of 14")
    parser.add_argument("--count", type=int, default=96, help="how many images")
    arguments = parser.parse_args()
    source, size = Source(arguments.images), arguments.size
    entries = source.entries[:: max(1, len(source.entries) // arguments.count)][: arguments.count]
    files = [source.read(entry) for entry in entries]
    originals = [_open(data) for data in files]
    boxes = random_boxes(torch.tensor([i.width / i.height for i in originals]), torch.Generator().manual_seed(1))
    started = time.perf_counter()
    wanted = torch.stack([_crop(_open(data), box, size) for data, box in zip(files, boxes.tolist(), strict=True)])
    each = 1000 * (time.perf_counter() - started) / len(files)
    small = (boxes[:, 2:] - boxes[:, :2]).prod(1) < 0.25
    sides = np.median([image.size for image in originals], axis=0)
    print(f"{len(files)} images of {sides[0]:.0f} × {sides[1]:.0f} px (median), crops of {size} px, one thread")
    print(f"{int(small.sum())} crops cover less than a quarter of their image; from the file: {each:.1f} ms per crop\n")
    print("| stored | side | error | error of small crops | sharpness of small crops | ms per crop | KiB per image |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    config = ViTConfig(image_size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    for factor in STORED:
        side = round(factor * size)
        squares = [np.asarray(i.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1) for i in originals]
        pixels = torch.from_numpy(np.stack(squares))
        found = render(pixels, boxes, None, config)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            render(pixels, boxes, None, config)
            times.append(1000 * (time.perf_counter() - started) / len(files))
        error = 255 * (found - wanted).abs().mean(dim=(1, 2, 3))
        sharp = _sharpness(found[small]) / _sharpness(wanted[small])
        cells = [f"{factor:.3g}", f"{side}", f"{error.mean():.2f}", f"{error[small].mean():.2f}"]
        cells += [f"{100 * sharp:.0f} %", f"{min(times):.2f}", f"{3 * side * side / 1024:.0f}"]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _crop(image: Image.Image, box: list[float], size: int) -> Tensor:
    width, height = image.size
    corners = (box[0] * width, box[1] * height, box[2] * width, box[3] * height)
    cut = image.resize((size, size), Image.Resampling.BILINEAR, box=corners)
    return torch.from_numpy(np.asarray(cut).transpose(2, 0, 1).copy()).float() / 255


def _sharpness(images: Tensor) -> float:
    return float(images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
