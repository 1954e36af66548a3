"""How fast each method learns: images per second in training, and the ratio to VQ-Prompt's rate.

    python benchmarks/methods.py --device cpu
    python benchmarks/methods.py --device cuda --json results/methods-h200.json

Two tasks of random images, with crops: in the first kernels are compiled, steps recorded and teachers are missing; the
second is timed, by the loop itself. Everything a step needs is in it, queries and rehearsed images included.
"""

from __future__ import annotations

import torch
from common import make_parser, noise_stream, stored_side, write_json

from vqprompt.core.backbones.load import load_backbone
from vqprompt.core.data.stream import Stream
from vqprompt.core.runtime.device import hardware
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.training.settings import Training

REFERENCE = "vq-prompt"


def measure(name: str, backbone: str, size: int, stream: Stream, training: Training, device: str) -> float:
    """Images per second in the second task. A method that learns all classes at once is measured in a second run."""
    rates = []
    learner = Learner(backbone, name, size=size, tasks=2, training=training, device=device)
    for task in stream:
        if METHODS[name].joint:
            learner = Learner(backbone, name, size=size, tasks=1, training=training, device=device)
        before = learner.images_seen, learner.seconds_training
        learner.learn(task)
        rates.append((learner.images_seen - before[0]) / max(learner.seconds_training - before[1], 1e-9))
    return rates[-1]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", default="vit-s14")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--size", type=int, help="image size (default: 224 on CUDA, 56 on a CPU)")
    parser.add_argument("--batch", type=int, help="batch size of all methods (default: 128 on CUDA, 16 on a CPU)")
    parser.add_argument("--steps", type=int, help="steps that are timed (default: 64 on CUDA, 4 on a CPU)")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    size, batch = args.size or (224 if cuda else 56), args.batch or (128 if cuda else 16)
    epochs = max(1, (args.steps or (64 if cuda else 4)) // 4)
    load_backbone(args.backbone, size)  # raises an error for a wrong name or size before anything is measured
    stream = noise_stream([10, 10], [4 * batch // 10] * 2, 1, stored_side(size))
    rates: dict[str, float] = {}
    names = [REFERENCE, *(name for name in args.methods if name != REFERENCE)]
    print(f"{args.backbone}, {size} px, batch {batch}, {4 * epochs} steps, {hardware(torch.device(args.device))}")
    for name in names:
        defaults = METHODS[name].training_defaults
        settings = {"lr": defaults.get("lr", 1e-3), "optimizer": defaults.get("optimizer", "adamw")}
        training = Training(epochs=epochs, batch_size=batch, augment="crop", **settings)
        rates[name] = measure(name, args.backbone, size, stream, training, args.device)
        print(
            f"{name:>12} {rates[name]:9.1f} images/s  {rates[name] / rates[REFERENCE]:5.2f} of {REFERENCE}", flush=True
        )
    content = {"backbone": args.backbone, "size": size, "batch": batch, "steps": 4 * epochs, "images/s": rates}
    write_json(args.json, {**content, "hardware": hardware(torch.device(args.device))})


if __name__ == "__main__":
    main()
