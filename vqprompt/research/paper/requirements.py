"""What another machine must have before it gets work: this version of the package, these weights, these images.

Nobody would notice that numbers come from other code or other weights. So such machines are refused before work
starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

import vqprompt
from vqprompt._version import __version__
from vqprompt.core.backbones.weights import read_weights
from vqprompt.core.errors import UserError
from vqprompt.research.datasets import DATASETS, check_data, parse_data
from vqprompt.research.methods import METHODS


@lru_cache(maxsize=1)
def source_digest() -> str:
    """12 hex digits of the package's source files, because two copies of the same version may differ."""
    folder, digest = Path(vqprompt.__file__).parent, hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=16)
def weights_digest(backbone: str, folder: str) -> str:
    """The fingerprint of a backbone's weights. folder: the base of a relative path."""
    return read_weights(backbone).fingerprint


@dataclass(frozen=True)
class Requirements:
    """version, sources: of this package. weights: backbones and their fingerprints. data: as for `--data`. folder: the
    base of relative paths. packages: those that bring methods or data sets, as NAME VERSION."""

    version: str
    sources: str
    weights: tuple[tuple[str, str], ...]
    data: tuple[str, ...]
    folder: str
    packages: tuple[str, ...] = ()

    @classmethod
    def here(cls, backbones: Iterable[str], data: Iterable[str], methods: Iterable[str] = ()) -> Requirements:
        """What this process has. Raises if weights cannot be read."""
        folder = str(Path.cwd())
        weights = tuple((name, weights_digest(name, folder)) for name in dict.fromkeys(backbones))
        sets = tuple(dict.fromkeys(data))
        brought = {*map(METHODS.version, methods), *(DATASETS.version(parse_data(each)[0] or "") for each in sets)}
        return cls(__version__, source_digest(), weights, sets, folder, tuple(sorted(brought - {""})))

    def missing(self) -> str | None:
        """Why this process cannot do the work; None if it can. Changes the working directory to the base of relative
        paths, if this machine has that folder."""
        if __version__ != self.version:
            return f"it has vqprompt {__version__}, and the work is for {self.version}; install the same version there"
        if source_digest() != self.sources:
            return (
                f"its vqprompt {__version__} has other source files ({source_digest()}, not {self.sources}); install "
                "the same ones there"
            )
        for package in self.packages:
            name, _, expected = package.rpartition(" ")
            installed = next((each.version for each in distributions(name=name)), "in no version")
            if installed != expected:
                return f"it has {name} {installed}, and the work needs {expected}; install the same version there"
        with suppress(OSError):
            os.chdir(self.folder)
        for name, expected in self.weights:
            try:
                digest = weights_digest(name, self.folder)
            except (UserError, OSError) as error:
                return f"it cannot read the backbone {name} ({error})"
            if digest != expected:
                return f"its backbone {name} has other weights ({digest}, not {expected}); copy the right ones there"
        for data in self.data:
            try:
                check_data(data)
            except UserError as error:
                return f"it cannot see the images ({error}); copy them there, or use a folder that all machines share"
        return None


def host_name() -> str:
    return platform.node() or "a machine without a name"
