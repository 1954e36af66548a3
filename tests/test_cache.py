"""The cache: what is damaged is made again with a warning, and what cannot be written costs time, not the run."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from conftest import command_environment
from test_images import fill

from vqprompt.core import cache, files
from vqprompt.core.cache import keep_array, load_array, save_array
from vqprompt.core.data.source import Source
from vqprompt.core.data.store import build_store
from vqprompt.core.errors import UserError, WriteError
from vqprompt.core.files import (
    lock_file,
    lock_folder,
    read_regular,
    replacing,
    write_atomically,
)

SIDE = 16
ARRAY = np.arange(600, dtype=np.float32).reshape(20, 30)


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


class TestArrays:
    @pytest.mark.parametrize("mapped", [True, False])
    def test_come_back(self, tmp_path, mapped):
        for array in (ARRAY, ARRAY.astype(np.uint8).T, np.zeros((0, 4)), np.array(3.5)):
            save_array(tmp_path / "a.npy", array)
            if array.size:
                assert np.array_equal(load_array(tmp_path / "a.npy", mapped), array)
        assert load_array(tmp_path / "b.npy") is None
        assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]

    def test_every_flipped_bit_is_noticed(self, tmp_path):
        save_array(tmp_path / "a.npy", ARRAY[:2])
        whole = (tmp_path / "a.npy").read_bytes()
        for place in range(0, len(whole), 7):
            flip(tmp_path / "a.npy", place, 1 << place % 8)
            with pytest.warns(
                UserWarning, match=r"a\.npy: the cached file is damaged .wrong checksum. and is made again"
            ):
                assert load_array(tmp_path / "a.npy") is None
            (tmp_path / "a.npy").write_bytes(whole)
        assert np.array_equal(load_array(tmp_path / "a.npy"), ARRAY[:2])

    @pytest.mark.parametrize("damage", ["truncated", "longer", "zeroed", "empty", "swapped", "folder", "fifo"])
    def test_other_damage_is_noticed(self, tmp_path, damage):
        path, other = tmp_path / "a.npy", tmp_path / "b.npy"
        save_array(path, ARRAY)
        save_array(other, ARRAY + 1)
        data = path.read_bytes()
        if damage == "swapped":
            shutil.copy(other, path)
        elif damage in ("folder", "fifo"):
            path.unlink()
            path.mkdir() if damage == "folder" else os.mkfifo(path)
        else:
            path.write_bytes(
                {"truncated": data[:-100], "longer": data + b"x", "zeroed": bytes(len(data)), "empty": b""}[damage]
            )
        with pytest.warns(UserWarning, match=r"a\.npy: the cached file .* is made again"):
            assert load_array(path) is None

    def test_a_large_one_in_several_pieces(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cache, "PIECE", 100)
        save_array(tmp_path / "a.npy", ARRAY)
        assert np.array_equal(load_array(tmp_path / "a.npy"), ARRAY)
        flip(tmp_path / "a.npy", 1500)
        with pytest.warns(UserWarning, match=r"wrong checksum"):
            assert load_array(tmp_path / "a.npy") is None


class TestStore:
    @pytest.mark.parametrize("part", ["pixels", "aspects"])
    def test_a_damaged_store_is_decoded_again_and_then_it_is_whole(self, tmp_path, home, part):
        folder = fill(tmp_path / "files")
        first = build_store(Source(folder), SIDE)
        pixels, aspect = np.array(first.pixels), first.aspect.clone()
        (path,) = [p for p in (home / "images").iterdir() if ("aspect" in p.name) == (part == "aspects")]
        flip(path, -60, 4)
        with pytest.warns(UserWarning, match=r"is made again"):
            again = build_store(Source(folder), SIDE)
        assert np.array_equal(again.pixels, pixels) and again.aspect.equal(aspect)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(build_store(Source(folder), SIDE).pixels, pixels)

    @pytest.fixture
    def full(self, monkeypatch):
        """A disk without space."""

        def refuse(*given, **named):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
        monkeypatch.setattr(os, "fsync", refuse)

    def test_a_full_disk_only_costs_the_cache(self, tmp_path, home, full):
        with pytest.warns(UserWarning, match=r"nothing is kept in the cache .*No space left.*VQPROMPT_HOME") as caught:
            store = build_store(Source(fill(tmp_path / "files")), SIDE)
        assert len(store) == 10 and store.pixels.any() and len(caught) == 1
        assert not [p for p in home.rglob("*") if p.is_file()]

    def test_a_full_disk_and_a_compressed_tar(self, tmp_path, home, full):
        from test_archives import tar_of

        path = tar_of(fill(tmp_path / "files"), tmp_path / "x.tgz", "w:gz")
        with pytest.warns(UserWarning, match=r"nothing is kept in the cache"):
            assert len(build_store(Source(path), SIDE)) == 10

    @pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/x"])
    def test_a_cache_that_cannot_be(self, tmp_path, monkeypatch, place):
        monkeypatch.setenv("VQPROMPT_HOME", place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(build_store(Source(fill(tmp_path / "files")), SIDE)) == 10
        assert len([w for w in caught if "nothing is kept" in str(w.message)]) <= 1

    def test_a_cache_that_is_a_file(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("VQPROMPT_HOME", str(tmp_path / "file"))
        with pytest.raises(UserError, match=r"must be a folder, but this is a file; set VQPROMPT_HOME"):
            build_store(Source(fill(tmp_path / "files")), SIDE)

    def test_keeping_an_array_warns_once(self, home, full):
        with pytest.warns(UserWarning, match=r"nothing is kept") as caught:
            keep_array(home / "a.npy", ARRAY)
            keep_array(home / "b.npy", ARRAY)
        assert len(caught) == 1 and not list(home.glob("*.npy"))


class TestWriting:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
    def test_what_the_system_refuses_is_said_in_one_line(self, tmp_path, number, monkeypatch):
        write_atomically(tmp_path / "a.json", "old")

        def refuse(descriptor):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(WriteError, match=rf"a\.json: cannot be written \({os.strerror(number)}\); .*") as caught:
            write_atomically(tmp_path / "a.json", "new")
        assert isinstance(caught.value, UserError) and isinstance(caught.value, OSError)
        assert (tmp_path / "a.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1

    def test_a_name_of_300_letters(self, tmp_path):
        with pytest.raises(WriteError, match=r"choose a shorter name"):
            write_atomically(tmp_path / ("x" * 300), "text")
        with pytest.raises(WriteError, match=r"choose a shorter name"), lock_folder(tmp_path / ("x" * 300)):
            pass

    def test_a_folder_that_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "inner"):
            with pytest.raises(WriteError, match=r"a part of this path is a file"), lock_folder(path):
                pass

    def test_partial_files_of_killed_processes_go(self, tmp_path):
        dead = 2**22 + 12345  # above the largest process number
        stale = tmp_path / f".a.json.{files.HOST}.{dead}.0.partial"
        alive = tmp_path / f".a.json.{files.HOST}.{os.getpid()}.0.partial"
        elsewhere = tmp_path / f".a.json.00000000.{dead}.0.partial"
        for path in (stale, alive, elsewhere):
            path.touch()
        write_atomically(tmp_path / "a.json", "text")
        assert not stale.exists() and alive.exists() and elsewhere.exists()

    def test_an_exception_inside_leaves_the_old_file(self, tmp_path):
        write_atomically(tmp_path / "a", "old")
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as partial:
            partial.write_text("half")
            raise KeyboardInterrupt
        assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


class TestReading:
    @pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
    def test_what_is_not_a_regular_file_is_refused_without_waiting(self, tmp_path, kind):
        path = tmp_path / "x"
        with ExitStack() as stack:
            if kind == "socket":
                stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
            elif kind == "device":
                path = Path("/dev/zero")
            else:
                os.mkfifo(path) if kind == "fifo" else path.mkdir()
            with pytest.raises(OSError, match=r"it is a folder|not a regular file but a pipe, socket or device"):
                read_regular(path)

    def test_a_file_of_proc_gives_what_its_size_says(self):
        assert read_regular(Path("/proc/self/status")) == b""


HOLDER = """
import sys, time
from pathlib import Path
from vqprompt.core.files import lock_file
with lock_file(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


class TestLocks:
    @pytest.fixture
    def holder(self, tmp_path, home):
        """Another process that holds a lock until it is killed."""
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
        process = subprocess.Popen(command, env=command_environment(home), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.wait()

    def test_a_held_lock_is_refused_and_a_killed_process_holds_none(self, tmp_path, holder):
        with pytest.raises(UserError, match="it is taken"), lock_file(tmp_path / "lock", "it is taken"):
            pass
        holder.kill()
        holder.wait()
        with lock_file(tmp_path / "lock", "it is taken"):
            pass
        assert not list(tmp_path.iterdir())

    def test_without_a_message_one_waits(self, tmp_path, holder):
        with ThreadPoolExecutor(1) as pool:

            def wait() -> int | None:
                with lock_file(tmp_path / "lock"):
                    return holder.poll()

            waiting = pool.submit(wait)
            assert not waiting.done()
            holder.kill()
            assert waiting.result(60) is not None or holder.wait() == -9

    def test_of_many_at_once_one_at_a_time_is_inside(self, tmp_path):
        inside = []

        def work(_: int) -> None:
            with lock_file(tmp_path / "lock"):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        assert not list(tmp_path.iterdir())


class TestPrivacy:
    @pytest.fixture(params=["folder", "zip", "tar", "tgz", "csv", "one class"])
    def given(self, request, tmp_path):
        """Images to learn, in each of the forms that people have them in."""
        from test_archives import tar_of
        from test_images import zip_of

        folder = fill(tmp_path / "files")
        if request.param in ("tar", "tgz"):
            return tar_of(folder, tmp_path / f"x.{request.param}", "w:gz" if request.param == "tgz" else "w"), None
        if request.param == "zip":
            return zip_of(folder, tmp_path / "x.zip"), None
        if request.param == "csv":
            images = [path for path in folder.rglob("*") if path.is_file()]
            (tmp_path / "x.csv").write_text("path,label\n" + "".join(f"{p},{p.parent.name}\n" for p in images))
            return tmp_path / "x.csv", None
        return (folder / "cat", "cat") if request.param == "one class" else (folder, None)

    def test_teaching_leaves_nothing_in_the_cache(self, given, home, monkeypatch):
        from vqprompt.product.model import ingest
        from vqprompt.product.model.model import Model

        monkeypatch.setattr(ingest, "IN_MEMORY", 0)  # as with many images: decoded ones go through a temporary file
        Model(size=14).learn(*given)
        assert not [path for path in home.rglob("*") if path.is_file()]

    def test_the_cache_is_listed_and_cleared_as_a_whole(self, tmp_path, home, monkeypatch):
        from test_archives import tar_of

        monkeypatch.setattr("vqprompt.core.data.content.TICK", -1.0)  # so that hashes of new files are kept too
        build_store(Source(tar_of(fill(tmp_path / "files"), tmp_path / "x.tgz", "w:gz")), SIDE)
        for part in ("queries", "kernels"):
            keep_array(home / part / "a.npy", ARRAY)
        (home / "backbones").mkdir()
        (home / "backbones" / "mine.safetensors").touch()
        assert {path.parent for path in home.rglob("*") if path.is_file()} == {
            *(part.folder for part in cache.list_cache()), home / "backbones"
        }  # fmt: skip
        assert all(part.files and part.size for part in cache.list_cache())
        with monkeypatch.context() as patch:  # another process deletes each file just after it was found
            patch.setattr(Path, "is_file", lambda path: path.with_name("gone").stat())
            assert not any(part.files for part in cache.list_cache())
        cache.clear_cache()
        assert not any(part.files for part in cache.list_cache()) and (home / "backbones" / "mine.safetensors").exists()
