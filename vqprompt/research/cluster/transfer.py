"""A run's folder as bytes, to send it to another machine. No shared disk is needed."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from vqprompt.core.errors import UserError
from vqprompt.core.files import write_atomically

LAST = ("metrics.json", "checkpoint.json")  # they name the other files, so they are written last
FolderContent = dict[str, bytes]


def pack(folder: Path) -> FolderContent:
    """All files of a folder by relative path, except hidden ones (locks, partial files)."""
    if not folder.is_dir():
        return {}
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not _hidden(name)}


def unpack(content: FolderContent, folder: Path) -> None:
    """Make a folder equal to the packed one. At any moment, a reader finds the whole old or the whole new state."""
    for name in content:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise UserError(f"a run's files include {name!r}, which leads out of its folder; nothing was unpacked")
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(content, key=lambda name: (LAST.index(name) if name in LAST else -1, name)):
        place = folder / name
        if not place.is_file() or place.stat().st_size != len(content[name]) or place.read_bytes() != content[name]:
            write_atomically(place, content[name])
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in content and not _hidden(name):
            file.unlink()


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
