"""One file: is there CUDA code in it, which, and where.

The unit of code is what the driver chooses from: a fatbin (it loads one of the entries), a PTX module kept as text, or
the lone cubins of a section, which a program keeps side by side, one for each device, and chooses from itself. A file
runs on a device only where *every* unit that a program may load has something for it.

Where fatbins are looked for: ``.nv_fatbin`` and ``__nv_relfatbin`` are walked from header to header, payloads unread.
Other data sections that get loaded (``.rodata``, ``.data`` …) are swept for fatbins, cubins and PTX text, since cuBLAS,
cuFFT and programs that embed PTX keep them there. Machine code and debug sections are left out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from buildkit.cuda import archive, cubin, elf, fatbin, ptx
from buildkit.cuda.arch import Arch
from buildkit.cuda.fatbin import Entry, Problem
from buildkit.cuda.readat import MemoryReader, ReadAt, Window
from buildkit.errors import FormatError

MAX_ENTRIES = 200_000
"""Entries that are read of one file; cuFFT 11 has 22,000."""
MAX_PROBLEMS = 50
"""Problems that are kept of one file."""

LOADABLE_SECTIONS = (".nv_fatbin",)
LINKABLE_SECTIONS = ("__nv_relfatbin", ".nv_relfatbin")

_WINDOW = 1 << 20
_MIN_ELF = 64
_GAP = 1 << 16
"""Bytes between two sections of an object that are rather read than skipped."""
_SMALL_MEMBER = 4 << 20
"""Bytes of an archive member that is read at once."""
_MAX_STUB = 4096
"""Bytes of an entry that is looked into for being empty; the empty cubins seen have 1,000 to 1,400."""
_ELF64_LE = elf.MAGIC + b"\x02\x01"
_NEEDLES = tuple((needle, re.compile(re.escape(needle))) for needle in (fatbin.NEEDLE, _ELF64_LE, ptx.NEEDLE))
_MARKS = tuple(re.compile(re.escape(mark)) for mark in (fatbin.MAGIC, _ELF64_LE, ptx.NEEDLE, b"fatbin"))
"""Device code in an object: its beginning, or the name of a section for it."""
_PTX_START = (b".version", b"//", b"\n", b" ", b"\t", b"\r", b"/*")

Form = Literal["fatbin", "cubin", "ptx"]
FileKind = Literal["elf", "archive", "fatbin", "cubin", "ptx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of device code. ``offset`` and ``size`` are bytes of the outermost file.

    ``linkable`` code (``nvcc -dc``) is input of a device linker and cannot be loaded by itself. ``empty`` units hold
    no kernel, variable or constant at all. ``place`` is the section, with the archive member before it.
    """

    form: Form
    offset: int
    size: int
    place: str
    linkable: bool
    empty: bool = False
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScan:
    """What was found in a file. ``needed`` and ``search`` are empty for what has no dynamic section."""

    kind: FileKind
    machine: str
    type: str
    units: tuple[Unit, ...] = ()
    problems: tuple[Problem, ...] = ()
    needed: tuple[str, ...] = ()
    soname: str | None = None
    search: tuple[str, ...] = ()
    members: int = 0
    """Of an archive: how many."""

    @property
    def loadable(self) -> tuple[Unit, ...]:
        """The units that count: those with content; in what a linker has made, those that can be loaded.

        A program keeps the relocatable code that it was linked from, unused. What is still input of a linker
        (objects, archives), and a program with nothing but relocatable code, counts with all of it.
        """
        full = tuple(u for u in self.units if not u.empty)
        if self.kind == "archive" or self.type == "relocatable":
            return full
        return tuple(u for u in full if not u.linkable) or full


def interesting(head: bytes, name: str) -> bool:
    """Whether a file that begins with ``head`` (8 bytes are enough, 4 KiB for PTX) is worth a scan."""
    if head.startswith((elf.MAGIC, archive.MAGIC, archive.THIN_MAGIC, fatbin.MAGIC)):
        return True
    return name.endswith(".ptx") or (head.startswith(_PTX_START) and ptx.NEEDLE in head and b".version" in head)


def scan_file(handle: ReadAt, name: str) -> FileScan | None:
    """The CUDA code in a file, or None where it is no ELF file, archive, fatbin or PTX text.

    Never raises for what is in the file: what was not understood is in ``problems``, and a bound is set to all work
    and memory. ``name`` helps to tell PTX text apart.
    """
    head = handle.read(0, ptx.HEAD)
    if not interesting(head, name):
        return None
    found = _Findings()
    if head.startswith(elf.MAGIC):
        return _scan_elf(handle, found)
    if head.startswith(archive.THIN_MAGIC):
        return FileScan(
            kind="archive",
            machine="",
            type="thin archive",
            problems=(Problem(0, "is a thin archive: its members are other files"),),
        )
    if head.startswith(archive.MAGIC):
        return _scan_archive(handle, found)
    if head.startswith(fatbin.MAGIC):
        for item in fatbin.walk(handle, 0, handle.size, found.problems, budget=MAX_ENTRIES):
            found.add_fatbin(handle, item, 0, "", linkable=False)
        return FileScan(kind="fatbin", machine="cuda", type="fatbin", units=found.units(), problems=found.kept())
    return _scan_ptx(handle, found)


