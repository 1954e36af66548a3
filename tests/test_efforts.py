"""Efforts good and best: what is trained goes into the model's file, and what is remembered moves along."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawings import write_drawings
from safetensors import safe_open

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model import efforts, ingest, teaching, trained
from vqprompt.product.model.calibration import Measurements
from vqprompt.product.model.records import STEP, ClassRecord, to_fixed_point

FIRST, SECOND = ["apple", "bicycle"], ["cactus", "car"]
REAL_PAYS = trained.pays  # before it is replaced
IMAGES = 8  # per class; half of them are held out


@pytest.fixture(scope="module", autouse=True)
def briefly():
    """Two epochs train enough for everything but accuracy. All training is kept, whatever it is worth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "pays", lambda without, measured: True)
        for effort, settings in efforts.TRAINING.items():
            brief = replace(settings, epochs=2)
            patch.setitem(efforts.TRAINING, effort, brief)
        yield


@pytest.fixture(scope="module")
def fresh(tiny_weights) -> Callable[[], Model]:
    return lambda: Model(tiny_weights, device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("drawings")
    return {
        "first": write_drawings(home / "first", FIRST, range(IMAGES)),
        "second": write_drawings(home / "second", SECOND, range(IMAGES)),
        "one": write_drawings(home / "one", ["bed"], range(IMAGES)),
        "few": write_drawings(home / "few", ["bed", "cat"], range(2)),
        "test": write_drawings(home / "test", FIRST + SECOND, range(80, 83)),
    }


@pytest.fixture(scope="module", params=["good", "best"])
def taught(request, fresh, folders, tmp_path_factory) -> Path:
    """Two classes at an effort, saved."""
    model = fresh()
    report = model.learn(folders["first"], effort=request.param)
    assert report.effort == model.effort == request.param and model.show()["effort"] == request.param
    return model.save(tmp_path_factory.mktemp("taught") / f"{request.param}.vqp")


def asked(folders: dict[str, Path]) -> list[Path]:
    return sorted(folders["test"].rglob("*.png"))


def tensors(model: Model) -> dict[str, np.ndarray]:
    return model.knowledge.trained.tensors


# ---------------------------------------------------------------------------------------------- training


def test_the_same_seed_gives_the_same_bits(fresh, folders, taught):
    saved, again, other = Model.load(taught), fresh(), fresh()
    again.learn(folders["first"], effort=saved.effort)
    other.learn(folders["first"], effort=saved.effort, seed=1)
    assert np.array_equal(saved.predict_proba(asked(folders)), again.predict_proba(asked(folders)))
    assert all(np.array_equal(tensor, tensors(again)[name]) for name, tensor in tensors(saved).items())
    assert any(not np.array_equal(tensor, tensors(other)[name]) for name, tensor in tensors(saved).items())


def test_features_are_those_of_the_trained_network(fresh, folders, taught):
    plain = fresh()
    plain.learn(folders["first"])
    ours, theirs = Model.load(taught).embed(asked(folders)), plain.embed(asked(folders))
    assert ours.shape == theirs.shape and np.abs(ours - theirs).mean() > 0.01
    swapped = np.roll(ours, ours.shape[1] // 2, axis=1)  # the class tokens of the two blocks in the other order

    def alike(one: np.ndarray) -> float:
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(one, theirs, strict=True)]))

    assert alike(ours) > alike(swapped) + 0.01  # the same numbers in the same places, a little moved


def test_held_out_images_are_what_accuracy_is_measured_with(folders, taught):
    known = Model.load(taught).knowledge
    for name, record in known.classes.items():
        assert record.count == IMAGES and record.unseen.sum() == IMAGES // 2
        assert known.measurements.per_class[name][1] == IMAGES // 2


