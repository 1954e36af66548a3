"""Runs on streams of every kind; and more images than fit: shards and streamed stores give what folders give."""

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vqprompt import Learner
from vqprompt.core.data.decode import aspect_of, decode_pixels
from vqprompt.core.data.shards import TarShards, find_shards
from vqprompt.core.data.store import StreamedStore
from vqprompt.core.data.stream import Stream
from vqprompt.core.errors import ImageError, UserError
from vqprompt.product.model.model import Model
from vqprompt.research.datasets import open_dataset
from vqprompt.research.paper.grids import Run
from vqprompt.research.paper.pool import left_to_do
from vqprompt.research.paper.requirements import Requirements
from vqprompt.research.results.config import resolve
from vqprompt.research.runs import runner
from vqprompt.research.training.batches import epoch_batches

CLASSES, EACH = 4, 10


def jpeg(c: int, i: int, size=(40, 30)) -> bytes:
    rng = np.random.default_rng(1000 * c + i)
    pixels = np.clip(60 * c + rng.integers(0, 60, (size[1], size[0], 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same images as a folder, as three tar shards and as parquet with small row groups."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = tmp_path_factory.mktemp("sources")
    order = [(c, i) for i in range(EACH) for c in range(CLASSES)]
    for c, i in order:
        place = root / "folder" / f"kind {c}" / f"{i:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(jpeg(c, i))
    (root / "tars").mkdir()
    (root / "tars" / "classes.txt").write_text("".join(f"kind {c}\n" for c in range(CLASSES)))
    for number, part in enumerate(np.array_split(np.arange(len(order)), 3)):
        files = {}
        for k in part:
            c, i = order[k]
            files |= {f"{k:06}.png": jpeg(c, i), f"{k:06}.cls": str(c).encode()}
        write_tar(root / "tars" / f"shard-{number:06}.tar", files)
    (root / "parquet").mkdir()
    table = pa.table({"image": [jpeg(*place) for place in order], "label": [f"kind {c}" for c, _ in order]})
    pq.write_table(table, root / "parquet" / "part-0.parquet", row_group_size=8)
    return root


@pytest.fixture
def weights(tiny_weights):
    return str(tiny_weights)


def content(model: Model):
    return {name: (r.ids.tolist(), r.total.tolist(), r.kept.tolist()) for name, r in model.knowledge.classes.items()}


def test_a_model_learns_the_same_from_a_folder_shards_and_parquet(sources, weights):
    models = {}
    for source in ("folder", "tars", "parquet"):
        models[source] = Model(weights, device="cpu")
        assert models[source].learn(sources / source).images == CLASSES * EACH
    assert content(models["folder"]) == content(models["tars"]) == content(models["parquet"])
    pattern = sources / "tars" / "shard-{000000..000001}.tar"
    part = Model(weights, device="cpu")
    assert 20 < part.learn(pattern).images < CLASSES * EACH
    again = part.learn(sources / "tars")
    assert again.known_images and content(part) == content(models["folder"]), "in two teachings"


def test_the_default_is_one_whole_store_and_a_limit_streams(sources, monkeypatch):
    whole = open_dataset(str(sources / "folder"), 28, 1)
    monkeypatch.setenv("VQPROMPT_CACHE_GB", "0.00002")
    limited = open_dataset(str(sources / "folder"), 28, 1)
    assert not isinstance(whole.store, StreamedStore) and isinstance(limited.store, StreamedStore)
    rows = np.array([7, 3, 31, 3])
    for _ in range(2):
        assert torch.equal(whole.store.read(rows), limited.store.read(rows))
    everything = np.arange(len(whole.store))
    assert torch.equal(whole.store.read(everything), limited.store.read(everything))
    assert torch.equal(whole.store.aspect, limited.store.aspect)
    assert (whole.is_test == limited.is_test).all() and whole.classes == limited.classes
    assert limited.store._used == (20_000 // (3 * 32 * 32)) == limited.store._room, "no more than that"


@pytest.mark.parametrize("source", ["tars", "parquet"])
def test_shards_have_the_pixels_of_the_folder(sources, source):
    folder, shards = (open_dataset(str(sources / name), 28, 1) for name in ("folder", source))

    def by_class(dataset, c):
        rows = np.flatnonzero(dataset.labels == dataset.classes.index(f"kind {c}"))
        return sorted(p.numpy().tobytes() for p in dataset.store.read(rows))

    for c in range(CLASSES):
        assert by_class(folder, c) == by_class(shards, c)
    assert shards.is_test.sum() == CLASSES * 2
    for task in Stream(shards, 2, 1):
        assert len(task.train) == 16 and len(task.train.read(torch.arange(3), torch.device("cpu"))) == 3
        assert (task.train.groups is None) == (source == "tars")


def test_a_run_that_streams_ends_as_one_that_does_not_and_resumes(sources, weights, tmp_path, monkeypatch):
    def settings(data):
        return resolve({"data": str(sources / data), "tasks": 2, "backbone": weights, "size": 28, "epochs": 2,
                        "batch_size": 8, "device": "cpu"})  # fmt: skip

    whole = runner.run(settings("folder"), tmp_path / "whole", report=False)
    monkeypatch.setenv("VQPROMPT_CACHE_GB", "0.00002")

    def stop(event):
        if event.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(settings("folder"), tmp_path / "streamed", report=False, progress=stop)
    resumed = runner.run(settings("folder"), tmp_path / "streamed", resume=True, report=False)
    assert resumed.accuracy == whole.accuracy and resumed.losses == whole.losses
    for source in ("tars", "parquet"):
        assert runner.run(settings(source), tmp_path / source, report=False).done
    monkeypatch.delenv("VQPROMPT_CACHE_GB")
    with pytest.raises(UserError, match="VQPROMPT_CACHE_GB"):
        runner.run(settings("folder"), tmp_path / "streamed", resume=True, report=False)


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Images of three classes, light or dark by class, in two domains of opposite tints."""
    root = tmp_path_factory.mktemp("domains")
    for d, tint in (("paint", [40, 0, 0]), ("photo", [0, 0, 40])):
        for c in range(3):
            for i in range(10):
                place = root / d / f"kind {c}" / f"{d} {i}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(100 * c + i).integers(0, 40, (30, 40, 3))
                Image.fromarray((80 * c + noise // 2 + tint).clip(0, 255).astype(np.uint8)).save(place)
    return root


@pytest.mark.parametrize(
    ("kind", "tasks"), [("domains", 2), ("blurry:50,30", 2), ("repeated:30", 2), ("few-shot:2,1,4", 3), ("file", 2),
                        ("online:8", 2), ("domains+online:12", 2)],
)  # fmt: skip
def test_a_run_of_every_kind_learns_and_ends_the_same_after_a_kill(
    sources, domains, weights, tmp_path, monkeypatch, kind, tasks
):
    data = domains if "domains" in kind else sources / "folder"
    if kind == "file":
        kind = str(tmp_path / "tasks.json")
        halves = [[f"kind {c}/{i:03}.png" for c in range(n, n + 3) for i in range(5 * n, 5 * n + 5)] for n in (0, 1)]
        Path(kind).write_text(json.dumps(halves))
    settings = {
        "data": str(data), "stream": kind, "tasks": 2, "backbone": weights, "size": 28, "batch_size": 4,
        "device": "cpu", "rebalancing": {"how": "closed-form", "covariance": "shared"},
    }  # fmt: skip
    settings |= {} if "online" in kind else {"epochs": 2}
    config = resolve(settings)
    built = []
    with monkeypatch.context() as patch:
        patch.setattr(runner, "Learner", lambda *given, **named: built.append(1) or Learner(*given, **named))
        whole = runner.run(config, tmp_path / "whole")
    assert len(built) == 1 + ("online" in kind or kind.startswith("few-shot")), "again for another number of tasks"

    def kill(event):
        if event.task == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(config, tmp_path / "killed", report=False, progress=kill)
    resumed = runner.run(config, tmp_path / "killed", resume=True, report=False)
    changing = {"seconds", "task_seconds", "images_per_second", "peak_memory"}
    assert resumed.model_dump(exclude=changing) == whole.model_dump(exclude=changing)
    assert len(whole.tasks) == tasks and whole.faa > 55, "3 or 4 classes"
    assert whole.stream == kind and whole.kept_bytes > 0 and whole.training_flops > whole.test_flops > 0
    assert len(whole.within_task) == tasks and whole.measures["within_task"] >= whole.faa
    assert bool(whole.curve) == ("area_under_curve" in whole.measures) == ("online" in kind)
    page = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    assert "Backward transfer" in page and ("Accuracy as images come" in page) == ("online" in kind)


def test_what_a_stream_cannot_have_is_refused_before_work_starts(domains, sources, tmp_path, monkeypatch):
    def refused(message, **settings):
        with pytest.raises(UserError, match=message):
            runner.run(resolve({"data": str(sources / "folder"), "tasks": 2, **settings}), tmp_path / "out")
        assert not (tmp_path / "out" / "config.json").exists()

    message = "{} cannot learn --stream repeated:30, in which classes come back; these can, with .*: .*vq-prompt"
    refused(message.format("ease"), method="ease", stream="repeated:30")
    refused(message.format("vq-prompt"), stream="repeated:30", rebalancing={"centroids": 2})
    refused("an online stream shows every image once; leave epochs out", stream="online:8", epochs=2)
    refused("'kind 0/000.png' is not DOMAIN/CLASS/image, as --stream domains needs it", stream="domains")
    assert resolve({"stream": "domains+online:50", "method": "slca"}).epochs == 1
    assert resolve({"stream": "online/tasks.json"}).epochs == 20, "a name is no kind"
    monkeypatch.setattr(runner, "open_dataset", lambda *given: pytest.fail("images were decoded"))
    (tmp_path / "tasks.json").write_text('["crow.jpg"]')
    refused("tasks.json: expected a list of tasks, as in", stream=str(tmp_path / "tasks.json"))
    refused("lost.json: cannot be read .*--stream needs a list of tasks", stream=str(tmp_path / "lost.json"))


def test_a_file_of_tasks_counts_by_its_content(sources, weights, tmp_path):
    """Not by its path: for a resumed run, for runs of grids, and for what another machine must have."""
    first, moved = tmp_path / "tasks.json", tmp_path / "moved.json"
    halves = [[f"kind {c}/{i:03}.png" for c in range(n, n + 2) for i in range(5)] for n in (0, 2)]
    first.write_text(json.dumps(halves))
    settings = {"data": str(sources / "folder"), "backbone": weights, "size": 28, "epochs": 1, "device": "cpu"}

    def planned(file: Path) -> Run:
        return Run("other place", resolve({**settings, "stream": str(file)}))

    needs = Requirements.of([planned(first)])
    runner.run(planned(first).config, tmp_path / "out" / "done", report=False)
    shutil.copy(first, moved)
    first.write_text(json.dumps([*halves[:1], halves[1][:-1]]))
    assert needs.missing().endswith("tasks.json lists other tasks; copy the right one there")
    digests = r"\(stream=tasks with digest \w{16} then, tasks with digest \w{16} now\)"
    with pytest.raises(UserError, match=f"was started with other settings {digests}; give the same ones, or another"):
        runner.run(planned(first).config, tmp_path / "out" / "done", resume=True)
    assert runner.run(planned(moved).config, tmp_path / "out" / "done", resume=True, report=False).done
    assert left_to_do([planned(first)], tmp_path / "out") == [planned(first)]
    assert left_to_do([planned(moved)], tmp_path / "out") == []
    moved.unlink()
    assert "cannot read what a run needs" in replace(needs, tasks={str(moved): ""}).missing()


def test_shuffling_by_groups_keeps_groups_together():
    groups = np.repeat(np.arange(10), 20)
    (batches,) = epoch_batches(200, 20, 1, 0, groups)
    order = torch.cat(batches)
    assert sorted(order.tolist()) == list(range(200))
    spans = [len(set(groups[part].tolist())) for part in order.split(40)]
    assert spans == [2] * 5, "two groups at a time"
    assert order[:40].tolist() != sorted(order[:40].tolist())
    (plain,) = epoch_batches(200, 20, 1, 0)
    assert len({tuple(groups[b].tolist()) for b in plain}) == 10 and max(len(set(groups[b])) for b in plain) > 5


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_aspect_ratio_of_a_header_is_that_of_the_pixels(orientation):
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (50, 20)).save(file, "JPEG", exif=exif)
    assert aspect_of(file.getvalue(), "x") == decode_pixels(file.getvalue(), "x", 16)[1]


def test_what_is_wrong_with_shards_is_named(tmp_path, sources):
    image = jpeg(0, 0)
    write_tar(tmp_path / "a.tar", {"1.png": image, "1.cls": b"0", "2.png": image})
    with pytest.raises(ImageError, match=r"'2' has no \.cls"):
        TarShards(find_shards(tmp_path))
    write_tar(tmp_path / "a.tar", {"1.png": image, "1.cls": b" "})
    with pytest.raises(ImageError, match="class of '1' is empty"):
        TarShards(find_shards(tmp_path))
    (tmp_path / "classes.txt").write_text("crow\n")
    write_tar(tmp_path / "a.tar", {"1.png": image, "1.cls": b"-1"})
    with pytest.raises(ImageError, match=r"'1' is of class -1, but classes\.txt names 1 class"):
        TarShards(find_shards(tmp_path))
    with pytest.raises(ImageError, match=r"3 of 6 shards are missing, such as .*shard-000003\.tar"):
        find_shards(sources / "tars" / "shard-{000000..000005}.tar")
    (tmp_path / "a.tar").write_bytes((sources / "tars" / "shard-000000.tar").read_bytes()[:-20_000])
    with pytest.raises(ImageError, match="damaged archive"):
        TarShards(find_shards(tmp_path))
    with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
        archive.add(sources / "tars" / "classes.txt", "1.cls")
    with pytest.raises(ImageError, match="compressed shard"):
        TarShards(find_shards(tmp_path))


def test_a_broken_image_in_a_shard_is_named_before_anything_is_learned(tmp_path):
    files = {}
    for c in range(2):
        for i in range(4):
            files |= {f"{c}{i}.png": jpeg(c, i), f"{c}{i}.cls": str(c).encode()}
    write_tar(tmp_path / "a.tar", files | {"13.png": b"no image"})
    with pytest.raises(ImageError, match=r"1 of 8 images cannot be used:\n.*a.tar: image \d: not an image"):
        open_dataset(str(tmp_path), 28, 1)


def test_a_limit_that_is_no_number_is_refused(sources, monkeypatch):
    monkeypatch.setenv("VQPROMPT_CACHE_GB", "much")
    with pytest.raises(UserError, match="VQPROMPT_CACHE_GB='much': give a number above 0, such as 50"):
        open_dataset(str(sources / "folder"), 28, 1)
