"""The paper's data sets on small copies in the very layouts people have: what is missing is named, no pickle runs."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import tarfile
import urllib.error
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_vit
from PIL import Image

from vqprompt.core.data.decode import decode, to_pixels
from vqprompt.core.data.stream import Stream
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.progress import Stage
from vqprompt.research.datasets import DATASETS, common, open_dataset, parse_data, published
from vqprompt.research.datasets.common import Remote
from vqprompt.research.datasets.published import PUBLISHED, TABLES, list_cub200, read_list
from vqprompt.research.learner.learner import Learner
from vqprompt.research.methods import METHODS
from vqprompt.research.results.config import resolve

SIZE = 28
SHARED_CUB = Path(__file__).parents[2] / "shared" / "data" / "cub200.zip"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing leaves the machine, and a folder of one's own is not looked into."""
    monkeypatch.delenv("VQPROMPT_DATA", raising=False)

    def refuse(*given, **named):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


def expect(monkeypatch, name, **changes):
    """The counts of a small copy instead of the whole set's."""
    monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], **changes))


def jpeg(colour: tuple[int, int, int], size=(20, 16), kind="JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pack(folder: Path, target: Path, wrapper: str = "") -> Path:
    """A zip, or a tar packed as its suffix says."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            for file in files:
                archive.write(file, f"{wrapper}{file.relative_to(folder).as_posix()}")
    else:
        with tarfile.open(target, {".tgz": "w:gz", ".gz": "w:gz", ".tar": "w"}[target.suffix]) as archive:
            for file in files:
                archive.add(file, f"{wrapper}{file.relative_to(folder).as_posix()}")
    return target


def refused(data: str, match: str, seed: int = 0) -> str:
    with pytest.raises(UserError, match=match) as caught:
        open_dataset(data, SIZE, seed)
    return str(caught.value)


def same(a, b) -> bool:
    """The same images with the same labels and splits, in whatever order."""

    def rows(d):
        pixels = [hashlib.sha256(p.tobytes()).hexdigest() for p in d.store.pixels]
        return sorted(zip(pixels, d.labels.tolist(), d.is_test.tolist(), strict=True))

    return a.classes == b.classes and rows(a) == rows(b)


def write_parquet(path: Path, rows: dict, names: dict[str, list[str]] | None = None, group: int = 4) -> Path:
    """As the hub's `datasets` writes it: struct images, class names in the schema's metadata."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(rows)
    features = {n: {"names": names[n], "_type": "ClassLabel"} if n in (names or {}) else {} for n in rows}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)
    return path


def image_column(blobs: list[bytes], names: list[str] | None = None) -> list[dict]:
    return [{"bytes": blob, "path": name} for blob, name in zip(blobs, names or [None] * len(blobs), strict=True)]


# ---------------------------------------------------------------------------------------------- CIFAR-100

CIFAR_CLASSES = (0, 1, 26, 99)  # apple, aquarium_fish, crab, worm


def cifar_arrays(train: int = 6, test: int = 3) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Pixels [n, 3072] (red plane, green plane, blue plane) and fine labels, shuffled as they come."""
    rng, parts = np.random.default_rng(3), {}
    for split, count in (("train", train), ("test", test)):
        labels = rng.permutation(np.repeat(CIFAR_CLASSES, count))
        pixels = (labels[:, None] * 2 + rng.integers(0, 40, (len(labels), 3072))).astype(np.uint8)
        parts[split] = pixels, labels.tolist()
    return parts


class Python2Pickler(pickle._Pickler):
    """Strings as Python 2 wrote them, which is what the real archive holds."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_text(self, value: str | bytes) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        head = b"U" + struct.pack("<B", len(data)) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text


def python2_pickle(value) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, 2).dump(value)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def write_cifar_python(folder: Path) -> Path:
    for split, (pixels, labels) in cifar_arrays().items():
        batch = {
            "filenames": [f"image_s_{i:06}.png" for i in range(len(labels))],
            "batch_label": "training batch 1 of 1",
            "fine_labels": labels,
            "coarse_labels": [label % 20 for label in labels],
            "data": pixels,
        }
        write(folder / "cifar-100-python" / split, python2_pickle(batch))
    write(folder / "cifar-100-python" / "meta", python2_pickle({"fine_label_names": list(published.CIFAR_NAMES)}))
    write(folder / "cifar-100-python" / "file.txt~", b"")
    return folder


def write_cifar_parquet(folder: Path, image: str = "img") -> Path:
    names = {"fine_label": [n if n != "crab" else "cra" for n in published.CIFAR_NAMES]}  # sic, on the hub
    for split, (pixels, labels) in cifar_arrays().items():
        blobs = []
        for row in pixels:
            buffer = io.BytesIO()
            Image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0)).save(buffer, "PNG")
            blobs.append(buffer.getvalue())
        rows = {image: image_column(blobs), "fine_label": labels, "coarse_label": [n % 20 for n in labels]}
        write_parquet(folder / "cifar100" / f"{split}-00000-of-00001.parquet", rows, names)
    return folder


