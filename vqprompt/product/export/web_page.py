"""A model as a static page that answers in any browser: from disk or from any web server, without Python.

Browsers read no other files for a page opened from disk, except scripts. So the model and ONNX Runtime Web travel
inside scripts, compressed.
"""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from importlib.resources import files
from pathlib import Path

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.product.export.onnx import onnx_file
from vqprompt.product.model.model import Model

RUNTIME = {"script": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}
PAGE = ("index.html", "predict.js", "page.js", "offline.js")
MADE = "model.js"  # in every folder that was written before


def export_page(model: Model, folder: str | Path, runtime: str | Path) -> Path:
    """runtime: the npm package onnxruntime-web, as `npm pack` gives it or unpacked."""
    folder = Path(folder)
    check_folder(folder)
    parts = {kind: _packed(content) for kind, content in read_runtime(Path(runtime)).items()}
    graph, metadata = onnx_file(model)
    described = {"classes": list(model.classes), "side": int(metadata["side"]), "graph": _packed(graph)}
    write_atomically(folder / "runtime.js", f"const vqpromptRuntime = {json.dumps(parts)};\n")
    for name in PAGE:
        write_atomically(folder / name, (files("vqprompt.product.export") / "web" / name).read_bytes())
    write_atomically(folder / MADE, f"const vqpromptModel = {json.dumps(described)};\n")
    return folder


def check_folder(folder: Path) -> None:
    """Refuse to write over anything but a page that was written before."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the name of a folder for the page")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MADE).is_file():
        raise UserError(f"{folder} has other files in it; give an empty folder or a new one for the page")


def read_runtime(package: Path) -> dict[str, bytes]:
    try:
        if package.is_dir():
            return {kind: (package / "dist" / name).read_bytes() for kind, name in RUNTIME.items()}
        with tarfile.open(package) as archive:
            found = {kind: archive.extractfile(f"package/dist/{name}") for kind, name in RUNTIME.items()}
            return {kind: file.read() for kind, file in found.items() if file is not None}
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise UserError(
            f"{package}: not the npm package onnxruntime-web ({error}); fetch it with `npm pack onnxruntime-web`"
        ) from None


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
