"""Shares a model on the Hugging Face hub: `save_pretrained`, `from_pretrained`, `push_to_hub`, and a card.

A repository holds the model's file (model.vqp), config.json with what a reader wants to know before downloading it, and
README.md, the card. The file is the model as it is now, without the older versions that `undo` could bring back. It
does not contain the backbone's weights; the card names them. No downloaded code is ever run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically
from vqprompt.core.words import counted

if TYPE_CHECKING:
    from vqprompt.product.model.model import Model

FILE, CONFIG, CARD = "model.vqp", "config.json", "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
ESCAPED = str.maketrans({**{sign: f"\\{sign}" for sign in "\\|`*_[]#"}, "<": "&lt;", ">": "&gt;"})  # for Markdown


class OnTheHub:
    """What models can do on the Hugging Face hub."""

    @classmethod
    def from_pretrained(
        cls: Any, name: str | Path, *, device: str = "auto", backbone: str | Path | None = None, **settings: Any
    ) -> Model:
        """A model from a folder that `save_pretrained` wrote, or from the hub ("somebody/garden"). settings: revision,
        cache_dir, token and local_files_only, as the hub's library has them."""
        folder = Path(name).expanduser()
        if folder.is_dir():
            if not (folder / FILE).is_file():
                raise UserError(f"{folder}: no {FILE} in this folder; give one that save_pretrained wrote")
            local: Model = cls.load(folder / FILE, device=device, backbone=backbone)
            return local
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = hf_hub_download(str(name), FILE, **settings)
        except HFValidationError:
            raise UserError(f"{name}: neither a folder nor the name of a repository, such as somebody/garden") from None
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"{name}: not a folder here, and it cannot be downloaded from the hub ({reason})") from None
        model: Model = cls.load(path, device=device, backbone=backbone)
        model.path = None  # so that save() does not write into the hub's cache
        return model

    def save_pretrained(
        self: Any,
        folder: str | Path,
        *,
        repo_id: str | None = None,
        licence: str = "other",
        push_to_hub: bool = False,
        **push_settings: Any,
    ) -> Path:
        """Write model, config and card into a folder, as on the hub. repo_id: the model's name there, for the card.
        push_to_hub: also upload them, with settings as in `push_to_hub`."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        self.check_taught()
        if repo_id is not None:
            try:
                validate_repo_id(repo_id)
            except HFValidationError as error:
                raise UserError(f"{repo_id!r} cannot be the name of a repository: {error}") from None
        folder = Path(folder)
        if folder.is_file():
            raise UserError(f"{folder}: this is a file; give a folder")
        self.shareable().save(folder / FILE)
        write_atomically(folder / CONFIG, json.dumps(_config(self), ensure_ascii=False, indent=2) + "\n")
        write_atomically(folder / CARD, model_card(self, repo_id=repo_id, licence=licence))
        if push_to_hub:
            _upload(folder, repo_id or folder.name, **push_settings)
        return folder

    def push_to_hub(self, repo_id: str, *, licence: str = "other", **settings: Any) -> str:
        """Upload model, config and card. A repository that does not exist yet is created. Returns its address.
        settings: private, token and commit_message, as the hub's library has them."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, repo_id=repo_id, licence=licence)
            return _upload(Path(folder), repo_id, **settings)


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
    repository, files = api.create_repo(repo_id, private=private, exist_ok=True), [FILE, CONFIG, CARD]
    api.upload_folder(
        repo_id=repository.repo_id, folder_path=str(folder), commit_message=commit_message, allow_patterns=files
    )
    return str(repository)


def _config(model: Model) -> dict[str, Any]:
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
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    from vqprompt.core.backbones.registry import BACKBONES

    shown = model.show()
    repo_id = repo_id or "your-name/your-model"
    title = repo_id.split("/")[-1]
    measured = EvalResult(
        task_type="image-classification", dataset_type="private", metric_type="accuracy",
        dataset_name="the images it was taught, left out one at a time",
        metric_value=None if shown["accuracy"] is None else round(shown["accuracy"], 4),
        metric_name="accuracy, every class weighted equally",
    )  # fmt: skip
    data = ModelCardData(
        library_name="vqprompt", pipeline_tag="image-classification", license=licence, model_name=title,
        tags=["continual-learning", "image-classification", "vit"],
        eval_results=None if shown["accuracy"] is None else [measured],
    )  # fmt: skip
    card = ModelCard.from_template(
        data, template_str=TEMPLATE.read_text(encoding="utf-8"), **shown, repo_id=repo_id, title=title,
        weights=Path(shown["backbone"]["name"]).name, registered=BACKBONES.get(shown["backbone"]["name"]),
        few=[c["name"] for c in shown["classes"] if c["images"] < 5], counted=counted,
        cell=lambda text: text.translate(ESCAPED),  # a name that Markdown shows as it is
        percent=lambda share, digits: f"{share:.{digits}%}",
    )  # fmt: skip
    return f"{card}\n"
