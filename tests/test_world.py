"""The world that taught classes are compared with, and what a lesson says about the answers that it takes away."""

from __future__ import annotations

import json
import re
from copy import copy
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from drawings import drawings, write_drawings
from PIL import Image
from typer.testing import CliRunner

from vqprompt import Model
from vqprompt.commands.app import app
from vqprompt.core.onnx.graph import Graph, Session
from vqprompt.core.statistics import discriminant
from vqprompt.core.statistics.discriminant import Basis, Groups
from vqprompt.core.statistics.leave_one_out import LeaveOneOut
from vqprompt.core.statistics.world import World, find_world
from vqprompt.product.export.onnx import add_answers, onnx_file
from vqprompt.product.model.calibration import Rivals
from vqprompt.product.model.description import LARGEST
from vqprompt.product.model.file import parse_metadata
from vqprompt.product.model.ingest import learn_world
from vqprompt.product.model.knowledge import Knowledge

SIZE = 112
NAMES = ["cat", "car", "tree", "fish", "flower", "guitar", "star"]
DRAWN = ["airplane", "apple", "banana", "bed", "bicycle", "butterfly", "cactus", "camera"]


def drawn(name: str, places: range) -> list[np.ndarray]:
    sheets, names = drawings()
    return list(sheets[names.index(name)][places.start : places.stop])


