"""After teaching: what a test counts, and the page, JSON and CSV that tell it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from drawings import write_drawings
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, precision_score
from test_report import Page

from vqprompt import Model
from vqprompt.product.evaluation.measure import Evaluation, ImageAnswer, Share, evaluate
from vqprompt.product.evaluation.page import _headline, classes_csv, images_csv, write_page

NAMES = ["apple", "bicycle", "cactus", "car"]
TINY = {"size": 56, "device": "cpu"}


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("taught")
    model = Model(**TINY)
    model.learn(write_drawings(home / "first", NAMES[:3], range(15)))
    model.learn(write_drawings(home / "second", NAMES[3:], range(15)))
    return model.save(home / "drawings.vqp")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = write_drawings(tmp_path_factory.mktemp("images"), NAMES, range(80, 86))
    (folder / "car" / "broken.png").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def found(taught, images) -> Evaluation:
    return evaluate(Model.load(taught, device="cpu"), images, strictness=2.0)  # so that some are unknown


def made_up(labels: list[str], answers: list[str], classes: tuple[str, ...], sure: float = 0.9) -> Evaluation:
    asked = [ImageAnswer(f"{i}.png", a, b, b, sure, 1.0) for i, (a, b) in enumerate(zip(labels, answers, strict=True))]
    return Evaluation(classes, tuple(asked))


@given(st.integers(0, 60), st.integers(1, 60))
def test_intervals_are_wilsons(hits, total):
    hits = min(hits, total)
    judge = binomtest(hits, total).proportion_ci(method="wilson")
    assert Share(hits, total).interval == pytest.approx((judge.low, judge.high), abs=1e-9)


def test_counts_agree_with_scikit_learn(found):
    labels, answers = [a.label for a in found.images], [a.answer for a in found.images]
    with pytest.warns(UserWarning, match="classes not in y_true"):  # "unknown" is an answer, but no label
        assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, answers))
    judge = confusion_matrix(labels, answers, labels=[*found.classes, "unknown"])[:-1]
    assert np.array_equal(found.confusion, judge)
    precision = precision_score(labels, answers, labels=list(found.classes), average=None, zero_division=0)
    np.testing.assert_allclose([c.precision.value or 0 for c in found.per_class], precision)
    assert len(found.images) == 24 and len(found.unreadable) == 1 and "broken.png" in found.unreadable[0]


def test_many_dogs_do_not_hide_the_horses():
    found = made_up(["dog"] * 5000 + ["horse"] * 30, ["dog"] * 5000 + ["horse"] * 16 + ["dog"] * 14, ("dog", "horse"))
    assert found.accuracy.value > 0.995 and found.balanced_accuracy == pytest.approx((1 + 16 / 30) / 2)
    assert "of horse, 14 of 30 were missed" in _headline(found) and "if every class counts the same" in _headline(found)
    assert found.confused_pairs() == [("horse", "dog", 14)]


def test_reliability_and_its_error():
    found = made_up(["a"] * 10, ["a"] * 8 + ["b"] * 2, ("a", "b"), sure=0.85)
    assert found.reliability[8] == (10, pytest.approx(0.85), pytest.approx(0.8))
    assert found.calibration_error == pytest.approx(0.05)


def test_mistakes_come_surest_first(found):
    wrong = [m.probability for m in found.mistakes() if m.answer != "unknown"]
    assert wrong == sorted(wrong, reverse=True)
    assert len(found.mistakes()) == found.accuracy.total - found.accuracy.hits


def test_classes_that_are_not_known(taught, tmp_path):
    folder = write_drawings(tmp_path / "test", ["apple", "fish"], range(80, 84))
    model = Model.load(taught, device="cpu")
    found = evaluate(model, folder)
    assert len(found.images) == 4 and found.others_refused.total == 4
    assert any("not known" in note for note in found.notes)
    with pytest.raises(ValueError, match="--known-only"):
        evaluate(model, folder, refuse_unknown_classes=True)


def test_another_spelling_is_the_same_class(taught, tmp_path):
    folder = write_drawings(tmp_path / "test", ["apple"], range(80, 82))
    (folder / "apple").rename(folder / "APPLE")
    assert len(evaluate(Model.load(taught, device="cpu"), folder).images) == 2


def test_before_and_after_the_last_teaching(taught, images):
    before = Model.load(taught, device="cpu")
    before.undo()
    found = evaluate(Model.load(taught, device="cpu"), images, before=before)
    assert found.balanced_accuracy_before is not None
    assert {c.name for c in found.per_class if c.recall_before is None} == {"car"}


def test_a_model_of_one_image_per_class_has_no_threshold_and_no_percentages(tmp_path):
    model = Model(**TINY)
    model.learn(write_drawings(tmp_path, NAMES[:2], range(1)))
    image = str(tmp_path / "apple" / "0.png")
    found = evaluate(model, [image, image], NAMES[:2])
    told = json.dumps(found.to_json(), allow_nan=False)
    assert [m["familiarity"] for m in json.loads(told)["mistakes"]] == [None], "one of two labels is wrong"
    page = write_page(found, tmp_path / "test.html", "model", "folder", None).read_text(encoding="utf-8")
    assert "called apple, no percentage: taught with one image" in page


def test_images_that_were_taught_are_no_honest_test(taught, found, command, tmp_path):
    assert not any("taught to this model" in note for note in found.notes)
    out = command("test", taught, taught.parent / "first", "--out", tmp_path)[1]
    assert "note: 45 of 45 images were taught to this model" in out


def test_what_was_called_unknown_is_told_apart_from_wrong_names():
    asked = [ImageAnswer(f"{n}.png", "apple", a, b, 0.9, 1.0) for n, (a, b) in enumerate(
        [("apple", "apple"), ("car", "car"), ("unknown", "apple"), ("unknown", "car")]
    )]  # fmt: skip
    result = Evaluation(("apple", "car"), tuple(asked))
    assert result.accuracy.hits == 1 and result.without_unknown.hits == 2
    assert "2 were called unknown; without this answer, 2 were right" in _headline(result)


def test_page_json_and_csv(taught, images, tmp_path, command):
    status, out, err = command("test", taught, images, "--out", tmp_path, "--before")
    assert status == 0, err
    assert "every class weighted equally" in out and "look at" in out
    told = json.loads((tmp_path / "test.json").read_text())
    assert told["images"] == 24 and len(told["classes"]) == 4 and told["classes"][0]["recall"]["total"] == 6
    with open(tmp_path / "classes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["class"] for r in rows] == NAMES and sum(int(r["right"]) for r in rows) == told["accuracy"]["hits"]
    with open(tmp_path / "images.csv", newline="") as file:
        assert sum(int(r["right"]) for r in csv.DictReader(file)) == told["accuracy"]["hits"]
    page = (tmp_path / "test.html").read_text()
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_all_classes_are_in_sight_and_figures_say_of_how_many_images(tmp_path):
    from browser import Browser

    names = tuple(f"class {i:02}" for i in range(24))
    report = made_up([n for n in names for _ in range(2)], [n for n in names for _ in range(2)], names)
    written = write_page(report, tmp_path / "test.html", "model", "folder", None)
    page = Browser()
    try:
        page.driver.get(written.as_uri())
        assert "Of 48 images:" in page.text(".card")
        hidden = "const r = document.querySelector('[aria-label=Classes]'); return r.scrollHeight - r.clientHeight"
        assert page.driver.execute_script(hidden) <= 0 and len(page.all(".list tbody tr")) == 24
    finally:
        page.close()


def test_two_hundred_classes_and_evil_names(tmp_path):
    rng = np.random.default_rng(0)
    classes = tuple(sorted(f"<script>alert({i})</script> & bird" for i in range(200)))
    labels = [classes[i % 200] for i in range(2000)]
    answers = [label if rng.random() < 0.8 else classes[rng.integers(200)] for label in labels]
    found = made_up(labels, answers, classes)
    page = Page(write_page(found, tmp_path / "test.html", "<i>model", "<u>folder", None)).source
    assert "<script" not in page and "<i>model" not in page and "There is no figure from the teaching" in page
    assert page.count(" named &lt;script") == np.count_nonzero(found.confusion), "only cells with an image are drawn"
    assert 'id="z3"' in page and len(page) < 2_000_000


def test_tables_survive_odd_names():
    found = made_up(["=cmd()", "a,b"], ["a,b", "a,b"], ("=cmd()", "a,b", "-5 untested"))
    assert "'=cmd()" in classes_csv(found) and '"a,b"' in images_csv(found)
    assert "'-5 untested,0,0,,0.000000" in classes_csv(found), "what is not known is an empty cell"
    assert json.loads(json.dumps(found.to_json()))["images"] == 2


def test_bad_input_in_words(taught, tmp_path, command):
    assert "no such folder" in command("test", taught, tmp_path / "nowhere")[2]
    (tmp_path / "empty").mkdir()
    assert "without classes" in command("test", taught, tmp_path / "empty")[2]
    (tmp_path / "bad" / "apple").mkdir(parents=True)
    (tmp_path / "bad" / "apple" / "x.png").write_bytes(b"")
    assert "none of the images can be read" in command("test", taught, tmp_path / "bad")[2]
    assert "no such" in command("test", tmp_path / "none.vqp", tmp_path)[2].lower()
