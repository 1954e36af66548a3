"""Shares a model on the Hugging Face hub: `save_pretrained`, `from_pretrained`, `push_to_hub`, and a card.

A repository holds the model's file (model.vqp), config.json with what a reader wants to know before downloading it, and
README.md, the card. The file is the model as it is now, without the older versions that `undo` could bring back. It
does not contain the backbone's weights; the card names them. No downloaded code is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.model.model import Model

FILE, CONFIG, CARD = "model.vqp", "config.json", "README.md"
LISTED = 200  # classes in the card's table
ESCAPED = str.maketrans({**{sign: f"\\{sign}" for sign in "\\|`*_[]#"}, "<": "&lt;", ">": "&gt;"})  # for Markdown


def save_pretrained(
    model: Model,
    folder: str | Path,
    *,
    repo_id: str | None = None,
    licence: str = "other",
    push_to_hub: bool = False,
    **push_settings: Any,
) -> Path:
    """Write model, config and card into a folder, as on the hub. repo_id: the model's name there, for the card."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if not model.classes:
        raise UserError("the model has learned nothing yet; teach it with learn")
    if repo_id is not None:
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise UserError(f"{repo_id!r} cannot be the name of a repository: {error}") from None
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"{folder}: this is a file; give a folder")
    model.shareable().save(folder / FILE)
    write_atomically(folder / CONFIG, json.dumps(_config(model), ensure_ascii=False, indent=2) + "\n")
    write_atomically(folder / CARD, model_card(model, repo_id=repo_id, licence=licence))
    if push_to_hub:
        _upload(folder, repo_id or folder.name, **push_settings)
    return folder


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    device: str = "auto",
    backbone: str | Path | None = None,
) -> Model:
    """A model from a folder that `save_pretrained` wrote, or from the hub ("somebody/garden")."""
    from vqprompt.product.model.model import Model

    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / FILE).is_file():
            raise UserError(f"{folder}: no {FILE} in this folder; give one that save_pretrained wrote")
        return Model.load(folder / FILE, device=device, backbone=backbone)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(str(name))
    except HFValidationError:
        raise UserError(f"{name}: neither a folder nor the name of a repository, such as somebody/garden") from None
    try:
        path = hf_hub_download(
            str(name), FILE, revision=revision, cache_dir=cache_dir, token=token, local_files_only=local_files_only
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name}: not a folder here, and it cannot be downloaded from the hub ({reason})") from None
    model = Model.load(path, device=device, backbone=backbone)
    model.path = None  # so that save() does not write into the hub's cache
    return model


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    licence: str = "other",
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "A model taught with vqprompt",
) -> str:
    """Upload model, config and card. A repository that does not exist yet is created. Returns its address."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, repo_id=repo_id, licence=licence)
        return _upload(Path(folder), repo_id, private=private, token=token, commit_message=commit_message)


def _upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "A model taught with vqprompt",
) -> str:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repository = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=str(folder),
        commit_message=commit_message,
        allow_patterns=[FILE, CONFIG, CARD],
    )
    return str(repository)


def _config(model: Model) -> dict[str, Any]:
    from vqprompt._version import __version__

    shown = model.show()
    return {
        "library_name": "vqprompt",
        "version": __version__,
        "file": FILE,
        "backbone": {**shown["backbone"], "name": Path(shown["backbone"]["name"]).name},
        "classes": {c["name"]: c["images"] for c in shown["classes"]},
        "accuracy": shown["accuracy"],
        "calibration_error": shown["calibration_error"],
    }


def model_card(model: Model, *, repo_id: str | None = None, licence: str = "other") -> str:
    """The model card: classes, counts, accuracy, backbone and licence, how to use it, limits."""
    from huggingface_hub import EvalResult, ModelCardData

    from vqprompt.core.backbones.registry import BACKBONES

    shown = model.show()
    name, b = repo_id or "your-name/your-model", shown["backbone"]
    title = name.split("/")[-1]
    known = BACKBONES.get(b["name"])
    results = None
    if shown["accuracy"] is not None:
        results = [
            EvalResult(
                task_type="image-classification", dataset_type="private", metric_type="accuracy",
                dataset_name="the images it was taught, left out one at a time",
                metric_value=round(shown["accuracy"], 4),
                metric_name="accuracy, every class weighted equally",
            )
        ]  # fmt: skip
    data = ModelCardData(
        library_name="vqprompt", pipeline_tag="image-classification", license=licence, model_name=title,
        tags=["continual-learning", "image-classification", "vit"], eval_results=results,
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n\n{_text(shown, title, name, b, known)}"


def _text(shown: dict[str, Any], title: str, name: str, b: dict[str, Any], known: Any) -> str:
    classes: Sequence[dict[str, Any]] = shown["classes"]
    few = [c["name"] for c in classes if c["images"] < 5]
    accuracy = (
        "Accuracy was not measured when it was taught."
        if shown["accuracy"] is None
        else f"Accuracy: **{shown['accuracy']:.1%}** of the images it was taught, each left out of the teaching once, "
        "every class weighted equally."
    )
    error = shown["calibration_error"]
    calibration = f" Its percentages are off by {error[-1]:.1%} on average." if error else ""
    rows = "\n".join(
        f"| {_cell(c['name'])} | {c['images']} | {'–' if c['accuracy'] is None else format(c['accuracy'], '.0%')} |"
        for c in classes[:LISTED]
    )
    more = f"\n\n… and {len(classes) - LISTED} more, all in config.json." if len(classes) > LISTED else ""
    weights = Path(b["name"]).name
    licence = f"its weights are under {known.licence}" if known else "check the licence of its weights"
    licence += f": {known.origin}" if known and known.origin else ""
    needed = "" if known else f" You need the weights file `{_cell(weights)}`, and give it with `backbone=`."
    few_classes = f"{counted(len(few), 'class')} {'has' if len(few) == 1 else 'have'}"
    weak = f"\n- {few_classes} fewer than 5 images: {_cell(', '.join(few[:10]))}." if few else ""
    return f"""# {_cell(title)}