@pytest.fixture
def small_cifar(monkeypatch):
    expect(monkeypatch, "cifar100", classes=4, images=36, train=24)


@pytest.mark.usefixtures("small_cifar")
class TestCifar100:
    def test_every_layout_gives_the_same(self, tmp_path):
        python = write_cifar_python(tmp_path / "py")
        (tmp_path / "packed").mkdir()
        layouts = [
            python,
            python / "cifar-100-python",
            pack(python, tmp_path / "packed" / "cifar-100-python.tar.gz"),
            tmp_path / "packed",
            write_cifar_parquet(tmp_path / "hub"),
            write_cifar_parquet(tmp_path / "other hub", image="image"),
        ]
        first = open_dataset(f"cifar100={layouts[0]}", SIZE)
        assert first.classes == ["apple", "aquarium_fish", "crab", "worm"] and first.name == "cifar100"
        assert np.bincount(first.labels[~first.is_test]).tolist() == [6] * 4 and first.is_test.sum() == 12
        pixels, labels = cifar_arrays()["test"]
        rows = np.flatnonzero(first.is_test)
        assert [first.classes[c] for c in first.labels[rows]] == [published.CIFAR_NAMES[c] for c in labels]
        assert np.array_equal(first.store.pixels[rows].reshape(len(rows), -1), pixels), "unscaled, in the file's order"
        for layout in layouts[1:]:
            assert same(first, open_dataset(f"cifar100={layout}", SIZE)), layout
        assert open_dataset(f"cifar100={layouts[1]}", SIZE).store.fingerprint == first.store.fingerprint != ""

    def test_its_own_folder_is_looked_into(self, home, tmp_path, monkeypatch):
        write_cifar_python(home / "data" / "cifar100")
        assert len(open_dataset("cifar100", SIZE).labels) == 36
        monkeypatch.setenv("VQPROMPT_DATA", str(tmp_path))
        refused("cifar100", "not on this machine")
        write_cifar_python(tmp_path / "cifar100")
        assert len(open_dataset("cifar100", SIZE).labels) == 36

    @pytest.mark.parametrize(
        ("write", "file", "kept", "words"),
        [
            (write_cifar_python, "python/train", 0, "no file 'train' in it, as cifar-100-python"),
            (write_cifar_python, "python/test", 0, "no file 'test' in it, as cifar-100-python"),
            (write_cifar_parquet, "test-00000-of-00001.parquet", 0, "needs parquet files of both train and test"),
        ],
    )
    def test_what_is_missing_or_cut_off_is_named(self, tmp_path, write, file, kept, words):
        (path,) = (p for p in write(tmp_path).rglob("*") if p.as_posix().endswith(file))
        path.write_bytes(path.read_bytes()[:kept]) if kept else path.unlink()
        refused(f"cifar100={tmp_path}", words)

    def test_a_truncated_archive(self, tmp_path):
        archive = pack(write_cifar_python(tmp_path / "py"), tmp_path / "cifar-100-python.tar.gz")
        archive.write_bytes(archive.read_bytes()[:-4000])
        refused(f"cifar100={archive}", "damaged archive .*get it again")

    def test_what_is_missing_is_counted_and_named(self, tmp_path, monkeypatch):
        expect(monkeypatch, "cifar100", classes=100, images=60_000)
        names = tuple(published.CIFAR_NAMES[c] for c in (*CIFAR_CLASSES, 50))
        refused(f"cifar100={write_cifar_python(tmp_path)}", "4 classes, not 100 .*'baby'.* and 36 images, not 60,000")
        expect(monkeypatch, "cifar100", classes=5, images=36, names=names)
        refused(f"cifar100={tmp_path}", "not the whole of cifar100: it has 4 classes, not 5 \\(missing: 'mouse'\\)")


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['BOMB']}",)


