"""`vqprompt export`: a model for other runtimes, or for the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vqprompt.commands.console import print_plain
from vqprompt.commands.options import ModelPath
from vqprompt.core.errors import UserError


def export(
    model: ModelPath,
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as ONNX, for onnxruntime and others.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="ONNX weights in 8 bits: a quarter of the size.")] = False,
    hub_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write model and card as the Hugging Face hub has them.")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="Where the model's weights file is now.")] = None,
) -> None:
    """Write a model for other programs: as ONNX, or as a folder for the Hugging Face hub.

    [bold]vqprompt export garden.vqp --onnx garden.onnx[/bold]
    """
    from vqprompt.product.model.model import Model

    if onnx is None and hub_folder is None:
        raise UserError("what to write? Give --onnx FILE or --hub-folder FOLDER")
    if int8 and onnx is None:
        raise UserError("--int8 is for ONNX; give --onnx FILE as well")
    taken = Model.load(model, device="cpu", backbone=backbone)
    if onnx is not None:
        from vqprompt.product.export.onnx import export_onnx

        print_plain(f"writing {onnx}: the network is traced, which takes some seconds …")
        written = export_onnx(taken, onnx, int8=int8)
        print_plain(f"wrote {written} ({written.stat().st_size / 1e6:.1f} MB)")
    if hub_folder is not None:
        from vqprompt.product.model.hub import save_pretrained

        save_pretrained(taken, hub_folder)
        print_plain(f"wrote {hub_folder}: look at its README.md, the model's card")
