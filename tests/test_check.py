"""Before teaching: copies, doubtful labels, strangers, unreadable and tiny images; a page and a list."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from drawings import drawings, write_drawings
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from vqprompt import Model
from vqprompt.product.check.check import check, near_pairs
from vqprompt.product.check.copies import ALIKE, likeness, small_grey
from vqprompt.product.check.doubts import find_doubts, noticed
from vqprompt.product.check.findings import Kind
from vqprompt.product.check.neighbours import nearest
from vqprompt.product.check.pixels import faults, look_at, unusual

NAMES = ["apple", "bicycle", "cactus"]
TINY = {"size": 56, "device": "cpu"}


def photograph(seed: int, side: int = 160) -> Image.Image:
    """Smooth colours at random, as different from each other as photographs are."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8))
    return coarse.resize((side, side), Image.Resampling.BICUBIC)


# ---------------------------------------------------------------------------------------------- neighbours


def test_neighbours_of_few_rows_are_exact():
    rows = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    places, similar = nearest(rows, 4)
    table = rows @ rows.T
    np.fill_diagonal(table, -np.inf)
    assert np.array_equal(places, np.argsort(-table, axis=1)[:, :4])
    np.testing.assert_allclose(similar, -np.sort(-table, axis=1)[:, :4], atol=1e-6)


def test_neighbours_of_many_rows_are_found_nearly_all_and_each_once():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(100, 32))
    rows = (centers[np.arange(3000) % 100] + 0.3 * rng.normal(size=(3000, 32))).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    places, similar = nearest(rows, 10)
    exact = rows @ rows.T
    np.fill_diagonal(exact, -np.inf)
    best = np.argsort(-exact, axis=1)[:, :10]
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(places, best, strict=True)]) > 0.8
    assert all(len({*row}) == 10 for row in places) and (np.diff(similar, axis=1) <= 0).all()
    assert not (places == np.arange(3000)[:, None]).any()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_neighbours_of_hardly_any_rows(n):
    places, similar = nearest(np.eye(n, 8, dtype=np.float32), 3)
    assert (places[:, : n - 1] >= 0).all() and (places[:, n - 1 :] == -1).all()
    assert np.isneginf(similar[:, n - 1 :]).all()


def test_equal_rows_do_not_hang_the_trees():
    places, _ = nearest(np.ones((2000, 4), np.float32) / 2, 3)
    assert (places >= 0).all()


# ---------------------------------------------------------------------------------------------- copies


def test_altered_copies_are_alike_and_other_images_are_not():
    for seed in range(8):
        image = photograph(seed)
        packed = io.BytesIO()
        image.resize((90, 90)).save(packed, "JPEG", quality=30)
        altered = [Image.open(packed), ImageOps.mirror(image), image.crop((9, 13, 148, 150)), image.convert("L")]
        for copy in altered:
            assert likeness(small_grey(image), small_grey(copy)) >= ALIKE
        assert likeness(small_grey(image), small_grey(photograph(seed + 100))) < ALIKE


def test_blank_images_are_not_called_copies():
    white, grey = np.full((48, 48), 255, np.uint8), np.full((48, 48), 128, np.uint8)
    assert likeness(white, grey) == 0 == likeness(white, white)


def test_near_pairs_need_both_features_and_pixels():
    features = np.array([[1, 0.0], [1, 0.01], [0, 1]])
    grey = np.stack([small_grey(photograph(s)) for s in (0, 1, 0)])
    assert near_pairs(features, grey) == []
    assert [pair[:2] for pair in near_pairs(features, grey[[0, 0, 1]])] == [(0, 1)]


# ---------------------------------------------------------------------------------------------- doubts


