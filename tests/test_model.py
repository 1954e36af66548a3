"""The living model: exact in any order, forgetting without a trace, undo, unknown, words for bad input."""

from __future__ import annotations

import copy
import csv
import json
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from drawings import drawings, write_drawings
from PIL import Image

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model.records import ClassRecord, gram_of, to_fixed_point

NAMES = ["apple", "bicycle", "cactus", "car"]
TINY = {"size": 28, "device": "cpu"}  # four patches: enough for everything but accuracy


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("drawings")
    return {
        "first": write_drawings(home / "first", NAMES[:2], range(12)),
        "second": write_drawings(home / "second", NAMES[2:], range(12)),
        "more": write_drawings(home / "more", NAMES[1:3], range(12, 20)),
        "test": write_drawings(home / "test", NAMES, range(80, 84)),
    }


@pytest.fixture(scope="module")
def taught(folders, tmp_path_factory) -> Path:
    model = Model(**TINY)
    for name in ("first", "second", "more"):
        model.learn(folders[name])
    return model.save(tmp_path_factory.mktemp("taught") / "drawings.vqp")


def test_images(folders: dict[str, Path]) -> list[Path]:
    return sorted(folders["test"].rglob("*.png"))


test_images.__test__ = False  # type: ignore[attr-defined]


def same(one: Model, other: Model, images: list[Path]) -> bool:
    return (
        one.classes == other.classes and np.abs(one.predict_proba(images) - other.predict_proba(images)).max() <= 1e-6
    )


# ---------------------------------------------------------------------------------------------- exactness


def test_any_order_and_number_of_teachings_gives_the_same_model(folders, taught, tmp_path):
    images = test_images(folders)
    once = Model(**TINY)
    everything = tmp_path / "everything"
    for name in ("first", "second", "more"):
        shutil.copytree(folders[name], everything, dirs_exist_ok=True)
    once.learn(everything)

    in_steps = Model.load(taught)
    backwards = Model(**TINY)
    for name in ("more", "second", "first"):
        for folder in sorted(folders[name].iterdir(), reverse=True):
            backwards.learn(folder, folder.name)

    assert once.counts == in_steps.counts == backwards.counts == {"apple": 12, "bicycle": 20, "cactus": 20, "car": 12}
    assert same(once, in_steps, images) and same(once, backwards, images)
    solved = [m.knowledge.solution for m in (once, in_steps, backwards)]
    found = [(s.shrinkage, s.calibration, s.measurements) for s in solved]
    assert found[0] == found[1] == found[2]  # shrinkage, temperature, threshold and accuracy, to the last bit


