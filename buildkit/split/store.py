"""A layer's atoms in the spool, and the small segments that parts need beside them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import pairwise

from buildkit.image.compress import Codec, compress_segment
from buildkit.image.tarspan import TRAILER, GlobalHeader
from buildkit.split.inventory import Inventory
from buildkit.split.planner import Atoms, Part, Sizes, pieces
from buildkit.split.spool import Spool, unpack

Recipe = tuple[int, ...]
"""Numbers of segments in the spool, in the order in which they make a blob."""


class AtomTable:
    """Boundaries of the atoms, their compressed sizes, and the segments that each consists of."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.sizes = array("Q")
        self._end = array("Q")
        self._ids = array("I")

    def open(self, first: int, stop: int) -> int:
        """Begin the next atom, entries ``[first, stop)``; its number."""
        self._end.append(len(self._ids))
        self.sizes.append(0)
        self.atoms.first.append(first)
        self.atoms.end = stop
        return len(self.sizes) - 1

    def grow(self, size: int) -> None:
        """``size`` compressed bytes more in the last atom, of a segment that ``attach`` will name."""
        self.sizes[-1] += size

    def attach(self, segment: int) -> None:
        """The last atom's next segment."""
        self._ids.append(segment)
        self._end[-1] += 1

    def segments(self, atom: int) -> Sequence[int]:
        return self._ids[self._end[atom - 1] if atom else 0 : self._end[atom]]


class Store:
    """One layer's atoms, and its repeated directories and global headers as segments that are made when asked for.

    Safe from several threads once the layer is read.
    """

    def __init__(self, spool: Spool, codec: Codec, inventory: Inventory, headers: Sequence[GlobalHeader]) -> None:
        self.spool = spool
        self.codec = codec
        self.inventory = inventory
        self.table = AtomTable()
        self._headers = headers
        self._made: dict[tuple[str, int], int] = {}
        self._recent = (-1, b"")
        self._lock = threading.RLock()

    def raw(self, segment: int) -> bytes:
        """What a segment unpacks to. The last one is kept: neighbours are asked for one after the other."""
        with self._lock:
            if self._recent[0] != segment:
                self._recent = (segment, unpack(self.codec, self.spool.segment(segment)))
            return self._recent[1]

    def directory(self, entry: int) -> int:
        """The segment that repeats a directory's entry."""
        return self._make("directory", entry)

    def global_header(self, number: int) -> int:
        """The segment that repeats a PAX global header."""
        return self._make("global", number)

    def trailer(self) -> int:
        """The segment that ends every part's tar."""
        return self._make("trailer", 0)

    def sizes(self) -> Sizes:
        size = self.spool.size
        return Sizes(
            atoms=self.table.sizes,
            global_header=lambda number: size[self.global_header(number)],
            directory=lambda entry: size[self.directory(entry)],
        )

    def recipe(self, part: Part) -> Recipe:
        """The segments of a part, end of archive included."""
        out: list[int] = []
        for piece in pieces(self.inventory, self.table.atoms, part):
            if piece.kind == "atom":
                out.extend(self.table.segments(piece.number))
            else:
                out.append(self._make(piece.kind, piece.number))
        out.append(self.trailer())
        return tuple(out)

    def recut(self, cuts: dict[int, list[int]]) -> None:
        """Replace atoms of several entries by finer ones that begin at the entries given (see ``planner.recut``)."""
        old, new = self.table, AtomTable()
        for atom in range(len(old.sizes)):
            run = old.atoms.entries(atom)
            if atom not in cuts:
                new.open(run.start, run.stop)
                for number in old.segments(atom):
                    new.grow(self.spool.size[number])
                    new.attach(number)
                continue
            data = b"".join(map(self.raw, old.segments(atom)))
            bounds = [run.start, *cuts[atom], run.stop]
            for first, stop in pairwise(bounds):
                begin = self._offset(first, run.start)
                end = self._offset(stop - 1, run.start) + self.inventory.length[stop - 1]
                number = self.spool.append(compress_segment(self.codec, data[begin:end]))
                new.open(first, stop)
                new.grow(self.spool.size[number])
                new.attach(number)
        self.table = new

    def _offset(self, entry: int, first: int) -> int:
        return self.inventory.start[entry] - self.inventory.start[first]

    def _make(self, kind: str, number: int) -> int:
        with self._lock:
            if (kind, number) not in self._made:
                data = TRAILER
                if kind == "directory":
                    data = self._span(number)
                elif kind == "global":
                    data = self._headers[number].raw
                self._made[kind, number] = self.spool.append(compress_segment(self.codec, data))
            return self._made[kind, number]

    def _span(self, entry: int) -> bytes:
        atom = self.table.atoms.of(entry)
        skip = self._offset(entry, self.table.atoms.first[atom])
        left = self.inventory.length[entry]
        out = []
        for number in self.table.segments(atom):
            size = self.spool.input[number]
            if skip < size and left:
                out.append(self.raw(number)[skip : skip + left])
                left -= len(out[-1])
            skip = max(0, skip - size)
        return b"".join(out)
