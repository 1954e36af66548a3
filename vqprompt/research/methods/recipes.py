"""Recipes: for every method and data set of the paper, the published settings, and where they were published.

`bench run` uses them by default, its tables mark with § what differs from them, and
`vqprompt methods NAME --data DATA` prints them. A part whose source begins with "ours" has no publication: it says why.

Sources are the papers and the public repositories as of November 2026: jiaolifengmi/VQ-Prompt, GT-RIPL/CODA-Prompt,
thu-ml/HiDe-Prompt, MIV-XJTU/EvoPrompt, GengDavid/SLCA.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PAPER_DATA = ("imagenet-r", "cifar100", "cub200", "imagenet-a", "vtab")
PAPER_BACKBONES = ("vit-b16-in1k", "vit-b16-in21k", "ibot-b16", "dino-b16")
VQ = ("vq-prompt", "vq-prompt-s", "soft-prompt")
CODA = ("l2p++", "deep-l2p++", "l2p++-v2", "dualprompt", "coda-p")
TUNED = ("ft", "ft++", "joint", "lwf", "bic")
BATCH = {"imagenet-a": 64, "vtab": 8}  # appendix: "64 for ImageNet-A and 8 for VTAB"
SHARP = 2.0  # `stored`: see docs/performance.md for what it keeps and what it costs

# The paper and its code: five seeds. CUB-200's script names its own.
SEEDS = (0, 1, 2, 3, 4)
CUB_SEEDS = (0, 12, 24, 36, 48)


@dataclass(frozen=True)
class Part:
    """Some settings of a recipe, and where they come from."""

    settings: dict[str, Any]
    source: str


def find_recipe(
    method: str, data: str | None, backbone: str = "vit-b16-in1k", tasks: int = 10, released: bool = False
) -> list[Part]:
    """The parts of a recipe; none for methods and data sets that the paper does not have.

    data: a data set's name. backbone: a registered name; another one has no published normalization or τ.
    released: VQ-Prompt as its code is, where the paper says something else.
    """
    if data not in PAPER_DATA:
        return []
    if method in VQ:
        parts = _vq_prompt(data, backbone, tasks, released)
    elif method in CODA:
        parts = _coda(method, data)
    elif method in TUNED:
        parts = _tuned(method, data)
    elif method in RIVALS:
        parts = RIVALS[method](data, backbone)
    else:
        return []
    return [*parts, *_images(method, data, backbone)]


def recipe_settings(parts: Iterable[Part]) -> dict[str, Any]:
    """All settings of a recipe; a later part wins."""
    return {key: value for part in parts for key, value in part.settings.items()}


# ------------------------------------------------------------------------------------------- VQ-Prompt

HOLD = {5: 80, 10: 40, 20: 20}  # ImageNet-R, by tasks: also the steps per epoch that the schedule counts
CONFIGS = {5: "imnet-r_prompt_short_vq", 10: "imnet-r_prompt_vq", 20: "imnet-r_prompt_long_vq"}


def _vq_prompt(data: str, backbone: str, tasks: int, released: bool) -> list[Part]:
    parts = [
        Part({"lr": 0.0025, "prompt_lr_scale": 5.0, "weight_decay": 0.0, "optimizer": "adamw", "epochs": 20},
             "section 4.4 of the paper; prompts 5×: the code, learners/prompt.py"),
        _vq_schedule(data, tasks),
        Part({"vq_weight": 0.1, "commitment_weight": 0.4},
             "the code, models/zoo.py; the paper has them the other way round")
        if released else
        Part({"vq_weight": 0.4, "commitment_weight": 0.1},
             "section 4.4 of the paper; its code has them the other way round (preset released)"),
        _temperature(data, backbone),
        *_vq_statistics(data),
    ]  # fmt: skip
    batch = BATCH.get(data, 64 if data == "imagenet-r" else 128)
    return [*parts, Part({"batch_size": batch}, "appendix of the paper, and the code's configs")]


def _vq_schedule(data: str, tasks: int) -> Part:
    if data == "cub200":
        return Part({"schedule": "coda"}, "the code, configs/cub-200_prompt_vq.yaml: schedule_type cosine")
    if data == "cifar100":
        return Part(
            {"schedule": "released", "hold": 80, "nominal_steps": 40},
            "the code, configs/cifar-100_prompt_vq.yaml: schedule 80, 0, 20; iter_step 40",
        )
    if data == "imagenet-r" and tasks in HOLD:
        steps = HOLD[tasks]
        return Part(
            {"schedule": "released", "hold": steps, "nominal_steps": steps},
            f"the code, configs/{CONFIGS[tasks]}.yaml: schedule {steps}, 0, 20; iter_step {steps}",
        )
    return Part({"schedule": "coda"}, "ours: no script; CUB-200's, because its tasks are about as small")


def _temperature(data: str, backbone: str) -> Part:
    if backbone == "vit-b16-in21k":
        return Part({"tau": 5.0}, "the code, experiments/cub-200.sh, the one script with this backbone (sup21k)")
    if backbone == "vit-b16-in1k" and data in ("imagenet-r", "cifar100"):
        return Part({"tau": 1.0}, "the code, experiments: prompt_param 10 8 1")
    return Part({"tau": 1.0}, "ours: no script with this backbone and data; all scripts but CUB-200's have 1")


def _vq_statistics(data: str) -> list[Part]:
    ratio = 2 if data == "cub200" else 4
    return [
        Part({"rebalancing.epochs": 10}, "section 4.4 of the paper"),
        Part({"rebalancing.lr": 1e-5, "rebalancing.schedule": "released", "rebalancing.weight_decay": 5e-4},
             "the code, trainer.py: ca_lr / 10, a first step at ca_lr; run.py"),
        Part({"rebalancing.ratio": ratio}, "the code, run.py and experiments: ca_batch_size_ratio"),
        Part({"rebalancing.variance": "population", "statistics_views": "augmented"},
             "the code, trainer.py: numpy.var, of the training set with its training transform"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- other methods


def _coda(method: str, data: str) -> list[Part]:
    parts = [
        Part({"lr": 1e-3, "weight_decay": 0.0, "optimizer": "adamw", "schedule": "coda"},
             "CODA-Prompt, configs: Adam, 0.001, cosine per epoch"),
        _coda_length(data),
    ]  # fmt: skip
    if method.startswith(("l2p", "deep")):
        parts.append(Part({"key_loss": "batch"}, "CODA-Prompt, models/zoo.py: cos_sim[:, k_idx]"))
    if method == "dualprompt":
        parts.append(Part({"unlearned_experts": True}, "CODA-Prompt, models/zoo.py: all keys are matched"))
    if method == "l2p++-v2":
        parts.append(Part({}, "statistics: the paper says only that they are VQ-Prompt's"))
        parts += _vq_statistics(data)
    return parts


def _coda_length(data: str) -> Part:
    if data == "imagenet-r":
        return Part({"epochs": 50, "batch_size": 128}, "CODA-Prompt, configs/imnet-r_prompt*.yaml")
    if data == "cifar100":
        return Part({"epochs": 20, "batch_size": 128}, "CODA-Prompt, configs/cifar-100_prompt.yaml")
    return Part(
        {"epochs": 20, "batch_size": BATCH.get(data, 128)},
        "ours: CODA-Prompt has no such script; as VQ-Prompt on this data",
    )


def _tuned(method: str, data: str) -> list[Part]:
    schedule = {"lr": 5e-5, "weight_decay": 0.0, "optimizer": "adamw", "schedule": "coda"}
    if method in ("lwf", "bic"):
        source = "ours: the paper names the method only; rate and schedule of CODA-Prompt's fine-tuning"
    elif data == "cifar100":
        source = "CODA-Prompt, configs/cifar-100_ft.yaml: Adam, 0.00005, cosine per epoch"
    else:
        source = "ours: CODA-Prompt has a script for CIFAR-100 alone; its rate and schedule"
    return [Part(schedule, source), _coda_length(data)]


def _hide_prompt(data: str, backbone: str) -> list[Part]:
    common = [
        Part({"batch_size": BATCH.get(data, 192)}, "HiDe-Prompt, training_scripts: 24 on each of 8 GPUs"),
        Part({"optimizer": "adamw", "weight_decay": 0.0, "clip": 1.0, "momentum": 0.01, "length": 40},
             "HiDe-Prompt, configs and training_scripts: Adam, clip-grad 1.0, length 20 for keys and for values"),
        Part({"rebalancing.ratio": 5, "identity_rebalancing.ratio": 1},
             "HiDe-Prompt, engines: batch size × 5, and × 1 for the task-identity classifier"),
        Part({"crop_area": 0.05}, "HiDe-Prompt, datasets.py: scale 0.05 to 1"),
    ]  # fmt: skip
    if data == "cub200":
        return [
            Part({"epochs": 50, "lr": 0.03 * 24 / 256, "contrastive_weight": 0.01},
                 "HiDe-Prompt, train_cub_vit.sh: 0.03 · 24/256"),
            Part({"identity_lr_scale": 0.3333}, "HiDe-Prompt, train_cub_vit.sh: 0.01 for the task-identity classifier"),
            Part({"schedule": "steps", "milestones": [0.62], "gamma": 0.1},
                 "HiDe-Prompt, cub_hideprompt_5e.py: × 0.1 every 30 epochs, called after an epoch"),
            *common,
        ]  # fmt: skip
    rates = {"lr": 0.003 * 24 / 256, "prompt_lr_scale": 10.0, "identity_lr_scale": 0.1667}
    if data == "cifar100":
        return [
            *common,
            Part({**rates, "epochs": 50, "contrastive_weight": 0.1, "length": 10},
                 "HiDe-Prompt, train_cifar100_vit.sh"),
            Part({"schedule": "steps", "milestones": [0.62], "gamma": 0.1}, "HiDe-Prompt, train_cifar100_vit.sh: step"),
        ]  # fmt: skip
    if backbone in ("ibot-b16", "dino-b16"):
        name = backbone.removesuffix("-b16")
        length = Part({"epochs": 50, "schedule": "constant"}, f"HiDe-Prompt, train_imr_{name}.sh")
    else:
        length = Part(
            {"epochs": 150, "schedule": "epoch-cosine", "min_lr": 1e-5}, "HiDe-Prompt, train_imr_vit.sh: cosine"
        )
    why = "HiDe-Prompt, train_imr_*.sh: 0.03 · 24/256, a tenth for the classifier"
    if data != "imagenet-r":
        why = "ours: no script; ImageNet-R's, with the batch size of the paper's appendix"
        length = Part(length.settings, why)
    return [Part({**rates, "contrastive_weight": 0.5}, why), length, *common]


def _evoprompt(data: str, backbone: str) -> list[Part]:
    if data == "imagenet-r":
        length = Part({"epochs": 50}, "EvoPrompt, evoprompt_imagenet_r_b0.yaml")
    elif data == "cifar100":
        length = Part({"epochs": 20}, "EvoPrompt, evoprompt_cifar100_b0.yaml")
    else:
        length = Part({"epochs": 20}, "ours: EvoPrompt has no such script; its CIFAR-100's, as VQ-Prompt has")
    return [
        Part({"lr": 0.005, "batch_size": BATCH.get(data, 64), "optimizer": "adamw", "weight_decay": 0.0},
             "EvoPrompt, options/evoprompt: Adam, 0.005, 64"),
        length,
        Part({"schedule": "constant", "clip": 1.0}, "EvoPrompt, options/evoprompt: constant, grad_clip_norm 1.0"),
        Part({"query": "raw"}, "EvoPrompt, prompt_transformer.py: the class token after the last block, not normed"),
        Part({"augment": "crop-color"}, "EvoPrompt, models/evoprompt.py: ColorJitter in half the images, a fifth grey"),
    ]  # fmt: skip


def _slca(data: str, backbone: str) -> list[Part]:
    epochs, share, name = (20, 0.9, "cifar") if data == "cifar100" else (50, 0.8, "imgnetr")
    name = "cub" if data == "cub200" else name
    source = f"SLCA, exps/slca/slca_{name}.json"
    if data not in ("cub200", "cifar100", "imagenet-r"):
        source = "ours: no script; as SLCA's for ImageNet-R"
    parts = [
        Part({"epochs": epochs, "schedule": "steps", "milestones": [share], "gamma": 0.1}, source),
        Part({"lr": 0.01, "backbone_lr_scale": 0.01, "optimizer": "sgd", "weight_decay": 5e-4,
              "batch_size": BATCH.get(data, 128)}, "SLCA, models/slca.py"),
        Part({"rebalancing.steps_for": "seen", "rebalancing.epochs": 5, "rebalancing.ratio": 2},
             "SLCA, models/slca.py: a step per class seen, 256 pseudo-features each"),
    ]  # fmt: skip
    if data == "cub200":
        parts.append(Part({"augment": "window"}, "SLCA, utils/data.py: squashed to 300 px, a random window of 224"))
    return parts


RIVALS = {"hide-prompt": _hide_prompt, "evoprompt": _evoprompt, "slca": _slca}


# ------------------------------------------------------------------------------------------- images


def _images(method: str, data: str, backbone: str) -> list[Part]:
    """How images reach the backbone."""
    if backbone not in PAPER_BACKBONES:
        shown = Part({}, "ours: normalized as the backbone's card says; the publications do not have this backbone")
    elif method == "slca":
        shown = Part({"normalize": "imagenet"}, "SLCA, utils/data.py")
    elif method in ("lwf", "bic"):
        shown = Part({"normalize": "none"}, "ours: like all methods that the paper ran itself")
    else:
        home = {"hide-prompt": "HiDe-Prompt, datasets.py", "evoprompt": "EvoPrompt, models/evoprompt.py"}
        code = "VQ-Prompt" if method in VQ else "CODA-Prompt"
        shown = Part(
            {"normalize": "none"}, f"{home.get(method, f'{code}, dataloaders/utils.py')}: pixels in [0, 1] as they are"
        )
    if data == "cifar100":  # its images have 32 px, so a larger store keeps nothing more
        return [shown]
    return [shown, Part({"stored": SHARP}, "everyone crops from the original image; kept at twice the size")]


# ------------------------------------------------------------------------------------------- describe, compare


def describe_recipe(method: str, data: str, backbone: str | None = None, tasks: int | None = None) -> list[str]:
    """A recipe as lines of `setting = value, …   source`."""
    backbone = backbone or ("vit-b16-in21k" if data == "cub200" else "vit-b16-in1k")
    tasks = tasks or {"vtab": 5, "imagenet-a": 20}.get(data, 10)
    parts = find_recipe(method, data, backbone, tasks)
    if not parts:
        why = "the paper does not have this data set" if data not in PAPER_DATA else "it is in no table of the paper"
        return [f"{method} on {data}: no recipe, because {why}; the settings are ours"]
    lines = [f"{method} on {data}, {tasks} tasks, {backbone}:"]
    for part in parts:
        shown = ", ".join(f"{key} = {_short(value)}" for key, value in part.settings.items())
        lines.append(f"  {shown}  ({part.source})" if shown else f"  {part.source}")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


SCHEDULE_SETTINGS = {
    "cosine": ("min_lr",),
    "epoch-cosine": ("min_lr",),
    "released": ("min_lr", "hold", "nominal_steps"),
    "steps": ("milestones", "gamma"),
}


MOVING = "options.moving.how"


def in_use(flat: dict[str, str]) -> dict[str, str]:
    """The settings of a run, by dotted name, that have an effect: without those of a schedule that it does not use, and
    without those of statistics if it keeps none (then nothing moves, whatever `moving.how` says)."""
    used = SCHEDULE_SETTINGS.get(flat.get("schedule", "cosine"), ())
    idle = {key for keys in SCHEDULE_SETTINGS.values() for key in keys if key not in used}
    if not flat.get("augment", "crop").startswith("crop"):
        idle.add("crop_area")
    groups: Sequence[str] = ()
    keeps = flat.get("options.statistics", "true") == "true" and any(k.startswith("options.rebal") for k in flat)
    if not keeps:
        idle.add("statistics_views")
        groups = ("options.rebalancing.", "options.moving.")
    used_here = {key: value for key, value in flat.items() if key not in idle and not key.startswith(tuple(groups))}
    return used_here if keeps or MOVING not in flat else {**used_here, MOVING: "none"}
