"""Learning on a Ray cluster. A model remembers sums, so learning is map and reduce.

Ray Data gives pieces of the images to workers, twice. First the workers name their images by content, to find copies
and known ones. Then they compute features and add them up. This process adds the sums of all workers. They are sums of
whole numbers, so the result is the same in any order, to the last bit. Every machine must see the images under the same
path.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.product.model.many import Chosen, Growing
from vqprompt.product.model.pictures import Picture
from vqprompt.product.model.records import ClassRecord
from vqprompt.product.model.streaming import NamedPictures, features_of, joined, labels_of, name_all, to_learn
from vqprompt.product.model.teaching import nothing_readable
from vqprompt.research.cluster import parse_on
from vqprompt.research.cluster.ray_cluster import check_machines, connected
from vqprompt.research.cluster.requirements import Requirements

PIECE = 2048  # images per piece of work, at most
PIECES_PER_WORKER = 4  # at least, so that a slow worker does not keep the others waiting

Sums = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]  # by class, as `Growing.parts` gives them


@dataclass(frozen=True)
class Place:
    """address: HOST:PORT of the head; None: the cluster that this machine is part of. cpus, gpus: per worker. workers:
    the most workers."""

    address: str | None = None
    cpus: int = 1
    gpus: float = 0.0
    workers: int | None = None


def parse_place(on: str, gpus: float | None = None, workers: int | None = None) -> Place | None:
    """`--on`: None for this machine."""
    kind, address = parse_on(on, ("local", "ray"))
    if kind == "local":
        if gpus is not None or workers is not None:
            raise UserError("--gpus and --workers are for --on ray; on this machine all cores are used")
        return None
    if gpus is not None and not 0 <= gpus <= 1:
        raise UserError(f"--gpus {gpus:g}: expected the share of a GPU per worker, from 0 to 1")
    return Place(address, gpus=gpus or 0.0, workers=workers)


@dataclass(frozen=True)
class Lesson:
    """What every worker gets. count, classes: of the images, to notice a worker that sees different images. backbone:
    its name or path, size and crop; None while images are only named."""

    source: str
    count: int
    classes: tuple[str, ...]
    skip_broken: bool
    device: str
    wanted: Requirements
    backbone: tuple[str, int, float] | None = None


class RayClassroom:
    """Names images and computes features for `Model.learn` on a cluster, instead of on this machine."""

    def __init__(self, ray: Any, place: Place, source: str, backbone: str) -> None:
        self.ray, self.place, self.source = ray, place, source
        self.wanted = Requirements.here([backbone], [source])
        slots = check_machines(ray, self.wanted, place.cpus, place.gpus)
        self.workers, self.backbone = min(place.workers or slots, slots), backbone
        self.lesson: Lesson | None = None

    def name_all(
        self, pictures: Sequence[Picture], skip_broken: bool, progress: Report
    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """As `streaming.name_all`."""
        device = "auto" if self.place.gpus else "cpu"
        classes = tuple(sorted(labels_of(pictures)))
        self.lesson = Lesson(self.source, len(pictures), classes, skip_broken, device, self.wanted)
        names, readable = np.zeros(len(pictures), np.uint64), np.ones(len(pictures), bool)
        broken: list[str] = []
        done = 0
        for places, (named, good, messages) in self._map(self.lesson, np.arange(len(pictures))):
            names[places], readable[places] = named, good
            broken += messages
            done += len(places)
            progress(Progress(Stage.STARTING, done, len(pictures), detail="looking through the files"))
        return names, readable, broken

    def take_in(
        self, extractor: Any, new: NamedPictures, known: dict[str, ClassRecord], skip_broken: bool, progress: Report
    ) -> tuple[dict[str, ClassRecord], list[str]]:
        """As `streaming.take_in`. extractor: what this machine would use; the workers open their own."""
        assert self.lesson is not None and isinstance(new.pictures, Chosen)
        settings = (self.backbone, extractor.vit.config.image_size, extractor.crop)
        growing: dict[str, Growing] = {}
        broken: list[str] = []
        done = 0
        for places, (sums, messages) in self._map(
            replace(self.lesson, backbone=settings), new.pictures.places, new.names
        ):
            broken += messages
            for label, parts in sums.items():
                growing.setdefault(label, Growing()).merge(*parts)
            done += len(places)
            progress(Progress(Stage.LEARNING, done, len(new.names)))
        if not growing:
            raise nothing_readable(broken)
        return joined(growing, known), broken

    def _map(
        self, lesson: Lesson, places: np.ndarray, names: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """The answers of workers about pieces of the images, as they arrive. names: of the images, if known."""
        from ray import data

        size = max(1, min(PIECE, -(-len(places) // (self.workers * PIECES_PER_WORKER))))
        starts = range(0, len(places), size)
        items = [
            {"piece": pickle.dumps((places[s : s + size], None if names is None else names[s : s + size]))}
            for s in starts
        ]
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        pieces, at_once = data.from_items(items, override_num_blocks=len(items)), min(self.workers, len(items))
        if self.place.gpus:  # actors, because Ray ends other processes after each piece, to free the GPU
            answers = pieces.map_batches(
                Worker, fn_constructor_args=(lesson,), batch_size=1, num_cpus=self.place.cpus,
                num_gpus=self.place.gpus, compute=data.ActorPoolStrategy(size=at_once),
            )  # fmt: skip
        else:
            answers = pieces.map_batches(
                answer_about,  # type: ignore[arg-type]
                fn_kwargs={"lesson": lesson}, batch_size=1, num_cpus=self.place.cpus,
                compute=data.TaskPoolStrategy(size=at_once),
            )  # fmt: skip
        for row in answers.iter_rows():
            places_of_piece, answer = pickle.loads(row["answer"])  # our own worker's
            if isinstance(answer, str):
                raise ImageError(answer)
            yield places_of_piece, answer


@contextmanager
def classroom(place: Place, source: Any, backbone: str) -> Iterator[RayClassroom]:
    """Connects to a cluster, for the time of the block."""
    if not isinstance(source, str | Path):
        raise UserError("--on ray learns from one folder, archive, table or set of shards at a time; give one")
    with connected(place.address) as ray:
        yield RayClassroom(ray, place, str(Path(source).expanduser()), backbone)


# ---------------------------------------------------------------------------------------------- in a worker


class Worker:
    """Answers about one piece at a time. It opens the images and the backbone once."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self.lacking = lesson.wanted.missing() or self._open()

    def _open(self) -> str | None:
        lesson = self.lesson
        self.pictures, _ = _opened(lesson.source)
        if len(self.pictures) != lesson.count or tuple(sorted(labels_of(self.pictures))) != lesson.classes:
            return f"the images at {lesson.source} are different on a worker; copy those of this machine there"
        if lesson.backbone is not None:
            from vqprompt.product.model.features import open_features

            self.extractor, _ = open_features(*lesson.backbone, lesson.device)  # its weights were compared above
        return None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        places, names = pickle.loads(batch["piece"][0])
        try:
            answer = self.lacking or self._answer(places, names)
        except UserError as error:
            answer = str(error)
        return {"answer": [pickle.dumps((places, answer))]}

    def _answer(self, places: np.ndarray, names: np.ndarray | None) -> Any:
        piece, skip_broken = Chosen(self.pictures, places), self.lesson.skip_broken
        if names is None:
            return name_all(piece, skip_broken, ignore)
        growing: dict[str, Growing] = {}
        broken: list[str] = []
        new = NamedPictures(piece, names)
        for picture, name, feature in features_of(self.extractor, new, skip_broken, broken, ignore):
            growing.setdefault(picture.label, Growing()).add(name, feature)
        return {label: g.parts() for label, g in growing.items()}, broken


def answer_about(batch: dict[str, Any], lesson: Lesson) -> dict[str, Any]:
    return _worker(lesson)(batch)


@lru_cache(maxsize=2)
def _worker(lesson: Lesson) -> Worker:
    return Worker(lesson)


@lru_cache(maxsize=1)
def _opened(source: str) -> Any:
    return to_learn(source, None, ())
