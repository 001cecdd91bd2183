"""What an image's layers look like as one file system (OCI image-spec, layer.md, "Whiteouts"). Pure.

Layers may come in any order, each once, so the topmost version of a file is known only at the end: what a file of a
higher layer hides or a whiteout removes is dropped then.
"""

from __future__ import annotations

import posixpath
from typing import Generic, TypeVar

from buildkit.image.tarspan import normalise

T = TypeVar("T")

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"


class Overlay(Generic[T]):
    """Paths of all layers so far, with a value for those that are worth one. Paths are absolute; layers count from 0,
    the lowest first."""

    def __init__(self) -> None:
        self._layer_of: dict[str, int] = {}
        self._folders: dict[str, int] = {}
        self._values: dict[str, T] = {}
        self._whiteouts: dict[str, int] = {}
        self._opaques: dict[str, int] = {}

    def enter(self, name: bytes, layer: int) -> str | None:
        """The path of an entry's ``name``; None for a whiteout, which is noted. Raises ValueError for a name that leads
        out of its folder."""
        raw = normalise(name)
        folder, _, last = raw.rpartition(b"/")
        if last == _OPAQUE:
            self._note(self._opaques, "/" + _text(folder), layer)
            return None
        if last.startswith(_WHITEOUT):
            self._note(self._whiteouts, posixpath.join("/", _text(folder), _text(last[len(_WHITEOUT) :])), layer)
            return None
        return "/" + _text(raw)

    def is_hidden(self, path: str, layer: int) -> bool:
        """Whether what came before hides ``path`` of ``layer`` already."""
        return self._layer_of.get(path, -1) > layer

    def add(self, path: str, layer: int, value: T | None, *, folder: bool) -> None:
        """There is a file (or link, or ``folder``) at ``path`` of ``layer``; of one layer's, the last counts."""
        if self.is_hidden(path, layer):
            return
        self._layer_of[path] = layer
        if folder:
            self._folders[path] = layer
        if value is not None:
            self._values[path] = value
        else:
            self._values.pop(path, None)

    def paths(self) -> frozenset[str]:
        """What is left after whiteouts and after files that took a folder's place."""
        return frozenset(path for path, layer in self._layer_of.items() if not self._removed(path, layer))

    def values(self) -> dict[str, T]:
        """The values of what is left."""
        return {path: v for path, v in self._values.items() if not self._removed(path, self._layer_of[path])}

    def _removed(self, path: str, layer: int) -> bool:
        if self._whiteouts.get(path, -1) > layer:
            return True
        parent = posixpath.dirname(path)
        while parent != "/":
            if self._whiteouts.get(parent, -1) > layer or self._opaques.get(parent, -1) > layer:
                return True
            # A file or a link in a higher layer, where a lower one had a folder, hides all that was in it.
            above = self._layer_of.get(parent, -1)
            if above > layer and self._folders.get(parent) != above:
                return True
            parent = posixpath.dirname(parent)
        return self._opaques.get("/", -1) > layer

    @staticmethod
    def _note(where: dict[str, int], path: str, layer: int) -> None:
        where[path] = max(layer, where.get(path, -1))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
