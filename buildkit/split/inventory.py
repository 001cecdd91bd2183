"""What a layer tar holds, in columns: a million entries take about 100 MB, not a gigabyte of objects.

Entries are numbered from 0 in the tar's order. Paths are normalised (no leading slash, ``b""`` is the root) and stand
for themselves by a 128-bit hash, so that equal paths are found by sorting. Directories, those with an entry and those
that are only implied by what lies in them, are *nodes*, numbered so that a parent comes before its children; node 0 is
the root.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from buildkit.errors import FormatError
from buildkit.image.tarspan import DIRECTORY, HARDLINK, SYMLINK, Entry, normalise

WHITEOUT = b".wh."
"""Prefix of names that delete something in a lower layer (image-spec, layer.md, "Whiteouts")."""
OPAQUE = b".wh..wh..opq"
NONE = 0xFFFFFFFF
"""No entry, no node."""

MAX_PATH = 4096
"""Bytes of a path; Linux's PATH_MAX."""
MAX_ENTRIES = 10**7
MAX_DIRECTORY_NAMES = 2**27
"""Bytes of all directories' paths. A small tar with absurdly deep paths would name far more than it holds."""

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A hard or symbolic link: number of its entry, and the target (a normalised path for a hard link)."""

    entry: int
    target: bytes


class Inventory:
    """The columns. Filled by ``add``, read by everything else; numbers, not objects, go out and in."""

    def __init__(self, *, where: str = "layer") -> None:
        self.where = where
        self.start = array("Q")
        """Offset of each span in the tar."""
        self.length = array("Q")
        """Bytes of each span."""
        self.kind = bytearray()
        """Type flag of each entry."""
        self.parent = array("I")
        """Node of the directory that each entry lies in (NONE for the root's own entry)."""
        self.cut = array("I")
        """32 bits of each path's hash: the strength of the boundary before the entry."""
        self.node_parent = array("I", [NONE])
        self.node_entry = array("I", [NONE])
        """The last entry of each node's directory; NONE for a directory that is only implied."""
        self.global_before = array("I")
        """For each PAX global header: number of the first entry after it."""
        self.whiteouts = array("I")
        """Numbers of the entries that delete something in lower layers."""
        self._keys = array("Q")  # two words for each entry
        self._names = bytearray()
        self._name_end = array("Q")
        self._nodes: dict[bytes, int] = {b"": 0}
        self._link_entry = array("I")
        self._link_end = array("Q")
        self._link_targets = bytearray()
        self._last_parent = (b"", 0)
        self._node_bytes = 0

    def __len__(self) -> int:
        return len(self.start)

    def add(self, entry: Entry) -> int:
        """Append an entry; its number. Raises FormatError, with the offset, for a path that leads out."""
        return self.append(
            name=entry.name,
            kind=entry.kind,
            start=entry.offset,
            length=entry.span,
            link=entry.link,
            global_headers=entry.globals_before,
        )

    def append(
        self, *, name: bytes, kind: int, start: int, length: int, link: bytes = b"", global_headers: int = 0
    ) -> int:
        """``add`` in single values, for inventories that come from no tar."""
        number = len(self.start)
        try:
            path = normalise(name)
            target = normalise(link) if kind == HARDLINK else link
        except ValueError as error:
            raise FormatError(f"entry {show_path(name)}: {error}", where=self.where, offset=start) from error
        if kind == HARDLINK and not target:
            raise FormatError(f"entry {show_path(name)}: hard link to nothing", where=self.where, offset=start)
        if not path and kind != DIRECTORY:
            raise FormatError(f"entry {show_path(name)}: the root is not a directory", where=self.where, offset=start)
        if len(path) > MAX_PATH or len(target) > MAX_PATH:
            raise FormatError(f"entry {show_path(name)}: path above {MAX_PATH} bytes", where=self.where, offset=start)
        if number >= MAX_ENTRIES:
            raise FormatError(f"more than {MAX_ENTRIES} entries", where=self.where, offset=start)
        digest = path_hash(path)
        while len(self.global_before) < global_headers:
            self.global_before.append(number)
        self.start.append(start)
        self.length.append(length)
        self.kind.append(kind)
        self.cut.append(int.from_bytes(digest[:4], "little"))
        self._keys.frombytes(digest)
        self._names += path
        self._name_end.append(len(self._names))
        if not path:
            self.parent.append(NONE)
            self.node_entry[0] = number
            return number
        directory, _, base = path.rpartition(b"/")
        if base.startswith(WHITEOUT):
            self.whiteouts.append(number)
        if directory != self._last_parent[0]:
            self._last_parent = (directory, self._intern(directory))
        self.parent.append(self._last_parent[1])
        if kind == DIRECTORY:
            self.node_entry[self._intern(path)] = number
        elif kind in (HARDLINK, SYMLINK):
            self._link_entry.append(number)
            self._link_targets += target
            self._link_end.append(len(self._link_targets))
        return number

    def name(self, number: int) -> bytes:
        """Normalised path of an entry."""
        return bytes(self._names[self._name_end[number - 1] if number else 0 : self._name_end[number]])

    def show(self, number: int) -> str:
        """An entry's path for people."""
        return show_path(self.name(number))

    def links(self, kind: int) -> Iterator[Link]:
        """All hard links or all symbolic links, in order."""
        begin = 0
        for entry, end in zip(self._link_entry, self._link_end, strict=True):
            if self.kind[entry] == kind:
                yield Link(entry=entry, target=bytes(self._link_targets[begin:end]))
            begin = end

    @property
    def nodes(self) -> int:
        return len(self.node_parent)

    def node_paths(self) -> Iterable[bytes]:
        """Path of each node, in the order of their numbers."""
        return self._nodes.keys()

    def node(self, path: bytes) -> int:
        """Number of the node for a normalised path, or NONE."""
        return self._nodes.get(path, NONE)

    def keys(self) -> Keys:
        """Hashes of all paths, shape (entries, 2). The inventory must not grow while the array lives."""
        return np.frombuffer(self._keys, dtype=np.uint64).reshape(-1, 2) if self._keys else np.empty((0, 2), np.uint64)

    def chain(self, node: int) -> Iterator[int]:
        """``node`` and its ancestors, up to the root."""
        while node != NONE:
            yield node
            node = self.node_parent[node]

    def _intern(self, path: bytes) -> int:
        node = self._nodes.get(path)
        if node is not None:
            return node
        # From the deepest known ancestor down, without recursion: a path may have two thousand parts.
        missing = [path]
        while (above := missing[-1].rpartition(b"/")[0]) not in self._nodes:
            missing.append(above)
        parent = self._nodes[above]
        for step in reversed(missing):
            self._node_bytes += len(step)
            if self._node_bytes > MAX_DIRECTORY_NAMES:
                raise FormatError(
                    f"paths of directories above {MAX_DIRECTORY_NAMES} bytes", where=self.where, offset=self.start[-1]
                )
            node = self._nodes[step] = len(self.node_parent)
            self.node_parent.append(parent)
            self.node_entry.append(NONE)
            parent = node
        return parent


def path_hash(path: bytes) -> bytes:
    """16 bytes that stand for a path."""
    return hashlib.blake2b(path, digest_size=16).digest()


def key_of(path: bytes) -> tuple[int, int]:
    """``path_hash`` as the two words of ``Inventory.keys``."""
    digest = path_hash(path)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def show_path(name: bytes) -> str:
    return "/" + name[:300].decode("utf-8", errors="backslashreplace").lstrip("/")
