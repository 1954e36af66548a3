"""`vqprompt watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vqprompt.commands.console import console, print_plain, print_warning
from vqprompt.commands.options import Device, Json, ModelPath, NewBackbone, NewSize, flag, option
from vqprompt.commands.predict import print_answer
from vqprompt.commands.teaching_words import print_warnings
from vqprompt.core.words import counted


def watch(
    folder: Annotated[Path, typer.Argument(help="Where images arrive. Its sub-folders are classes.")],
    model: ModelPath,
    sort: bool = flag("--sort", "Move images that were answered to FOLDER/sorted/CLASS."),
    every: float = option("How often to look.", 2.0, min=0.1, metavar="SECONDS"),
    once: bool = flag("--once", "Look twice, to leave out what is still being written, and end."),
    size: NewSize = None,
    backbone: NewBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Watch a folder: say what is in images that arrive, and teach the sub-folders that you make.

    [bold]vqprompt watch inbox/ garden.vqp --sort[/bold]; move an image to inbox/kestrel/ to teach it
    """
    from vqprompt.product.model.opening import ModelDefaults
    from vqprompt.product.model.predicting import Answer
    from vqprompt.product.model.teaching import Taught
    from vqprompt.product.watch import Watch

    def answered(image: Path, answer: Answer) -> None:
        print_answer(image, answer, as_json)
        console.file.flush()  # another program may be reading

    def taught(lesson: Taught) -> None:
        if not as_json:
            names = ", ".join(c.name for c in lesson.classes)
            print_plain(f"learned {counted(lesson.images, 'image')} of {names}")
            print_warnings(lesson.warnings, model)

    defaults = ModelDefaults.of(backbone, size, device)
    Watch(folder, model, answered, taught, print_warning, sort, defaults).run(every, looks=2 if once else None)