@pytest.mark.usefixtures("small_cifar")
class TestPickles:
    def test_a_malicious_one_is_refused_unrun(self, tmp_path, monkeypatch):
        monkeypatch.setenv("BOMB", str(tmp_path / "went off"))
        write_cifar_python(tmp_path)
        for protocol in range(6):
            write(tmp_path / "cifar-100-python" / "train", pickle.dumps({"data": Bomb()}, protocol))
            refused(f"cifar100={tmp_path}", "train is not a pickle of plain data .*wants to call (posix|nt).system")
        assert not (tmp_path / "went off").exists()

    @pytest.mark.parametrize(
        ("data", "words"),
        [*((code, "and is not read .*wants to call") for code in (
            b"cbuiltins\neval\n(S'1'\ntR.", b"c__builtin__\nexec\n.", b"cnumpy\nload\n.", b"cos\nsystem\n.",
            b"cnumpy.core.multiarray\nscalar\n.", b"\x80\x04\x8c\x05numpy\x8c\x06f2py.x\x93.", b"cpickle\nloads\n.")),
         *((damaged, "") for damaged in (b"", b"junk", pickle.dumps([1] * 99)[:-20]))],
    )  # fmt: skip
    def test_nothing_but_arrays_can_be_called_and_damage_is_named(self, data, words):
        with pytest.raises(ImageError, match=f"x is not a pickle of plain data {words}"):
            published.load_plain_pickle(data, "x")

    def test_plain_data_is_read_whoever_wrote_it(self):
        value = {"data": np.arange(600, dtype=np.uint8).reshape(2, 300), "fine_labels": [1, 2], "x": (True, None, 1.5)}
        for data in (python2_pickle(value), *(pickle.dumps(value, protocol) for protocol in (3, 4))):
            unpickled = published.load_plain_pickle(data, "x")
            assert np.array_equal(unpickled["data"], value["data"]) and unpickled["fine_labels"] == [1, 2]

    @pytest.mark.parametrize(
        "value",
        [[], {"data": 1}, {"data": np.zeros((2, 3), np.uint8), "fine_labels": [0, 0]},
         {"data": np.zeros((1, 3072)), "fine_labels": [0]},
         {"data": np.zeros((1, 3072), np.uint8), "fine_labels": ["a"]}],
    )  # fmt: skip
    def test_other_data_is_refused(self, tmp_path, value):
        write(write_cifar_python(tmp_path) / "cifar-100-python" / "test", python2_pickle(value))
        refused(f"cifar100={tmp_path}", "test is not part of CIFAR-100: it lacks pixels")

    def test_labels_out_of_range(self, tmp_path):
        batch = {"data": np.zeros((1, 3072), np.uint8), "fine_labels": [100]}
        write(write_cifar_python(tmp_path) / "cifar-100-python" / "test", python2_pickle(batch))
        refused(f"cifar100={tmp_path}", "test has labels beyond 0 … 99")


# ---------------------------------------------------------------------------------------------- CUB-200-2011

BIRDS = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross", "004.Groove_billed_Ani"]


def birds(train: int = 4, test: int = 2) -> list[tuple[str, int, bool, bytes]]:
    """Path under images/, class number, for training?, content. The split is not in the order of the names."""
    rows = []
    for c, name in enumerate(BIRDS, start=1):
        for i in range(train + test):
            path = f"{name}/{name[4:]}_{i:04}_{i * 7}.jpg"
            rows.append((path, c, i % 3 != 1, jpeg((60 * c % 256, 40 * i, 90), size=(20 + i, 16))))
    return rows


def write_cub(folder: Path) -> Path:
    root, rows = folder / "CUB_200_2011", birds()
    for path, _, _, content in rows:
        write(root / "images" / path, content)
    write(root / "images.txt", "".join(f"{i} {r[0]}\n" for i, r in enumerate(rows, 1)))
    write(root / "image_class_labels.txt", "".join(f"{i} {r[1]}\n" for i, r in enumerate(rows, 1)))
    write(root / "train_test_split.txt", "".join(f"{i} {int(r[2])}\n" for i, r in enumerate(rows, 1)))
    write(root / "classes.txt", "".join(f"{i} {name}\n" for i, name in enumerate(BIRDS, 1)))
    write(root / "bounding_boxes.txt", "1 60.0 27.0 325.0 304.0\n")
    write(root / "parts" / "parts.txt", "1 back\n")
    write(root / "README", "Caltech-UCSD Birds-200-2011")
    write(folder / "attributes.txt", "1 has_bill_shape::curved_(up_or_down)\n")
    return folder


def write_cub_folders(folder: Path) -> Path:
    for path, _, train, content in birds():
        write(folder / ("train" if train else "test") / path, content)
    return folder


def write_cub_parquet(folder: Path) -> Path:
    for split, wanted in (("train", True), ("test", False)):
        rows = [r for r in birds() if r[2] is wanted]
        half = len(rows) // 2
        for number, part in enumerate((rows[:half], rows[half:])):
            columns = {"image": image_column([r[3] for r in part]), "label": [r[1] - 1 for r in part]}
            write_parquet(folder / "data" / f"{split}-0000{number}-of-00002.parquet", columns, {"label": BIRDS})
    return folder


@pytest.fixture
def small_cub(monkeypatch):
    expect(monkeypatch, "cub200", classes=4, images=24, train=16)


