"""What has a name (methods, data sets, routes, executors): our own, and what installed packages add by entry points.

A package is imported when one of its names is used, or when all are listed. So a broken package changes nothing for
people who do not use it.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar, cast

from vqprompt.core.errors import UserError

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """group: of the entry points. kind: what each of them must be an instance or a subclass of. own: those of this
    package, whose names no other package can take."""

    def __init__(self, group: str, kind: type, own: dict[str, T]) -> None:
        super().__init__(own)
        self.group, self.kind = group, kind

    @cached_property
    def entry_points(self) -> dict[str, EntryPoint]:
        """Those of other packages, by name."""
        by_name: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=self.group), key=_package):
            if point.name in self.data or point.name in by_name:
                owner = _package(by_name[point.name]) if point.name in by_name else "vqprompt"
                warnings.warn(f"{self._describe(point)} is not used: {owner} has that name; rename it", stacklevel=3)
            else:
                by_name[point.name] = point
        return by_name

    def __missing__(self, name: str) -> T:
        point = self.entry_points[name]
        try:
            value = point.load()
        except Exception as error:  # whatever the package's own code raises
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{self._describe(point)} cannot be loaded ({reason}); repair or uninstall it") from None
        if not (isinstance(value, self.kind) or (isinstance(value, type) and issubclass(value, self.kind))):
            raise UserError(
                f"{self._describe(point)} cannot be used: {point.value} is {value!r}, where a "
                f"{self.kind.__module__}.{self.kind.__name__} is expected"
            )
        self.data[name] = cast(T, value)
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        """Names of what can be used. What cannot is named in a warning, once."""
        for name in list(self.entry_points):
            try:
                self[name]
            except UserError as error:
                del self.entry_points[name]
                warnings.warn(str(error), stacklevel=2)
        return iter(list(self.data))

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self.entry_points

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def version(self, name: str) -> str:
        """The package that brought an entry, and its version; empty for our own."""
        point = self.entry_points.get(name)
        return "" if point is None or point.dist is None else f"{point.dist.name} {point.dist.version}"

    def _describe(self, point: EntryPoint) -> str:
        return f"{point.name!r} ({self.group}) of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module