def photograph(name: str, place: int, side: int = 96) -> Image.Image:
    """A thing somewhere on a coloured pattern: varied like photographs, and unlike drawings."""
    rng = np.random.default_rng([NAMES.index(name), place])
    v, u = np.mgrid[0:side, 0:side] / side
    waves = np.sin(
        rng.uniform(20, 60) * (np.cos(angle := rng.uniform(0, 3)) * u + np.sin(angle) * v) + rng.uniform(0, 6)
    )
    rough = np.kron(rng.normal(size=(12, 12)), np.ones((side // 12, side // 12)))
    scene = rng.uniform(90, 160) + 50 * (waves + rng.uniform(0, 1) * rough)[..., None] * rng.uniform(0.3, 1, 3)
    width = int(rng.integers(50, 90))
    x, y = rng.integers(0, side - width, 2)
    ink = (
        1 - np.asarray(Image.fromarray(drawn(name, range(place, place + 1))[0]).resize((width, width)))[..., None] / 255
    )
    scene[y : y + width, x : x + width] += ink * (rng.uniform(0, 255, 3) - scene[y : y + width, x : x + width])
    return Image.fromarray(np.clip(scene, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def taught() -> Model:
    """A model of seven kinds of photographs."""
    model = Model(size=SIZE, device="cpu")
    model.learn([photograph(name, n) for name in NAMES for n in range(14)], [name for name in NAMES for _ in range(14)])
    return model


@pytest.fixture(scope="module")
def two_kinds(taught) -> Model:
    """The same model, with eight classes of drawings, of one and of twenty images."""
    model, taken = copy(taught), [(f"drawn {name}", i) for n, name in enumerate(DRAWN) for i in range((1, 20)[n % 2])]
    model.learn([drawn(name[6:], range(i, i + 1))[0] for name, i in taken], [name for name, _ in taken])
    return model


OTHERS = [image for name in drawings()[1] if name != "house" for image in drawn(name, range(90, 91))]


def test_one_drawing_of_a_house_does_not_make_every_drawing_a_cottage(taught):
    model = copy(taught)
    others, houses = model.embed(OTHERS), model.embed(drawn("house", range(60, 76)))
    assert (model.judge(others)[1] < 0).all()
    lesson = model.learn(drawn("house", range(1)), "cottage")
    cottage = model.classes.index("cottage")

    def called_cottage(known: Knowledge, features: np.ndarray) -> float:
        shares, familiarity = known.solution.judge(features)
        return float(((shares.argmax(1) == cottage) & (familiarity >= 0)).mean())

    assert called_cottage(model.knowledge, others) <= 0.15 and lesson.warnings == ()
    assert called_cottage(model.knowledge, houses) >= 0.3
    without = replace(model.knowledge, world=None).solved(model.knowledge)
    assert called_cottage(without, others) >= 0.8  # what the world is good for


def test_an_image_does_not_drop_its_own_rival_when_the_threshold_is_chosen():
    """Otherwise no image of a small class would ever be behind the world, and the threshold would be too strict."""
    rng, y = np.random.default_rng(0), np.repeat([0, 1], 10)
    x = rng.normal(size=(20, 16)) + 6 * np.eye(2, 16)[y]
    x[0] += 8 * np.eye(16)[5]  # an outlier, and one thing of the world looks like it; the other is far away
    groups = Groups.of(x, y, 2)
    left_out = LeaveOneOut(groups, Basis.of(groups), x, y)
    world = World(np.stack([np.rint(8 * x[:1]), np.full((1, 16), -120)], 1).repeat(2, 0), np.full((2, 2), 1 / 8))
    rivals, ahead = Rivals.of(world, left_out, left_out.at(0.5), 0.5, y)
    assert rivals.left.tolist() == [False, True] and ahead[0] < 0 < ahead[1:].min()


def test_where_classes_are_of_two_kinds_drawings_of_few_images_are_not_moved_among_the_photographs(
    two_kinds, monkeypatch
):
    """A class of one image is moved towards the center of all classes, unless they are of two kinds."""
    asked, names = two_kinds.embed([i for name in DRAWN for i in drawn(name, range(60, 80))]), two_kinds.classes
    truth = np.repeat([names.index(f"drawn {name}") for name in DRAWN], 20)
    single = np.repeat([two_kinds.knowledge.classes[f"drawn {name}"].count == 1 for name in DRAWN], 20)

    def recognized() -> np.ndarray:
        solution = two_kinds.knowledge.solved(two_kinds.knowledge).solution
        return solution.judge(asked)[0].argmax(1) == truth

    now = recognized()
    monkeypatch.setattr(discriminant, "STANDS_OUT", np.inf)
    before = recognized()
    assert now[single].mean() > before[single].mean() + 0.1 and now.mean() > before.mean() + 0.05


@pytest.mark.parametrize("kinds", [1, 2])
def test_files_and_exported_models_compare_with_the_world_too(kinds, request):
    taught = request.getfixturevalue("taught" if kinds == 1 else "two_kinds")
    x = taught.embed(OTHERS[:12] + [photograph("cat", n) for n in range(50, 56)])
    shares, familiarity = taught.judge(x)
    again = Model.from_bytes(taught.to_bytes())
    assert np.array_equal(again.judge(x)[1], familiarity) and len(taught.to_bytes()) < 6e6
    line = taught.knowledge.solution.rivals.line.any()
    version = parse_metadata(taught.to_bytes(), Path())["version"]
    assert version == str(4 + line) and (line or kinds == 1)  # so that older programs read what they can
    again.rename("cat", "zebra")
    # Solved again with classes in another order, so sums round in another way. The search for the temperature ends
    # within 1e-3 of the best logarithm, or somewhat beyond, where rounding hides the valley. All else is equal.
    one, two = taught.knowledge.solution, again.knowledge.solution
    assert np.log(two.calibration.temperature) == pytest.approx(np.log(one.calibration.temperature), abs=3e-3)
    same = replace(two, calibration=one.calibration)
    np.testing.assert_allclose(same.judge(x)[1], familiarity, rtol=1e-4, atol=5e-3)
    np.testing.assert_allclose(again.judge(x)[1], familiarity, rtol=1e-3, atol=0.02)
    graph = Graph()
    add_answers(graph, graph.input("x", "float32", "n", x.shape[1]), taught.knowledge.solution)
    got, score = Session(graph).run(x=x)
    np.testing.assert_allclose(got, shares, atol=1e-3)
    np.testing.assert_allclose(score, familiarity, rtol=1e-3, atol=0.02)
    other = replace(taught.knowledge.solution, rivals=None)
    assert np.abs(other.judge(x)[1] - familiarity).min() > 0.05  # the world counts


@pytest.mark.parametrize("names", [["center"], ["line"], ["norms", "reliance"], ["center", "line"]])
def test_numbers_in_a_file_may_be_huge_and_familiarity_is_still_a_number(two_kinds, names):
    solution, x = two_kinds.knowledge.solution, two_kinds.embed(OTHERS[:4])
    shapes = {name: getattr(solution.rivals, name).shape for name in names}
    huge = {name: np.resize(np.float32([LARGEST, -LARGEST]), shape) for name, shape in shapes.items()}
    assert not np.isnan(replace(solution, rivals=replace(solution.rivals, **huge)).judge(x)[1]).any()


def test_a_lesson_that_takes_answers_away_says_so_and_can_be_undone(taught, tmp_path, home):
    path = copy(taught).save(tmp_path / "things.vqp")
    for number, image in enumerate(OTHERS[::4]):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    images = [str(p) for p in sorted(tmp_path.glob("*.png"))]
    ran = CliRunner().invoke(app, ["learn", str(path), *images, "--as", "things", "--device", "cpu"])
    assert ran.exit_code == 0, ran.output
    assert re.search(r"warning: things takes \d+ of \d+ ordinary images that were unknown", ran.output)
    assert f"to take this back: vqprompt undo {path}" in ran.output.replace("\n", "")

    model = copy(taught)
    lesson = model.learn([photograph("cat", n) for n in range(30, 44)], "kitten").to_json()
    assert ("kitten", "cat", 14) in [(w["class"], w["from"], w["of"]) for w in lesson["warnings"]]
    low, high = lesson["accuracy_interval"]
    assert low < lesson["accuracy"] < high and lesson["warnings"][0]["text"] in json.dumps(lesson)


def test_images_of_something_else_that_are_taught_as_a_class_are_noticed(taught):
    def told(pictures, name):
        warnings = taught.learn(pictures, name, preview=True).to_json()["warnings"]
        return [w["text"] for w in warnings if "did not look like it" in w["text"]]

    assert told(drawn("house", range(20)), "fish") == [
        "20 of 20 new images of fish did not look like it before: unknown 20"
    ]
    (text,) = told([photograph("cat", n) for n in range(30, 44)], "fish")
    assert re.match(r"1[1-4] of 14 new images of fish did not look like it before: \w+ \d, ", text)
    for name in ("fish", "star"):
        assert told([photograph(name, n) for n in range(30, 44)], name) == [], "an ordinary lesson"
    assert told([photograph("cat", n) for n in range(30, 39)], "fish") == [], "corrections are often few such images"


def test_answers_that_cannot_be_checked_have_words_instead_of_percentages(tmp_path):
    folder = write_drawings(tmp_path / "images", ["apple", "house"], range(4))
    path = tmp_path / "few.vqp"

    def asked(*lessons: tuple[list[str], str]) -> str:
        model = Model(size=28, device="cpu")
        for images, name in lessons:
            model.learn([folder / image for image in images], name)
        model.save(path)
        ran = CliRunner().invoke(
            app, ["predict", str(path), str(folder / "house/0.png"), "--no-unknown", "--device", "cpu"]
        )
        assert ran.exit_code == 0, ran.output
        note = onnx_file(model)[1]["notes"][model.classes.index("house")]
        assert note in ran.output and bool(note) == ("%" not in ran.output), "exported models say the same"
        return ran.output

    assert "house (no percentage: the model knows no other class)" in asked((["house/0.png", "house/1.png"], "house"))
    apples = ["apple/0.png", "apple/1.png", "apple/2.png"], "apple"
    assert "house (no percentage: taught with one image)" in asked(apples, (["house/0.png"], "house"))
    assert "%" in asked(apples, (["house/0.png", "house/1.png"], "house"))


def test_a_world_is_made_of_any_folder_for_any_backbone(tmp_path, home, monkeypatch):
    rng = np.random.default_rng(0)
    centers = 4 * rng.normal(size=(9, 32))
    # three classes, and a mixed collection of six kinds
    features = np.repeat(centers, 20, axis=0) + 0.1 * rng.normal(size=(180, 32))
    labels = np.repeat([0, 1, 2, 3, 3, 3, 3, 3, 3], 20)
    world = World.of(features, labels)
    distances = ((centers[:, None] - world.means) ** 2).sum(2)
    assert sorted(distances.argmin(1)) == list(range(9)) and distances.min(1).max() < 0.2
    assert np.array_equal(((world.examples[:, None] - world.means) ** 2).sum(2).argmin(1), range(9))

    folder = write_drawings(tmp_path / "ordinary", ["apple", "house", "tree"], range(3))
    (folder / "tree" / "broken.png").write_bytes(b"no image")
    for size in ("28", "112"):
        ran = CliRunner().invoke(app, ["backbones", "--world", str(folder), "--size", size])
        assert ran.exit_code == 0 and "3 means in" in ran.output, ran.output
    for size, expected in ((28, 3), (70, 3), (280, 168), (7, None)):  # its own, then the package's, then none
        world = find_world(Model(device="cpu").backbone.fingerprint, size)
        assert (world and len(world)) == expected, size

    def interrupted(file, **arrays):
        Path(file if isinstance(file, Path) else file.name).write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learn_world(Model(device="cpu", size=28), folder)
    assert len(find_world(Model(device="cpu").backbone.fingerprint, 28)) == 3, "the file is as it was"


def test_the_embedded_world_belongs_to_the_default_backbone():
    backbone = Model(device="cpu").backbone
    card = (files("vqprompt.assets") / "README.md").read_text()
    for size, means in ((112, 316), (224, 168)):
        world = find_world(backbone.fingerprint, size)
        assert world.codes.shape == (2, means, backbone.width) and str(means) in card