@pytest.mark.usefixtures("small_cub")
class TestCub200:
    def test_every_layout_gives_the_same(self, tmp_path):
        original, folders = write_cub(tmp_path / "original"), write_cub_folders(tmp_path / "folders")
        layouts = [
            original,
            original / "CUB_200_2011",
            pack(original, tmp_path / "CUB_200_2011.tgz"),
            folders,
            pack(folders, tmp_path / "cub200.zip"),
            pack(folders, tmp_path / "cub.tar", "cub/"),
            write_cub_parquet(tmp_path / "hub"),
        ]
        first = open_dataset(f"cub200={layouts[0]}", SIZE)
        assert first.classes == BIRDS and not first.notes
        assert np.bincount(first.labels[first.is_test]).tolist() == [2] * 4 and (~first.is_test).sum() == 16
        for layout in layouts[1:]:
            assert same(first, open_dataset(f"cub200={layout}", SIZE)), layout

    def test_an_archive_in_its_own_folder_or_beside_it(self, home, tmp_path):
        (home / "data" / "cub200").mkdir(parents=True)
        packed = pack(write_cub(tmp_path), home / "data" / "cub200" / "CUB_200_2011.tgz")
        first = open_dataset("cub200", SIZE)
        shutil.rmtree(packed.parent)
        pack(write_cub_folders(tmp_path / "folders"), home / "data" / "cub200.zip")
        assert same(first, open_dataset("cub200", SIZE))

    @pytest.mark.parametrize("table", TABLES)
    def test_a_missing_table_is_named(self, tmp_path, table):
        (write_cub(tmp_path) / "CUB_200_2011" / table).unlink()
        refused(f"cub200={tmp_path}", f"'{table}' missing")

    def test_a_damaged_table_is_named(self, tmp_path):
        packed = pack(write_cub(tmp_path / "files"), tmp_path / "cub.zip")
        packed.write_bytes(packed.read_bytes().replace(b"1 001.Black", b"1 001.White"))  # the checksum knows
        refused(f"cub200={packed}", "(classes|images).txt cannot be read .*CRC.*get it again")

    def test_missing_images_are_named(self, tmp_path):
        gone = birds()[3][0]
        (write_cub(tmp_path) / "CUB_200_2011" / "images" / gone).unlink()
        refused(f"cub200={tmp_path}", f"1 of 24 images in images.txt are not there \\('CUB_200_2011/images/{gone}'\\)")

    def test_tables_that_disagree(self, tmp_path):
        table = write_cub(tmp_path) / "CUB_200_2011" / "train_test_split.txt"
        table.write_text(table.read_text().replace("24 ", "25 "))
        refused(f"cub200={tmp_path}", "do not list the same images")
        table.write_text("1 1\nnonsense\n")
        refused(f"cub200={tmp_path}", "train_test_split.txt, line 2: 'nonsense' is not")

    def test_without_a_split_it_is_refused(self, tmp_path):
        write_cub(tmp_path)
        refused(f"cub200={tmp_path / 'CUB_200_2011' / 'images'}", "which images are for testing")

    def test_another_split_is_told(self, tmp_path, monkeypatch):
        expect(monkeypatch, "cub200", train=18)
        (note,) = open_dataset(f"cub200={write_cub(tmp_path)}", SIZE).notes
        assert "split 16 to learn from / 8 to test with, not the usual 18 / 6" in note

    def test_a_part_is_refused_with_the_way_out(self, tmp_path):
        shutil.rmtree(write_cub_folders(tmp_path) / "train" / BIRDS[1])
        shutil.rmtree(tmp_path / "test" / BIRDS[1])
        refused(f"cub200={tmp_path}", "3 classes, not 4 and 18 images, not 24; get it again, or .*--data FOLDER")
        assert len(open_dataset(str(tmp_path), SIZE).classes) == 3

    def test_damaged_images_are_named(self, tmp_path):
        bad = birds()[0][0]
        write(write_cub(tmp_path) / "CUB_200_2011" / "images" / bad, b"junk")
        refused(f"cub200={pack(tmp_path, tmp_path.with_suffix('.tgz'))}", f"1 of 24 images.*\n.*{bad}: not an image")


@pytest.mark.skipif(not SHARED_CUB.exists(), reason="the real CUB-200 is not here")
def test_the_real_cub200_is_whole():
    listing = list_cub200(PUBLISHED["cub200"], SHARED_CUB)
    splits = [e.split for e in listing.entries]
    assert (splits.count("train"), splits.count("test"), len(listing.classes)) == (5994, 5794, 200)
    assert listing.classes[0] == "001.Black_footed_Albatross"
    common.check_whole(PUBLISHED["cub200"], SHARED_CUB, listing.classes, len(listing.entries))


# ---------------------------------------------------------------------------------------------- ImageNet-R, ImageNet-A

WNIDS = ["n01443537", "n02066245", "n02165456"]  # sorted; CODA-Prompt counts them 124, 8 and 0


