"""What a machine must have before it does runs of a grid: this version of the package, these weights, these images.

Nobody would notice that numbers come from other code or other weights, so every job looks at its machine first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

import vqprompt
from vqprompt._version import __version__
from vqprompt.core.backbones.weights import read_weights
from vqprompt.core.data.stream import tasks_digest
from vqprompt.core.errors import UserError
from vqprompt.research.datasets import DATASETS, check_data, parse_data
from vqprompt.research.methods import METHODS
from vqprompt.research.paper.grids import Run


@lru_cache(maxsize=16)
def weights_digest(backbone: str, folder: str) -> str:
    """The fingerprint of a backbone's weights. folder: the base of a relative path."""
    return read_weights(backbone).fingerprint


@lru_cache(maxsize=16)
def installed(package: str) -> str:
    """The version of a package; of ours also a digest of its source files, because two copies may differ."""
    if package != "vqprompt":
        return next((each.version for each in distributions(name=package)), "in no version")
    folder, digest = Path(vqprompt.__file__).parent, hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + file.read_bytes())
    return f"{__version__} (source files {digest.hexdigest()[:12]})"


@dataclass(frozen=True)
class Requirements:
    """packages: ours and those that bring methods or data sets, with their versions. weights: backbones and their
    fingerprints. tasks: files that list the tasks of streams, and digests. data: as for `--data`. folder: the base of
    relative paths."""

    packages: dict[str, str]
    weights: dict[str, str]
    tasks: dict[str, str]
    data: tuple[str, ...]
    folder: str

    @classmethod
    def of(cls, runs: Sequence[Run], track: Sequence[str] = ()) -> Requirements:
        """What these runs need, as this process has it. Raises if weights cannot be read, or for a tracker (`track`)
        that other machines could not reach."""
        if "mlflow" in track and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise UserError(
                "--track mlflow elsewhere needs a server that all machines can reach; set MLFLOW_TRACKING_URI to it"
            )
        folder, configs = str(Path.cwd()), [run.config for run in runs]
        brought = {METHODS.version(c.method) for c in configs}
        brought |= {DATASETS.version(parse_data(c.data)[0] or "") for c in configs}
        names = ["vqprompt", *sorted(package.rpartition(" ")[0] for package in brought - {""})]
        weights = {name: weights_digest(name, folder) for name in dict.fromkeys(c.backbone for c in configs)}
        tasks = {c.kind.file: tasks_digest(Path(c.kind.file)) for c in configs if c.kind.name == "file"}
        data = tuple(dict.fromkeys(c.data for c in configs))
        return cls({name: installed(name) for name in names}, weights, tasks, data, folder)

    def missing(self) -> str | None:
        """Why this process cannot do the work; None if it can. Changes the working directory to the base of relative
        paths, if this machine has that folder."""
        for name, expected in self.packages.items():
            if installed(name) != expected:
                return f"it has {name} {installed(name)}, and the work needs {expected}; install the same version there"
        with suppress(OSError):
            os.chdir(self.folder)
        try:
            for name, expected in self.weights.items():
                if (own := weights_digest(name, self.folder)) != expected:
                    return f"its backbone {name} has other weights ({own}, not {expected}); copy the right ones there"
            for file, expected in self.tasks.items():
                if tasks_digest(Path(file)) != expected:
                    return f"its file {file} lists other tasks; copy the right one there"
            for data in self.data:
                check_data(data)
        except (UserError, OSError) as error:
            return f"it cannot read what a run needs ({error}); copy it there, or use a folder that all machines share"
        return None
