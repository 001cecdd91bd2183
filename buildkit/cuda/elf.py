"""ELF as far as CUDA needs it: header, sections, segments, what the dynamic linker is asked for, symbols.

Sources: System V ABI, "Object Files" and "Dynamic Linking" (gABI 4.1); ``elf.h`` of glibc for the numbers. Written for
hostile files: a number out of a file is never used before it was compared with the file's size, and tables are read in
pieces. pyelftools reads tables eagerly and raises many kinds of errors on bad input, hence not used here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from buildkit.cuda.readat import ReadAt, read_exactly
from buildkit.errors import FormatError

MAGIC = b"\x7fELF"
EM_CUDA = 190

ET_REL, ET_EXEC, ET_DYN, ET_CORE = 1, 2, 3, 4
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_DYNAMIC, SHT_NOBITS = 1, 2, 3, 6, 8
SHF_ALLOC, SHF_EXECINSTR, SHF_COMPRESSED = 0x2, 0x4, 0x800
PT_LOAD, PT_DYNAMIC = 1, 2
_SHN_XINDEX = 0xFFFF
_PN_XNUM = 0xFFFF
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 14, 15, 29

_MACHINES = {
    3: "i386",
    20: "ppc",
    21: "ppc64",
    22: "s390",
    40: "arm",
    62: "x86_64",
    EM_CUDA: "cuda",
    183: "aarch64",
    224: "amdgpu",
    243: "riscv",
    247: "bpf",
    258: "loongarch",
}
_TYPES = {ET_REL: "relocatable", ET_EXEC: "executable", ET_DYN: "shared object", ET_CORE: "core"}

MAX_SECTIONS = 1 << 17
"""Headers that are read. Cubins have about five sections per kernel; no real file seen comes near."""
MAX_NAMES = 32 * 2**20
"""Bytes of names that are read, and that all sections' names may have together: large cubins have a few MiB."""
MAX_DYNAMIC = 1 << 16
"""Entries of a dynamic section that are read."""
MAX_STRING = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section header (gABI 4.1, "Sections"); ``offset`` and ``size`` in bytes of the file, not checked yet."""

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A program header (gABI 5.1); ``offset`` and ``file_size`` in bytes of the file, not checked yet."""

    type: int
    flags: int
    offset: int
    address: int
    file_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The ELF header. ``bits`` is 32 or 64; offsets of the two tables are in bytes from the start of the file."""

    bits: int
    little_endian: bool
    os_abi: int
    abi_version: int
    type: int
    machine: int
    flags: int
    segments_at: int
    segment_size: int
    segment_count: int
    sections_at: int
    section_size: int
    section_count: int
    names_index: int

    @property
    def machine_name(self) -> str:
        return _MACHINES.get(self.machine, f"machine {self.machine}")

    @property
    def type_name(self) -> str:
        return _TYPES.get(self.type, f"type {self.type}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """What the dynamic linker is told: the libraries needed, in order, the own soname, where to search."""

    needed: tuple[str, ...] = ()
    soname: str | None = None
    search: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A symbol of ``.symtab``. ``other`` keeps all its bits: CUDA marks kernels there."""

    name: str
    type: int
    binding: int
    other: int
    section: int