def renditions(count: int = 5) -> list[tuple[str, str, bytes]]:
    return [
        (wnid, f"{('art', 'toy')[i % 2]}_{i}.jpg", jpeg((80 * c, 50 * i, 30)))
        for c, wnid in enumerate(WNIDS)
        for i in range(count)
    ]


def write_imagenet(folder: Path, name: str = "imagenet-r") -> Path:
    for wnid, file, content in renditions():
        write(folder / name / wnid / file, content)
    write(folder / name / "README.txt", "goldfish …")
    return folder


def write_lists(folder: Path, rows=None) -> dict[str, bool]:
    """CODA-Prompt's two lists; returns what is for testing."""
    numbers, split = {"n01443537": 124, "n02066245": 8, "n02165456": 0}, {}
    for name, test in (("train", False), ("test", True)):
        chosen = [(w, f) for i, (w, f, _) in enumerate(rows or renditions()) if (i % 5 in (1, 3)) is test]
        split |= {f"{w}/{f}": test for w, f in chosen}
        paths = "".join(f"- data/imagenet-r/{w}/{f}\n" for w, f in chosen)
        targets = "".join(f"- {numbers[w]}\n" for w, f in chosen)
        write(folder / f"imagenet-r_{name}.yaml", f"data:\n{paths}targets:\n{targets}")
    return split


@pytest.fixture
def small_imagenet(monkeypatch):
    expect(monkeypatch, "imagenet-r", classes=3, images=15, train=9)
    expect(monkeypatch, "imagenet-a", classes=3, images=15)


@pytest.mark.usefixtures("small_imagenet")
class TestImageNetR:
    def test_without_lists_a_seeded_fifth_is_held_out_and_told(self, tmp_path):
        folder = write_imagenet(tmp_path / "a")
        first, again, other = (open_dataset(f"imagenet-r={folder}", SIZE, seed) for seed in (1, 1, 2))
        assert first.classes == ["n02165456", "n02066245", "n01443537"], "CODA-Prompt's order"
        assert np.bincount(first.labels[first.is_test]).tolist() == [1, 1, 1]
        assert np.array_equal(first.is_test, again.is_test) and not np.array_equal(first.is_test, other.is_test)
        notes = "\n".join(first.notes)
        assert "imagenet-r_train.yaml and imagenet-r_test.yaml; they are not in" in notes
        assert "20% of each class held out for testing (seed 1)" in notes

    @pytest.mark.parametrize("layout", ["folder", "inner", "tar", "parquet", "train and test"])
    def test_lists_are_heeded(self, tmp_path, layout):
        place = tmp_path / "place"
        place.mkdir()
        if layout == "tar":
            pack(write_imagenet(tmp_path / "files"), place / "imagenet-r.tar")
        elif layout == "parquet":
            wnids, names, blobs = zip(*renditions(), strict=True)
            rows = {"image": image_column(list(blobs), list(names)), "wnid": list(wnids), "class_name": ["x"] * 15}
            write_parquet(place / "test" / "test-00000-of-00001.parquet", rows)
        elif layout == "train and test":
            for i, (wnid, file, content) in enumerate(renditions()):
                write(place / ("train" if i % 5 else "test") / wnid / file, content)
        else:
            write_imagenet(place)
        data = place / "imagenet-r" if layout == "inner" else place
        split = write_lists(data)
        dataset = open_dataset(f"imagenet-r={data}", SIZE)
        assert dataset.classes == ["n02165456", "n02066245", "n01443537"], "by the lists' numbers"
        assert dataset.is_test.sum() == 6 and any("split by imagenet-r_train.yaml" in n for n in dataset.notes)
        reference = {to_pixels(decode(blob, ""), 32).tobytes(): f"{wnid}/{file}" for wnid, file, blob in renditions()}
        for pixels, label, test in zip(dataset.store.pixels, dataset.labels, dataset.is_test, strict=True):
            name = reference[pixels.tobytes()]
            assert split[name] == test and name.startswith(dataset.classes[label])

    def test_one_list_is_not_enough(self, tmp_path):
        write_lists(write_imagenet(tmp_path))
        (tmp_path / "imagenet-r_test.yaml").unlink()
        assert "only one of them is in" in open_dataset(f"imagenet-r={tmp_path}", SIZE).notes[0]

    def test_listed_images_that_are_missing_are_named(self, tmp_path):
        write_lists(write_imagenet(tmp_path))
        (tmp_path / "imagenet-r" / "n02066245" / "toy_1.jpg").unlink()
        refused(f"imagenet-r={tmp_path}", "1 of the 15 images .* are not there \\('n02066245/toy_1.jpg'\\)")

    def test_images_in_no_list_are_left_out_and_told(self, tmp_path):
        write_lists(write_imagenet(tmp_path))
        write(tmp_path / "imagenet-r" / "n02066245" / "art_99.jpg", jpeg((1, 2, 3)))
        dataset = open_dataset(f"imagenet-r={tmp_path}", SIZE)
        assert len(dataset.labels) == 15 and "left out 1 images that no list names" in dataset.notes

    @pytest.mark.parametrize(
        "text",
        ["data:\n- a/b.jpg\ntargets:\n", "!!python/object/apply:os.system ['true']\n", "data: [a]\n", "- a\n", "",
         "data:\n- a/b.jpg\ntargets:\n- x\n", "data:\n- a/b.jpg\nother:\n- 1\n"],
    )  # fmt: skip
    def test_lists_of_another_kind_are_refused(self, tmp_path, text):
        write_lists(write_imagenet(tmp_path))
        write(tmp_path / "imagenet-r_test.yaml", text)
        refused(f"imagenet-r={tmp_path}", "imagenet-r_test.yaml.*get it again")

    def test_quoted_paths_and_comments(self, tmp_path):
        write(tmp_path / "l.yaml", "# split\ndata:\n- 'data/imagenet-r/n1/a b.jpg'\n\ntargets:\n- 3\n")
        assert read_list(tmp_path / "l.yaml") == {"n1/a b.jpg": 3}

    def test_a_missing_class_is_named(self, tmp_path, monkeypatch):
        expect(monkeypatch, "imagenet-r", names=(*WNIDS[1:], "n01443537"))
        shutil.rmtree(write_imagenet(tmp_path) / "imagenet-r" / "n02066245")
        refused(f"imagenet-r={tmp_path}", "2 classes, not 3 \\(missing: 'n02066245'\\) and 10 images, not 15")


