"""Reads a layer tar once: takes stock of it, compresses it atom by atom into the spool, and foresees its parts.

The digest of a part needs the part's bytes in order, and which bytes those are is only known when the whole layer was
seen: a hard link, a whiteout or a second entry for a directory may come last. Unpacking everything again to hash it
would cost as much as compressing it did. So while the layer is read the planner runs along, and a part's digests are
computed on the way, as the part turns out if nothing surprising follows. Parts that come out otherwise (mostly none, or
few) are hashed again from the spool.
"""

from __future__ import annotations

import copy
import hashlib
import queue
import threading
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from buildkit.image.compress import Codec, Joiner, Readable, Segment, compress_segment
from buildkit.image.tarspan import HARDLINK, Entry, TarReader, normalise
from buildkit.split.inventory import Inventory
from buildkit.split.planner import LARGE, Budget, Delta, OpenPart, Packing
from buildkit.split.spool import Bin, Spool, unpack
from buildkit.split.store import Recipe, Store

MAX_QUEUED = 12
"""Segments in work at once at most, each of up to the codec's segment size, twice (input and output)."""


Raw = bytes | memoryview
"""A segment's input. A memoryview is of a buffer that is used again, once the consumer has given it back."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A layer that was read to its end: its store, and the parts that were foreseen, by recipe."""

    store: Store
    foreseen: dict[Recipe, Foreseen]
    tar_size: int


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


def measure(
    tar: Readable,
    *,
    where: str,
    codec: Codec,
    budget: Budget,
    pool: Executor,
    threads: int,
    spool: Spool,
    progress: Callable[[int], object] = lambda _: None,
) -> Measured:
    """Read ``tar`` to its end. ``progress`` is told the bytes of each piece that was read.

    Raises FormatError with the offset for a tar that does not parse, StorageError where the spool cannot grow.
    """
    reader = TarReader(tar, where=where)
    inventory = Inventory(where=where)
    store = Store(spool, codec, inventory, reader.globals)
    consumer = _Consumer(store, budget, min(threads + 2, MAX_QUEUED))

    def emit(raw: Raw, place: Place) -> None:
        size = len(raw)  # the consumer may have given the buffer back by the time that put returns
        consumer.put(_Item(future=pool.submit(compress_segment, codec, raw), raw=raw, place=place))
        progress(size)

    try:
        feed(reader, inventory, codec, budget, emit, consumer.buffers)
    except BaseException:
        consumer.abandon()
        raise
    foreseen = consumer.finish()
    extra = reader.finish()
    progress(extra)
    return Measured(store=store, foreseen=foreseen, tar_size=reader.offset)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    future: Future[Segment]
    raw: Raw
    place: Place


class _Consumer:
    """Takes the segments in order, in a thread of its own: into the spool, into the atom table, into the forecast."""

    def __init__(self, store: Store, budget: Budget, depth: int) -> None:
        self._store = store
        self._forecast = _Forecast(store, budget)
        self._queue: queue.Queue[_Item | None] = queue.Queue(depth)
        self.buffers = Buffers(depth + 2)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="split-consumer", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        self._queue.put(item)
        if self._error is not None:
            raise self._error

    def finish(self) -> dict[Recipe, Foreseen]:
        self._stop()
        if self._error is not None:
            raise self._error
        return self._forecast.finish()

    def abandon(self) -> None:
        self._error = self._error or RuntimeError("abandoned")
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                # Waited for even after a failure: the worker may still be reading from the buffer.
                segment = item.future.result()
                if self._error is None:
                    self._take(item, segment)
            except BaseException as error:
                self._error = self._error or error
            finally:
                if isinstance(item.raw, memoryview):
                    self.buffers.give(item.raw)

    def _take(self, item: _Item, segment: Segment) -> None:
        table, place, forecast = self._store.table, item.place, self._forecast
        if place.opens:
            atom = table.open(place.first, place.first + 1 if place.stop is None else place.stop)
            if place.stop is not None:
                forecast.whole(atom, segment, item.raw, place.follows)
                return
            forecast.begin(atom, place.atom_input)
        forecast.more(segment, item.raw)
        if place.stop is not None:
            forecast.end()


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


class _Forecast:
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
