"""Images that are too large, of the wrong kind or not files at all: refused clearly, without hanging."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import command_environment
from faults.images import black_png
from PIL import Image, ImageFile
from test_images import encoded, fill, picture, png

from vqprompt.core.data import decode as decoding
from vqprompt.core.data.decode import (
    accepted_formats,
    aspect_of,
    decode,
    decode_pixels,
    stored_side,
    to_pixels,
    to_rgb,
)
from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.words import printable
from vqprompt.research.datasets import open_dataset

SIDE = 64
RNG = np.random.default_rng(0)
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def noise(width, height, mode="RGB"):
    rough = RNG.integers(0, 256, (height // 40 + 1, width // 40 + 1, 3), np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


class TestFormats:
    @pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.eps"])
    def test_postscript_never_reaches_another_program(self, monkeypatch, name):
        for module in ("subprocess.Popen", "os.system", "PIL.EpsImagePlugin.Ghostscript"):
            monkeypatch.setattr(module, lambda *a, **k: pytest.fail("another program was started"))
        with pytest.raises(ImageError, match=f"{name}: an image of the kind EPS, which is not read here"):
            decode(POSTSCRIPT, name)

    @pytest.mark.parametrize(
        "kind", ["ICO", "PCX", "TGA", "SGI", "IM", "MSP", "XBM", "SPIDER", "DDS", "BLP", "JPEG2000"]
    )
    def test_formats_that_nobody_photographs_in_are_not_read(self, kind):
        image = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(kind, "RGB")
        with pytest.raises(ImageError, match=r"x: (not an image|an image of the kind \w+, which is not read here)"):
            decode(encoded(picture(32, 32).convert(image), kind), "x")

    def test_only_known_formats_are_accepted(self):
        known = {"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "HEIF"}
        assert {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"} <= set(accepted_formats()) <= known

    def test_avif_where_pillow_decodes_it(self):
        if "AVIF" not in accepted_formats():
            pytest.skip("this Pillow has no AVIF")
        assert decode(encoded(noise(64, 48), "AVIF"), "x").size == (64, 48)

    @pytest.mark.parametrize(
        ("brand", "words"), [(b"heic", r"HEIC.*pip install 'vqprompt\[heif\]'"), (b"avif", "AVIF.*upgrade pillow")]
    )
    def test_what_cannot_be_decoded_says_what_to_install(self, monkeypatch, brand, words):
        Image.init()
        monkeypatch.setattr(decoding, "accepted_formats", lambda: decoding.FORMATS)
        with pytest.raises(ImageError, match=f"x.heic: an? {words}"):
            decode(b"\0\0\0\x18ftyp" + brand + b"\0" * 100, "x.heic")


class TestShrinking:
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
    @pytest.mark.parametrize("mode", ["RGB", "L"])
    def test_small_images_keep_every_bit(self, kind, mode):
        data = encoded(noise(4 * SIDE + 40, 4 * SIDE - 1, mode), kind)
        with Image.open(io.BytesIO(data)) as image:
            plain = to_rgb(image)
        pixels, aspect = decode_pixels(data, "x", SIDE)
        assert np.array_equal(pixels, to_pixels(plain, SIDE)) and aspect == plain.width / plain.height

    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "I;16", "CMYK"])
    def test_large_ones_look_the_same(self, kind, mode, monkeypatch):
        monkeypatch.setattr(decoding, "LARGE", 100_000)
        monkeypatch.setattr(decoding, "STRIP", 20_000)
        if (kind == "JPEG") != (mode in ("RGB", "L", "CMYK")) and mode not in ("RGB", "L"):
            pytest.skip(f"{kind} has no {mode}")
        image = noise(1000, 750)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
        elif mode == "P":
            image = image.convert("P", palette=Image.Palette.ADAPTIVE)
        else:
            image = image.convert(mode)
        data = encoded(image, kind)
        pixels, aspect = decode_pixels(data, "x", SIDE)
        with Image.open(io.BytesIO(data)) as opened:
            plain = to_pixels(to_rgb(opened), SIDE)
        difference = abs(pixels.astype(int) - plain)
        assert aspect == 4 / 3 and difference.mean() < 3 and difference.max() < 24

    def test_never_below_twice_the_side(self):
        for width, height in [(256, 256), (257, 1000), (999, 300), (4000, 3000), (260, 8000)]:
            found = decode(encoded(noise(width, height), "JPEG"), "x", SIDE)
            assert min(found.size) >= min(2 * SIDE, width, height)

    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    def test_a_large_photograph_is_turned_upright(self, kind, monkeypatch):
        monkeypatch.setattr(decoding, "LARGE", 100_000)
        exif = Image.Exif()
        exif[0x0112] = 6
        image = noise(1000, 750)
        pixels, aspect = decode_pixels(encoded(image, kind, exif=exif), "x", SIDE)
        plain = to_pixels(image.transpose(Image.Transpose.ROTATE_270), SIDE)
        assert aspect == 0.75 and abs(pixels.astype(int) - plain).mean() < 3

    def test_paths_pillow_images_and_arrays(self, tmp_path):
        image = noise(90, 60)
        image.save(tmp_path / "a.png")
        found = [
            decode_pixels(given, "x", SIDE)
            for given in (tmp_path / "a.png", str(tmp_path / "a.png"), image, np.asarray(image))
        ]
        assert all(np.array_equal(pixels, found[0][0]) and aspect == 1.5 for pixels, aspect in found)
        assert decode(image).size == (90, 60)

    @pytest.mark.parametrize("given", [3, None, np.zeros((0, 4, 3), np.uint8), np.zeros((2, 2), np.float32)])
    def test_what_is_no_image_is_refused(self, given):
        with pytest.raises(UserError, match=r"image"):
            decode_pixels(given, "x", SIDE)


class TestBombs:
    def test_the_refusal_names_the_setting_that_raises_the_limit(self, monkeypatch):
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: (_ for _ in ()).throw(OSError("stopped here")))
        with pytest.raises(
            ImageError, match=r"^x: 12000×9000 pixels is more than the 100 megapixels.*VQPROMPT_MAX_MEGAPIXELS=108"
        ):
            decode(png(12_000, 9_000), "x")  # before it is decoded
        monkeypatch.setenv("VQPROMPT_MAX_MEGAPIXELS", "108")
        with pytest.raises(ImageError, match=r"stopped here"):
            decode(png(12_000, 9_000), "x")

    @pytest.mark.parametrize(("width", "height"), [(99_999_999, 1), (1, 50_000_000), (65_536, 65_536)])
    def test_a_side_that_is_too_long_is_refused_before_anything_is_decoded(self, monkeypatch, width, height):
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
        data = black_png(width, height, filled=False)
        for read in (decode, aspect_of, lambda data, name: decode_pixels(data, name, 256)):
            with pytest.raises(
                ImageError, match=rf"^x: {width}×{height} pixels is more than the 65535 pixels per side"
            ):
                read(data, "x")

    def test_an_array_or_pillow_image_with_too_long_a_side(self):
        for given in (np.zeros((1, 70_000), np.uint8), Image.new("L", (1, 70_000))):
            with pytest.raises(ImageError, match=r"×.* pixels is more than the 65535 pixels per side"):
                decode_pixels(given, "x", 16)

    def test_a_thin_picture_looks_as_it_would_without_shrinking(self, monkeypatch):
        data = encoded(noise(400, 90).resize((9000, 90)), "PNG")
        small, aspect = decode_pixels(data, "x", 64)
        monkeypatch.setattr(decoding, "LONG", 10**6)
        plain, _ = decode_pixels(data, "x", 64)
        assert aspect == 100 and np.abs(small.astype(int) - plain).mean() < 2

    def test_a_limit_that_is_no_number_is_refused(self, monkeypatch):
        monkeypatch.setenv("VQPROMPT_MAX_MEGAPIXELS", "many")
        with pytest.raises(UserError, match=r"VQPROMPT_MAX_MEGAPIXELS='many': give a number above 0"):
            decode(png(20, 20), "x")

    def test_a_sparse_file_of_20_gigabytes(self, tmp_path):
        fill(tmp_path)
        with open(tmp_path / "cat" / "huge.jpg", "wb") as file:
            file.truncate(20 << 30)
        with pytest.raises(
            ImageError, match=r"huge.jpg: its size of 21,475 MB is more than the 512 MB.*VQPROMPT_MAX_FILE_MB=21475"
        ):
            decode_pixels(tmp_path / "cat" / "huge.jpg", "x", SIDE)

    def test_the_claim_of_a_sparse_file_in_a_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VQPROMPT_MAX_FILE_MB", "1")
        fill(tmp_path)
        with open(tmp_path / "cat" / "huge.jpg", "wb") as file:
            file.truncate(3 << 20)
        with pytest.raises(ImageError, match=r"1 of 11 images cannot be used:\n  cat/huge.jpg: its size of 3 MB"):
            open_dataset(str(tmp_path), SIDE)


class TestNotFiles:
    """Each of these blocked for ever, or read without end."""

    def put(self, path: Path, kind: str) -> None:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            server = socket.socket(socket.AF_UNIX)
            here = Path.cwd()
            os.chdir(path.parent)  # the name of a socket may have 108 bytes
            server.bind(path.name)
            os.chdir(here)
            server.close()
        else:
            path.symlink_to("/dev/zero")

    @pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
    def test_as_an_image(self, tmp_path, kind):
        self.put(tmp_path / "x.jpg", kind)
        with pytest.raises(UserError, match=r"x\.jpg: no image file that can be read .*not a regular file"):
            decode_pixels(tmp_path / "x.jpg", "x", SIDE)

    @pytest.mark.parametrize("kind", ["fifo", "socket"])
    def test_in_a_class_folder(self, tmp_path, kind):
        self.put(fill(tmp_path) / "cat" / "x.jpg", kind)
        with pytest.raises(
            ImageError, match=r"1 of 11 images cannot be used:\n  cat/x.jpg: cannot be read .*not a regular"
        ):
            open_dataset(str(tmp_path), SIDE)

    def test_a_link_to_a_device_leads_out_of_the_folder(self, tmp_path):
        self.put(fill(tmp_path) / "cat" / "x.jpg", "device")
        with pytest.raises(ImageError, match=r"the link 'cat/x.jpg' leads out of the folder, to '/dev/zero'"):
            open_dataset(str(tmp_path), SIDE)

    @pytest.mark.parametrize("kind", ["fifo", "device"])
    def test_as_a_data_set(self, tmp_path, kind):
        self.put(tmp_path / "x.zip", kind)
        with pytest.raises(ImageError, match=r"x\.zip: cannot be opened .*not a regular file"):
            open_dataset(str(tmp_path / "x.zip"), SIDE)

    def test_links_in_a_circle(self, tmp_path):
        fill(tmp_path)
        (tmp_path / "cat" / "up").symlink_to(tmp_path)
        (tmp_path / "dog" / "loop.png").symlink_to("loop.png")
        (tmp_path / "dog" / "loop").symlink_to("loop")
        (tmp_path / "dog" / "cat").symlink_to("../cat")
        with pytest.raises(ImageError, match=r"1 of 11 images cannot be used:\n  dog/loop.png: cannot be read"):
            open_dataset(str(tmp_path), SIDE)
        (tmp_path / "dog" / "loop.png").unlink()
        dataset = open_dataset(str(tmp_path), SIDE)
        assert len(dataset.labels) == 10 and any("'cat/up'" in note for note in dataset.notes)

    def test_proc(self):
        if not Path("/proc/self").exists():
            pytest.skip("no /proc here")
        with pytest.raises(ImageError, match=r"^/proc"):
            open_dataset("/proc/self/", SIDE)
        for name in ("/proc/kmsg", "/proc/self/mem", "/proc/self/environ"):
            with pytest.raises(UserError, match=name):
                decode_pixels(name, "x", SIDE)


class TestNames:
    def test_too_long(self, tmp_path):
        with pytest.raises(UserError, match=r"no image file that can be read"):
            decode_pixels(tmp_path / ("x" * 300 + ".jpg"), "x", SIDE)
        with pytest.raises(UserError, match=r"neither a data set"):
            open_dataset(str(tmp_path / ("x" * 300)), SIDE)
        with pytest.raises(UserError, match=r"neither a data set"):
            open_dataset("a\0b", SIDE)

    def test_latin_1(self, tmp_path):
        folder = os.fsencode(fill(tmp_path)) + b"/gr\xfcn"
        os.mkdir(folder)  # noqa: PTH102 (a name in bytes)
        for i in range(3):
            Path(os.fsdecode(folder + b"/\xe4%d.png" % i)).write_bytes(encoded(picture(colour=(9, i, 3))))
        with pytest.raises(ImageError, match=r"class name 'gr.*n' is not UTF-8; rename its folder") as caught:
            open_dataset(str(tmp_path), SIDE)
        printable(str(caught.value)).encode()
        os.rename(folder, os.fsencode(tmp_path) + "/grün".encode())  # noqa: PTH104 (a name in bytes)
        for _ in range(2):
            assert open_dataset(str(tmp_path), SIDE).classes == ["cat", "dog", "grün"]

    def test_control_characters_are_escaped(self):
        assert printable("a\x1b[31mb\x07\u202e\x9b\ud800é 犬\n\tc") == "a\\x1b[31mb\\x07\\u202e\\x9b\\ud800é 犬\n\tc"

    def test_classes_need_names_of_their_own(self):
        from conftest import make_dataset

        from vqprompt.core.data.stream import Dataset

        whole = make_dataset()
        for classes, words in [
            (["a", "b", "a", "c", "d", "e"], "class name 'a' is there more than once"),
            (["a", " ", "b", "c", "d", "e"], "a class has an empty name"),
            (["a", 3, "b", "c", "d", "e"], "the class name 3 is a int"),
        ]:
            with pytest.raises(ImageError, match=words):
                Dataset("toy", classes, whole.store, whole.labels, whole.is_test)


def test_stored_images_are_an_eighth_larger():
    assert [stored_side(size) for size in (70, 224, 28, 518)] == [80, 256, 32, 592]


READ_AND_MEASURE = """
import re, sys
from concurrent.futures import ThreadPoolExecutor
from vqprompt.core.data.decode import decode_pixels
from vqprompt.core.data.source import Source
from vqprompt.core.data.store import build_store