@pytest.mark.usefixtures("small_imagenet")
class TestImageNetA:
    def test_every_layout_gives_the_same(self, tmp_path):
        folder = write_imagenet(tmp_path / "a", "imagenet-a")
        wnids, names, blobs = zip(*renditions(), strict=True)
        rows = {"image": image_column(list(blobs), list(names)), "label": [WNIDS.index(w) for w in wnids]}
        write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", rows, {"label": WNIDS})
        first = open_dataset(f"imagenet-a={folder}", SIZE, 3)
        assert first.classes == WNIDS and first.is_test.sum() == 3
        assert any("held out for testing (seed 3)" in note for note in first.notes)
        for layout in (pack(folder, tmp_path / "imagenet-a.tar"), tmp_path / "hub"):
            assert same(first, open_dataset(f"imagenet-a={layout}", SIZE, 3))

    def test_a_split_of_its_own_is_kept(self, tmp_path):
        for i, (wnid, file, content) in enumerate(renditions()):
            write(tmp_path / "imagenet-a" / ("test" if i % 5 == 0 else "train") / wnid / file, content)
        dataset = open_dataset(f"imagenet-a={tmp_path}", SIZE)
        assert dataset.is_test.sum() == 3 and not dataset.notes

    def test_whole_sets_have_200_known_classes(self):
        of_r, of_a = PUBLISHED["imagenet-r"].names, PUBLISHED["imagenet-a"].names
        assert len(set(of_r)) == len(set(of_a)) == 200 and list(of_a) == sorted(of_a)
        assert {"n01443537", "n02066245", "n02165456"} <= set(of_r)
        assert all(re.fullmatch(r"n\d{8}", w) for w in (*of_r, *of_a))


# ---------------------------------------------------------------------------------------------- VTAB


def write_vtab(folder: Path, first: int = 10, per_domain: int = 2) -> Path:
    for c in range(5 * per_domain):
        for split, count in (("train", 2), ("test", 1)):
            for i in range(count):
                write(folder / "vtab" / split / str(first + c) / f"{i}.jpg", jpeg((20 * c, 60 * i, 9)))
    return folder


class TestVtab:
    @pytest.fixture(autouse=True)
    def small_vtab(self, monkeypatch):
        expect(monkeypatch, "vtab", classes=10)

    @pytest.mark.parametrize("first", [0, 8, 10])
    def test_a_domain_a_task(self, tmp_path, first):
        """Numbers are sorted as numbers, or 10 would come before 2 and mix the domains."""
        dataset = open_dataset(f"vtab={write_vtab(tmp_path / 'v', first)}", SIZE)
        assert dataset.classes[:3] == [f"resisc45/{first}", f"resisc45/{first + 1}", f"dtd/{first + 2}"]
        assert [g[0].split("/")[0] for g in dataset.groups] == ["resisc45", "dtd", "pets", "eurosat", "flowers"]
        for seed in (0, 1, 2):
            for task in Stream(dataset, 5, seed).tasks:
                assert len({name.split("/")[0] for name in task.classes}) == 1 and len(task.classes) == 2
        assert same(dataset, open_dataset(f"vtab={pack(tmp_path / 'v', tmp_path / 'vtab.zip', 'vtab-cil/')}", SIZE))

    def test_ten_classes_each(self, tmp_path, monkeypatch):
        expect(monkeypatch, "vtab", classes=50)
        dataset = open_dataset(f"vtab={write_vtab(tmp_path, per_domain=10)}", SIZE)
        assert [len(g) for g in dataset.groups] == [10] * 5 and len(dataset.classes) == 50
        shutil.rmtree(tmp_path / "vtab" / "train" / "20")
        shutil.rmtree(tmp_path / "vtab" / "test" / "20")
        refused(f"vtab={tmp_path}", "49 classes, not 50")

    def test_without_splits(self, tmp_path):
        refused(f"vtab={write_vtab(tmp_path) / 'vtab' / 'train'}", "no train/ and test/ folders")

    def test_by_hand(self, home):
        message = refused("vtab", "cannot be downloaded")
        assert "drive.google.com" in message and str(home / "data" / "vtab") in message


