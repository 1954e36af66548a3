"""A model as a static page that answers in any browser: from disk or from any web server, without Python.

Browsers read no other files for a page opened from disk, except scripts. So the model and ONNX Runtime Web travel
inside scripts, compressed.
"""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically

RUNTIME = {"script": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}
PAGE = ("index.html", "predict.js", "page.js", "offline.js")


def write_page(folder: Path, graph: bytes, described: dict[str, Any], runtime: Path) -> None:
    """described: classes and side, at least. runtime: the npm package onnxruntime-web, as `npm pack` gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        with (
            (files("vqprompt.product.export") / "web" / name).open("rb") as source,
            (folder / name).open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    model = {**described, "graph": _packed(graph)}
    write_atomically(folder / "model.js", f"const vqpromptModel = {json.dumps(model)};\n")
    parts = {kind: _packed(content) for kind, content in read_runtime(runtime).items()}
    write_atomically(folder / "runtime.js", f"const vqpromptRuntime = {json.dumps(parts)};\n")


def read_runtime(package: Path) -> dict[str, bytes]:
    try:
        with tarfile.open(package) as archive:
            found = {kind: archive.extractfile(f"package/dist/{name}") for kind, name in RUNTIME.items()}
            return {kind: file.read() for kind, file in found.items() if file is not None}
    except (OSError, KeyError, tarfile.TarError) as error:
        raise UserError(f"{package}: not the npm package onnxruntime-web ({error}); fetch it with npm pack") from None


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
