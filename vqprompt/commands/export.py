"""`vqprompt export`: a model for other runtimes, for browsers, or for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from vqprompt.commands.console import print_plain
from vqprompt.commands.options import ModelPath, option
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.core.errors import UserError


def export(
    model: ModelPath,
    onnx: Path | None = option("Write it as ONNX, with FILE.json that says how to use it.", metavar="FILE"),
    web: Path | None = option("Write a page that predicts in any browser.", metavar="FOLDER"),
    ort: Path | None = option("For --web: the npm package onnxruntime-web; downloaded by default.", metavar="PATH"),
    hub_folder: Path | None = option("Write model and card as the Hugging Face hub has them.", metavar="FOLDER"),
    backbone: str | None = option("Where the model's weights file is now."),
) -> None:
    """Write a model for other programs: as ONNX, as a web page, or as a folder for the Hugging Face hub.

    [bold]vqprompt export garden.vqp --onnx garden.onnx[/bold]
    """
    if onnx is None and web is None and hub_folder is None:
        raise UserError("what to write? Give --onnx FILE, --web FOLDER or --hub-folder FOLDER")
    if web is None and ort is not None:
        raise UserError("--ort belongs to --web FOLDER; give both, or leave it out")
    from vqprompt.product.export.onnx import check_target, export_onnx
    from vqprompt.product.export.web_page import check_folder, export_page, fetch_runtime, read_runtime
    from vqprompt.product.model.model import Model

    if onnx is not None:
        check_target(onnx)
    if web is not None:
        check_folder(web)
        with progress_bar() as progress:
            ort = ort or fetch_runtime(progress)
        read_runtime(ort)
    taken = Model.load(model, device="cpu", backbone=backbone)
    if onnx is not None:
        print_plain(f"wrote {export_onnx(taken, onnx)} ({onnx.stat().st_size / 1e6:.1f} MB), and {onnx}.json about it")
    if web is not None:
        export_page(taken, web, ort)
        size = sum(file.stat().st_size for file in web.iterdir())
        print_plain(f"wrote {web} ({size / 1e6:.1f} MB): open its index.html, or put it on any web server")
    if hub_folder is not None:
        taken.save_pretrained(hub_folder)
        print_plain(f"wrote {hub_folder}: look at its README.md, the model's card")
