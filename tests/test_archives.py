"""Archives that are damaged, lie about their size or are made to exhaust a machine."""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import shutil
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from test_images import encoded, fill, picture, zip_of

from vqprompt.core.data.archives import count_listed, open_files
from vqprompt.core.data.source import Source
from vqprompt.core.data.store import build_store
from vqprompt.core.errors import ImageError
from vqprompt.core.files import sha256_of
from vqprompt.research.datasets import open_dataset

SIDE = 16


def tar_of(folder, target, mode="w"):
    with tarfile.open(target, mode, format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, path.relative_to(folder).as_posix())
    return target


def refused(path, match):
    with pytest.raises(ImageError, match=match) as caught:
        open_dataset(str(path), SIDE)
    return str(caught.value)


class TestZipBombs:
    def test_a_member_of_four_gigabytes(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VQPROMPT_MAX_FILE_MB", "10")
        with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for i in range(3):
                archive.writestr(f"cat/{i}.png", encoded(picture(colour=(i, 9, 9))))
            archive.writestr("cat/bomb.png", bytes(20 << 20))
        refused(
            tmp_path / "x.zip",
            r"1 of 4 images.*\n.*cat/bomb.png: its size of 21 MB is more than the 10 MB.*VQPROMPT_MAX_FILE_MB=21",
        )

    def test_a_ratio_that_no_image_has(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("cat/bomb.png", bytes(100 << 20))
        refused(tmp_path / "x.zip", r"105 MB unpacked from 0.1 MB is more than the 250 times.*VQPROMPT_MAX_RATIO=")

    def test_a_claim_of_petabytes(self, tmp_path):
        path = zip_of(fill(tmp_path / "files"), tmp_path / "x.zip")
        data = bytearray(path.read_bytes())
        at = data.find(b"PK\x01\x02")
        while at >= 0:
            data[at + 24 : at + 28] = b"\xfe\xff\xff\xff"  # the size in the directory
            at = data.find(b"PK\x01\x02", at + 4)
        path.write_bytes(data)
        refused(path, "more than the 250 times its packed size")

    def test_too_many_files(self, tmp_path, monkeypatch):
        monkeypatch.setenv("VQPROMPT_MAX_ENTRIES", "9")
        path = zip_of(fill(tmp_path / "files"), tmp_path / "x.zip")
        refused(path, "a zip file of 10 files is more than the 9 files accepted.*VQPROMPT_MAX_ENTRIES=10")
        refused(tar_of(tmp_path / "files", tmp_path / "x.tar"), "over 9 files is more than the 9 files accepted")
        refused(tmp_path / "files", "over 9 files is more than the 9 files accepted")


class TestTarBombs:
    @pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
    def test_a_small_file_that_unpacks_to_a_large_one(self, tmp_path, home, suffix):
        with tarfile.open(tmp_path / f"x.tar.{suffix}", f"w:{suffix}") as archive:
            info = tarfile.TarInfo("cat/0.png")
            info.size = 100 << 20
            archive.addfile(info, io.BytesIO(bytes(info.size)))
        refused(
            tmp_path / f"x.tar.{suffix}",
            "MB unpacked from .* is more than the 250 times its packed size.*VQPROMPT_MAX_RATIO",
        )
        assert not list(home.rglob("*.tar")) and not list(home.rglob("*.partial"))

    def test_a_limit_on_the_whole(self, tmp_path, home, monkeypatch):
        monkeypatch.setenv("VQPROMPT_MAX_UNPACKED_GB", "0.000001")
        refused(tar_of(fill(tmp_path / "files"), tmp_path / "x.tgz", "w:gz"), "GB unpacked.*VQPROMPT_MAX_UNPACKED_GB")
        assert not list(home.rglob("*.tar")) and not list(home.rglob("*.partial"))

    def test_a_member_that_claims_a_terabyte(self, tmp_path):
        info = tarfile.TarInfo("cat/0.png")
        info.size = 1 << 40
        (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
        refused(tmp_path / "x.tar", "damaged archive .*get it again")


class TestDamage:
    def test_the_last_entries_of_a_zip_s_directory_are_cut_off(self, tmp_path):
        """The end record says how many there are and how long they are; it used to be believed."""
        path = zip_of(fill(tmp_path / "files"), tmp_path / "x.zip")
        data = bytearray(path.read_bytes())
        end = data.rfind(b"PK\x05\x06")
        size = struct.unpack_from("<I", data, end + 12)[0]
        last = data.rfind(b"PK\x01\x02")
        data[end + 12 : end + 16] = struct.pack("<I", size - (end - last))
        del data[last:end]
        path.write_bytes(data)
        assert "damaged archive" in refused(path, "x.zip")

    @pytest.mark.parametrize("letter", [b"x", b"/", b"."])
    def test_a_name_in_the_directory_that_is_not_the_file_s_own(self, tmp_path, letter):
        path = zip_of(fill(tmp_path / "files"), tmp_path / "x.zip")
        data = bytearray(path.read_bytes())
        at = data.find(b"cat/1.png", data.find(b"PK\x01\x02"))
        for place in (0, 6, 8):
            changed = data.copy()
            changed[at + place : at + place + 1] = letter
            path.write_bytes(changed)
            refused(path, "damaged archive")

    def test_two_files_of_one_name(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, pytest.warns(UserWarning, match=r"Duplicate"):
            for colour in (1, 2):
                archive.writestr("cat/0.png", encoded(picture(colour=(colour, 9, 9))))
        refused(tmp_path / "x.zip", "damaged archive .*lists 2 files, 2 were found, 1 of them with different names")

    @pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
    def test_compressed_data_that_is_broken(self, tmp_path, method):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as archive:
            for i in range(3):
                archive.writestr(f"cat/{i}.png", encoded(picture(40, 40, colour=(i, 9, 9))))
        with zipfile.ZipFile(tmp_path / "x.zip") as archive:
            info = archive.infolist()[1]
        data = bytearray((tmp_path / "x.zip").read_bytes())
        start = info.header_offset + 30 + len(info.filename)
        data[start : start + info.compress_size] = b"\xff" * info.compress_size
        (tmp_path / "x.zip").write_bytes(data)
        refused(tmp_path / "x.zip", r"1 of 3 images cannot be used:\n  cat/1.png: cannot be read")

    def test_a_damaged_header_in_the_middle_of_a_tar(self, tmp_path):
        """`tarfile` takes it for the end, and says nothing."""
        path = tar_of(fill(tmp_path / "files"), tmp_path / "x.tar")
        data = bytearray(path.read_bytes())
        data[data.find(b"dog/2.png")] ^= 1
        path.write_bytes(data)
        with tarfile.open(path) as archive:
            assert len(archive.getnames()) == 7, "of 10"
        refused(path, "damaged archive .no file can be read from byte .* on, but there is more")

    @pytest.mark.parametrize("blocks", [2, 4, 20])
    def test_a_tar_cut_off_between_two_files(self, tmp_path, blocks):
        path = tar_of(fill(tmp_path / "files"), tmp_path / "x.tar")
        with tarfile.open(path) as archive:
            cut = archive.getmembers()[6].offset
        path.write_bytes(path.read_bytes()[:cut])
        refused(path, "damaged archive .it has no end mark")

    @pytest.mark.parametrize(("suffix", "packer"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
    def test_a_compressed_tar_cut_off(self, tmp_path, home, suffix, packer):
        plain = tar_of(fill(tmp_path / "files"), tmp_path / "x.tar").read_bytes()
        packed = packer.compress(plain)
        for kept in (len(packed) // 2, len(packed) - 9):
            (tmp_path / f"x.tar.{suffix}").write_bytes(packed[:kept])
            refused(tmp_path / f"x.tar.{suffix}", f"x.tar.{suffix}: (damaged archive|neither a folder)")
        assert not list(home.rglob("*.tar")) and not list(home.rglob("*.partial"))
        (tmp_path / f"x.tar.{suffix}").write_bytes(packed)
        assert len(Source(tmp_path / f"x.tar.{suffix}").entries) == 10


@pytest.mark.parametrize(("count", "comment"), [(3, b""), (3, b"a comment"), (70_000, b"")])
def test_the_private_part_of_zipfile_that_is_used_counts_files(count, comment):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.comment = comment
        for number in range(count):
            archive.writestr(str(number), b"")
    assert count_listed(packed) == count  # above 65,535 files, the number is in a record of its own (zip64)


class TestContent:
    def test_zips_that_differ_in_content_alone(self, tmp_path):
        """Equal names, sizes and (forged) checksums."""
        stores = []
        for shade in (50, 60):
            with zipfile.ZipFile(tmp_path / f"{shade}.zip", "w") as archive:
                for name in ("cat/0.bmp", "cat/1.bmp"):
                    archive.writestr(name, encoded(picture(colour=(shade,) * 3), "BMP"))
            stores.append(open_files(tmp_path / f"{shade}.zip"))
        assert stores[0].sizes == stores[1].sizes and stores[0].key != stores[1].key

    def test_a_file_changed_within_its_times(self, tmp_path):
        """Same size, and the time of modification put back."""
        import os

        folder = fill(tmp_path / "files", count=2)
        file = folder / "cat" / "0.bmp"
        before = []
        for shade in (50, 60):
            picture(colour=(shade,) * 3).save(file)
            os.utime(file, ns=(10**18, 10**18))
            before.append(build_store(Source(folder), SIDE))
        assert before[0].fingerprint != before[1].fingerprint
        assert not np.array_equal(before[0].pixels, before[1].pixels)

    @pytest.fixture
    def hashed(self, monkeypatch):
        """Counts how often a file is hashed; files may be as new as they are here."""
        from vqprompt.core.data import archives, content

        count = []

        class Counting:
            @staticmethod
            def sha256(data=b""):
                count.extend([len(data)] if data else [])  # a hash that goes on with names is not one of a file
                return hashlib.sha256(data)

        monkeypatch.setattr(content, "TICK", -1.0)
        monkeypatch.setattr(content, "sha256_of", lambda file: [count.append(file), sha256_of(file)][1])
        monkeypatch.setattr(archives, "hashlib", Counting)
        return count

    def test_a_file_is_hashed_once_on_its_way_into_a_store_and_never_again(self, tmp_path, home, hashed):
        folder = fill(tmp_path / "files", count=2)
        first = build_store(Source(folder), SIDE)
        assert len(hashed) == 4 and all(file.suffix == ".npy" for file in (home / "hashes").iterdir())
        shutil.rmtree(home / "images")
        assert build_store(Source(folder), SIDE).fingerprint == first.fingerprint and len(hashed) == 4

    def test_what_is_remembered_has_no_names_and_is_private(self, tmp_path, home, hashed):
        build_store(Source(fill(tmp_path / "files", count=2)), SIDE)
        (index,) = (home / "hashes").iterdir()
        assert not re.search(rb"cat|dog|bmp|png", index.read_bytes())
        for path in home.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0 and not re.search("cat|dog|bmp|png", path.name)

    def test_a_damaged_memory_of_hashes_is_not_believed(self, tmp_path, home, hashed):
        folder = fill(tmp_path / "files", count=2)
        first = Source(folder).key
        (index,) = (home / "hashes").iterdir()
        data = bytearray(index.read_bytes())
        data[20] ^= 1
        index.write_bytes(data)
        with pytest.warns(UserWarning, match=r"damaged .wrong checksum. and is made again"):
            assert Source(folder).key == first and len(hashed) == 8

    @pytest.mark.parametrize("new", [True, False])
    def test_a_file_that_changes_between_hashing_and_reading(self, tmp_path, monkeypatch, new):
        from vqprompt.core.data import content

        monkeypatch.setattr(content, "TICK", 1000.0 if new else -1.0)
        source = Source(fill(tmp_path / "files", count=2))
        assert source.key
        picture(colour=(1, 2, 3)).save(tmp_path / "files" / "cat" / "0.png")
        with pytest.raises(ImageError, match=r"cat/0.png: cannot be read .it changed while it was being read"):
            build_store(source, SIDE)
