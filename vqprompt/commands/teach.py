"""The commands for a model of your own: learn, show, relabel, unlearn, merge, rename, forget, undo; and example, cache.

A model is one file. Every command reads it, changes it under a lock, and replaces it in one step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vqprompt.commands.console import console, print_json, print_plain, text_table
from vqprompt.commands.options import (
    ClassFolders,
    Device,
    Json,
    ModelPath,
    NewBackbone,
    NewSize,
    Preview,
    argument,
    flag,
    option,
)
from vqprompt.commands.progress_bar import progress_bar
from vqprompt.commands.teaching_words import announce, percent, tell, tell_correction
from vqprompt.core.errors import UserError
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.model.model import Model

TaughtImages = Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Files or folders, as they were taught.")]
NewClass = Annotated[str, typer.Option("--as", metavar="CLASS", help="The class that they become.")]


def learn(
    model: ModelPath,
    images: list[Path] = argument(
        "Folders (or zips) with one folder per class, or CSV/JSONL tables of path and label; with --as, image files or "
        "folders of one class."
    ),
    label: str | None = option("All these images are of this class.", None, "--as", metavar="CLASS"),
    as_unknown: bool = flag(
        "--as-unknown",
        "These images look similar, but are none of the classes. They are never an answer; what is nearer to them than "
        "to any class is unknown.",
    ),
    classes: ClassFolders = None,
    effort: str = option(
        "instant: seconds, and exact. good: also trains prompts, minutes to hours on a CPU. best: tunes the network "
        "instead. auto: measures first, and trains if it is expected to be worth its time. The expected time is "
        "printed first. Later teachings can use this effort, auto or instant.",
        "instant",
    ),
    hold_out: float = option(
        "0 does not measure accuracy. At good and best, this share of the images (for 0, a fifth) is not trained on, "
        "to measure with; and at least ten images of a class, or half of them.",
        0.2,
        min=0,
        max=0.9,
    ),
    skip_broken: bool = flag("--skip-broken", "Leave out images that cannot be read."),
    exclude: Path | None = option("A list of images not to learn, one path per line.", metavar="FILE"),
    size: NewSize = None,
    backbone: NewBackbone = None,
    device: Device = "auto",
    seed: int = option("Of the training at good and best; the same seed gives the same bits.", 0),
    no_cache: bool = flag(
        "--no-cache",
        "Write no decoded images to disk. Without this option, more than 128 MB of them are put into a temporary file "
        "in the cache folder while learning. (A compressed tar is always unpacked into one.) Either way nothing of it "
        "is kept, not even a name.",
    ),
    preview: Preview = False,
    as_json: Json = False,
) -> None:
    """Teach a model: make it, or add to it. New classes are added, known ones get better; no image is kept.

    [bold]vqprompt learn garden.vqp birds/[/bold], [bold]vqprompt learn garden.vqp a.jpg b.jpg --as heron[/bold],
    [bold]vqprompt learn garden.vqp drones/ --as-unknown[/bold]. To correct it later: relabel, unlearn, merge, undo.
    """
    from vqprompt.product.check.doubts import noticed
    from vqprompt.product.model.efforts import check_effort
    from vqprompt.product.model.opening import ModelDefaults, changing

    check_effort(effort)
    source = images if len(images) > 1 else images[0]
    defaults = ModelDefaults.of(backbone, size, device)
    with changing(model, defaults.open) as changed, progress_bar() as progress:
        if model.exists() and defaults.size not in (None, changed.backbone.size):
            raise UserError(
                f"{model}: this model looks at images of {changed.backbone.size} px, and --size {defaults.size} is for "
                "new models; leave it out, or make another model"
            )
        taught = changed.learn(
            source, label, effort=effort, hold_out=hold_out, skip_broken=skip_broken, exclude=_listed(exclude),
            seed=seed, on_disk=not no_cache, classes=classes or "", as_unknown=as_unknown, preview=preview,
            announce=announce, progress=progress,
        )  # fmt: skip
    line = None if preview else noticed(changed.knowledge.classes, {*taught.new_classes, *taught.grown_classes})
    if as_json:
        print_json({**taught.to_json(), "noticed": line})
    else:
        tell(taught, changed, model, line)


def show(model: ModelPath, as_json: Json = False) -> None:
    """Show what a model knows: classes, images, accuracy, history, size.

    [bold]vqprompt show garden.vqp[/bold]
    """
    from vqprompt.product.model.model import Model

    loaded = Model.load(model)
    facts = loaded.show()
    if as_json:
        print_json(facts, indent=2)
        return
    rows = [
        (c["name"], str(c["images"]), percent(c["accuracy"]), "".join(c["taught"][-1:])[:10]) for c in facts["classes"]
    ]
    if rows:
        console.print(text_table(("class", "images", "recognized", "last taught"), rows, ("images", "recognized")))
    b = facts["backbone"]
    trained = {"instant": "nothing is trained", "good": "prompts are trained", "best": "the network is tuned"}
    moved = f" (an estimate for {counted(len(facts['moved']), 'class')}, whose memory moved)" if facts["moved"] else ""
    against = f", {counted(facts['counterexamples'], 'counterexample')}" if facts["counterexamples"] else ""
    accuracy, errors = percent(facts["accuracy"], facts["accuracy_interval"]), facts["calibration_error"]
    lines = [
        "",
        f"{counted(len(facts['classes']), 'class')}, {counted(facts['images'], 'image')}{against}; "
        f"effort {facts['effort']} ({trained[facts['effort']]})",
        f"accuracy {accuracy} on images it had not learned{moved}" if errors else "accuracy is not measured",
        *([f"percentages are off by {percent(errors[-1])} on average"] if errors else []),
        f"backbone {b['name']}, {b['size']} px; file {facts['bytes'] / 1e6:.1f} MB; "
        f"{counted(facts['can_undo'], 'step')} to undo",
        "",
    ]
    for event in loaded.history:
        effort = "" if event.effort == "instant" else f" at effort {event.effort}"
        lines.append(f"{event.date.replace('T', ' ')[:16]}  {event.what} {event.detail}{effort}")
    print_plain("\n".join(lines))


def relabel(
    model: ModelPath, images: TaughtImages, label: NewClass, preview: Preview = False, as_json: Json = False
) -> None:
    """Move images that were taught as the wrong class to the right one. They are found by their content.

    [bold]vqprompt relabel garden.vqp kestrel/17.jpg --as falcon[/bold]; [bold]--as unknown[/bold]: none of the classes
    """
    with _changing(model) as changed:
        done = changed.relabel(images, label, preview=preview)
    tell_correction(f"{counted(done.images, 'image')} moved to {label}", done, model, preview, as_json)


def unlearn(
    model: ModelPath,
    images: TaughtImages,
    for_good: bool = flag("--for-good", "Also delete every older version that knows one of them."),
    preview: Preview = False,
    as_json: Json = False,
) -> None:
    """Take images away that were taught, as if they had never been. They are found by their content.

    [bold]vqprompt unlearn garden.vqp kestrel/17.jpg[/bold]
    """
    with _changing(model) as changed:
        done = changed.unlearn(images, for_good=for_good, preview=preview)
    tell_correction(f"{counted(done.images, 'image')} taken away", done, model, preview, as_json)


def merge(
    model: ModelPath,
    names: Annotated[list[str], typer.Argument(metavar="CLASS", help="Two classes or more.")],
    new: NewClass,
    preview: Preview = False,
    as_json: Json = False,
) -> None:
    """Make one class of several.

    [bold]vqprompt merge garden.vqp kestrel falcon --as falcon[/bold]
    """
    with _changing(model) as changed:
        done = changed.merge(names, new, preview=preview)
    what = f"{', '.join(names)} merged: {new} has {counted(done.images, 'image')}"
    tell_correction(what, done, model, preview, as_json)


def rename(
    model: ModelPath,
    old: str = argument("A class of the model.", metavar="OLD"),
    new: str = argument("Its new name.", metavar="NEW"),
) -> None:
    """Give a class another name.

    [bold]vqprompt rename garden.vqp kestrel falcon[/bold]
    """
    with _changing(model) as changed:
        changed.rename(old, new)
    print_plain(f"{old} has this name already" if new.strip() == old else f"{old} is now called {new}")


def forget(
    model: ModelPath,
    name: str = argument('A class of the model; "unknown": all that was taught as such.', metavar="CLASS"),
    for_good: bool = flag("--for-good", "Also delete all that is kept of it: older versions, its name, file names."),
) -> None:
    """Remove a class, as if it had never been learned.

    [bold]vqprompt forget garden.vqp heron[/bold]
    """
    with _changing(model) as changed:
        changed.forget(name, for_good=for_good)
    left = counted(len(changed.classes), "class")
    sure = percent(changed.accuracy, changed.knowledge.accuracy_interval)
    print_plain(f"{name} is forgotten; {left} left" + ("" if changed.accuracy is None else f", accuracy {sure}"))
    if changed.effort != "instant":
        print_plain("note: the network that was trained with it stays. To leave no trace, make a new model without it")


def undo(
    model: ModelPath,
    steps: int = option("How many changes to undo; `show` lists them.", 1, min=1),
    to: int | None = option("Return to this version instead; see show --json.", metavar="VERSION"),
) -> None:
    """Go back to the model before the last change.

    [bold]vqprompt undo garden.vqp[/bold]
    """
    with _changing(model) as changed:
        if to is None:
            done = f"undone: {changed.undo(steps)}"
        else:
            changed.return_to(to)
            done = f"returned to version {to}"
    print_plain(f"{done}; the model has {counted(len(changed.classes), 'class')} now")


def example(folder: Path = argument("A new folder, such as drawings.")) -> None:
    """Write real drawings into a folder, to try everything without images of your own.

    [bold]vqprompt example drawings[/bold]
    """
    from vqprompt.product.example import write_example

    write_example(folder)
    print_plain(f"wrote {folder}/first (five classes), {folder}/later (one more) and {folder}/ask. Now try:\n")
    for command in (
        f"learn my.vqp {folder}/first --size 112   # teach five classes; 112 px are enough for drawings",
        f"learn my.vqp {folder}/later              # next month: one more",
        f"predict my.vqp {folder}/ask              # a house, an umbrella, and something it was never taught",
    ):
        print_plain(f"  vqprompt {command}")


def cache(clear: bool = flag("--clear", "Delete it.")) -> None:
    """Show what the research commands keep of images on disk, or delete it. No names of files or classes are kept.

    Teaching a model keeps nothing here.

    [bold]vqprompt cache --clear[/bold]
    """
    from vqprompt.core.cache import clear_cache, list_cache

    parts = list_cache()
    for part in parts:
        print_plain(f"{part.what:18} {part.files:6} files {part.size / 1e6:10.1f} MB  {part.folder}")
    if clear:
        clear_cache()
        print_plain(f"deleted {sum(part.size for part in parts) / 1e6:.1f} MB")
    elif any(part.files for part in parts):
        print_plain("vqprompt cache --clear deletes it; it is made again when needed")


# ---------------------------------------------------------------------------------------------- helpers


def _changing(path: Path) -> AbstractContextManager[Model]:
    from vqprompt.product.model.opening import changing  # slow to import

    return changing(path)


def _listed(path: Path | None) -> list[str]:
    from vqprompt.core.files import read_text

    if path is None:
        return []
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--exclude {path}: cannot be read ({error})") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
