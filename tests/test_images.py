"""Images as people have them: each works, or is refused before anything is learned, naming the file and the remedy."""

import io
import os
import struct
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vqprompt.core.data import store as images_module
from vqprompt.core.data.decode import decode, decode_pixels, to_pixels
from vqprompt.core.data.images import Images
from vqprompt.core.data.source import Source
from vqprompt.core.data.store import Store, build_store
from vqprompt.core.errors import ImageError, PastImagesError, UserError
from vqprompt.core.files import ABANDONED_AFTER
from vqprompt.core.progress import Progress, Stage
from vqprompt.research.datasets import open_dataset

SIDE = 16
RNG = np.random.default_rng(0)


def picture(width=12, height=12, colour=(200, 40, 90)) -> Image.Image:
    """A flat colour with a darker top left corner, so that turning shows."""
    pixels = np.full((height, width, 3), colour, np.uint8)
    pixels[: height // 2, : width // 2] //= 2
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A well-formed PNG that claims a size, whatever it holds."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def close(image: Image.Image, expected: Image.Image, tolerance: int) -> bool:
    assert image.mode == "RGB"
    difference = np.asarray(image, int) - np.asarray(expected, int)
    return image.size == expected.size and abs(difference).max() <= tolerance


def fill(folder: Path, classes=("cat", "dog"), count=5, splits=("",)) -> Path:
    for split in splits:
        for c, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                picture(colour=(40 * c + i, 100, 200 - i)).save(folder / split / name / f"{i}.png")
    return folder


def zip_of(folder: Path, target: Path, wrapper: str = "", directories: bool = False) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() or directories:
                archive.write(path, wrapper + path.relative_to(folder).as_posix())
    return target


# ---------------------------------------------------------------------------------------------- one image


class TestModes:
    def test_grey(self):
        assert close(decode(encoded(picture().convert("L")), "x"), picture().convert("L").convert("RGB"), 0)

    @pytest.mark.parametrize("mode", ["RGBA", "LA"])
    def test_transparency_becomes_white_paper(self, mode):
        image = picture().convert(mode)
        image.putalpha(Image.fromarray(np.repeat(np.array([[0, 255, 128]], np.uint8), 4, 1).repeat(12, 0)))
        pixels = np.asarray(decode(encoded(image), "x"), int)
        opaque = np.asarray(picture().convert(mode).convert("RGB"), int)
        assert (pixels[:, :4] == 255).all()
        assert (pixels[:, 4:8] == opaque[:, 4:8]).all()
        assert abs(pixels[:, 8:] - (opaque[:, 8:] + 255) / 2).max() <= 2

    def test_palette(self):
        assert close(decode(encoded(picture().convert("P", palette=Image.Palette.ADAPTIVE)), "x"), picture(), 2)

    @pytest.mark.parametrize("kind", ["PNG", "GIF"])
    def test_palette_with_transparency(self, kind):
        image = Image.new("P", (4, 2))
        image.putpalette([10, 20, 30, 200, 100, 0])
        image.putdata([0, 0, 1, 1] * 2)
        pixels = np.asarray(decode(encoded(image, kind, transparency=0), "x"))
        assert (pixels[:, :2] == 255).all() and (pixels[:, 2:] == (200, 100, 0)).all()

    def test_cmyk(self):
        image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # full magenta and yellow: red
        red, green, blue = decode(encoded(image, "JPEG", quality=95), "x").getpixel((4, 4))
        assert red > 200 and green < 60 and blue < 60

    @pytest.mark.parametrize("kind", ["PNG", "TIFF"])
    def test_sixteen_bits_are_scaled_not_clipped(self, kind):
        values = np.array([[0, 255, 256, 32768, 65535]], np.uint16).repeat(2, 0)
        pixels = np.asarray(decode(encoded(Image.fromarray(values), kind), "x"))[0]
        assert pixels.tolist() == [[v] * 3 for v in [0, 1, 1, 128, 255]]

    def test_floating_point(self):
        values = np.array([[0.0, 0.5, 1.0]], np.float32)
        pixels = np.asarray(decode(encoded(Image.fromarray(values), "TIFF"), "x"))[0, :, 0]
        assert pixels.tolist() == [0, 128, 255]

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_rotation(self, orientation):
        """The stored pixels are turned so that a viewer that heeds the tag shows the picture upright."""
        upright = picture(16, 8)
        turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # undoes what the tag asks for
        stored = upright if turn is None else upright.transpose(Image.Transpose(turn))
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind, tolerance in [("JPEG", 25), ("PNG", 0)]:
            options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
            assert close(decode(encoded(stored, kind, exif=exif, **options), "x"), upright, tolerance)

    @pytest.mark.filterwarnings("ignore::UserWarning:PIL")
    def test_damaged_exif_is_no_reason_to_lose_the_image(self):
        exif = Image.Exif()
        exif[0x0112], exif[0x010E] = 6, "a longer text, which is kept apart from its entry"
        whole = encoded(picture(16, 8), "JPEG", exif=exif, quality=100, subsampling=0)
        start, damaged = whole.index(b"Exif"), 0
        for place in range(start + 6, start + 60):
            for value in (0x00, 0x7F, 0xFF):
                changed = whole[:place] + bytes([value]) + whole[place + 1 :]
                assert sorted(decode(changed, "x").size) == [8, 16]
                with suppress(struct.error), Image.open(io.BytesIO(changed)) as image:
                    ImageOps.exif_transpose(image)
                    continue
                damaged += 1
        assert damaged, "some of these Pillow itself gives up on"

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "BMP", "TIFF", "PPM"])
    def test_formats(self, kind):
        options = {"lossless": True} if kind == "WEBP" else {}
        assert close(decode(encoded(picture(), kind, **options), "x"), picture(), 2)

    def test_animated_gif_gives_its_first_frame(self):
        frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert decode(data, "x").getpixel((0, 0)) == (255, 0, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "not an image"),
            (b"just some text, named .jpg by mistake", "not an image"),
            (encoded(picture(200, 200), "JPEG")[:-300], "damaged image"),
            (encoded(Image.fromarray(RNG.integers(0, 256, (50, 50, 3), np.uint8)))[:2000], "damaged image"),
            (
                png(50_000, 50_000),
                r"50000×50000 pixels is more than the 100 megapixels.*VQPROMPT_MAX_MEGAPIXELS=2500; else shrink it or",
            ),
            (png(20, 20, b"too little"), "damaged image"),
        ],
        ids=["empty", "text", "truncated jpeg", "truncated png", "huge bomb", "png without pixels"],
    )
    def test_names_the_file_and_the_remedy(self, data, reason):
        with pytest.raises(ImageError, match=rf"^some/file\.jpg: .*{reason}.*take it out$"):
            decode(data, "some/file.jpg")


