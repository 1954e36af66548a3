"""A model that was corrected is the one that was taught correctly from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from drawings import drawings, write_drawings
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load, save
from serving import drawn, serving

from vqprompt import Model
from vqprompt.core.errors import UserError
from vqprompt.product.model import records as record_module
from vqprompt.product.model.file import checksum, parse_metadata
from vqprompt.product.model.pictures import content_id, own_test_pictures

WIDTH, CLASSES = 12, ("ant", "bee", "cat", "dog")


class Colors:
    """Features of images that are one color each: random, but the same for the same color. Reds are near each other."""

    fingerprint, size, width, precision = "0" * 16, 28, WIDTH, "fp32"
    at_once = 1

    def of(self, pictures):
        for picture in pictures:
            pixels = picture.open() if picture.decoded is None else picture.decoded()[0].transpose(1, 2, 0)
            kind, number = int(pixels[..., 0].flat[0]), int(pixels[..., 1].flat[0])
            rng = np.random.default_rng([kind, number])
            yield (np.random.default_rng(kind).normal(0, 3, WIDTH) + rng.normal(0, 1, WIDTH)).astype(np.float32)

    def of_one(self, picture):
        return next(self.of([picture]))


def image(kind: int, number: int) -> np.ndarray:
    return np.full((28, 28, 3), (kind, number, 0), np.uint8)


def new_model() -> Model:
    return Model("vit-s14", size=28, device="cpu", opener=lambda *_: Colors())


def taught(labels: dict[tuple[int, int], str]) -> Model:
    """One class after another, in the order of names; the counterexamples last."""
    model = new_model()
    for name in sorted(set(labels.values()), key=lambda name: (name == "unknown", name)):
        images = [image(*key) for key, label in labels.items() if label == name]
        model.learn(images, None if name == "unknown" else name, as_unknown=name == "unknown")
    return model


def content(model: Model) -> dict[str, bytes]:
    """Everything that answers depend on, to the bit."""
    known, bits = model.knowledge, {}
    for name, record in known.records.items():
        parts = (record.ids, record.total, record.kept, record.modes, record.unseen)
        bits[name] = b"".join(part.tobytes() for part in parts)
    if (s := known.solution) is not None:
        tensors = [s.discriminant.weights, s.discriminant.bias, s.background.matrix, s.background.vector, s.gram]
        tensors += [] if s.against is None else [s.against.weights, s.against.bias]
        bits["solution"] = b"".join(t.tobytes() for t in tensors)
        bits["numbers"] = repr((float(s.background.constant), s.shrinkage, s.calibration, s.measurements)).encode()
    return bits


KEYS = [(kind, number) for kind in (10, 60, 120, 200) for number in range(5)]
LABELS = st.fixed_dictionaries({key: st.sampled_from((*CLASSES, "unknown", "")) for key in KEYS})


@settings(max_examples=40)
@given(first=LABELS, then=LABELS, data=st.data())
def test_a_corrected_model_is_to_the_bit_the_one_taught_correctly(first, then, data):
    """From any labels to any others, by relabeling, unlearning and teaching in any order; then two are merged."""
    model = taught({key: label for key, label in first.items() if label})
    versions = [content(model)]
    for key in data.draw(st.permutations(KEYS)):
        before, now = first[key], then[key]
        if before == now:
            continue
        if not now:
            model.unlearn([image(*key)])
        elif before:
            model.relabel([image(*key)], now)
        else:
            model.learn([image(*key)], None if now == "unknown" else now, as_unknown=now == "unknown")
        versions.append(content(model))
    wanted = {key: label for key, label in then.items() if label}
    assert content(model) == content(taught(wanted))
    if len(model.classes) > 1:
        one, other = model.classes[0], model.classes[-1]
        model.merge([one, other], "both")
        wanted = {key: "both" if label in (one, other) else label for key, label in wanted.items()}
        assert content(model) == content(taught(wanted))
        model.undo()
    model = Model.from_bytes(model.to_bytes())  # with everything that can be undone
    for expected in versions[-2 : -1 - model.can_undo : -1]:
        model.undo()
        assert content(model) == expected


def test_a_preview_tells_what_the_correction_then_does_and_changes_nothing():
    right = {key: CLASSES[(10, 60, 120, 200).index(key[0])] for key in KEYS}
    model = taught(right | {(10, number): "bee" for number in range(5)})
    before = content(model), model.versions
    moved = [image(10, number) for number in range(5)]
    would = model.relabel(moved, "ant", preview=True)
    assert (content(model), model.versions) == before
    did = model.relabel(moved, "ant")
    assert did == would and did.classes == {"bee": 5} and did.new_name == "ant"
    assert did.changes.tested == 20 and did.accuracy == 1.0
    told = did.changes.to_json()
    assert {(a["label"], a["before"], a["now"]) for a in told["examples"]} == {("ant", "bee", "ant")}
    assert (told["changed"], told["better"], told["worse"]) == (len(told["examples"]),) * 2 + (0,) and told[
        "changed"
    ] >= 3
    assert "left-out images change their answer" in str(did.changes)
    assert str(model.history[-1]).startswith("relabeled 5 images of 'bee' → ant")
    model.relabel(moved, "wasp")
    model.rename("wasp", "hornet")
    assert all(told["taught"] for told in model.show()["classes"]), "also a class that was made of others' images"
    model.undo(2)

    fifth = [image(120, n) for n in range(5)]
    assert model.unlearn(fifth, preview=True).notes == ("no image of 'cat' is left, so it is no longer a class",)
    assert model.merge(["ant", "bee"], "insect", preview=True).changes.tested == 20
    would = model.learn([image(60, 9)], as_unknown=True, preview=True)
    assert would.changes.tested == 20 and model.counterexamples == 0 and model.classes == CLASSES


def test_counterexamples_are_never_an_answer_and_make_what_is_near_them_unknown():
    labels = {(kind, number): name for kind, name in zip((10, 60), CLASSES, strict=False) for number in range(12)}
    model = taught(labels)
    near = [image(120, number) for number in range(20, 32)]
    known = [image(10, number) for number in range(20, 32)]
    accepted = model.predict(known, unknown=True)
    model.learn([image(120, number) for number in range(9)], as_unknown=True)
    assert set(model.predict(near)) == {"unknown"} and model.classes == ("ant", "bee")
    assert model.predict(known) == accepted and model.predict_proba(near).shape == (12, 2)
    assert model.show()["counterexamples"] == 9 and set(model.predict(near, unknown=False)) <= {"ant", "bee"}

    loaded = Model.from_bytes(model.to_bytes())
    assert content(loaded) == content(model) and loaded.counterexamples == 9
    model.relabel([image(120, number) for number in range(9)], "cat")
    assert model.counterexamples == 0 and set(model.predict(near)) >= {"cat"}
    model.relabel([image(120, 0)], "unknown")
    model.forget("unknown")
    assert model.counterexamples == 0 and model.counts["cat"] == 8


def test_what_counterexamples_take_away_is_said_before_and_after_and_true_of_new_images():
    images, names = drawings()
    known = ("butterfly", "cactus", "eyeglasses", "house")
    rows = [images[names.index(name)] for name in known]
    model = Model(size=28, device="cpu")
    model.learn([image for row in rows for image in row[:20]], [name for name in known for _ in range(20)])
    new = [image for row in rows for image in row[50:75]]
    before = np.mean(np.array(model.predict(new)) == "unknown")
    stars = [*images[names.index("star"), :20]]
    would = model.learn(stars, as_unknown=True, preview=True)
    did = model.learn(stars, as_unknown=True)
    assert did.warnings == would.warnings and {w.name for w in did.warnings} == {"unknown"}
    assert str(did.warnings[0]).startswith("unknown takes ") and " of 20 left-out images of " in str(did.warnings[0])
    lost = sum(a.now == "unknown" for a in would.changes.answers) / would.changes.tested
    more = np.mean(np.array(model.predict(new)) == "unknown") - before
    solution, x = model.knowledge.solution, model.embed(new)
    nearer = np.mean(solution.against.scores(x).max(1) > solution.discriminant.scores(x).max(1))
    assert abs(lost - nearer) < 0.15 and more > 0.05, (lost, nearer, more)

    model.forget("unknown")
    told = model.relabel([*rows[3][:5]], "barn").to_json()
    assert ("barn", "house", 15) in [(w["class"], w["from"], w["of"]) for w in told["warnings"]]
    assert told["accuracy_interval"][0] < told["accuracy"] < told["accuracy_interval"][1]


def test_what_is_taken_away_for_good_is_in_no_version_and_nothing_names_it(tmp_path):
    labels = {(kind, n): name for kind, name in zip((10, 60, 120), CLASSES, strict=False) for n in range(4)}
    model = taught(labels)
    gone = [image(10, 0), image(120, 0)]
    ids = [content_id(i).to_bytes(8, "little") for i in gone]
    model.relabel([gone[0]], "bee")
    path = model.save(tmp_path / "m.vqp")
    assert all(i in path.read_bytes() for i in ids)
    model.unlearn(gone)
    assert all(i in model.save(path).read_bytes() for i in ids)  # for undo
    model.undo()
    model.unlearn(gone, for_good=True)
    assert not any(i in model.save(path).read_bytes() for i in ids)
    assert model.counts == {"ant": 3, "bee": 4, "cat": 3}

    model.merge(["ant", "bee"], "insect")
    model.unlearn([image(120, n) for n in (1, 2, 3)], for_good=True)  # the last images of a class
    model.forget("insect", for_good=True)
    data = model.save(path).read_bytes()
    assert not any(f'"{name}"'.encode() in data for name in ("cat", "ant", "bee", "insect")) and model.classes == ()


def test_beyond_the_features_that_are_kept_it_is_exact_or_refused(monkeypatch):
    monkeypatch.setattr(record_module, "KEPT", 6)
    monkeypatch.setattr("vqprompt.product.model.correcting.KEPT", 6)
    keys = {(10, n): "ant" for n in range(9)} | {(60, n): "bee" for n in range(4)}
    model = taught(keys)
    kept = set(model.knowledge.classes["ant"].ids[:6].tolist())
    inside = [key for key in keys if key[0] == 10 and content_id(image(*key)) in kept]
    outside = [key for key in keys if key[0] == 10 and key not in inside]
    with pytest.raises(UserError, match="forget the class, and learn it again without this image"):
        model.unlearn([image(*inside[0])])
    with pytest.raises(UserError, match="give its file"):
        model.unlearn([content_id(image(*outside[0]))])
    model.relabel([image(*outside[0])], "bee")
    assert content(model) == content(taught({**keys, outside[0]: "bee"}))
    model.unlearn([image(*key) for key in (*outside[1:], inside[0])])
    left = {key: name for key, name in keys.items() if key not in (*outside, inside[0])} | {outside[0]: "bee"}
    assert content(model) == content(taught(left))


def test_wrong_corrections_are_refused_with_a_way_out(tmp_path):
    model = taught({(10, 0): "elephant", (10, 1): "elephant", (60, 0): "bee", (60, 1): "bee"})
    Image.fromarray(image(9, 9)).save(tmp_path / "never.png")
    before = content(model)
    for correct, words in (
        (lambda: model.relabel(tmp_path / "never.png", "bee"), "never.png: the model has not learned this image"),
        (lambda: model.unlearn([123]), "image 000000000000007b: the model has not learned"),
        (lambda: model.unlearn([]), "no image is given"),
        (lambda: model.rename("elefant", "x"), "did you mean 'elephant'"),
        (lambda: model.forget("Elephant"), "did you mean 'elephant'"),
        (lambda: model.merge(["bee", "elefant"], "x"), "did you mean 'elephant'"),
        (lambda: model.merge(["bee"], "x"), "two classes or more"),
        (lambda: model.rename("bee", "elephant"), "merge them"),
        (lambda: model.relabel([image(10, 0)], "Bee"), "spelled differently"),
        (lambda: model.learn([image(1, 1)], "bee", as_unknown=True), "leave out --as"),
        (lambda: model.learn([image(1, 1)], as_unknown=True, effort="good"), "effort instant"),
        (lambda: model.learn([image(10, 0)], "bee"), "vqprompt relabel"),
    ):
        with pytest.raises(UserError, match=words):
            correct()
    assert content(model) == before and model.can_undo == 2
    assert "nothing to do" in model.relabel([image(10, 0)], "elephant").notes[0] and model.can_undo == 2
    assert "another spelling of 'elephant'" in model.relabel([image(10, 0)], "elefant").notes[0]
    assert any("another spelling of 'elefant'" in note for note in model.learn([image(2, 2)], "elefants").notes)


def test_over_http_corrections_are_previewed_made_and_undone(tmp_path):
    folder = tmp_path / "drawings"
    for name in ("apple", "bicycle", "car"):
        drawn(folder, name, range(8))
    of = {name: sorted((folder / name).iterdir()) for name in ("apple", "bicycle", "car")}
    files = [("files", (p.name, p.read_bytes())) for p in of["car"]]
    with serving(tmp_path / "m.vqp") as client:
        client.teach(of["apple"], "apple")
        client.teach(of["bicycle"], "bicycle")
        job = client.wait(client.post("/models/m/teach", files=files, data={"as_unknown": "true", "preview": "true"}))
        assert job["result"]["changes"]["tested"] == 16 and client.about()["counterexamples"] == 0
        assert client.about()["version"] == 2
        job = client.wait(client.post("/models/m/teach", files=files, data={"as_unknown": "true"}))
        assert job["result"]["classes"] == [{"name": "unknown", "images": 8, "new": True}]
        assert client.about()["counterexamples"] == 8 and len(client.about()["classes"]) == 2
        listed = client.get("/models/m/images", params={"label": "unknown"}).json()
        assert listed["total"] == 8 and client.get(f"/models/m/thumbnails/{listed['images'][0]}").status_code == 200

        would = client.change("relabel", images=listed["images"], label="car", preview=True)["result"]
        assert client.about()["version"] == 3 and would["classes"] == {"unknown": 8} and would["new_name"] == "car"
        assert client.change("relabel", images=listed["images"], label="car")["result"] == would
        assert {c["name"]: c["images"] for c in client.about()["classes"]} == dict.fromkeys(of, 8)
        gone = listed["images"][:3]
        assert client.change("unlearn", images=gone, for_good=True)["result"]["classes"] == {"car": 3}
        assert client.get(f"/models/m/thumbnails/{gone[0]}").status_code == 404
        assert gone[0] not in client.get("/jobs").text
        assert client.change("merge", names=["apple", "car"], new="apple")["state"] == "done"
        assert client.change("undo")["result"]["undone"].startswith("merged 'apple', 'car' → apple")
        assert client.change("merge", names=["apple", "car"], new="fruit")["result"]["changes"]["tested"] == 21
        last = client.change("unlearn", images=gone)
        assert last["state"] == "failed" and "has not learned this image" in last["error"]
        for path, body, status, words in (
            ("relabel", {"images": ["x"], "label": "car"}, 422, "images"),
            ("relabel", {"images": gone, "label": "Fruit"}, 400, "spelled differently"),
            ("merge", {"names": ["bicycle", "fruits"], "new": "x"}, 400, "did you mean 'fruit'?"),
            ("unlearn", {"images": []}, 422, "images"),
        ):
            answer = client.post(f"/models/m/{path}", json=body)
            assert answer.status_code == status and words in answer.json()["error"], (path, answer.text)


def test_the_command_line_corrects_previews_and_asks(command, tmp_path):
    nested = tmp_path / "nested"
    folder = write_drawings(nested / "old", ["apple", "bicycle"], range(6))
    write_drawings(nested / "new", ["apple", "bicycle"], range(6, 9))
    model = tmp_path / "m.vqp"
    one, other = folder / "apple" / "0.png", folder / "bicycle"
    for arguments, words in (
        (("learn", model, one, other / "0.png"), "--as NAME"),
        (("learn", model, "https://example.com/birds"), "this is a URL"),
        (("learn", model, "https://example.com/a.png", "--as", "apple"), "this is a URL"),
        (("learn", model, nested), "outer folders ('new', 'old') or the inner ones ('apple', 'bicycle')"),
        (("check", nested), "--classes inner"),
    ):
        code, _, err = command(*arguments)
        assert code == 2 and words in err.replace("\n", " ") and not model.exists(), err
    code, out, _ = command("learn", model, other, "--as", "bicycle", "--size", 28)
    assert code == 0 and "knows only 'bicycle' and cannot tell it from others" in out
    code, out, err = command("learn", model, nested, "--classes", "inner")
    assert code == 0 and Model.load(model).counts == {"apple": 9, "bicycle": 9}, err

    assert "Give --classes outer" in command("test", model, nested, "--out", tmp_path)[2].replace("\n", " ")
    assert command("test", model, nested, "--classes", "inner", "--known-only", "--out", tmp_path)[0] == 0
    whole = tmp_path / "whole"
    shutil.copytree(nested, whole / "train")
    for part in ("new", "old"):
        write_drawings(whole / "test" / part, ["apple", "bicycle"], range(9, 12))
    archive = Path(shutil.make_archive(str(whole), "zip", whole))
    for source in (whole, archive):
        assert {picture.label for picture in own_test_pictures(source, "inner")} == {"apple", "bicycle"}
        assert "Give --classes outer" in command("test", model, source, "--out", tmp_path)[2].replace("\n", " ")
        assert command("test", model, source, "--classes", "inner", "--known-only", "--out", tmp_path)[0] == 0

    code, out, _ = command("relabel", model, one, "--as", "bicycle", "--preview")
    assert code == 0 and "nothing is changed" in out and Model.load(model).counts["apple"] == 9
    code, out, _ = command("relabel", model, one, "--as", "bicycle")
    assert "1 image moved to bicycle" in out and "left-out images" in out and Model.load(model).counts["apple"] == 8
    assert command("unlearn", model, one)[0] == 0 and Model.load(model).counts == {"apple": 8, "bicycle": 9}
    code, out, _ = command("learn", model, one, "--as-unknown")
    assert "1 counterexample" in out and "1 counterexample" in command("show", model)[1]
    assert "did you mean 'bicycle'?" in command("merge", model, "apple", "bycicle", "--as", "x")[2]
    code, out, _ = command("merge", model, "apple", "bicycle", "--as", "thing", "--json")
    assert code == 0 and json.loads(out)["classes"] == {"apple": 8, "bicycle": 9}
    assert command("undo", model)[0] == 0 and Model.load(model).classes == ("apple", "bicycle")


def test_a_file_whose_counterexamples_are_not_as_described_is_refused():
    model = taught({(10, 0): "ant", (10, 1): "ant", (60, 0): "bee", (60, 1): "bee", (120, 0): "unknown"})
    data = model.to_bytes()
    metadata, tensors = parse_metadata(data, Path("m")), load(data)
    for changes, words in (
        ({"against_bias": None}, "against_bias: it is missing"),
        ({"against_weights": tensors["against_weights"][:, :3].copy()}, "against_weights: it must be float32"),
        ({"against_bias": np.full(1, np.nan, np.float32)}, "against_bias.*: a value is no number"),
        ({"against_bias": np.zeros(9, np.float32), "against_weights": np.zeros((9, WIDTH), np.float32)}, "it must be"),
    ):
        wrong = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        packed = save(wrong, {**metadata, "checksum": checksum(metadata, wrong)})
        with pytest.raises(UserError, match=f"damaged: .*{words}"):
            Model.from_bytes(packed)