def read_header(handle: ReadAt) -> Header:
    """The ELF header at offset 0. Raises FormatError if there is none, or if it is cut short or self-contradictory.

    Counts that do not fit 16 bits are taken from section 0, as gABI 4.1 says of ``e_shnum`` and ``e_shstrndx``.
    """
    ident = read_exactly(handle, 0, 16, "the ELF header")
    if ident[:4] != MAGIC:
        raise FormatError("is not an ELF file", offset=0)
    bits = {1: 32, 2: 64}.get(ident[4])
    order = {1: "<", 2: ">"}.get(ident[5])
    if bits is None or order is None:
        raise FormatError(f"ELF class {ident[4]} and data encoding {ident[5]} are not known", offset=4)
    layout = struct.Struct(order + ("HHIQQQIHHHHHH" if bits == 64 else "HHIIIIIHHHHHH"))
    fields = layout.unpack(read_exactly(handle, 16, layout.size, "the ELF header"))
    kind, machine, _, _, segments_at, sections_at, flags, _, ph_size, ph_count, sh_size, sh_count, names = fields
    if sections_at and (sh_count == 0 or names == _SHN_XINDEX or ph_count == _PN_XNUM):
        # Section 0 holds the counts that did not fit: size, link and info.
        first = handle.read(sections_at, 64 if bits == 64 else 40)
        if len(first) == (64 if bits == 64 else 40):
            numbers = struct.unpack(order + ("IIQQQQIIQQ" if bits == 64 else "IIIIIIIIII"), first)
            sh_count = sh_count or numbers[5]
            names = numbers[6] if names == _SHN_XINDEX else names
            ph_count = numbers[7] if ph_count == _PN_XNUM else ph_count
    return Header(
        bits=bits,
        little_endian=order == "<",
        os_abi=ident[7],
        abi_version=ident[8],
        type=kind,
        machine=machine,
        flags=flags,
        segments_at=segments_at,
        segment_size=ph_size,
        segment_count=ph_count,
        sections_at=sections_at,
        section_size=sh_size,
        section_count=sh_count if sections_at else 0,
        names_index=names,
    )


def read_data_sections(handle: ReadAt, header: Header) -> tuple[Section, ...]:
    """The sections of the file's own content that is no machine code (PROGBITS, not EXECINSTR) and not empty.

    Objects of static archives have thousands of sections, one for each function; names cost most of reading them.
    """
    return tuple(_sections(handle, header, data_only=True))


def read_sections(handle: ReadAt, header: Header) -> tuple[Section, ...]:
    """All section headers, with names. Raises FormatError where the table or the names lie outside the file."""
    return tuple(_sections(handle, header, data_only=False))


def _sections(handle: ReadAt, header: Header, *, data_only: bool) -> Iterator[Section]:
    layout = struct.Struct(_order(header) + ("IIQQQQIIQQ" if header.bits == 64 else "IIIIIIIIII"))
    count = header.section_count
    if count == 0:
        return
    if header.section_size != layout.size:
        raise FormatError(f"section headers of {header.section_size} bytes are not known", offset=header.sections_at)
    table = _table(handle, header.sections_at, layout.size, count, "section header")
    names = b""
    if 0 < header.names_index < count:
        row = layout.unpack_from(table, header.names_index * layout.size)
        size = min(row[5], MAX_NAMES)
        if row[1] != SHT_NOBITS:
            names = read_exactly(handle, row[4], size, "the table of section names")
    elif header.names_index:
        raise FormatError(f"names of sections are in section {header.names_index} of {count}")
    total = 0
    for row in layout.iter_unpack(table):
        if data_only and (row[1] != SHT_PROGBITS or row[2] & SHF_EXECINSTR or not row[5]):
            continue
        name = _string(names, row[0])
        # Overlapping strings could make a small table of names into gigabytes of them.
        total += len(name)
        if total > MAX_NAMES:
            raise FormatError(f"the sections' names have more than {MAX_NAMES} bytes", offset=header.sections_at)
        yield Section(
            name=name,
            type=row[1],
            flags=row[2],
            address=row[3],
            offset=row[4],
            size=row[5],
            link=row[6],
            entry_size=row[9],
        )


def read_segments(handle: ReadAt, header: Header) -> tuple[Segment, ...]:
    """All program headers. Raises FormatError where the table lies outside the file."""
    layout = struct.Struct(_order(header) + ("IIQQQQQQ" if header.bits == 64 else "IIIIIIII"))
    if header.segment_count == 0 or header.segments_at == 0:
        return ()
    if header.segment_size != layout.size:
        raise FormatError(f"program headers of {header.segment_size} bytes are not known", offset=header.segments_at)
    table = _table(handle, header.segments_at, layout.size, header.segment_count, "program header")
    segments = []
    for row in layout.iter_unpack(table):
        if header.bits == 64:
            kind, flags, offset, address, _, file_size, _, _ = row
        else:
            kind, offset, address, _, file_size, _, flags, _ = row
        segments.append(Segment(type=kind, flags=flags, offset=offset, address=address, file_size=file_size))
    return tuple(segments)


