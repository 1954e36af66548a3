"""The backbones that have a name, and where their files are."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vqprompt.core.backbones.config import ViTConfig
from vqprompt.core.cache import cache_folder
from vqprompt.core.errors import UserError
from vqprompt.core.files import is_file, open_regular, sha256_of

TIMM = "timm:"  # before the name of a model that timm loads, if it is installed
WEIGHTS_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
EMBEDDED = Path(__file__).parents[2] / "assets" / "vit_s14.safetensors"


class WeightsError(UserError):
    """Weights that cannot be found or downloaded, or that are not those of a plain ViT."""


@dataclass(frozen=True)
class Backbone:
    """The fields are explained in backbones.toml."""

    name: str
    summary: str
    config: ViTConfig
    repo: str | None = None
    file: str = "model.safetensors"
    url: str = ""
    checksum: str = ""
    fingerprint: str = ""
    licence: str = "Apache-2.0"
    good_for: str = ""
    origin: str = ""

    @property
    def suffix(self) -> str:
        """Of the file here. MoCo's end with .pth.tar, but are no archives."""
        return Path(self.file.removesuffix(".tar")).suffix

    @property
    def megabytes(self) -> int:
        """Of its weights, about: the matrices of its blocks, as float32."""
        return round(12 * self.config.depth * self.config.width**2 * 4 / 1e6)


PIXELS: dict[str, dict[str, Any]] = {
    "none": {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "halves": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    "clip": {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)},
}


def _listed() -> dict[str, Backbone]:
    table = tomllib.loads(Path(__file__).with_name("backbones.toml").read_text(encoding="utf-8"))
    configs = {n: ViTConfig(**e.pop("config", {}), **PIXELS[e.pop("pixels", "imagenet")]) for n, e in table.items()}
    return {name: Backbone(name, config=configs[name], **entry) for name, entry in table.items()}


BACKBONES = _listed()
BEST, BEST_SIZE = "dinov2-b14", 224  # to take online; at its own 518 px an image has five times the tokens


def backbones_folder() -> Path:
    return cache_folder() / "backbones"


def locate(backbone: Backbone) -> Path:
    """The weights file: from the backbones folder, else from the package, the hub or the makers' own server."""
    own = [backbones_folder() / f"{backbone.name}{suffix}" for suffix in WEIGHTS_SUFFIXES]
    if there := next((path for path in own if is_file(path)), None):
        return there
    if backbone.name == "vit-s14":
        return EMBEDDED
    try:
        if backbone.repo is None:
            from vqprompt.core.downloads import download  # slow to import, and rarely needed

            target = backbones_folder() / f"{backbone.name}{backbone.suffix}"
            return download(backbone.url, target, backbone.checksum)
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(backbone.repo, backbone.file))
    except ImportError as error:
        raise WeightsError(how_to_get(backbone, "that takes `pip install huggingface_hub`")) from error
    except Exception as error:  # any error of the transport has the same way out
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WeightsError(how_to_get(backbone, reason)) from error
    check_hub_digest(path)
    return path


def how_to_get(backbone: Backbone, reason: str) -> str:
    url = backbone.url or f"https://huggingface.co/{backbone.repo}/resolve/main/{backbone.file}"
    source = f"{backbone.file} of {backbone.repo}" if backbone.repo else backbone.file
    target = backbones_folder() / f"{backbone.name}{backbone.suffix}"
    return (
        f"{backbone.name} is not on this machine and could not be downloaded ({reason}).\n"
        f"Fetch {source}\n  from {url}\n  to   {target}\n"
        "Or take vit-s14, which is in the package."
    )


def check_hub_digest(path: Path) -> None:
    """Check a file of the hub's cache, where a large file is named by its sha256."""
    blob = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        with open_regular(blob) as file:
            digest = sha256_of(file)
        if digest != blob.name:
            raise WeightsError(f"{path}: damaged, its sha256 is {digest}; delete {blob} and load again")