# ---------------------------------------------------------------------------------------------- folders and zips


def labels_of(source: Source) -> dict[str, int]:
    counts = {}
    for entry in source.entries:
        key = f"{entry.split}/{entry.label}" if entry.split else entry.label
        counts[key] = counts.get(key, 0) + 1
    return counts


SPLIT = {"train/cat": 5, "train/dog": 5, "test/cat": 5, "test/dog": 5}


class TestLayouts:
    def test_class_folders(self, tmp_path):
        assert labels_of(Source(fill(tmp_path))) == {"cat": 5, "dog": 5}

    def test_train_and_test(self, tmp_path):
        assert labels_of(Source(fill(tmp_path, splits=("train", "test")))) == SPLIT

    @pytest.mark.parametrize("wrapper", ["", "birds/", "download/birds/"])
    @pytest.mark.parametrize("directories", [True, False])
    @pytest.mark.parametrize("splits", [("",), ("train", "test")])
    def test_zip_with_and_without_wrappers(self, tmp_path, wrapper, directories, splits):
        folder = fill(tmp_path / "files", splits=splits)
        source = Source(zip_of(folder, tmp_path / "x.zip", wrapper, directories))
        assert labels_of(source) == (SPLIT if len(splits) > 1 else {"cat": 5, "dog": 5})

    def test_folder_with_wrapper(self, tmp_path):
        fill(tmp_path / "outer" / "inner", splits=("train", "test"))
        (tmp_path / "outer" / "README.txt").write_text("about these images")
        assert labels_of(Source(tmp_path)) == SPLIT

    def test_zip_and_folder_hold_the_same_images(self, tmp_path):
        folder = fill(tmp_path / "files", splits=("train", "test"))
        a = open_dataset(str(folder), SIDE)
        b = open_dataset(str(zip_of(folder, tmp_path / "x.zip", "birds/")), SIDE)
        assert a.classes == b.classes and np.array_equal(a.store.pixels, b.store.pixels)
        assert np.array_equal(a.labels, b.labels) and np.array_equal(a.is_test, b.is_test)

    def test_what_systems_leave_behind_is_passed_over(self, tmp_path):
        folder = fill(tmp_path / "files")
        for junk in [
            "__MACOSX/cat/._0.png",
            ".git/x/1.png",
            "cat/.hidden.png",
            ".DS_Store",
            "cat/Thumbs.db",
            "notes.txt",
        ]:
            path = folder / junk
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"junk")
        for source in (Source(folder), Source(zip_of(folder, tmp_path / "x.zip", "w/", directories=True))):
            assert labels_of(source) == {"cat": 5, "dog": 5}
            assert sorted(Path(p).name for p in source.ignored) == ["Thumbs.db", "notes.txt"]

    def test_images_outside_the_splits_are_reported(self, tmp_path):
        fill(tmp_path, splits=("train", "test"))
        (tmp_path / "val" / "cat").mkdir(parents=True)
        for place in ("val/cat/0.png", "train/0.png", "0.png"):
            picture().save(tmp_path / place)
        dataset = open_dataset(str(tmp_path), SIDE)
        assert len(dataset.labels) == 20
        assert any(note.startswith("left out") and note.count(".png") == 3 for note in dataset.notes)

    def test_images_below_class_folders_belong_to_the_class(self, tmp_path):
        fill(tmp_path)
        (tmp_path / "cat" / "2019" / "may").mkdir(parents=True)
        picture().save(tmp_path / "cat" / "2019" / "may" / "a.PNG")
        assert labels_of(Source(tmp_path)) == {"cat": 6, "dog": 5}

    def test_a_class_may_be_called_train(self, tmp_path):
        assert labels_of(Source(fill(tmp_path, classes=("car", "train")))) == {"car": 5, "train": 5}

    def test_unicode_and_spaces(self, tmp_path):
        classes = ("große Katze", "犬 🐕", "l'été [2]")
        folder = fill(tmp_path / "Bilder für später", classes=classes, count=3)
        picture().save(folder / classes[1] / "ein Bild (1) – Kopie.png")
        for source in (folder, zip_of(folder, tmp_path / "ü x.zip")):
            dataset = open_dataset(str(source), SIDE)
            assert dataset.classes == sorted(classes)
            assert len(dataset.store) == 10

    def test_links_inside_the_folder_are_followed(self, tmp_path):
        fill(tmp_path / ".real")
        for name in ("cat", "dog"):
            (tmp_path / name).symlink_to(Path(".real") / name)
        (tmp_path / "cat" / "again.png").symlink_to("0.png")
        assert labels_of(Source(tmp_path)) == {"cat": 6, "dog": 5}

    def test_links_that_leave_the_folder_are_refused_by_name(self, tmp_path, monkeypatch):
        fill(tmp_path / "real")
        (tmp_path / "linked").mkdir()
        for name in ("cat", "dog"):
            (tmp_path / "linked" / name).symlink_to(tmp_path / "real" / name)
        with pytest.raises(ImageError, match=r"the link 'cat' leads out of the folder.*VQPROMPT_FOLLOW_LINKS=1"):
            Source(tmp_path / "linked")
        monkeypatch.setenv("VQPROMPT_FOLLOW_LINKS", "1")
        assert labels_of(Source(tmp_path / "linked")) == {"cat": 5, "dog": 5}