# ---------------------------------------------------------------------------------------------- parquet


class TestParquet:
    def test_no_pyarrow(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        write(tmp_path / "train.parquet", b"")
        refused(f"cub200={tmp_path}", "reading parquet needs pyarrow; pip install")

    def test_damaged(self, tmp_path):
        pytest.importorskip("pyarrow")
        write(tmp_path / "train.parquet", b"PAR1 junk")
        refused(f"cub200={tmp_path}", "damaged parquet .*train.parquet")

    def test_missing_columns_are_named(self, tmp_path):
        write_parquet(tmp_path / "train.parquet", {"picture": [b"x"], "label": [0]})
        refused(f"cub200={tmp_path}", "no column img or image; it has picture, label")

    @pytest.mark.usefixtures("small_cub")
    def test_rows_without_an_image_are_named(self, tmp_path):
        write_cub_parquet(tmp_path)
        file = tmp_path / "data" / "train-00001-of-00002.parquet"
        labels = [r[1] - 1 for r in birds() if r[2]][8:]
        images = image_column([jpeg((9, 9, 9))] * 7 + [None], ["a.jpg"] * 8)
        write_parquet(file, {"image": images, "label": labels}, {"label": BIRDS})
        refused(f"cub200={tmp_path}", "\n.*1-of-00002.parquet/7/.*cannot be read \\(the row has no image in it")

    def test_rows_without_a_label_are_named(self, tmp_path):
        write_parquet(tmp_path / "train.parquet", {"image": [jpeg((9, 9, 9))] * 6, "label": [0, 1, 0, 1, 0, None]})
        refused(str(tmp_path), "train.parquet: row 2 of group 2 has no label")
        write_parquet(
            tmp_path / "train.parquet", {"image": [jpeg((9, 9, 9))] * 2, "label": [0, -1]}, {"label": ["a", "b"]}
        )
        refused(str(tmp_path), "train.parquet: row 2 of group 1 has no label")

    def test_plain_bytes_and_labels_without_names(self, tmp_path, monkeypatch):
        expect(monkeypatch, "cub200", classes=11, images=44, train=22)
        for split in ("train", "test"):
            rows = {"image": [jpeg((c * 20, 9, 9)) for c in range(11)] * 2, "label": list(range(11)) * 2}
            write_parquet(tmp_path / "default" / split / "0000.parquet", rows)
        assert open_dataset(f"cub200={tmp_path}", SIZE).classes == [str(c) for c in range(11)]


# ---------------------------------------------------------------------------------------------- downloads, names


class Response(io.BytesIO):
    @property
    def headers(self):
        return {"Content-Length": str(len(self.getvalue()))}


class TestDownload:
    def serve(self, monkeypatch, files: dict[str, bytes]) -> list[str]:
        asked = []

        def urlopen(request, timeout):
            asked.append(request.full_url)
            if request.full_url not in files:
                raise urllib.error.URLError("not found")
            return Response(files[request.full_url])

        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        return asked

    @pytest.mark.usefixtures("small_cub")
    def test_once_with_progress_and_checksum(self, home, tmp_path, monkeypatch):
        data = pack(write_cub(tmp_path), tmp_path / "x.tgz").read_bytes()
        remote = Remote("CUB_200_2011.tgz", "https://x/CUB.tgz", hashlib.md5(data).hexdigest())
        expect(monkeypatch, "cub200", files=(remote,), hub=None)
        asked, seen = self.serve(monkeypatch, {remote.url: data}), []
        first = open_dataset("cub200", SIZE, progress=seen.append)
        assert seen[0].stage is Stage.DOWNLOADING and seen[0].detail == "CUB_200_2011.tgz, MB"
        assert same(first, open_dataset("cub200", SIZE)) and len(asked) == 1
        assert [p.name for p in (home / "data" / "cub200").iterdir()] == ["CUB_200_2011.tgz"]

    def test_a_wrong_checksum_leaves_nothing(self, home, monkeypatch):
        expect(monkeypatch, "cub200", files=(Remote("a.tgz", "https://x/a.tgz", "0" * 32),), hub=None)
        self.serve(monkeypatch, {"https://x/a.tgz": b"half"})
        refused("cub200", "could not be downloaded .*has the md5 .*, not 000")
        assert not list((home / "data" / "cub200").iterdir())

    @pytest.mark.parametrize("name", ["cifar100", "imagenet-r", "cub200", "imagenet-a"])
    def test_offline_says_what_to_fetch_and_where_to_put_it(self, home, name):
        message = refused(name, f"{name} is not on this machine and could not be downloaded .*no network here")
        for remote in (*PUBLISHED[name].files, *PUBLISHED[name].optional_files):
            assert f"from {remote.url}\n  to   {home / 'data' / name / remote.name}" in message
        assert f"--data {name}=/path/to/it" in message

    @pytest.mark.usefixtures("small_imagenet")
    def test_lists_are_optional_and_come_first(self, home, tmp_path, monkeypatch):
        data = pack(write_imagenet(tmp_path), tmp_path / "x.tar").read_bytes()
        (tar,), lists = PUBLISHED["imagenet-r"].files, PUBLISHED["imagenet-r"].optional_files
        expect(monkeypatch, "imagenet-r", files=(tar._replace(md5=hashlib.md5(data).hexdigest()),), hub=None)
        asked = self.serve(monkeypatch, {tar.url: data})
        assert len(open_dataset("imagenet-r", SIZE).labels) == 15
        assert asked == [lists[0].url, lists[1].url, tar.url]

    @pytest.mark.usefixtures("small_cub")
    def test_the_hub_stands_in(self, monkeypatch):
        def snapshot_download(repository, repo_type, allow_patterns, local_dir):
            assert (repository, repo_type) == ("bentrevett/caltech-ucsd-birds-200-2011", "dataset")
            write_cub_parquet(Path(local_dir))

        pytest.importorskip("pyarrow")
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert open_dataset("cub200", SIZE).classes == BIRDS

    def test_a_given_place_is_never_filled(self, tmp_path):
        refused(f"cub200={tmp_path / 'nowhere'}", "nowhere: no such file or folder")
        assert not (tmp_path / "nowhere").exists()


class TestNames:
    def test_name_and_place(self):
        assert parse_data("cub200") == ("cub200", None)
        assert parse_data("cub200=/a=b/c") == ("cub200", "/a=b/c")
        assert parse_data("./cub200") == (None, "./cub200")
        assert parse_data("birds=/x") == (None, "birds=/x")

    def test_a_misspelt_name(self):
        refused("cub20=/x", "neither a data set .*cub200.* nor an existing folder or zip; .*NAME=PATH")

    def test_quickdraw_is_nowhere_else(self):
        refused("quickdraw50=/x", "part of the package")

    def test_defaults_follow_the_name(self):
        for data in ("cifar100", "cifar100=/somewhere"):
            config = resolve({"data": data})
            assert (config.tasks, config.batch_size, config.test_crop, config.size) == (10, 128, 0.0, 224)
        for data, tasks, batch_size in (("imagenet-r", 10, 64), ("vtab", 5, 8), ("imagenet-a", 20, 64)):
            config = resolve({"data": data})
            assert (config.tasks, config.batch_size) == (tasks, batch_size)
        assert (resolve({"data": "imagenet-r", "tasks": 5}).tasks, config.test_crop) == (5, 0.875), "given"
        for name in DATASETS:
            for method in METHODS:
                assert resolve({"data": name, "method": method}).data == name


# ---------------------------------------------------------------------------------------------- learned end to end


@pytest.mark.parametrize(("name", "layout"), [("cub200", write_cub), ("cifar100", write_cifar_python)])
@pytest.mark.usefixtures("small_cub", "small_cifar")
def test_learned_from_name_to_prediction(tmp_path, name, layout):
    given = {"data": f"{name}={layout(tmp_path)}", "size": SIZE, "tasks": 2, "method": "vq-prompt"}
    config = resolve({**given, "epochs": 2, "batch_size": 8, "augment": "none", "lr": 0.01})
    dataset = open_dataset(config.data, config.size, config.seed)
    stream = Stream(dataset, config.tasks, config.seed)
    settings = {"training": config.training, "device": "cpu", "compile": "off", **config.options}
    learner = Learner(make_vit(), config.method, tasks=2, seed=1, **settings)
    for task in stream:
        learner.learn(task)
    assert sorted(learner.classes) == sorted(dataset.classes)
    assert len(learner.accuracies(stream.tasks)) == 2
    assert learner.settings.test_crop == (0.0 if name == "cifar100" else 0.875)
    assert torch.isfinite(learner.logits(stream.tasks[0].test)).all()
