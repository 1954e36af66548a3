"""A watched folder: what arrives is answered, what a person sorts is taught, and nothing is ever lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command_environment
from drawings import write_drawings

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model.file import locked
from vqprompt.product.model.opening import ModelDefaults
from vqprompt.product.watch import Watch


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    return write_drawings(tmp_path_factory.mktemp("drawn"), ["apple", "bicycle", "car"], range(12))


@pytest.fixture(scope="module")
def taught_file(drawn, tmp_path_factory) -> Path:
    model = Model(size=28, device="cpu")
    for name in ("apple", "bicycle"):
        model.learn([drawn / name / f"{n}.png" for n in range(8)], name, hold_out=0)
    return model.save(tmp_path_factory.mktemp("model") / "m.vqp")


class Inbox:
    """A folder with its watch, and what the watch said."""

    def __init__(self, home: Path, model: Path | None = None, sort: bool = False) -> None:
        self.folder, self.model = home / "inbox", home / "m.vqp"
        self.folder.mkdir(exist_ok=True)
        if model is not None:
            shutil.copy(model, self.model)
        self.answers: dict[str, str] = {}
        self.lessons: list[dict[str, int]] = []
        self.warnings: list[str] = []
        self.sort = sort
        self.restart()

    def restart(self) -> None:
        self.watch = Watch(
            self.folder, self.model,
            lambda image, answer: self.answers.update({image.relative_to(self.folder).as_posix(): answer.name}),
            lambda taught: self.lessons.append({c.name: c.images for c in taught.classes}),
            self.warnings.append, self.sort, ModelDefaults(size=28, device="cpu"),
        )  # fmt: skip

    def put(self, image: Path, place: str) -> Path:
        target = self.folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)
        return target

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.watch.look()

    def files(self) -> set[str]:
        return {p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file()}


def test_images_that_arrive_are_answered_once_and_sub_folders_are_taught(drawn, tmp_path):
    inbox = Inbox(tmp_path)
    inbox.put(drawn / "apple" / "9.png", "photo.png")
    inbox.look()
    assert not inbox.answers and "knows nothing yet, so 1 image must wait" in inbox.warnings[0]
    for name in ("apple", "bicycle"):
        for n in range(6):
            inbox.put(drawn / name / f"{n}.png", f"{name}/{n}.png")
    inbox.look()
    assert inbox.lessons == [{"apple": 6, "bicycle": 6}], "both in one step"
    assert inbox.answers.keys() == {"photo.png"}, "what waited is answered as soon as the model knows something"
    inbox.answers.clear()
    inbox.look(3)
    assert not inbox.answers and len(inbox.lessons) == 1 and inbox.model.is_file()

    inbox.folder.joinpath("photo.png").rename(inbox.folder / "apple" / "photo.png")  # a person says what it is
    inbox.look()
    assert inbox.lessons[1:] == [{"apple": 1}] and Model.load(inbox.model).counts == {"apple": 7, "bicycle": 6}
    inbox.folder.joinpath("apple", "3.png").rename(inbox.folder / "bicycle" / "three.png")  # and corrects it
    inbox.look()
    assert Model.load(inbox.model).counts == {"apple": 6, "bicycle": 7} and "it is bicycle now" in inbox.warnings[-1]
    inbox.restart()
    inbox.look()
    assert len(inbox.lessons) == 2, "the model itself knows what it was taught"


def test_a_file_is_read_when_it_has_arrived(drawn, taught_file, tmp_path):
    inbox = Inbox(tmp_path, taught_file)
    content = (drawn / "car" / "1.png").read_bytes()
    photo = inbox.folder / "photo.png"
    for part in range(1, 5):  # it grows from look to look
        photo.write_bytes(content[: len(content) * part // 5])
        inbox.look(1)
    assert not inbox.answers and not inbox.warnings
    inbox.look(2)  # the copy has stopped halfway
    assert not inbox.answers and len(inbox.warnings) == 1 and "photo.png" in inbox.warnings[0]
    photo.write_bytes(content)
    inbox.look()
    assert inbox.answers.keys() == {"photo.png"} and len(inbox.warnings) == 1

    growing = inbox.put(drawn / "car" / "2.png", "car/2.png")
    inbox.put(drawn / "car" / "3.png", "car/3.png")
    inbox.look(1)
    os.utime(growing, ns=(1, 1))
    inbox.look(1)
    assert not inbox.lessons, "a class waits for its last file"
    inbox.look(1)
    assert inbox.lessons == [{"car": 2}]


def test_sorting_replaces_nothing_and_what_was_sorted_is_not_taught(drawn, taught_file, tmp_path):
    inbox = Inbox(tmp_path, taught_file, sort=True)
    inbox.put(drawn / "apple" / "9.png", "photo.png")
    inbox.look()
    (first,) = inbox.answers
    assert first == f"sorted/{inbox.answers[first]}/photo.png" and inbox.files() == {first}
    inbox.put(drawn / "apple" / "9.png", "photo.png")
    inbox.look(4)
    assert inbox.files() == {first, first.replace("photo", "photo-2")} == inbox.answers.keys()
    assert not inbox.lessons and not inbox.warnings


def test_one_bad_image_or_class_does_not_stop_the_others(drawn, taught_file, tmp_path):
    inbox = Inbox(tmp_path, taught_file)
    for n in range(4):
        inbox.put(drawn / "car" / f"{n}.png", f"car/{n}.png")
    inbox.put(drawn / "apple" / "0.png", "car/apple.png")  # the model has learned it as an apple
    inbox.put(drawn / "car" / "7.png", "unknown/7.png")
    inbox.put(drawn / "car" / "8.png", "Apple/8.png")
    (inbox.folder / "car" / "broken.png").write_bytes(b"not an image")
    inbox.look(3)
    assert sum(lesson["car"] for lesson in inbox.lessons) == 4
    assert Model.load(inbox.model).counts == {"apple": 8, "bicycle": 8, "car": 4}
    for wanted in ("as 'apple', not 'car'", "'unknown' cannot be", "spelled differently from 'apple'", "broken.png"):
        assert sum(wanted in warning for warning in inbox.warnings) == 1, inbox.warnings


def test_what_cannot_be_read_is_named_once_also_for_a_new_model(tmp_path):
    inbox = Inbox(tmp_path)
    (inbox.folder / "car").mkdir()
    (inbox.folder / "car" / "broken.png").write_bytes(b"not an image")
    inbox.watch.run(0, looks=4)
    assert len(inbox.warnings) == 1 and "broken.png" in inbox.warnings[0] and not inbox.model.exists()


def test_a_model_that_others_use_is_waited_for_and_their_changes_are_seen(drawn, taught_file, tmp_path):
    inbox = Inbox(tmp_path, taught_file)
    inbox.put(drawn / "car" / "1.png", "car/1.png")
    with locked(inbox.model):
        inbox.watch.run(0, looks=3)
    assert not inbox.lessons and len(inbox.warnings) == 1 and "another process is teaching" in inbox.warnings[0]
    other = Model.load(inbox.model, device="cpu")
    other.learn([drawn / "car" / "5.png"], "car")
    other.save()
    inbox.look()
    assert Model.load(inbox.model).counts["car"] == 2
    inbox.folder.rename(tmp_path / "away")  # a network drive
    inbox.watch.run(0, looks=2)
    assert "is not there now" in inbox.warnings[-1]


def test_the_command_can_be_killed_and_goes_on(command, drawn, taught_file, tmp_path):
    inbox = Inbox(tmp_path, taught_file)
    inbox.put(drawn / "apple" / "9.png", "photo.png")
    arguments = [sys.executable, "-m", "vqprompt", "watch", inbox.folder, inbox.model, "--sort", "--json"]
    environment = command_environment(tmp_path)
    with subprocess.Popen(
        [*arguments, "--every", "0.1"], stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        image = json.loads(running.stdout.readline())["image"]
        running.send_signal(signal.SIGKILL)
    inbox.put(drawn / "car" / "1.png", "car/1.png")
    status, out, err = command("watch", inbox.folder, inbox.model, "--sort", "--once", "--every", "0.1")
    assert status == 0 and "learned 1 image of car" in out, err
    assert [p for p in inbox.folder.rglob("photo*")] == [Path(image)], "sorted before the kill, or after it"
    with pytest.raises(UserError, match="no such folder"):
        Watch(tmp_path / "nowhere", inbox.model, print, print, print)
