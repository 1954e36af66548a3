"""A model as a static page that answers in any browser: from disk or from any web server, without Python.

Browsers read no other files for a page opened from disk, except scripts. So the model and ONNX Runtime Web travel
inside scripts, compressed.
"""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path

from vqprompt.core.cache import cache_folder
from vqprompt.core.downloads import download
from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.progress import Report, ignore
from vqprompt.product.export.onnx import onnx_file
from vqprompt.product.model.model import Model

PACKAGE = "onnxruntime-web-1.30.0.tgz"
URL = f"https://registry.npmjs.org/onnxruntime-web/-/{PACKAGE}"
CHECKSUM = "sha256:d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
RUNTIME = {"script": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}
PAGE = ("index.html", "predict.js", "page.js", "offline.js")
MADE = "model.js"  # in every folder that was written before


def export_page(model: Model, folder: str | Path, runtime: str | Path | None = None) -> Path:
    """runtime: the npm package onnxruntime-web, as `npm pack` gives it or unpacked; None: it is downloaded once."""
    folder = Path(folder)
    check_folder(folder)
    parts = {kind: _packed(content) for kind, content in read_runtime(runtime or fetch_runtime()).items()}
    graph, about = onnx_file(model)
    described = {**{key: about[key] for key in ("classes", "notes", "side")}, "graph": _packed(graph)}
    write_atomically(folder / "runtime.js", f"const vqpromptRuntime = {json.dumps(parts)};\n")
    for name in PAGE:
        write_atomically(folder / name, (files("vqprompt.product.export") / "web" / name).read_bytes())
    write_atomically(folder / MADE, f"const vqpromptModel = {json.dumps(described)};\n")
    return folder


def fetch_runtime(progress: Report = ignore) -> Path:
    """The npm package in the cache; downloaded if it is not there."""
    target = cache_folder() / "runtime" / PACKAGE
    if target.is_file():
        return target
    try:
        return download(URL, target, CHECKSUM, progress)
    except (OSError, HTTPException) as error:
        raise UserError(
            f"{URL} could not be downloaded ({error}); fetch it where there is a network, or with `npm pack "
            "onnxruntime-web`, and give the file with --ort"
        ) from None


def check_folder(folder: Path) -> None:
    """Refuse to write over anything but a page that was written before."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the name of a folder for the page")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MADE).is_file():
        raise UserError(f"{folder} has other files in it; give an empty folder or a new one for the page")


def read_runtime(package: str | Path) -> dict[str, bytes]:
    package = Path(package)
    try:
        if package.is_dir():
            return {kind: (package / "dist" / name).read_bytes() for kind, name in RUNTIME.items()}
        with tarfile.open(package) as archive:
            members = {kind: archive.extractfile(f"package/dist/{name}") for kind, name in RUNTIME.items()}
            return {kind: member.read() for kind, member in members.items() if member is not None}
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise UserError(
            f"{package}: not the npm package onnxruntime-web ({error}); leave out --ort to have it downloaded, or "
            "fetch it with `npm pack onnxruntime-web`"
        ) from None


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
