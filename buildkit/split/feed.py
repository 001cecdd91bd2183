"""Cuts a layer tar into atoms, and atoms into segments, while it is read."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from buildkit.image.compress import Codec
from buildkit.image.tarspan import HARDLINK, Entry, TarReader, normalise
from buildkit.split.inventory import Inventory
from buildkit.split.planner import LARGE, Budget

Raw = bytes | memoryview
"""A segment's input. A memoryview is of a buffer that is used again, once the consumer has given it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment belongs. ``opens``: it begins the atom of entry ``first``; ``stop``: it ends that atom, before
    entry ``stop``. ``atom_input``: bytes of the whole atom's input. ``follows``: the atom holds hard links to that
    entry, which is an atom of its own, and nothing else; -1 for all others."""

    first: int
    stop: int | None
    opens: bool
    atom_input: int
    follows: int = -1


class Buffers:
    """Buffers of one segment's size each, which go round: a gigabyte of fresh memory costs a quarter of a second."""

    def __init__(self, count: int) -> None:
        self._free: queue.LifoQueue[bytearray] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(bytearray())

    def take(self, size: int) -> memoryview:
        """A buffer of ``size`` bytes; waits until one is free."""
        buffer = self._free.get()
        return memoryview(buffer if len(buffer) == size else bytearray(size))

    def give(self, view: memoryview) -> None:
        """Give back a buffer, by it or by a part of it."""
        buffer = view.obj
        assert isinstance(buffer, bytearray)
        view.release()
        self._free.put(buffer)


def feed(
    reader: TarReader,
    inventory: Inventory,
    codec: Codec,
    budget: Budget,
    emit: Callable[[Raw, Place], object],
    buffers: Buffers,
) -> None:
    """Cut what the reader gives into atoms and these into segments, in order, each given to ``emit``.

    Whoever takes a memoryview gives it back to ``buffers``.
    """
    _Feeder(reader, inventory, codec, budget, emit, buffers).run()


class _Feeder:
    def __init__(
        self,
        reader: TarReader,
        inventory: Inventory,
        codec: Codec,
        budget: Budget,
        emit: Callable[[Raw, Place], object],
        buffers: Buffers,
    ) -> None:
        self._buffers = buffers
        self._reader = reader
        self._inventory = inventory
        self._segment = codec.segment
        self._most = min(budget.atom, codec.segment)
        self._stable = budget.stable
        self._emit = emit
        self._pending: list[bytes] = []
        self._size = 0
        self._first = 0
        self._class = (False, 0, -1)
        self._last = 0
        self._large: dict[bytes, int] = {}  # entries that are atoms of their own, by path; and the links to them

    def run(self) -> None:
        for entry in self._reader:
            number = self._inventory.add(entry)
            if entry.span >= LARGE or entry.span > self._most:
                self._flush(number)
                self._alone(entry, number)
            else:
                self._collect(entry, number)
        self._flush(len(self._inventory))

    def _collect(self, entry: Entry, number: int) -> None:
        # Whiteouts go elsewhere than their neighbours, links to a large file go where that is, and an atom lies between
        # two global headers.
        whiteouts = self._inventory.whiteouts
        follows = self._large.get(normalise(entry.link), -1) if entry.kind == HARDLINK else -1
        if follows >= 0:
            self._large[self._inventory.name(number)] = follows
        kind = (bool(whiteouts) and whiteouts[-1] == number, entry.globals_before, follows)
        if self._pending and (kind != self._class or self._ends_before(entry.span, number)):
            self._flush(number)
        if not self._pending:
            self._first, self._class = number, kind
        self._pending.append(entry.head)
        while data := self._reader.read(self._segment):
            self._pending.append(data)
        self._size += entry.span
        self._last = entry.span

    def _ends_before(self, span: int, number: int) -> bool:
        most = self._most
        if self._size + span > most:
            return True
        if not self._stable or self._size < most // 8:
            return False
        # By chance of the path's hash, one cut in every quarter of the largest atom's bytes.
        return self._inventory.cut[number] * (most // 4) < self._last << 32

    def _flush(self, stop: int) -> None:
        if self._pending:
            raw = b"".join(self._pending)
            place = Place(first=self._first, stop=stop, opens=True, atom_input=len(raw), follows=self._class[2])
            self._emit(raw, place)
            self._pending, self._size = [], 0

    def _alone(self, entry: Entry, number: int) -> None:
        self._large[self._inventory.name(number)] = number
        left = entry.span
        rest = entry.head
        opens = True
        while left:
            view = self._buffers.take(self._segment)
            # Headers may be larger than a segment.
            have = min(len(rest), len(view))
            view[:have], rest = rest[:have], rest[have:]
            want = min(self._segment, left)
            while have < want:
                have += self._reader.readinto(view[have:want])
            left -= want
            stop = None if left else number + 1
            self._emit(view[:want], Place(first=number, stop=stop, opens=opens, atom_input=entry.span))
            opens = False