def more():  # MB that it had at most up to now; ru_maxrss would begin with what the process that started this one had
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024 - before

before = 0
before = more()
build_store(Source(sys.argv[1]), 64)
print("photographs", more())
for name, times in (("phone.jpg", 1), ("deep.png", 1), ("wide.png", 8), ("tall.png", 8)):
    with ThreadPoolExecutor(times) as pool:
        for pixels, aspect in pool.map(lambda _: decode_pixels(f"{sys.argv[2]}/{name}", "x", 256), range(times)):
            assert pixels.shape == (3, 256, 256)
    print(name, aspect, more())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures in /proc")
def test_memory_does_not_grow_with_the_size_nor_with_the_number_of_photographs(tmp_path):
    """In a process of its own; what takes least comes first, because a peak never falls. Without care, the deep image
    takes 3,152 MB, and eight thin ones 1,130."""
    photographs, large = tmp_path / "photographs", tmp_path / "large"
    data = encoded(noise(3000, 2000), "JPEG")
    for i in range(12):
        path = photographs / ("cat" if i % 2 else "dog") / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + bytes([i]))
    large.mkdir()
    Image.new("RGB", (12000, 9000), (90, 120, 30)).save(large / "phone.jpg", quality=80)
    (large / "wide.png").write_bytes(black_png(65_535, 370))
    (large / "tall.png").write_bytes(black_png(370, 65_535))
    (large / "deep.png").write_bytes(black_png(9999, 9999, bits=16))
    assert (large / "deep.png").stat().st_size < 2_000_000
    done = subprocess.run(
        [sys.executable, "-c", READ_AND_MEASURE, photographs, large], env=command_environment(tmp_path),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert [float(aspect) for _, aspect, _ in told[1:]] == [4 / 3, 1, 65_535 / 370, 370 / 65_535]
    for (name, *_, taken), most in zip(told, (50, 100, 500, 500, 500), strict=True):
        assert int(taken) < most, f"{name}: {taken} MB"
