"""Learning on a Ray cluster. A model remembers sums, so learning is map and reduce.

Ray Data gives pieces of the images to workers, twice. First the workers identify their images by content, to find
copies and known ones. Then they compute features and add them up. This process adds the sums of all workers. They are
sums of whole numbers, so the result is the same in any order, to the last bit. Every machine must see the images under
the same path.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vqprompt.core.errors import ImageError, UserError
from vqprompt.core.progress import Progress, Report, Stage, ignore
from vqprompt.product.model.decoded import DecodedPictures
from vqprompt.product.model.extractor import Extractor
from vqprompt.product.model.ingest import Identified, NewPictures, ThisMachine
from vqprompt.product.model.network import open_extractor
from vqprompt.product.model.records import RecordBuilder, Sums
from vqprompt.product.model.sources import PictureSet, open_pictures
from vqprompt.research.cluster import parse_on
from vqprompt.research.cluster.ray_cluster import check_machines, connected
from vqprompt.research.cluster.requirements import Requirements

PIECE = 2048  # images per piece of work, at most
PIECES_PER_WORKER = 4  # at least, so that a slow worker does not keep the others waiting


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
class Assignment:
    """What every worker gets. count, classes: of the images, to notice a worker that sees different images. backbone:
    its name or path, size and crop; None while images are only identified."""

    source: str
    count: int
    classes: tuple[str, ...]
    device: str
    wanted: Requirements
    backbone: tuple[str, int, float] | None = None
    skip_broken: bool = False


class Cluster:
    """A `Workplace`: the workers of a Ray cluster. backbone, crop: as the model's, whose features are computed."""

    def __init__(self, ray: Any, place: Place, source: str, backbone: str, crop: float) -> None:
        self.ray, self.place, self.source = ray, place, source
        self.wanted = Requirements.here([backbone], [source])
        slots = check_machines(ray, self.wanted, place.cpus, place.gpus)
        self.workers, self.backbone, self.crop = min(place.workers or slots, slots), backbone, crop
        self._assignment: Assignment | None = None  # of the pictures that were identified

    def identify(
        self, pictures: PictureSet, known: np.ndarray, decoded: DecodedPictures | None, progress: Report
    ) -> Identified:
        device = "auto" if self.place.gpus else "cpu"
        names, found, done = tuple(pictures.names), Identified.none_of(len(pictures)), 0
        self._assignment = Assignment(self.source, len(pictures), names, device, self.wanted)
        for places, (ids, broken) in self._map(self._assignment, np.arange(len(pictures))):
            found.ids[places] = ids
            found.broken |= {int(places[i]): message for i, message in broken.items()}
            done += len(places)
            progress(Progress(Stage.STARTING, done, len(pictures), detail="looking through the files"))
        return found

    def add_up(
        self, new: NewPictures, extractor: Extractor, skip_broken: bool, progress: Report
    ) -> tuple[dict[str, Sums], list[str]]:
        """extractor: what this machine would use; the workers open their own."""
        assert self._assignment is not None
        backbone = (self.backbone, extractor.size, self.crop)
        assignment = replace(self._assignment, backbone=backbone, skip_broken=skip_broken)
        builders: dict[str, RecordBuilder] = {}
        broken: list[str] = []
        done = 0
        for places, (sums, messages) in self._map(assignment, new.places, new.ids):
            broken += messages
            for label, part in sums.items():
                builders.setdefault(label, RecordBuilder()).merge(part)
            done += len(places)
            progress(Progress(Stage.LEARNING, done, len(new)))
        return {name: builder.sums() for name, builder in builders.items()}, broken

    def _map(
        self, assignment: Assignment, places: np.ndarray, ids: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """The answers of workers about pieces of the images, as they arrive. ids: of the images, once known."""
        from ray import data

        size = max(1, min(PIECE, -(-len(places) // (self.workers * PIECES_PER_WORKER))))
        starts = range(0, len(places), size)
        items = [
            {"piece": pickle.dumps((places[s : s + size], None if ids is None else ids[s : s + size]))} for s in starts
        ]
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        pieces, at_once = data.from_items(items, override_num_blocks=len(items)), min(self.workers, len(items))
        if self.place.gpus:  # actors, because Ray ends other processes after each piece, to free the GPU
            answers = pieces.map_batches(
                Worker, fn_constructor_args=(assignment,), batch_size=1, num_cpus=self.place.cpus,
                num_gpus=self.place.gpus, compute=data.ActorPoolStrategy(size=at_once),
            )  # fmt: skip
        else:
            answers = pieces.map_batches(
                answer_about,  # type: ignore[arg-type]
                fn_kwargs={"assignment": assignment}, batch_size=1, num_cpus=self.place.cpus,
                compute=data.TaskPoolStrategy(size=at_once),
            )  # fmt: skip
        for row in answers.iter_rows():
            places_of_piece, answer = pickle.loads(row["answer"])  # our own worker's
            if isinstance(answer, str):
                raise ImageError(answer)
            yield places_of_piece, answer


@contextmanager
def cluster(place: Place, source: Any, backbone: str, crop: float = 0.875) -> Iterator[Cluster]:
    """Connects to a cluster, for the time of the block."""
    if not isinstance(source, str | Path):
        raise UserError("--on ray learns from one folder, archive, table or set of shards at a time; give one")
    with connected(place.address) as ray:
        yield Cluster(ray, place, str(Path(source).expanduser()), backbone, crop)


# ---------------------------------------------------------------------------------------------- in a worker


class Worker:
    """Answers about one piece at a time. It opens the images and the backbone once."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.lacking = assignment.wanted.missing() or self._open()

    def _open(self) -> str | None:
        assignment = self.assignment
        self.pictures = _opened(assignment.source)
        if len(self.pictures) != assignment.count or tuple(self.pictures.names) != assignment.classes:
            return f"the images at {assignment.source} are different on a worker; copy those of this machine there"
        if assignment.backbone is not None:
            self.extractor = open_extractor(*assignment.backbone, assignment.device)  # its weights were compared above
        return None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        places, ids = pickle.loads(batch["piece"][0])
        try:
            answer = self.lacking or self._answer(places, ids)
        except UserError as error:
            answer = str(error)
        return {"answer": [pickle.dumps((places, answer))]}

    def _answer(self, places: np.ndarray, ids: np.ndarray | None) -> Any:
        piece, here = self.pictures.subset(places), ThisMachine()
        if ids is None:
            found = here.identify(piece, np.zeros(0, np.uint64), None, ignore)
            return found.ids, found.broken
        new = NewPictures(piece, places, ids)
        return here.add_up(new, self.extractor, self.assignment.skip_broken, ignore)


def answer_about(batch: dict[str, Any], assignment: Assignment) -> dict[str, Any]:
    return _worker(assignment)(batch)


@lru_cache(maxsize=2)
def _worker(assignment: Assignment) -> Worker:
    return Worker(assignment)


@lru_cache(maxsize=1)
def _opened(source: str) -> PictureSet:
    return open_pictures(source)[0]