def read_dynamic(handle: ReadAt, header: Header, segments: tuple[Segment, ...]) -> Dynamic:
    """DT_NEEDED and its company, by the program headers alone: that is what the dynamic linker uses.

    An object without a dynamic segment (static, relocatable) needs nothing. Raises FormatError where strings or
    entries lie outside the file.
    """
    place = next((s for s in segments if s.type == PT_DYNAMIC), None)
    if place is None or place.file_size == 0:
        return Dynamic()
    layout = struct.Struct(_order(header) + ("qQ" if header.bits == 64 else "iI"))
    count = min(place.file_size // layout.size, MAX_DYNAMIC)
    # A separate debug file keeps the program header and not the content: NOBITS, so zeros or nothing are there.
    table = handle.read(place.offset, count * layout.size)
    entries: list[tuple[int, int]] = []
    for tag, value in layout.iter_unpack(table[: len(table) - len(table) % layout.size]):
        if tag == _DT_NULL:
            break
        entries.append((tag, value))
    else:
        if len(table) < count * layout.size:
            raise FormatError("the dynamic section reaches beyond the file", offset=place.offset)
    first = dict(reversed(entries))
    if _DT_STRTAB not in first:
        return Dynamic()
    at = _file_offset(segments, first[_DT_STRTAB])
    if at is None:
        raise FormatError(f"the dynamic strings' address {first[_DT_STRTAB]:#x} is in no segment", offset=place.offset)
    size = first.get(_DT_STRSZ, 0)

    def string(index: int) -> str:
        if index >= size:
            raise FormatError(f"string {index:#x} is outside the dynamic strings", offset=at)
        return _string(handle.read(at + index, min(MAX_STRING, size - index)), 0)

    return Dynamic(
        needed=tuple(string(value) for tag, value in entries if tag == _DT_NEEDED),
        soname=string(first[_DT_SONAME]) if _DT_SONAME in first else None,
        search=tuple(
            path
            for tag, value in entries
            if tag in (_DT_RPATH, _DT_RUNPATH)
            for path in string(value).split(":")
            if path
        ),
    )


def iter_symbols(handle: ReadAt, header: Header, sections: tuple[Section, ...]) -> Iterator[Symbol]:
    """The symbols of every ``.symtab``. Raises FormatError where symbols or names lie outside the file."""
    layout = struct.Struct(_order(header) + ("IBBHQQ" if header.bits == 64 else "IIIBBH"))
    for table in sections:
        if table.type != SHT_SYMTAB:
            continue
        if table.link >= len(sections) or table.entry_size != layout.size:
            raise FormatError("the symbol table is malformed", offset=table.offset)
        strings = sections[table.link]
        names = read_exactly(handle, strings.offset, min(strings.size, MAX_NAMES), "the symbols' names")
        step = layout.size * 4096
        for start in range(0, table.size - table.size % layout.size, step):
            size = min(step, table.size - table.size % layout.size - start)
            for row in layout.iter_unpack(read_exactly(handle, table.offset + start, size, "the symbol table")):
                if header.bits == 64:
                    name, info, other, section, _, _ = row
                else:
                    name, _, _, info, other, section = row
                yield Symbol(
                    name=_string(names, name), type=info & 0xF, binding=info >> 4, other=other, section=section
                )


def _order(header: Header) -> str:
    return "<" if header.little_endian else ">"


def _table(handle: ReadAt, offset: int, entry: int, count: int, what: str) -> bytes:
    if count > MAX_SECTIONS:
        raise FormatError(f"{count} {what}s are more than the {MAX_SECTIONS} that are read", offset=offset)
    if offset + entry * count > handle.size:
        raise FormatError(f"the {what}s reach beyond the file, to byte {offset + entry * count}", offset=offset)
    return read_exactly(handle, offset, entry * count, f"the table of {what}s")


def _file_offset(segments: tuple[Segment, ...], address: int) -> int | None:
    for segment in segments:
        if segment.type == PT_LOAD and segment.address <= address < segment.address + segment.file_size:
            return address - segment.address + segment.offset
    return None


def _string(table: bytes, start: int) -> str:
    """The NUL-terminated string at ``start``, at most ``MAX_STRING`` bytes; empty where the table ends before it."""
    stop = min(start + MAX_STRING, len(table))
    end = table.find(b"\0", start, stop)
    return table[start : end if end >= 0 else stop].decode("utf-8", "replace")