@pytest.mark.parametrize(
    ("images", "share", "held"), [(5, 0.2, 2), (19, 0.2, 9), (40, 0.2, 10), (100, 0.2, 20), (9, 0.8, 7)]
)
def test_at_least_ten_images_of_a_class_or_half_of_them_are_held_out(images, share, held):
    labels, ids = np.array(["a"] * images + ["b"] * 8), np.arange(images + 8)[::-1].astype(np.uint64)
    chosen = efforts.held_out(labels, ids, share)
    assert chosen[:images].sum() == held and chosen[images:].sum() == max(4, round(8 * share))


def test_without_measured_accuracy_training_is_still_kept_only_if_it_pays(fresh, folders, monkeypatch):
    model, asked_about = fresh(), []
    monkeypatch.setattr(trained, "pays", lambda without, measured: asked_about.append((without, measured)) or True)
    report = model.learn(folders["first"], effort="good", hold_out=0)
    assert report.accuracy is None and model.accuracy is None
    assert all(without and measured for without, measured in asked_about) and len(asked_about) == 1
    assert len(model.predict(asked(folders))) == len(asked(folders))


# ---------------------------------------------------------------------------------------------- teaching on


def test_instant_on_a_trained_model_is_exact_and_trains_nothing(folders, taught):
    one, other = Model.load(taught), Model.load(taught)
    before = {name: tensor.copy() for name, tensor in tensors(one).items()}
    old = one.knowledge.classes["apple"]
    one.learn(folders["second"])
    for place in sorted(folders["second"].iterdir(), reverse=True):
        other.learn(place, place.name)
    assert np.array_equal(one.predict_proba(asked(folders)), other.predict_proba(asked(folders)))
    assert all(np.array_equal(tensor, tensors(one)[name]) for name, tensor in before.items())
    assert one.knowledge.classes["apple"] is old and one.show()["moved"] == [] and one.effort == taught.stem


def test_training_on_moves_the_memory_and_undo_brings_all_of_it_back(folders, taught, tmp_path):
    model = Model.load(taught)
    before, answers = model.knowledge, model.predict_proba(asked(folders))
    report = model.learn(folders["second"], effort=model.effort)
    assert report.new_classes == tuple(SECOND) and model.show()["moved"] == FIRST
    assert model.history[-1].effort == model.effort
    for name in FIRST:
        old, now = before.classes[name], model.knowledge.classes[name]
        assert np.array_equal(old.ids, now.ids) and not np.array_equal(old.kept, now.kept)
        assert np.abs(now.kept.sum(0) - now.total).max() <= IMAGES  # the mean moved like the images
    # where the memory says the old images are now is nearer to where they are than where they were
    names = {name: sorted((folders["first"] / name).glob("*.png")) for name in FIRST}
    truly = {name: model.embed(files).mean(0) for name, files in names.items()}
    moved = sum(np.linalg.norm(model.knowledge.classes[n].mean - truly[n]) for n in FIRST)
    stale = sum(np.linalg.norm(before.classes[n].mean - truly[n]) for n in FIRST)
    assert moved < stale

    model = Model.load(model.save(tmp_path / "four.vqp"))
    model.undo()
    model = Model.load(model.save())
    assert model.classes == tuple(FIRST) and model.effort == taught.stem
    assert np.array_equal(model.predict_proba(asked(folders)), answers)


def test_an_instant_model_can_be_trained_later_and_undone(fresh, folders):
    model = fresh()
    model.learn(folders["first"])
    answers = model.predict_proba(asked(folders))
    model.learn(folders["second"], effort="good")
    assert model.effort == "good" and set(model.classes) == set(FIRST + SECOND) and model.show()["moved"] == FIRST
    assert all(model.knowledge.classes[name].unseen.all() for name in FIRST)  # nothing was trained on these
    model.undo()
    assert model.effort == "instant" and np.array_equal(model.predict_proba(asked(folders)), answers)