def clusters(classes: int, each: int, seed: int = 0, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    return 6 + 2 * rng.normal(size=(classes, width))[labels] + 0.5 * rng.normal(size=(len(labels), width)), labels


@pytest.mark.parametrize("each", [8, 60])
def test_swapped_labels_are_found(each):
    x, y = clusters(10, each)
    rng = np.random.default_rng(1)
    bad = np.zeros(len(y), bool)
    bad[rng.choice(len(y), len(y) // 20, replace=False)] = True
    wrong = np.where(bad, (y + 1 + rng.integers(0, 9, len(y))) % 10, y)
    seen = find_doubts(x, wrong, 10)
    hits = seen.mislabelled & bad
    assert hits.sum() >= 0.75 * bad.sum() and hits.sum() >= 0.9 * seen.mislabelled.sum()
    assert np.array_equal(seen.likelier[hits], y[hits])


def test_strangers_are_found_also_when_they_are_many():
    x, y = clusters(6, 40)
    x[::20] = -6 + np.random.default_rng(3).normal(size=x[::20].shape)
    seen = find_doubts(x, y, 6)
    assert seen.strange[::20].all() and seen.strange.sum() <= len(x) // 20 + 3


def test_clean_images_raise_no_doubt():
    x, y = clusters(8, 30)
    seen = find_doubts(x, y, 8)
    assert not seen.mislabelled.any() and seen.strange.mean() < 0.01


def test_one_image_per_class_and_one_class_are_no_trouble():
    x, y = clusters(5, 1)
    assert not find_doubts(x, y, 5).mislabelled.any()
    x, y = clusters(1, 12)
    assert not find_doubts(x, y, 1).mislabelled.any()
    assert not find_doubts(np.ones((6, 4)), np.array([0, 0, 0, 1, 1, 1]), 2).strange.any()


# ---------------------------------------------------------------------------------------------- pixels


def test_blank_dark_over_exposed_and_blurred_images_and_screenshots_are_found_among_good_ones():
    def detailed(seed: int) -> Image.Image:
        noise = np.random.default_rng(seed).normal(0, 8, (160, 160, 1))
        return Image.fromarray(np.clip(np.asarray(photograph(seed)) + noise, 0, 255).astype(np.uint8))

    good = [detailed(seed) for seed in range(100)]
    for number, sky in enumerate(((255, 255, 255), (120, 200, 255))):  # neither is over-exposed
        good[number].paste(sky, (0, 0, 160, 100))
    good[2] = ImageOps.expand(good[2], 16, "black")  # a frame is no screenshot
    pixels = [np.asarray(detailed(200 + seed), float) for seed in range(2)]
    screen = Image.new("RGB", (480, 300), (30, 31, 36))
    screen.paste((70, 110, 180), (0, 0, 480, 60))
    screen.paste((60, 62, 70), (0, 60, 100, 300))
    screen.paste(detailed(203), (240, 100))
    bad = {
        Kind.BLANK: [Image.new("RGB", (90, 60), colour) for colour in ("black", "white")],
        Kind.DARK: [Image.fromarray((0.15 * pixels[0]).astype(np.uint8))],
        Kind.BRIGHT: [Image.fromarray(np.clip(pixels[1] * times, 0, 255).astype(np.uint8)) for times in (2, 3)],
        Kind.BLURRED: [detailed(202).filter(ImageFilter.GaussianBlur(14))],
        Kind.FOREIGN: [screen],
    }
    wanted = [kind for kind, images in bad.items() for _ in images]
    looks = [look_at(image) for image in (*good, *(image for images in bad.values() for image in images))]
    assert {(row - 100, kind) for row, kind, _ in faults(looks)} == set(enumerate(wanted))
    assert not list(faults(looks[:100]))


def test_crooked_scans_are_told_from_things_on_plain_ground():
    page = Image.new("RGB", (300, 420), "ivory")
    page.paste((40, 40, 45), (60, 60, 200, 66))
    for angle in (-25, -8, 3, 12):
        scan = page.rotate(angle, expand=True, resample=Image.Resampling.BICUBIC, fillcolor=(90, 90, 95))
        assert look_at(scan).crooked and look_at(scan.rotate(90, expand=True)).crooked
        assert not look_at(ImageOps.expand(scan, 8, (90, 90, 95))).crooked  # a card on a table
    round_thing = Image.new("RGB", (300, 300))
    ImageDraw.Draw(round_thing).ellipse((0, 0, 299, 299), "green")
    assert not any(look_at(image).crooked for image in (page, round_thing, photograph(0)))


def test_what_is_usual_in_a_folder_is_no_fault():
    paper = [look_at(Image.fromarray(image)) for image in drawings()[0][:, 0]]
    assert not list(faults(paper)) and unusual(paper).max() < 3
    blank = [look_at(Image.new("RGB", (30, 30), (shade, shade, shade))) for shade in range(0, 200, 10)]
    assert not list(faults([*blank, *paper]))


def test_screenshots_scans_and_drawings_among_photographs_are_of_another_kind(tmp_path):
    for c in range(3):
        for seed in range(20):
            (tmp_path / str(c)).mkdir(exist_ok=True)
            photograph(100 * c + seed).save(tmp_path / str(c) / f"{seed}.png")
    assert not any(f.kind is Kind.FOREIGN for f in check(tmp_path, **TINY).findings)
    screen, dark, page = (Image.new("RGB", (160, 120), shade) for shade in ((244, 244, 246), (30, 31, 36), "ivory"))
    screen.paste((40, 90, 170), (0, 0, 160, 12))
    dark.paste((45, 46, 52), (0, 0, 40, 120))
    for line in range(20, 110, 8):
        screen.paste((60, 60, 60), (40, line, 60 + line, line + 3))
        dark.paste((205, 205, 210), (50, line, 70 + line // 2, line + 3))
        page.paste((40, 40, 45), (12, line, 150 - line % 37, line + 3))
    planted = {
        "screenshot": screen, "dark screenshot": dark,
        "drawing": Image.fromarray(drawings()[0][3, 0]).resize((160, 160)),
        "scan on its side": page.rotate(90, expand=True), "crooked scan": page.rotate(7, expand=True, fillcolor="grey"),
    }  # fmt: skip
    for number, (name, image) in enumerate(planted.items()):
        image.save(tmp_path / str(number % 3) / f"{name}.png")
    foreign = {Path(f.where).stem for f in check(tmp_path, **TINY).findings if f.kind is Kind.FOREIGN}
    assert foreign == planted.keys()


# ---------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Photographs of three colours, with every fault there is."""
    home = tmp_path_factory.mktemp("faults")
    for c, name in enumerate(("red", "green", "blue")):
        (home / name).mkdir()
        for i in range(9):
            pixels = np.asarray(photograph(100 * c + i)) // 3
            pixels[..., c] += 160
            Image.fromarray(pixels).save(home / name / f"{i}.png")
    shutil.copy(home / "red" / "1.png", home / "red" / "again.png")
    shutil.copy(home / "red" / "2.png", home / "blue" / "twin.png")
    Image.open(home / "green" / "3.png").crop((8, 8, 150, 152)).convert("RGB").save(home / "green" / "crop.jpg")
    (home / "green" / "broken.png").write_bytes(b"no image")
    Image.open(home / "blue" / "4.png").resize((9, 9)).save(home / "blue" / "dwarf.png")
    (home / "lone & <b>odd").mkdir()
    photograph(999).save(home / "lone & <b>odd" / "<script>alert(1).png")
    return home


@pytest.fixture(scope="module")
def found(folder):
    return check(folder, **TINY)


def kinds(found, name: str) -> set[Kind]:
    return {f.kind for f in found.findings if Path(f.where).name == name}


def test_every_fault_is_found(found):
    assert Kind.SAME in kinds(found, "again.png")
    assert Kind.SAME_TWO_CLASSES in kinds(found, "twin.png")
    assert {f.where.split("/")[-2] for f in found.findings if f.kind is Kind.SAME_TWO_CLASSES} == {"red", "blue"}
    assert Kind.UNREADABLE in kinds(found, "broken.png")
    assert Kind.TINY in kinds(found, "dwarf.png")
    assert Kind.NEAR in kinds(found, "crop.jpg") | kinds(found, "3.png")
    assert found.few == (("lone & <b>odd", 1),)
    assert [f.doubt for f in found.findings] == sorted((f.doubt for f in found.findings), reverse=True)


def test_nothing_is_moved_and_the_list_is_what_learn_takes(folder, tmp_path, command):
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    status, out, _ = command("check", folder, "--out", tmp_path, "--size", 56)
    assert status == 0 and "broken.png: cannot be read" in out and "learn --exclude" in out
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"check.html", "exclude.txt"}
    model = tmp_path / "colours.vqp"
    status, _, err = command("learn", model, folder, "--size", 56)
    assert status == 2 and not model.exists()  # the broken one, and the one in two classes
    status, out, err = command("learn", model, folder, "--size", 56, "--exclude", tmp_path / "exclude.txt")
    assert status == 0, err
    assert sum(Model.load(model).counts.values()) <= 27


def test_the_page_is_safe_and_whole(folder, found, tmp_path):
    from vqprompt.product.check.findings import write_page

    page = write_page(found, tmp_path / "check.html", "a <b>folder</b>", tmp_path / "exclude.txt").read_text()
    assert "<script" not in page and "a <b>" not in page and "&lt;b&gt;odd" in page
    assert "default-src 'none'" in page and "data:image/jpeg" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_json(folder, tmp_path, command):
    status, out, _ = command("check", folder, "--out", tmp_path, "--size", 56, "--json")
    told = json.loads(out)
    assert (
        status == 0
        and told["images"] == 33
        and {"unreadable", "same"} <= {f["kind"] for f in told["findings"]}
        and told["few"] == [{"class": "lone & <b>odd", "images": 1}]
    )


def test_copies_between_training_and_test(tmp_path):
    for part, seeds in (("train", range(8)), ("test", range(50, 53))):
        for name, offset in (("a", 0), ("b", 1000)):
            (tmp_path / part / name).mkdir(parents=True)
            for seed in seeds:
                photograph(seed + offset).save(tmp_path / part / name / f"{seed}.png")
    shutil.copy(tmp_path / "test" / "a" / "50.png", tmp_path / "train" / "a" / "leak.png")
    ImageOps.mirror(Image.open(tmp_path / "test" / "b" / "51.png")).save(tmp_path / "train" / "b" / "mirror.png")
    archive = shutil.make_archive(str(tmp_path.with_name("packed")), "zip", tmp_path)
    sources = ({"source": tmp_path}, {"source": tmp_path / "train", "test": tmp_path / "test"}, {"source": archive})
    for source in sources:
        found = check(**source, **TINY)
        assert found.images == 24 and not found.notes
        told = {Path(f.where).name: f.kind for f in found.findings if "test" in f.kind}
        assert told == {"leak.png": Kind.SAME_TEST, "mirror.png": Kind.NEAR_TEST}


def test_a_model_helps_to_judge_few_images(tmp_path):
    model = Model(**TINY)
    model.learn(write_drawings(tmp_path / "known", NAMES, range(20)))
    new = write_drawings(tmp_path / "new", ["apple"], [30])
    shutil.copy(tmp_path / "known" / "bicycle" / "3.png", new / "apple" / "learned.png")
    found = check(new, model=model)
    told = [f for f in found.findings if f.where.endswith("learned.png")]
    assert told and told[0].kind is Kind.SAME_TWO_CLASSES and told[0].likelier == "bicycle"
    assert found.few == ()  # with what the model knows there are enough


def test_what_learn_notices_is_one_line():
    from vqprompt.product.model.records import ClassRecord, to_fixed_point

    x, y = clusters(5, 30)
    names = np.arange(len(x), dtype=np.uint64)
    clean = {str(c): ClassRecord.of(names[y == c], to_fixed_point(x[y == c])) for c in range(5)}
    assert noticed(clean, ["0"]) is None
    y[0] = 3
    odd = {str(c): ClassRecord.of(names[y == c], to_fixed_point(x[y == c])) for c in range(5)}
    line = noticed(odd, ["3"])
    assert line and "1 look like another class" in line and "\n" not in line
    assert noticed(odd, ["1"]) is None and noticed({}, []) is None


def test_what_learn_notices_does_not_take_all_classes_of_a_large_model(monkeypatch):
    from vqprompt.product.check import doubts
    from vqprompt.product.model.records import ClassRecord, to_fixed_point

    x, y = clusters(60, 10)
    y[10 * 45] = 3  # of class 45, whose mean is not among those that class 3 is nearest to
    names = np.arange(len(x), dtype=np.uint64)
    classes = {f"{c:02}": ClassRecord.of(names[y == c], to_fixed_point(x[y == c])) for c in range(60)}
    monkeypatch.setattr(doubts, "RIVALS", 12)
    compared = []
    monkeypatch.setattr(doubts, "find_doubts", lambda *given: compared.append(given[2]) or find_doubts(*given))
    line = noticed(classes, ["03"])
    assert line and "1 look like another class" in line and compared == [13]


def test_where_nothing_can_be_written_no_image_is_looked_at(folder, tmp_path, command, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("vqprompt.product.check.check.check", lambda *given, **named: pytest.fail("it has begun"))
    status, _, err = command("check", folder, "--out", tmp_path / "file" / "inside")
    assert status == 2 and "is a file; give a folder" in err


def test_bad_input_in_words(tmp_path, command):
    assert "no such folder" in command("check", tmp_path / "nowhere")[2]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"")
    status, out, _ = command("check", tmp_path, "--out", tmp_path / "out", "--size", 28)
    assert status == 0 and "cannot be read" in out