Recognizes {counted(len(classes), "class")} in images, and says *unknown* for what is like none of them. Taught with
[vqprompt](https://pypi.org/project/vqprompt/) from {counted(shown["images"], "image")}, none of which is in the file.
More classes can be taught at any time.

{accuracy}{calibration}

## How to use it

```python
import vqprompt

model = vqprompt.Model.from_pretrained("{name}")
model.predict("photo.jpg")              # a class, or "unknown"
model.learn("more-photos/")             # one folder per class: new classes join, known ones get better
model.save("mine.vqp")
```

## Backbone

`{_cell(weights)}` at {b["size"]} px, frozen (fingerprint `{b["fingerprint"]}`); {licence}.{needed}

## Classes

| class | images | recognized |
|---|---:|---:|
{rows}{more}

## Limits

- It knows only these classes. Pictures of another kind (drawings instead of photographs, another camera, night instead
  of day) are recognized less often than the figures above say; test it with your own: `vqprompt test`.
- About 1 in 20 images of known classes is called unknown, and some unknown things are taken for a class.{weak}
- The file holds features of some of the images it was taught, and a fingerprint of each. They do not show the images,
  but they reveal whether a given image was among them.
"""


def _cell(text: str) -> str:
    """A name that Markdown shows as it is."""
    return text.translate(ESCAPED)


class OnTheHub:
    """The three methods that models have on the Hugging Face hub."""

    @classmethod
    def from_pretrained(cls, name: str | Path, **settings: Any) -> Model:
        """A model from the Hugging Face hub ("somebody/garden"), or from a folder that `save_pretrained` wrote."""
        return from_pretrained(name, **settings)

    def save_pretrained(self: Any, folder: str | Path, **settings: Any) -> Path:
        """Write the model with a card into a folder, as on the hub."""
        return save_pretrained(self, folder, **settings)

    def push_to_hub(self: Any, repo_id: str, **settings: Any) -> str:
        """Upload the model with a card. Returns its address."""
        return push_to_hub(self, repo_id, **settings)