def test_another_kind_of_training_is_refused_with_a_reason(folders, taught):
    model = Model.load(taught)
    other = "best" if model.effort == "good" else "good"
    with pytest.raises(UserError, match=f"{other}.*cannot follow effort '{model.effort}'.*or instant"):
        model.learn(folders["second"], effort=other)
    with pytest.raises(UserError, match="unknown; the efforts are instant, good, best, auto"):
        model.learn(folders["second"], effort="perfect")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("one", "with one class there is nothing to tell apart"), ("few", "4 images of 2 classes are too few")],
)
def test_what_cannot_train_anything_is_learned_at_once_and_said(fresh, folders, folder, reason):
    model = fresh()
    report = model.learn(folders[folder], effort="good")
    assert report.effort == model.effort == "instant" and any(reason in note for note in report.notes)


def test_auto_trains_if_the_expected_gain_is_worth_its_time_and_says_both_first(fresh, folders, taught, monkeypatch):
    plans = []
    easy, hard, later = fresh(), fresh(), Model.load(taught)
    monkeypatch.setattr(teaching, "WORTH", 1.0)
    report = easy.learn(folders["first"], effort="auto", announce=plans.append)
    instant = fresh()
    instant.learn(folders["first"])
    assert report.effort == plans[0].effort == "instant" and plans[0].seconds > 0
    assert plans[0].gain == pytest.approx(efforts.REMOVED * (1 - instant.accuracy))
    assert np.array_equal(easy.predict_proba(asked(folders)), instant.predict_proba(asked(folders)))
    monkeypatch.setattr(teaching, "WORTH", 0.0)
    assert hard.learn(folders["first"], effort="auto", announce=plans.append).effort == plans[1].effort == "best"
    assert later.learn(folders["second"], effort="auto", announce=plans.append).effort == later.effort == taught.stem
    assert plans[2].gain < efforts.REMOVED / 2, "half of the classes are old"


def test_an_interrupted_training_leaves_the_model_as_it_was(folders, taught):
    model = Model.load(taught)
    before = model.knowledge

    def interrupt(event):
        if event.stage == "learning" and event.done > event.total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.learn(folders["second"], effort=model.effort, progress=interrupt)
    assert model.knowledge is before
    model.learn(folders["second"])  # and it can be taught again


def test_training_that_does_not_pay_is_dropped_and_said(folders, taught, monkeypatch):
    monkeypatch.setattr(trained, "pays", lambda without, measured: False)
    model, instant = Model.load(taught), Model.load(taught)
    report = model.learn(folders["second"], effort=model.effort)
    instant.learn(folders["second"])
    assert report.effort == "instant" and model.show()["moved"] == []
    assert any(note.startswith("nothing was trained: of the held-out images") for note in report.notes)
    assert np.array_equal(model.predict_proba(asked(folders)), instant.predict_proba(asked(folders)))
    assert model.accuracy == instant.accuracy


def test_training_that_is_too_much_is_halved(folders, taught, monkeypatch):
    whole, half = Model.load(taught), Model.load(taught)
    before = tensors(whole)
    whole.learn(folders["second"], effort=whole.effort)
    answers = iter([False, True])
    monkeypatch.setattr(trained, "pays", lambda without, measured: next(answers))
    report = half.learn(folders["second"], effort=half.effort)
    assert "50% of the training was kept: the memory of other classes does not bear more" in report.notes
    name = "pool.prompts" if whole.effort == "good" else "vit.norm.weight"
    np.testing.assert_allclose(tensors(half)[name], (before[name] + tensors(whole)[name]) / 2, rtol=1e-5, atol=1e-6)
    assert half.show()["moved"] == FIRST


def test_training_pays_unless_it_is_worse_than_chance_explains():
    def measured(right: int) -> Measurements:
        return Measurements(right / 100, {"a": (right, 100)}, (0.0, 0.0))

    assert REAL_PAYS(measured(80), measured(77)) and not REAL_PAYS(measured(80), measured(75))
    assert REAL_PAYS(None, measured(75)), "nothing was held out, so nothing speaks against it"


