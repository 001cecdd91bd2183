"""Foresees the parts of a layer while it is read: their hashes, and their blobs on disk.

The digest of a part needs the part's bytes in order, and which bytes those are is only known when the whole layer was
seen: a hard link, a whiteout or a second entry for a directory may come last. Unpacking everything again to hash it
would cost as much as compressing it did. So while the layer is read the planner runs along, and a part's digests are
computed on the way, as the part turns out if nothing surprising follows. A part is recognised by its recipe; those that
come out otherwise (mostly none, or few) are hashed again from the spool.
"""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_left
from dataclasses import dataclass

from buildkit.image.compress import Codec, Joiner, Segment
from buildkit.split.feed import Raw
from buildkit.split.planner import Budget, Delta, OpenPart, Packing
from buildkit.split.spool import Bin, unpack
from buildkit.split.store import Recipe, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """Of one part: sha256 of its blob and of its tar (hex), and the tar's size in bytes."""

    blob: str
    tar: str
    tar_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A part that was foreseen. ``whole``: the bin that holds its blob and nothing else, where that worked out."""

    hashes: Hashes
    whole: Bin | None


class HashLine:
    """Hashes of a part in the making: what was put in so far, in order."""

    def __init__(self, codec: Codec) -> None:
        self._joiner = Joiner(codec)
        self._tar = hashlib.sha256()
        self._blob = hashlib.sha256(self._joiner.header())
        self.recipe: list[int] = []

    def copy(self) -> HashLine:
        other = copy.copy(self)
        other._joiner = copy.copy(self._joiner)
        other._tar, other._blob = self._tar.copy(), self._blob.copy()
        other.recipe = list(self.recipe)
        return other

    def put(self, number: int, segment: Segment, raw: Raw) -> None:
        self.recipe.append(number)
        for part in self._joiner.add(segment):
            self._blob.update(part)
        self._tar.update(raw)

    def header(self) -> bytes:
        return self._joiner.header()

    def trailer(self) -> bytes:
        """The blob's last bytes; they are hashed by ``finish``."""
        return self._joiner.trailer()

    def finish(self) -> Hashes:
        self._blob.update(self.trailer())
        return Hashes(blob=self._blob.hexdigest(), tar=self._tar.hexdigest(), tar_size=self._joiner.input)


def hash_recipe(store: Store, recipe: Recipe) -> Hashes:
    """The hashes of a part from the spool, by unpacking it."""
    line = HashLine(store.codec)
    for number in recipe:
        segment = store.spool.segment(number)
        line.put(number, segment, unpack(store.codec, segment))
    return line.finish()


class _PartLine:
    """A part in the making as it is foreseen: its hashes, its bin, and how far in the source it has come."""

    def __init__(self, store: Store, *, alive: bool = True) -> None:
        self._store = store
        self.hashes = HashLine(store.codec)
        self.bin = store.spool.bin()
        self.whole = self.bin is not store.spool.common
        """Whether the bin holds nothing but this part so far."""
        if self.whole:
            self.bin.write((self.hashes.header(),))
        self._lead: list[int] = []
        self._reached = -1
        self._headers = 0
        self.alive = alive
        """Whether everything came in the source's order so far; otherwise the forecast is given up."""

    def copy(self) -> _PartLine:
        other = copy.copy(self)
        other.hashes = self.hashes.copy()
        return other

    def lead_in(self, delta: Delta, first: int, *, write: bool = True) -> None:
        """Put what an atom brings with it: directories and global headers before its first entry.

        Without ``write`` they are hashed, and ``write_lead`` writes them, if it comes to that.
        """
        starts = self._store.inventory.start
        before = len(self.hashes.recipe)
        for entry in sorted(delta.carried.values()):
            if self._advance(entry) and starts[entry] < starts[first]:
                self._put(self._store.directory(entry))
            else:
                self.alive = False
        self._advance(first)
        self._lead = self.hashes.recipe[before:]
        if write:
            self.write_lead()

    def write_lead(self) -> None:
        if self.whole:
            for number in self._lead:
                self.bin.write(self._store.spool.segment(number).parts)

    def _advance(self, entry: int) -> bool:
        if entry <= self._reached:
            self.alive = False
        before = self._store.inventory.global_before
        while self.alive and self._headers < len(before) and before[self._headers] <= entry:
            self._put(self._store.global_header(self._headers))
            self._headers += 1
        self._reached = entry
        return self.alive

    def _put(self, number: int) -> None:
        segment = self._store.spool.segment(number)
        self.hashes.put(number, segment, unpack(self._store.codec, segment))

    def put(self, number: int, segment: Segment, raw: Raw) -> None:
        """Hash an atom's segment."""
        if self.alive:
            self.hashes.put(number, segment, raw)

    def finish(self) -> tuple[Recipe, Foreseen] | None:
        if not self.alive:
            return None
        number = self._store.trailer()
        self._put(number)
        if self.whole:
            self.bin.write((*self._store.spool.segment(number).parts, self.hashes.trailer()))
        return tuple(self.hashes.recipe), Foreseen(hashes=self.hashes.finish(), whole=self.bin if self.whole else None)