class _Place(NamedTuple):
    """A range of a file, ``[start, end)``, and what it is called."""

    name: str
    start: int
    end: int


class _Findings:
    """Collects units and problems; the only mutable thing here, never seen outside."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._units: list[Unit] = []
        self._cubins: dict[tuple[str, bool], list[Entry]] = {}
        self._linked: set[tuple[str, bool]] = set()
        self._entries = 0

    @property
    def budget(self) -> int:
        return MAX_ENTRIES - self._entries

    def add(self, unit: Unit) -> None:
        self._units.append(unit)
        # A fatbin without entries takes memory, too.
        self._entries += max(1, len(unit.entries))

    def add_fatbin(self, handle: ReadAt, item: fatbin.Fatbin, base: int, place: str, *, linkable: bool) -> None:
        """A fatbin in ``handle``, which lies at ``base`` of the outermost file."""
        empty = _is_empty(handle, item)
        entries = item.entries
        if base:
            entries = tuple(entry._replace(offset=entry.offset + base) for entry in entries)
        self.add(
            Unit(
                form="fatbin",
                offset=base + item.offset,
                size=item.size,
                place=place,
                linkable=linkable,
                empty=empty,
                entries=entries,
            )
        )

    def add_cubin(self, entry: Entry, place: str, *, linkable: bool, empty: bool) -> None:
        """A lone cubin; those of the same place become one unit, relocatable ones among them or not."""
        self._cubins.setdefault((place, empty), []).append(entry)
        if not linkable:
            self._linked.add((place, empty))
        self._entries += 1

    def problem(self, offset: int, message: str) -> None:
        self.problems.append(Problem(offset, message))

    def units(self) -> tuple[Unit, ...]:
        """All units, in order of their offsets."""
        cubins = [
            Unit(
                form="cubin",
                offset=entries[0].offset,
                size=entries[-1].offset + entries[-1].size - entries[0].offset,
                place=place,
                linkable=(place, empty) not in self._linked,
                empty=empty,
                entries=tuple(entries),
            )
            for (place, empty), entries in self._cubins.items()
        ]
        return tuple(sorted([*self._units, *cubins], key=lambda unit: unit.offset))

    def kept(self) -> tuple[Problem, ...]:
        """The problems, the first ``MAX_PROBLEMS`` of them."""
        more = len(self.problems) - MAX_PROBLEMS
        if more > 0:
            return (*self.problems[:MAX_PROBLEMS], Problem(self.problems[MAX_PROBLEMS].offset, f"and {more} more"))
        return tuple(self.problems)


def _scan_elf(handle: ReadAt, found: _Findings) -> FileScan:
    try:
        header = elf.read_header(handle)
    except FormatError as error:
        found.problem(error.offset or 0, _reason(error))
        return FileScan(kind="elf", machine="", type="", problems=found.kept())
    if header.machine == elf.EM_CUDA:
        _add_cubin(handle, header, found, 0, "")
        return FileScan(kind="cubin", machine="cuda", type=header.type_name, units=found.units(), problems=found.kept())
    dynamic = elf.Dynamic()
    if header.little_endian and header.type != elf.ET_CORE:
        dynamic = _scan_object(handle, header, found, 0, "")
    return FileScan(
        kind="elf",
        machine=header.machine_name,
        type=header.type_name,
        units=found.units(),
        problems=found.kept(),
        needed=dynamic.needed,
        soname=dynamic.soname,
        search=dynamic.search,
    )


def _scan_object(handle: ReadAt, header: elf.Header, found: _Findings, base: int, member: str) -> elf.Dynamic:
    """A host ELF file at the start of ``handle``, which lies at ``base`` of the outermost file."""
    segments: tuple[elf.Segment, ...] = ()
    dynamic = elf.Dynamic()
    try:
        segments = elf.read_segments(handle, header)
        dynamic = elf.read_dynamic(handle, header, segments)
    except FormatError as error:
        found.problem(base + (error.offset or 0), _reason(error))
    try:
        sections = elf.read_data_sections(handle, header)
        has_sections = header.section_count > 0
    except FormatError as error:
        found.problem(base + (error.offset or 0), _reason(error))
        sections, has_sections = (), False
    prefix = f"{member}: " if member else ""
    if not has_sections:
        # Without section headers the program headers say what is loaded, and without those all of it may be.
        ranges = [(s.offset, s.file_size) for s in segments if s.type == elf.PT_LOAD] or [(0, handle.size)]
        for offset, size in ranges:
            place = _Place(f"{prefix}segment", offset, min(offset + size, handle.size))
            _sweep(handle, [place], found, base, skip_elf_at=0)
        return dynamic
    swept: list[_Place] = []
    for section in sections:
        fatbins = section.name in LOADABLE_SECTIONS or section.name in LINKABLE_SECTIONS
        loaded = bool(section.flags & elf.SHF_ALLOC)
        end = section.offset + section.size
        if end > handle.size and (fatbins or loaded):
            at = base + min(section.offset, handle.size)
            found.problem(at, f"section {section.name} reaches to byte {end} of {handle.size}")
            if not fatbins:
                continue
            end = handle.size
        place = _Place(prefix + section.name, section.offset, end)
        if fatbins and section.flags & elf.SHF_COMPRESSED:
            found.problem(base + section.offset, f"section {section.name} is compressed")
        elif fatbins:
            linkable = section.name in LINKABLE_SECTIONS
            for item in fatbin.walk(handle, place.start, place.end, found.problems, budget=found.budget):
                found.add_fatbin(handle, item, base, place.name, linkable=linkable)
        elif loaded and not section.flags & elf.SHF_COMPRESSED:
            swept.append(place)
    # Objects have a section for every function; in linked files, what lies between is machine code by the megabyte.
    for group in _neighbours(swept, _GAP if header.type == elf.ET_REL else 0):
        _sweep(handle, group, found, base)
    return dynamic


def _neighbours(places: list[_Place], gap: int) -> Iterator[list[_Place]]:
    """Places in groups with at most ``gap`` bytes between, so that thousands of tiny sections are one sweep."""
    group: list[_Place] = []
    for place in sorted(places, key=lambda p: (p.start, p.end)):
        if group and place.start > group[-1].end + gap:
            yield group
            group = []
        if not group or place.start >= group[-1].end:
            group.append(place)
        elif place.end > group[-1].end:
            # Overlapping sections: what is not covered yet.
            group.append(_Place(place.name, group[-1].end, place.end))
    if group:
        yield group


def _scan_archive(handle: ReadAt, found: _Findings) -> FileScan:
    machines: set[str] = set()
    members = 0
    for member in archive.iter_members(handle, found.problems):
        members += 1
        inner: ReadAt = Window(handle, member.offset, member.size)
        if member.size <= _SMALL_MEMBER:
            inner = MemoryReader(inner.read(0, member.size))
        head = inner.read(0, 8)
        if head.startswith(elf.MAGIC):
            try:
                header = elf.read_header(inner)
            except FormatError as error:
                found.problem(member.offset + (error.offset or 0), f"{member.name}: {_reason(error)}")
                continue
            machines.add(header.machine_name)
            if header.machine != elf.EM_CUDA and isinstance(inner, MemoryReader) and _has_no_mark(inner, header):
                continue
            if header.machine == elf.EM_CUDA:
                _add_cubin(inner, header, found, member.offset, member.name)
            elif header.little_endian:
                _scan_object(inner, header, found, member.offset, member.name)
        elif head.startswith(fatbin.MAGIC):
            for item in fatbin.walk(inner, 0, inner.size, found.problems, budget=found.budget):
                found.add_fatbin(inner, item, member.offset, member.name, linkable=False)
        if found.budget <= 0:
            found.problem(member.offset, "has more device code than is read; the rest was left unread")
            break
    return FileScan(
        kind="archive",
        machine="/".join(sorted(machines)),
        type="archive",
        units=found.units(),
        problems=found.kept(),
        members=members,
    )


def _has_no_mark(member: MemoryReader, header: elf.Header) -> bool:
    """Whether a whole object lacks everything that device code begins with: most members of most archives do.

    Spares reading their thousands of section headers. One that is cut short is not spared.
    """
    if header.sections_at + header.section_size * header.section_count > member.size:
        return False
    data = member.read(4, member.size)
    return not any(mark.search(data) for mark in _MARKS)


def _scan_ptx(handle: ReadAt, found: _Findings) -> FileScan:
    _sweep(handle, [_Place("", 0, handle.size)], found, 0)
    if not found.units():
        found.problem(0, "is called PTX and has no module that begins with .version and .target")
    return FileScan(kind="ptx", machine="cuda", type="text", units=found.units(), problems=found.kept())


def _add_cubin(handle: ReadAt, header: elf.Header, found: _Findings, base: int, place: str) -> int:
    """The cubin at the start of ``handle``; how many bytes it takes."""
    try:
        sections = elf.read_sections(handle, header)
        arch = cubin.read_arch(handle, header)
    except FormatError as error:
        found.problem(base + (error.offset or 0), _reason(error))
        return _MIN_ELF
    size = cubin.extent(header, sections)
    if size > handle.size:
        found.problem(
            base, f"a cubin reaches to byte {base + size}, beyond the end of its place at {base + handle.size}"
        )
        size = handle.size
    entry = Entry(fatbin.KIND_ELF, arch, (0, 0), base, 0, size, size, "", header.flags)
    linkable = header.type == elf.ET_REL
    found.add_cubin(entry, place, linkable=linkable, empty=not cubin.has_content(sections))
    return max(size, _MIN_ELF)


def _is_empty(handle: ReadAt, item: fatbin.Fatbin) -> bool:
    """Whether no entry has any content; looked for in small fatbins only. See ``cubin.has_content``."""
    if not item.entries or any(e.size > _MAX_STUB for e in item.entries):
        return False
    for entry in item.entries:
        try:
            data = fatbin.payload(handle, entry)
            if entry.kind == fatbin.KIND_ELF:
                inner = MemoryReader(data)
                if cubin.has_content(elf.read_sections(inner, elf.read_header(inner))):
                    return False
            elif entry.kind != fatbin.KIND_PTX or ptx.has_content(data):
                return False
        except FormatError:
            return False  # what cannot be read may have content
    return True


def _sweep(handle: ReadAt, places: list[_Place], found: _Findings, base: int, *, skip_elf_at: int = -1) -> None:
    """Fatbins, cubins and PTX text anywhere in ``places``, which are in order and close to each other.

    A hit counts only if what follows makes sense: these bytes may be anything, and programs that handle fatbins
    contain the magic as a constant. ``skip_elf_at``: the file's own header.
    """
    starts = [place.start for place in places]
    start = places[0].start
    resume = start
    for position, needle in _hits(handle, start, places[-1].end):
        if position < resume or position == skip_elf_at:
            continue
        place = places[bisect_right(starts, position) - 1]
        if position >= place.end:
            continue  # between two of them
        end = place.end
        if found.budget <= 0:
            found.problem(base + position, "has more device code than is read; the rest was left unread")
            return
        if needle == fatbin.NEEDLE:
            problems: list[Problem] = []
            item = fatbin.read_fatbin(handle, position, end, problems, budget=found.budget)
            if item is None or not item.entries:
                continue
            found.problems.extend(Problem(base + p.offset, p.message) for p in problems)
            found.add_fatbin(handle, item, base, place.name, linkable=False)
            resume = item.offset + item.size
        elif needle == ptx.NEEDLE:
            begin = max(place.start, position - ptx.HEAD)
            head = ptx.parse_head(handle.read(begin, min(2 * ptx.HEAD, end - begin)), at=position - begin)
            if head is not None:
                _add_ptx(head, base + begin + head.offset, found, place.name)
        else:
            inner = Window(handle, position, end - position)
            try:
                header = elf.read_header(inner)
            except FormatError:
                continue  # four bytes of magic among data, not a file
            if header.machine == elf.EM_CUDA and header.type in (elf.ET_REL, elf.ET_EXEC, elf.ET_DYN):
                resume = position + _add_cubin(inner, header, found, base + position, place.name)


def _add_ptx(head: ptx.PtxHead, offset: int, found: _Findings, place: str) -> None:
    entry = Entry(fatbin.KIND_PTX, head.target, head.version, offset, 0, 0, 0, "", 0)
    found.add(Unit(form="ptx", offset=offset, size=0, place=place, linkable=False, entries=(entry,)))


def _hits(handle: ReadAt, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Where the needles are, in order of position, by windows of 1 MiB."""
    longest = max(len(needle) for needle, _ in _NEEDLES) - 1
    last = -1
    while start < end:
        data = handle.read(start, min(_WINDOW, end - start))
        hits = [(start + hit.start(), needle) for needle, pattern in _NEEDLES for hit in pattern.finditer(data)]
        for position, needle in sorted(hits):
            # Windows overlap, and a short needle may lie within the overlap.
            if position > last:
                yield position, needle
                last = position
        if start + len(data) >= end or len(data) <= longest:
            return
        start += len(data) - longest
        if not hits:
            start = max(start, handle.data_from(start))


def _reason(error: FormatError) -> str:
    """What is wrong, without the offset: a problem has that apart, counted from the start of the outermost file."""
    return error.message if error.offset is None else error.message.removeprefix(f"byte {error.offset}: ")


def coverage(units: tuple[Unit, ...]) -> dict[tuple[int, Arch], int]:
    """In how many of ``units`` each pair of entry kind and architecture occurs."""
    counts: dict[tuple[int, Arch], int] = {}
    for unit in units:
        for key in {(entry.kind, entry.arch) for entry in unit.entries}:
            counts[key] = counts.get(key, 0) + 1
    return counts