def test_repeated_lessons_of_the_same_classes_do_not_wear_out_the_memory(fresh, tmp_path, monkeypatch):
    """Ten lessons, each with four more images of each class."""
    monkeypatch.setattr(trained, "pays", REAL_PAYS)
    lessons = [write_drawings(tmp_path / str(n), FIRST + SECOND, range(4 * n, 4 * n + 4)) for n in range(10)]
    unseen = write_drawings(tmp_path / "unseen", FIRST + SECOND, range(40, 100))
    files = sorted(unseen.rglob("*.png"))
    right = {}
    for effort in ("instant", "good"):
        model = fresh()
        for lesson in lessons:
            model.learn(lesson, effort=effort)
        answers = model.predict(files, unknown=False)
        right[effort] = np.array([answer == file.parent.name for answer, file in zip(answers, files, strict=True)])
    change = right["good"].astype(float) - right["instant"]
    assert change.mean() > -2 * change.std() / len(change) ** 0.5, "worse than chance explains"


# ---------------------------------------------------------------------------------------------- what it says


def test_the_file_says_what_was_trained(taught):
    with safe_open(taught, "np") as file:
        metadata, names = file.metadata(), set(file.keys())
        described = json.loads(metadata["model"])
        kept = sum(record["kept"] for record in described["records"])
        assert file.get_tensor("unseen").shape == (kept,) and file.get_tensor("unseen").dtype == np.uint8
    (training,) = described["trained"]
    assert metadata["version"] == "4" and described["versions"][-1]["trained"] == 0
    assert training["effort"] == taught.stem
    own = {name for name in names if name.startswith("trained.0.")}
    if taught.stem == "good":
        assert own == {"trained.0.pool.prompts"} and training["method"] == "moving-prompts"
    else:
        assert {"trained.0.up0", "trained.0.down23", "trained.0.vit.norm.weight"} <= own
        assert not any(name.endswith(("qkv.weight", "fc1.weight", "pos_embed")) for name in own)


def test_training_that_does_not_fit_its_method_is_refused(taught):
    from vqprompt.core.backbones.load import load_backbone
    from vqprompt.core.backbones.weights import read_weights
    from vqprompt.product.model.onnx_features import OnnxFeatures

    model = Model.load(taught)
    kept, weights, vit = model.knowledge.trained, read_weights(model.weights), load_backbone(model.weights)
    with_more = {**kept.tensors, "nothing": np.zeros(3, np.float32)}
    with_less = dict(list(kept.tensors.items())[1:])
    huge = {**kept.options, "pool": 10**12, "rank": 10**12}  # nothing of that size is ever made
    for wrong, words in (
        (replace(kept, tensors=with_more), r"'nothing' is \(.*\) and should be missing"),
        (replace(kept, tensors=with_less), "is missing and should be"),
        (replace(kept, options=huge), "pool=1000000000000"),
    ):
        with pytest.raises(UserError, match=words):
            OnnxFeatures(weights, None, 0.875, wrong)
        with pytest.raises(UserError, match=words):
            trained.build(vit, wrong)


# ---------------------------------------------------------------------------------------------- parts


def test_a_record_moves_with_a_linear_map_and_its_images_scatter_by_the_doubt():
    rng = np.random.default_rng(0)
    names, features = np.arange(300, dtype=np.uint64), rng.normal(size=(300, 6))
    record = ClassRecord.of(names, to_fixed_point(features), np.arange(300) % 3 == 0)
    matrix, shift = rng.normal(size=(6, 6)), rng.normal(size=6)
    moved = record.moved(lambda x: x @ matrix + shift, np.zeros((256, 6)))
    np.testing.assert_allclose(moved.mean, record.mean @ matrix + shift, atol=STEP)
    np.testing.assert_allclose(moved.features, record.features @ matrix + shift, atol=STEP)
    doubted = record.moved(lambda x: x @ matrix + shift, 3 + 2 * rng.normal(size=(256, 6)))
    assert np.array_equal(doubted.total, moved.total)
    added = doubted.features - moved.features
    np.testing.assert_allclose(added.mean(0), 0, atol=STEP)
    np.testing.assert_allclose(added.std(0), 2, rtol=0.15)
    assert moved.count == 300 and len(moved.kept) == 256 and np.array_equal(moved.unseen, record.unseen)