class Forecast:
    """Runs the packing along, keeps a line of hashes for each part, and puts each segment into its part's bin.

    An atom of one segment is put where the packing puts it. An atom of several is hashed while it comes in, before its
    size is known: as the next of the open part, as the first of a new part, or, where the ratio so far leaves it open,
    as both; then its segments lie in the new part's bin and are moved if they turn out to belong to the open one.
    Links to a large file go to its part, and whiteouts to the first, whenever they come.
    """

    def __init__(self, store: Store, budget: Budget) -> None:
        self._store = store
        self._limit = budget.limit
        self._packing = Packing(store.inventory, store.table.atoms, budget, store.sizes())
        self._lines: dict[OpenPart, _PartLine] = {}
        self._atom = 0
        self._numbers: list[int] = []
        self._join: tuple[OpenPart, _PartLine] | None = None
        self._room = 0
        self._fresh: _PartLine | None = None
        self._seen = [1, 1]  # bytes before and after compression
        self._part_of: dict[int, OpenPart] = {}  # by the entry of an atom of its own
        # The first part with the whiteouts, which the packing does not count; None once one has come too early for it.
        self._first: OpenPart | None = OpenPart(self._packing.view)

    def whole(self, atom: int, segment: Segment, raw: Raw, follows: int) -> None:
        """An atom of one segment."""
        spool, table = self._store.spool, self._store.table
        self._count(segment)
        table.grow(segment.size)
        parts = self._packing.parts
        part, delta = None, None
        if self._pinned(atom):
            if parts and not parts[0].over(self._limit):
                part = parts[0]
            else:
                self._first = None
        elif follows in self._part_of:
            part = self._part_of[follows]
            delta = part.delta((atom,))
            part.add((atom,), delta)
        else:
            part, delta = self._packing.add((atom,))
            self._part_of[table.atoms.first[atom]] = part
        if part is not None and parts and part is parts[0] and self._first is not None:
            delta = self._first.delta((atom,))
            self._first.add((atom,), delta)
        if part is None or delta is None:
            table.attach(spool.append(segment))
            return
        line = self._lines.get(part)
        if line is None:
            line = self._lines[part] = _PartLine(self._store)
        line.lead_in(delta, table.atoms.first[atom])
        number = spool.append(segment, line.bin)
        table.attach(number)
        line.put(number, segment, raw)

    def begin(self, atom: int, atom_input: int) -> None:
        """The first of an atom's several segments is about to come."""
        self._atom, self._numbers, self._join, self._fresh = atom, [], None, None
        if self._pinned(atom):
            self._first = None
            return
        first = self._store.table.atoms.first[atom]
        part, capacity = self._packing.candidate((atom,))
        starts = True
        if part is not None:
            delta = part.delta((atom,))
            self._room = capacity - part.size - delta.size
            expected = atom_input * self._seen[1] // self._seen[0]
            starts = expected > self._room * 2 // 3
            if expected < self._room * 3 // 2:
                line = self._lines[part].copy()
                if part is self._packing.parts[0] and self._first is not None:
                    delta = self._first.delta((atom,))
                line.lead_in(delta, first, write=not starts)
                self._join = (part, line)
        if starts:
            fresh = OpenPart(self._packing.view)
            self._fresh = _PartLine(self._store)
            self._fresh.lead_in(fresh.delta((atom,)), first)

    def more(self, segment: Segment, raw: Raw) -> None:
        self._count(segment)
        into = None
        if self._fresh is not None:
            into = self._fresh.bin
        elif self._join is not None:
            into = self._join[1].bin
        number = self._store.spool.append(segment, into)
        self._store.table.grow(segment.size)
        self._store.table.attach(number)
        self._numbers.append(number)
        self._room -= segment.size
        if self._join is not None and self._room < 0:
            if self._fresh is None:
                # It was written for nothing.
                self._lines[self._join[0]].whole = False
            self._join = None
        if self._join is not None:
            self._join[1].put(number, segment, raw)
        if self._fresh is not None:
            self._fresh.put(number, segment, raw)

    def end(self) -> None:
        """The atom is complete: now the packing says where it belongs."""
        if self._pinned(self._atom):
            return
        part, _ = self._packing.add((self._atom,))
        self._part_of[self._store.table.atoms.first[self._atom]] = part
        if part is self._packing.parts[0] and self._first is not None:
            self._first.add((self._atom,), self._first.delta((self._atom,)))
        if part not in self._lines:
            self._lines[part] = self._fresh or _PartLine(self._store, alive=False)
        elif self._join is not None and part is self._join[0]:
            line = self._lines[part] = self._join[1]
            if self._fresh is not None:
                line.write_lead()
                for number in self._numbers:
                    self._store.spool.move(number, line.bin)
        else:
            self._lines[part].alive = False

    def finish(self) -> dict[Recipe, Foreseen]:
        finished = [line.finish() for line in self._lines.values()]
        return dict(pair for pair in finished if pair is not None)

    def _count(self, segment: Segment) -> None:
        self._seen[0] += segment.input
        self._seen[1] += segment.size

    def _pinned(self, atom: int) -> bool:
        """Whether the atom holds whiteouts, which go into the first part, however late they come."""
        whiteouts, first = self._store.inventory.whiteouts, self._store.table.atoms.first[atom]
        at = bisect_left(whiteouts, first)
        return at < len(whiteouts) and whiteouts[at] == first