class TestSplit:
    def test_a_fifth_of_each_class_is_held_out_seeded(self, tmp_path):
        folder = str(fill(tmp_path, count=10))
        first, again, other = (open_dataset(folder, SIDE, seed) for seed in (1, 1, 2))
        assert np.bincount(first.labels[first.is_test]).tolist() == [2, 2]
        assert np.array_equal(first.is_test, again.is_test)
        assert not np.array_equal(first.is_test, other.is_test)
        assert any("20% of each class held out" in note and "seed 1" in note for note in first.notes)

    def test_two_images_are_enough(self, tmp_path):
        dataset = open_dataset(str(fill(tmp_path, count=2)), SIDE)
        assert np.bincount(dataset.labels[dataset.is_test]).tolist() == [1, 1]

    def test_a_split_of_its_own_is_kept(self, tmp_path):
        dataset = open_dataset(str(fill(tmp_path, splits=("train", "test"))), SIDE)
        assert dataset.is_test.sum() == 10 and not dataset.notes


class TestBadSources:
    def refused(self, path, match):
        with pytest.raises(UserError, match=match) as caught:
            open_dataset(str(path), SIDE)
        return str(caught.value)

    def test_missing(self, tmp_path):
        self.refused(tmp_path / "nowhere", "nowhere: neither a data set .*quickdraw50.* nor an existing folder or zip")
        with pytest.raises(ImageError, match="nowhere: no such folder or zip"):
            Source(tmp_path / "nowhere")

    def test_neither_folder_nor_zip(self, tmp_path):
        (tmp_path / "data.tar").write_bytes(b"x" * 100)
        self.refused(tmp_path / "data.tar", "data.tar: neither a folder nor a zip")

    @pytest.mark.parametrize("place", ["bird", "wrapper/bird"])
    def test_an_empty_class(self, tmp_path, place):
        fill(tmp_path / "files" / Path(place).parent)
        (tmp_path / "files" / place).mkdir()
        (tmp_path / "files" / place / "notes.txt").write_text("photographs follow")
        for source in (tmp_path / "files", zip_of(tmp_path / "files", tmp_path / "x.zip", directories=True)):
            self.refused(source, f"'{place}' has no image; fill it or take it out")

    @pytest.mark.parametrize(
        ("splits", "more", "words"),
        [
            ((), "", "no image found; expected <class>/<image>"),
            ((), "a.png", "'a.png' is not inside a class folder; expected"),
            (("train", "test"), "test/bird/", "'test/bird' has no image"),
            (("train", "test"), "train/bird/0.png", "no test images for the class 'bird'"),
            (("",), "bird/0.png", "'bird' has a single image; it needs two"),
        ],
    )
    def test_what_a_class_lacks(self, tmp_path, splits, more, words):
        fill(tmp_path, splits=splits)
        (tmp_path / more).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / more).mkdir(exist_ok=True) if more.endswith("/") else more and picture().save(tmp_path / more)
        self.refused(tmp_path, words)

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_one_split_without_the_other(self, tmp_path, split):
        fill(tmp_path, splits=(split,))
        (tmp_path / "val" / "cat").mkdir(parents=True)
        picture().save(tmp_path / "val" / "cat" / "0.png")
        self.refused(tmp_path, f"has {split}/ but no .*; add it, or give the class folders alone")

    def test_every_bad_image_is_named_at_once(self, tmp_path):
        fill(tmp_path)
        (tmp_path / "cat" / "text.jpg").write_text("not an image")
        (tmp_path / "dog" / "bomb.png").write_bytes(png(50_000, 50_000))
        whole = (tmp_path / "dog" / "0.png").read_bytes()
        (tmp_path / "dog" / "half.png").write_bytes(whole[: len(whole) // 2])
        message = self.refused(tmp_path, "3 of 13 images cannot be used")
        for name in ("cat/text.jpg", "dog/bomb.png", "dog/half.png"):
            assert name in message
        assert message.count("take it out") == 3

    def test_many_bad_images_are_counted_not_listed(self, tmp_path):
        fill(tmp_path)
        for i in range(30):
            (tmp_path / "cat" / f"bad {i}.png").write_bytes(b"x")
        message = self.refused(tmp_path, "30 of 40 images")
        assert message.count("not an image") == 10 and "and 20 more" in message

    def test_a_link_to_nowhere(self, tmp_path):
        fill(tmp_path)
        (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "gone")
        (tmp_path / "cat" / "gone.txt").symlink_to(tmp_path / "gone")
        self.refused(tmp_path, r"1 of 11 images cannot be used:\n  cat/gone.png: cannot be read")

    def test_a_damaged_zip_member(self, tmp_path):
        path = zip_of(fill(tmp_path / "files", count=2), tmp_path / "x.zip")
        with zipfile.ZipFile(path) as archive:
            info = archive.infolist()[0]
        data = bytearray(path.read_bytes())
        start = info.header_offset + 30 + len(info.filename)
        data[start : start + info.compress_size] = b"\xff" * info.compress_size
        path.write_bytes(data)
        self.refused(path, r"1 of 4 images cannot be used:\n  cat/0.png: cannot be read .*take it out")

    def test_an_encrypted_zip(self, tmp_path):
        path = zip_of(fill(tmp_path / "files", count=2), tmp_path / "x.zip")
        data = bytearray(path.read_bytes())
        for signature, flags in [(b"PK\x03\x04", 6), (b"PK\x01\x02", 8)]:  # set "encrypted" in every header
            at = data.find(signature)
            while at >= 0:
                data[at + flags] |= 1
                at = data.find(signature, at + 4)
        path.write_bytes(data)
        self.refused(path, r"4 of 4 images cannot be used:\n.*is encrypted, password required")

    def test_a_truncated_zip(self, tmp_path):
        path = zip_of(fill(tmp_path / "files"), tmp_path / "x.zip")
        path.write_bytes(path.read_bytes()[:-40])
        self.refused(path, "x.zip: neither a folder nor a zip")


# ---------------------------------------------------------------------------------------------- the store


@pytest.fixture
def decoded(monkeypatch):
    """Names of the images that are decoded from here on."""
    names = []
    plain = decode_pixels
    monkeypatch.setattr(
        images_module, "decode_pixels", lambda data, name, side: (names.append(name), plain(data, name, side))[1]
    )
    return names


class TestStore:
    def test_holds_every_image_squashed_with_its_aspect(self, tmp_path):
        folder = fill(tmp_path, count=2)
        wide = Image.fromarray(RNG.integers(0, 256, (20, 60, 3), np.uint8))
        wide.save(folder / "dog" / "wide.png")
        source = Source(folder)
        store = build_store(source, SIDE)
        assert store.pixels.dtype == np.uint8 and store.pixels.shape == (5, 3, SIDE, SIDE)
        for i, entry in enumerate(source.entries):
            with Image.open(folder / entry.path) as image:
                assert np.array_equal(store.pixels[i], to_pixels(image.convert("RGB"), SIDE))
        assert store.aspect.tolist() == [1, 1, 1, 1, 3]

    def test_need_not_fit_in_memory(self, tmp_path):
        assert isinstance(build_store(Source(fill(tmp_path)), SIDE).pixels, np.memmap)

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
    def test_reads_rows_in_the_order_asked_for(self, wanted):
        pixels = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1).repeat(3, 1)
        store = Store(pixels, np.ones(10), "")
        assert store.read(np.array(wanted))[:, 0, 0, 0].tolist() == wanted

    def test_joined_images_can_do_what_others_can(self):
        a, b = (
            Store(np.arange(s, s + 4, dtype=np.uint8).reshape(4, 1, 1, 1), np.arange(1.0, 5), f"{s}") for s in (0, 10)
        )
        joined = Images.concatenate([Images(a, np.array([3, 1]), np.zeros(2)), Images(b, np.arange(4), np.ones(4))])
        assert joined.named and joined.key == Images.concatenate([joined]).key and len(joined.digest()) == 16
        assert len(joined) == 6 and joined.labels.tolist() == [0, 0, 1, 1, 1, 1]
        assert joined.rows.tolist() == [3, 1, 0, 1, 2, 3] and joined.aspect.tolist() == [4, 2, 1, 2, 3, 4]
        index = torch.tensor([5, 0, 2, 1, 1])
        assert joined.read(index, torch.device("cpu")).flatten().tolist() == [13, 3, 10, 1, 1]
        some = joined.take(index)
        everything = torch.arange(len(some))
        assert some.read(everything, torch.device("cpu")).flatten().tolist() == [13, 3, 10, 1, 1]
        assert some.labels.tolist() == [1, 0, 1, 0, 0] and some.aspect.tolist() == joined.aspect[index].tolist()
        assert len(joined.take(torch.tensor([], dtype=torch.long))) == 0
        nameless = Images(Store(a.pixels, np.ones(4), ""), np.arange(4), np.zeros(4))
        assert not Images.concatenate([joined, nameless]).named
        assert [len(pixels) for _, pixels in joined.batches(index.split(2), torch.device("cpu"))] == [2, 2, 1]

    def test_joined_images_are_guarded_by_each_guard(self):
        def closed():
            raise PastImagesError("closed")

        a, b = (Store(np.zeros((4, 1, 1, 1), np.uint8), np.ones(4), "") for _ in range(2))
        for store in (a, b):
            joined = Images.concatenate(
                [Images(a, np.arange(4), np.zeros(4)), Images(store, np.arange(4), np.zeros(4), closed)]
            )
            for images in (joined, joined.take(torch.tensor([0, 5]))):
                with pytest.raises(PastImagesError):
                    images.read(torch.tensor([0]), torch.device("cpu"))

    def test_is_decoded_once(self, tmp_path, decoded):
        folder = fill(tmp_path)
        first = build_store(Source(folder), SIDE)
        assert len(decoded) == 10
        second = build_store(Source(folder), SIDE)
        assert len(decoded) == 10
        assert np.array_equal(first.pixels, second.pixels) and first.fingerprint == second.fingerprint

    def test_another_size_is_another_store(self, tmp_path, decoded):
        folder = fill(tmp_path)
        assert build_store(Source(folder), SIDE).fingerprint != build_store(Source(folder), 24).fingerprint
        assert len(decoded) == 20

    def test_a_changed_file_is_seen(self, tmp_path, decoded):
        folder = fill(tmp_path)
        before = build_store(Source(folder), SIDE)
        file = folder / "cat" / "3.png"
        size = file.stat().st_size
        picture(colour=(250, 250, 0)).save(file)
        os.truncate(file, max(size, file.stat().st_size))  # the same size or not, the time tells
        after = build_store(Source(folder), SIDE)
        assert len(decoded) == 20
        changed = [i for i in range(10) if not np.array_equal(before.pixels[i], after.pixels[i])]
        assert changed == [3]

    def test_a_new_file_is_seen(self, tmp_path, decoded):
        folder = fill(tmp_path)
        build_store(Source(folder), SIDE)
        picture().save(folder / "dog" / "new.png")
        assert len(build_store(Source(folder), SIDE)) == 11

    def test_a_changed_zip_is_seen(self, tmp_path, decoded):
        folder = fill(tmp_path / "files")
        path = zip_of(folder, tmp_path / "x.zip")
        before = build_store(Source(path), SIDE)
        picture(colour=(250, 250, 0)).save(folder / "cat" / "3.png")
        after = build_store(Source(zip_of(folder, path)), SIDE)
        assert before.fingerprint != after.fingerprint

    def test_two_folders_alike_in_size_and_time_are_two(self, tmp_path, decoded):
        a, b = (fill(tmp_path / name, count=1) for name in "ab")
        for folder, shade in ((a, 50), (b, 60)):
            for name in ("cat", "dog"):
                Image.new("L", (8, 8), shade).save(folder / name / "0.png")
                os.utime(folder / name / "0.png", ns=(1, 1))
        assert (a / "cat" / "0.png").stat().st_size == (b / "cat" / "0.png").stat().st_size
        first, second = build_store(Source(a), SIDE), build_store(Source(b), SIDE)
        assert len(decoded) == 4 and not np.array_equal(first.pixels, second.pixels)

    def test_two_folders_with_the_same_content_share_a_store(self, tmp_path, decoded):
        for name in "ab":
            build_store(Source(fill(tmp_path / name, count=1)), SIDE)
        assert len(decoded) == 2

    def test_refused_images_leave_no_store(self, tmp_path, home, decoded):
        folder = fill(tmp_path)
        (folder / "cat" / "bad.png").write_bytes(b"x")
        for _ in range(2):
            with pytest.raises(ImageError):
                build_store(Source(folder), SIDE)
        assert not list((home / "images").iterdir())
        (folder / "cat" / "bad.png").unlink()
        assert len(build_store(Source(folder), SIDE)) == 10

    def test_an_interrupted_decode_leaves_no_store(self, tmp_path, home, monkeypatch):
        folder = fill(tmp_path)

        def progress(event):
            if event.done == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_store(Source(folder), SIDE, progress)
        assert not list((home / "images").iterdir())

    def test_what_a_killed_decode_left_goes_after_a_day(self, tmp_path, home):
        (home / "images").mkdir(parents=True)
        old, new = (home / "images" / f".{name}.npy.elsewhere.1.0.partial" for name in ("old", "new"))
        for file, age in ((old, 2 * ABANDONED_AFTER), (new, 60)):
            file.write_bytes(b"half")
            os.utime(file, (time.time() - age,) * 2)
        build_store(Source(fill(tmp_path)), SIDE)
        assert not old.exists() and new.exists(), "another process may be writing the new one"

    def test_progress_counts_to_the_end(self, tmp_path):
        seen = []
        build_store(Source(fill(tmp_path)), SIDE, seen.append)
        assert seen == [Progress(Stage.DECODING, i, 10) for i in range(1, 11)]