def test_remembered_images_are_as_far_apart_as_images_would_be_now():
    """Also where no map tells how each image moves: otherwise old classes seem easier to recognize than they are."""
    random = np.random.default_rng(0)
    centers, labels = random.normal(size=(9, 6)) * 4, np.repeat(np.arange(8), 40)

    def images(of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = centers[of] + random.normal(size=(len(of), 6))
        return before, 1.1 * before + 0.2 + 0.7 * random.normal(size=before.shape)

    (old, now), (known, wanted) = images(labels), images(np.full(200, 8))
    record = ClassRecord.of(np.arange(200, dtype=np.uint64), to_fixed_point(known))
    moved = trained.move_records({"known": record}, old, now, labels, seed=0)["known"]
    assert np.trace(np.cov(moved.features.T)) == pytest.approx(np.trace(np.cov(wanted.T)), rel=0.1)
    assert moved.mean == pytest.approx(wanted.mean(0), abs=0.25)


def test_many_pictures_lie_in_a_file_without_a_name_or_in_memory(fresh, folders, monkeypatch, tmp_path):
    monkeypatch.setenv("VQPROMPT_HOME", str(tmp_path))
    monkeypatch.setattr(ingest, "IN_MEMORY", 3 * 32 * 32 * 5)
    opened, make = [], ingest.temporary_file
    monkeypatch.setattr(ingest, "temporary_file", lambda: opened.append(make()) or opened[-1])
    models = {}
    for on_disk in (True, False):
        models[on_disk] = fresh()
        models[on_disk].learn(folders["first"], effort="good", on_disk=on_disk)
        assert len(opened) == 1 and opened[0].closed
        assert not any(file.name.startswith(".temporary") for file in tmp_path.iterdir())
    assert np.array_equal(*(model.predict_proba(asked(folders)) for model in models.values()))


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_says_how_long_and_what_was_done(folders, tiny_weights, command, tmp_path):
    model = tmp_path / "drawings.vqp"
    status, out, err = command("learn", model, folders["first"], "--backbone", tiny_weights, "--effort", "good")
    assert status == 0 and "16 images of 2 classes (2 new) at effort good: about" in err
    assert "accuracy now" in out
    status, out, _ = command("show", model)
    assert "effort good (prompts are trained)" in out and "at effort good" in out
    status, _, err = command("learn", model, folders["second"], "--effort", "best")
    assert status == 2 and "cannot follow" in err
    status, out, _ = command("forget", model, "apple")
    assert status == 0 and "To leave no trace, make a new model" in out


def test_all_broken_images_are_named_before_anything_is_learned(tiny_weights, command, tmp_path):
    folder = write_drawings(tmp_path / "images", FIRST, range(3))
    (folder / "apple" / "a.png").write_bytes(b"no image")
    (folder / "bicycle" / "b.png").write_bytes(b"\x89PNG no")
    (folder / "bicycle" / "c.png").write_bytes(b"")
    status, _, err = command("learn", tmp_path / "m.vqp", folder, "--backbone", tiny_weights)
    assert status == 2 and "3 of 9 images cannot be used" in err and "--skip-broken" in err
    assert all(name in err for name in ("a.png", "b.png", "c.png")) and "about" not in err
    assert not (tmp_path / "m.vqp").exists()
    status, out, _ = command("learn", tmp_path / "m.vqp", folder, "--backbone", tiny_weights, "--skip-broken")
    assert status == 0 and "learned 6 images" in out and out.count("left out:") == 3