def test_a_second_teaching_does_not_read_the_first_images(folders, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(folders["first"], first)
    model = Model(**TINY)
    model.learn(first)
    shutil.rmtree(first)
    model.learn(folders["second"])
    assert model.classes == tuple(NAMES)


def test_forgetting_equals_never_having_learned(folders, taught):
    forgetful, never = Model.load(taught), Model(**TINY)
    forgetful.forget("cactus")
    never.learn(folders["first"])
    never.learn(folders["second"] / "car", "car")
    never.learn(folders["more"] / "bicycle", "bicycle")
    assert same(forgetful, never, test_images(folders))
    assert np.array_equal(*(m.knowledge.solution.gram for m in (forgetful, never)))


def test_forgetting_for_good_leaves_nothing_of_the_class_in_the_file(folders, tmp_path):
    model = Model(**TINY)
    model.learn(folders["second"])  # a version without the class, which stays
    model.learn(folders["first"])
    ids = model.knowledge.classes["apple"].ids
    model.rename("apple", "plum")
    model.rename("plum", "pear")
    model.learn(folders["more"] / "bicycle", "bicycle")
    model.undo()  # what is undone can be returned to, and must be searched as well
    model.forget("bicycle")
    model.forget("pear", for_good=True)
    path = model.save(tmp_path / "m.vqp")
    assert not any(name in path.read_bytes() for name in (b"apple", b"plum", b"pear"))
    assert not any(int(i).to_bytes(8, "little") in path.read_bytes() for i in ids)
    again = Model.load(path)
    assert again.classes == ("cactus", "car") and [v.number for v in again.versions] == [0, 1, 7]
    assert [event.what for event in again.history] == ["learned", "learned", "forgot", "forgot"]
    again.undo()
    assert again.knowledge.version == 1 and again.can_undo == 1


def test_a_class_that_was_forgotten_can_be_forgotten_for_good_later(folders, tmp_path):
    model = Model(**TINY)
    model.learn(folders["first"])
    model.forget("apple")
    model.rename("bicycle", "bike")
    with pytest.raises(UserError, match="knows no class 'bicycle'"):  # it is there, under another name
        model.forget("bicycle", for_good=True)
    model.forget("apple", for_good=True)
    path = model.save(tmp_path / "m.vqp")
    assert b"apple" not in path.read_bytes() and Model.load(path).classes == ("bike",)
    with pytest.raises(UserError, match="knows no class 'apple'"):
        model.forget("apple", for_good=True)


def test_the_same_images_again_change_nothing(folders, taught):
    model = Model.load(taught)
    before = model.predict_proba(test_images(folders))
    found = model.learn(folders["first"])
    assert found.images == 0 and found.known_images == 24
    assert np.array_equal(before, model.predict_proba(test_images(folders)))


def test_records_do_not_depend_on_order_even_beyond_what_is_kept():
    rng = np.random.default_rng(0)
    features, names = to_fixed_point(rng.normal(size=(700, 8))), rng.permutation(700).astype(np.uint64)
    whole = ClassRecord.of(names, features)
    for cut in (1, 300, 699):
        parts = ClassRecord.of(names[:cut], features[:cut]), ClassRecord.of(names[cut:], features[cut:])
        for merged in (parts[0].merged(parts[1]), parts[1].merged(parts[0])):
            assert all(np.array_equal(getattr(merged, name), part) for name, part in vars(whole).items())
    assert whole.count == 700 and len(whole.kept) == 256
    assert np.array_equal(gram_of(whole), np.rint(gram_of(whole)))


# ---------------------------------------------------------------------------------------------- undo, rename


def test_undo_goes_back_step_by_step_also_after_saving(folders, taught):
    images = test_images(folders)
    steps = [Model(**TINY)]
    steps[0].learn(folders["first"])
    middle = Model(**TINY)
    middle.learn(folders["first"])
    middle.learn(folders["second"])
    model = Model.load(taught)
    assert "learned 16 images" in model.undo()
    assert same(model, middle, images)
    model.save(taught.with_name("undone.vqp"))
    model = Model.load(taught.with_name("undone.vqp"))
    model.undo()
    assert same(model, steps[0], images)
    assert "learned 24 images" in model.undo() and model.classes == () and model.can_undo == 0
    with pytest.raises(UserError, match="nothing to undo"):
        model.undo()


def test_versions_have_numbers_that_are_never_given_again_and_can_be_returned_to(folders, taught, tmp_path):
    images, model = test_images(folders), Model.load(taught)
    second = Model.load(taught)
    second.undo()
    assert [v.number for v in model.versions] == [0, 1, 2, 3] and second.knowledge.version == 2
    model.undo(steps=2)
    model.rename("apple", "pear")
    assert [v.number for v in model.versions] == [0, 1, 2, 3, 4] and model.can_undo == 2
    assert "renamed apple → pear" in model.versions[-1].description
    model.return_to(3)  # what was undone comes back
    assert same(model, Model.load(taught), images)
    model = Model.load(taught)
    model.forget("car")
    model.return_to(2)
    model = Model.load(model.save(tmp_path / "m.vqp"))
    assert model.knowledge.version == 5 and str(model.history[-1]).startswith("returned to version 2")
    assert same(model, second, images) and "returned to version 2" in model.undo() and "car" not in model.classes
    with pytest.raises(UserError, match=r"no other version 7.*kept: 0, 1, 2, 3, 5"):
        model.return_to(7)
    with pytest.raises(UserError, match="9 steps cannot be undone; give 1 to 4"):
        model.undo(9)


def test_renaming_changes_the_name_alone(folders, taught):
    model, before = Model.load(taught), Model.load(taught)
    model.rename("cactus", "Saguaro")
    assert model.classes == ("Saguaro", "apple", "bicycle", "car")
    order = [before.classes.index(n if n != "Saguaro" else "cactus") for n in model.classes]
    images = test_images(folders)
    assert np.abs(model.predict_proba(images) - before.predict_proba(images)[:, order]).max() < 1e-6
    assert next(c for c in model.show()["classes"] if c["name"] == "Saguaro")["taught"]
    for taken in ("apple", "Bicycle", " car "):
        with pytest.raises(UserError, match=r"apple|bicycle|car"):
            model.rename("Saguaro", taken)
    with pytest.raises(UserError, match="did you mean 'apple'"):
        model.rename("Apple", "pear")


def test_versions_are_kept_within_limits(taught, monkeypatch, tmp_path):
    from vqprompt.product.model import file, knowledge

    model = Model.load(taught)
    monkeypatch.setattr(knowledge, "HISTORY_KEPT", 12)
    for i in range(14):
        model.rename(model.classes[0], f"a{i}")
    again = Model.load(model.save(tmp_path / "m.vqp"))
    assert again.can_undo == knowledge.VERSIONS_KEPT and len(again.history) == 12
    again.undo(again.can_undo)
    again.rename(again.classes[0], "b")
    assert again.can_undo == 1 and len(again.versions) == knowledge.VERSIONS_KEPT + 1  # undone ones go first
    monkeypatch.setattr(file, "BYTES_KEPT", 1000)
    model.forget(model.classes[1])
    assert Model.load(model.save(tmp_path / "small.vqp")).can_undo == 0


# ---------------------------------------------------------------------------------------------- threads and copies


def test_threads_that_teach_one_model_at_once_lose_nothing(folders):
    model, images = Model(**TINY), test_images(folders)
    model.learn(folders["first"])
    sources = [(folders[part] / name, name) for part in ("second", "more") for name in ("cactus", "car", "bicycle")]
    sources = [(place, name) for place, name in sources if place.is_dir()]
    problems = []

    def work(job):
        try:
            job()
        except Exception as error:
            problems.append(error)

    def ask():
        for _ in range(20):
            shares = model.predict_proba(images[:2])
            assert np.allclose(shares.sum(1), 1) and 2 <= shares.shape[1] <= 4

    jobs = [lambda place=place, name=name: model.learn(place, name) for place, name in sources]
    threads = [threading.Thread(target=work, args=(job,)) for job in [*jobs, ask, ask]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and model.counts == {"apple": 12, "bicycle": 20, "cactus": 20, "car": 12}
    assert [v.number for v in model.versions] == list(range(len(sources) + 2))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_answers_the_same_and_is_taught_alone(folders, taught, copied):
    model, images = Model.load(taught), test_images(folders)
    other = copied(model)
    assert np.array_equal(model.predict_proba(images), other.predict_proba(images)) and other.path == model.path
    other.forget("car")
    assert "car" in model.classes and "car" not in other.classes
    assert copied(Model(**TINY)).classes == ()


# ---------------------------------------------------------------------------------------------- predict


def test_predict_takes_one_path_several_images_and_arrays(folders, taught):
    model = Model.load(taught)
    path = folders["test"] / "car" / "80.png"
    array = np.asarray(Image.open(path))
    assert isinstance(model.predict(str(path)), str)
    several = model.predict([path, Image.open(path), array, np.stack([array] * 3, axis=2)], unknown=False)
    assert len(set(several)) == 1
    assert model.predict_proba(path).shape == (4,)
    assert model.predict_proba([path]).shape == (1, 4)
    assert model.predict_proba([]).shape == (0, 4)
    assert model.predict_proba(path).sum() == pytest.approx(1)


def test_an_empty_model_says_so(tmp_path):
    with pytest.raises(UserError, match="learned nothing yet"):
        Model(**TINY).predict("photo.jpg")
    with pytest.raises(UserError, match="learned nothing yet"):
        Model(**TINY).save(tmp_path / "m.vqp")


def test_a_missing_image_is_named(taught):
    with pytest.raises(UserError, match=r"nothere\.jpg"):
        Model.load(taught).predict("nothere.jpg")


# ---------------------------------------------------------------------------------------------- few images


def test_one_image_per_class_works(folders, tmp_path):
    model = Model(**TINY)
    for name in NAMES:
        source = sorted((folders["test"] / name).iterdir())[0]
        model.learn([source], name)
    assert model.accuracy is None
    found = model.learn(folders["first"] / "apple", "apple")
    assert any("fewer than 5" in note for note in found.notes)
    path = folders["test"] / "bicycle" / "80.png"
    assert Model.load(model.save(tmp_path / "m.vqp")).predict(path, unknown=False) == "bicycle"


def test_one_class_alone_works(folders):
    model = Model(**TINY)
    model.learn(folders["first"] / "apple", "apple")
    assert model.predict(folders["test"] / "apple" / "80.png", unknown=False) == "apple"


def test_accuracy_is_told_before_and_after_and_who_suffers(folders):
    model = Model(**TINY)
    first = model.learn(folders["first"])
    second = model.learn(folders["second"])
    assert first.accuracy_before is None and second.accuracy_before == first.accuracy
    assert 0 < second.accuracy <= 1
    confusing = model.learn(folders["more"] / "bicycle", "cactus")  # wrong labels: somebody must suffer
    assert confusing.suffering and confusing.suffering[0].before > confusing.suffering[0].now
    assert model.learn(folders["more"] / "cactus", "cactus", hold_out=0).accuracy is None


# ---------------------------------------------------------------------------------------------- where labels come from


def test_labels_from_csv_jsonl_and_imagefolder_metadata(folders, tmp_path):
    files = sorted(folders["first"].rglob("*.png"))
    rows = [(str(f), f.parent.name) for f in files]
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as out:
        csv.writer(out).writerows([("path", "label"), *rows])
    lines = tmp_path / "table.jsonl"
    lines.write_text("".join(json.dumps({"file": p, "class": c}) + "\n" for p, c in rows))
    hub = tmp_path / "hub"
    hub.mkdir()
    for f in files:
        shutil.copy(f, hub / f"{f.parent.name}-{f.name}")
    (hub / "metadata.csv").write_text(
        "file_name,label\n" + "".join(f"{f.parent.name}-{f.name},{f.parent.name}\n" for f in files)
    )
    lists = Model(**TINY)
    lists.learn([p for p, _ in rows], [c for _, c in rows])
    for source in (table, lines, hub, folders["first"]):
        model = Model(**TINY)
        model.learn(source)
        assert model.counts == {"apple": 12, "bicycle": 12}
        assert same(model, lists, test_images(folders))


def test_tables_with_faults_say_which_line(folders, tmp_path):
    table = tmp_path / "t.csv"
    for text, words in (
        ("", "no lines"),
        ("a,b\n1,2\n", "no column"),
        (f"path,label\n{folders['first']}/apple/0.png,\n", "line 2"),
        ("path,label\nnowhere.png,cat\n", "line 2: nowhere.png: no such image"),
    ):
        table.write_text(text)
        with pytest.raises(UserError, match=words):
            Model(**TINY).learn(table)
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"path": 1\n')
    with pytest.raises(UserError, match="line 1: not JSON"):
        Model(**TINY).learn(lines)


# ---------------------------------------------------------------------------------------------- bad input


def unchanged(path: Path, work, words: str) -> None:
    before = path.read_bytes()
    model = Model.load(path)
    classes, history = model.classes, model.history
    with pytest.raises(UserError, match=words):
        work(model)
    assert model.classes == classes and model.history == history and path.read_bytes() == before


def test_spelling_clashes_are_refused(folders, taught, tmp_path):
    for name in ("Apple", "APPLE", "ap ple"):
        unchanged(
            taught, lambda m, name=name: m.learn(folders["more"] / "cactus", name), "spelled differently from 'apple'"
        )
    both = tmp_path / "both"
    write_drawings(both, ["bed"], range(3))
    write_drawings(both, ["camera"], range(3))
    (both / "camera").rename(both / "BED")
    unchanged(taught, lambda m: m.learn(both), "spelled differently")
    for name in ("unknown", "Unknown", "", "a\nb"):
        unchanged(taught, lambda m, name=name: m.learn(folders["more"] / "cactus", name), "cannot be the name")


def test_the_same_picture_in_two_classes_is_refused(folders, taught, tmp_path):
    two = tmp_path / "two"
    shutil.copytree(folders["test"], two)
    shutil.copy(two / "car" / "80.png", two / "apple" / "again.png")
    unchanged(taught, lambda m: m.learn(two), "the same picture is in two classes")
    unchanged(taught, lambda m: m.learn(folders["first"] / "apple", "pear"), "has learned this picture as 'apple'")


def test_copies_within_a_class_count_once(folders, tmp_path):
    shutil.copytree(folders["test"], tmp_path / "t")
    shutil.copy(tmp_path / "t" / "car" / "80.png", tmp_path / "t" / "car" / "copy.png")
    model = Model(**TINY)
    assert model.learn(tmp_path / "t").copies == 1 and model.counts["car"] == 4


def test_broken_images_stop_it_or_are_skipped(folders, taught, tmp_path):
    broken = tmp_path / "broken"
    write_drawings(broken, ["bed"], range(4))
    (broken / "bed" / "x.png").write_bytes(b"no image")
    unchanged(taught, lambda m: m.learn(broken), r"x\.png.*--skip-broken")
    model = Model.load(taught)
    found = model.learn(broken, skip_broken=True)
    assert found.images == 4 and "x.png" in found.broken[0] and model.counts["bed"] == 4


def test_excluded_images_are_not_learned(folders):
    model = Model(**TINY)
    model.learn(folders["first"], exclude=[folders["first"] / "apple" / "0.png"])
    assert model.counts == {"apple": 11, "bicycle": 12}


def test_folders_without_classes_are_refused(folders, taught, tmp_path):
    unchanged(taught, lambda m: m.learn(folders["first"] / "apple"), "without classes")
    unchanged(taught, lambda m: m.learn(tmp_path / "nowhere"), "no such folder")
    (tmp_path / "empty").mkdir()
    unchanged(taught, lambda m: m.learn(tmp_path / "empty"), "without classes")
    unchanged(taught, lambda m: m.learn([1, 2], ["a", "b"]), "give a path, the bytes of an image file, a Pillow image")
    unchanged(taught, lambda m: m.learn([Image.new("RGB", (9, 9))]), "which class is on 1 image")
    unchanged(taught, lambda m: m.learn([Image.new("RGB", (9, 9))], ["a", "b"]), "1 images but 2 labels")
    unchanged(taught, lambda m: m.forget("heron"), "knows no class 'heron'")


def test_pillow_images_and_arrays_can_be_learned():
    images, names = drawings()
    model = Model(**TINY)
    model.learn(list(images[0, :6]), names[0])
    model.learn([Image.fromarray(i) for i in images[1, :6]], [names[1]] * 6)
    assert model.counts == {names[0]: 6, names[1]: 6}
