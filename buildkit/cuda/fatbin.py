"""Fatbins: NVIDIA's containers for one piece of device code, compiled for several architectures.

NVIDIA publishes no specification. This is what ``fatbinary`` of CUDA 11.8 and 13.0 writes (``scripts/golden-cuda``
makes the samples in ``tests/golden/cuda``) and what its ``cuobjdump`` reads back; all numbers little-endian::

    header     u32 magic BA55ED50, u16 version 1, u16 header size 16, u64 size of the entries after it
    entry      0  u16 kind: 1 PTX, 2 machine code (an ELF file), 8 LTO intermediate code; others exist
               2  u16 version, usually 0101
               4  u32 header size, 64 or more: where the payload starts
               8  u64 payload size, padded to 8; the next entry starts after it
               16 u32 compressed size, 0 where the payload is plain
               20 u32 offset of the compiler's options in the entry, 0 where there are none
               24 u16 minor, u16 major: PTX ISA version of PTX, container's version of machine code
               28 u32 architecture: 70, 75, 90 ...
               32 u32 offset and u32 length of the source's name
               40 u64 flags, below
               48 u64 ...
               56 u64 uncompressed size, 0 where the payload is plain
    flags      2000 LZ4 block, 8000 zstd frame; 100000 the target has the suffix a, 200000 the suffix f
               (01, 10: 64-bit, Linux; 1000000: a feature record, on every sm_100 and later; 10000 on LTO code)

What is read of a fatbin are its headers; a payload is touched only to decompress it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import lz4.block
import zstandard

from buildkit.cuda.arch import Arch, Suffix
from buildkit.cuda.readat import ReadAt, read_exactly
from buildkit.errors import FormatError

MAGIC = b"\x50\xed\x55\xba"
NEEDLE = MAGIC + b"\x01\x00\x10\x00"
"""Magic, version and header size: eight bytes that machine code which merely tests for the magic does not have."""
NEEDLE_PATTERN = re.compile(re.escape(NEEDLE))
"""The same, to search with: regular expressions find it 1.5 times as fast as ``bytes.find`` (3.0, not 2.0 GB/s)."""
HEADER_SIZE = 16
MIN_ENTRY = 64

KIND_PTX = 1
KIND_ELF = 2
KIND_LTO = 8

MAX_PAYLOAD = 256 * 2**20
"""Bytes of one payload after decompression. The largest in CUDA 12 libraries has about 30 MB."""

_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_LZ4, _ZSTD = 0x2000, 0x8000
_SUFFIX_BITS, _SUFFIX_A, _SUFFIX_F = 0xF00000, 0x100000, 0x200000
_LZ4_RATIO = 255
"""An LZ4 block cannot expand by more (block format, "Metadata": each length byte adds at most 255)."""
_LOOKAHEAD = 144
_STEP = 1 << 20

Compression = Literal["", "lz4", "zstd"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that was not understood, as a value: the offset in the file's bytes, and what is wrong there."""

    offset: int
    message: str


class Entry(NamedTuple):
    """One payload of a fatbin. Offsets and sizes are bytes; ``offset`` counts from the start of the handle.

    ``version`` is the PTX ISA version for PTX. ``stored`` is the compressed size, or the padded size of plain ones. A
    tuple, as libraries have tens of thousands of entries.
    """

    kind: int
    arch: Arch
    version: tuple[int, int]
    offset: int
    header_size: int
    stored: int
    size: int
    compression: Compression
    flags: int

    @property
    def kind_name(self) -> str:
        return {KIND_PTX: "ptx", KIND_ELF: "elf", KIND_LTO: "lto"}.get(self.kind, f"kind {self.kind}")

    @property
    def target(self) -> str:
        """``sm_70`` for machine code, ``compute_70`` for PTX, ``lto_70`` for LTO code."""
        if self.kind == KIND_ELF:
            return self.arch.sm
        return self.arch.compute if self.kind == KIND_PTX else f"{self.kind_name}_{self.arch.number}{self.arch.suffix}"


class Fatbin(NamedTuple):
    """A header and its entries. ``size`` counts the header."""

    offset: int
    size: int
    entries: tuple[Entry, ...]


def walk(handle: ReadAt, start: int, end: int, problems: list[Problem], *, budget: int) -> Iterator[Fatbin]:
    """The fatbins in ``[start, end)``, which holds fatbins and zero padding and nothing else, as ``.nv_fatbin`` does.

    Anything else there becomes one of ``problems``, and the walk goes on at the next magic. ``budget`` bounds the
    number of entries, for files that would have millions of empty ones.
    """
    position = start
    while position < end:
        position = _skip_zeros(handle, position, end)
        if position >= end:
            return
        head = handle.read(position, _HEADER.size)
        if head[:4] == MAGIC[: len(head)]:
            found = read_fatbin(handle, position, end, problems, budget=budget)
            if found is not None:
                budget -= len(found.entries)
                yield found
                position = found.offset + found.size
                if budget <= 0:
                    problems.append(Problem(position, "has more entries than are read; the rest was left unread"))
                    return
                continue
        else:
            problems.append(Problem(position, f"{head[:8].hex()} is not the beginning of a fatbin"))
        position = _find(handle, position + 4, end)
        if position < 0:
            return


def read_fatbin(
    handle: ReadAt, offset: int, end: int, problems: list[Problem], *, budget: int = 1 << 16
) -> Fatbin | None:
    """The fatbin at ``offset``; what is wrong with it goes to ``problems``. None where its header makes no sense.

    A fatbin that reaches beyond ``end`` is cut there: its whole entries are returned beside the problem.
    """
    head = handle.read(offset, _HEADER.size)
    if len(head) < _HEADER.size:
        problems.append(Problem(offset, f"a fatbin header is cut short: {len(head)} of {_HEADER.size} bytes"))
        return None
    magic, version, header_size, size = _HEADER.unpack(head)
    if head[:4] != MAGIC or version != 1 or header_size != HEADER_SIZE:
        problems.append(
            Problem(offset, f"fatbin magic {magic:#x}, version {version}, header size {header_size} are not known")
        )
        return None
    stop = offset + header_size + size
    limit = min(end, handle.size)
    if stop > limit:
        problems.append(Problem(offset, f"a fatbin reaches to byte {stop}, beyond the end of its place at {limit}"))
        stop = limit
    entries: list[Entry] = []
    position = offset + header_size
    while position < stop:
        if len(entries) >= budget:
            break
        raw = handle.read(position, min(_LOOKAHEAD, stop - position))
        if len(raw) < _ENTRY.size:
            problems.append(Problem(position, f"a fatbin entry is cut short: {len(raw)} of {_ENTRY.size} bytes"))
            break
        parsed = _entry(raw, position, stop, problems)
        if parsed is None:
            break
        entry, position = parsed
        entries.append(entry)
    return Fatbin(offset, stop - offset, tuple(entries))


def payload(handle: ReadAt, entry: Entry, *, limit: int = MAX_PAYLOAD) -> bytes:
    """The entry's payload, decompressed: at most ``limit`` bytes. Plain payloads keep their padding.

    Raises FormatError where it is cut short, says it is larger than ``limit`` or does not decompress to its size.
    """
    at = entry.offset + entry.header_size
    if entry.size > limit or entry.stored > limit:
        raise FormatError(f"a payload of {max(entry.size, entry.stored)} bytes is above the {limit} read", offset=at)
    data = read_exactly(handle, at, entry.stored, "a fatbin's payload")
    if not entry.compression:
        return data
    if entry.compression == "lz4" and entry.size > _LZ4_RATIO * entry.stored + 64:
        raise FormatError(f"{entry.stored} bytes of LZ4 cannot become {entry.size}", offset=at)
    try:
        if entry.compression == "lz4":
            plain: bytes = lz4.block.decompress(data, uncompressed_size=entry.size)
        else:
            # The frame names a size of its own, which the library would allocate.
            claimed = zstandard.frame_content_size(data)
            if claimed not in (-1, entry.size):
                raise FormatError(f"the zstd frame has {claimed} bytes, its entry says {entry.size}", offset=at)
            with zstandard.ZstdDecompressor(max_window_size=limit).stream_reader(data) as reader:
                plain = reader.read(entry.size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError, MemoryError) as error:
        raise FormatError(f"{entry.compression} data does not decompress: {error}", offset=at) from error
    if len(plain) != entry.size:
        raise FormatError(f"decompresses to {len(plain)} bytes instead of {entry.size}", offset=at)
    return plain


def _find(handle: ReadAt, start: int, end: int) -> int:
    """Offset of the first ``NEEDLE`` in ``[start, end)``, or -1; reads windows of 1 MiB."""
    overlap = len(NEEDLE) - 1
    while start < end:
        data = handle.read(start, min(_STEP, end - start))
        hit = NEEDLE_PATTERN.search(data)
        if hit:
            return start + hit.start()
        if len(data) <= overlap:
            return -1
        start += len(data) - overlap
        if not data.strip(b"\0"):
            start = max(start, handle.data_from(start))
    return -1


def _entry(raw: bytes, position: int, stop: int, problems: list[Problem]) -> tuple[Entry, int] | None:
    """The entry whose first bytes are ``raw``, and where the next one starts."""
    kind, _, header_size, padded, compressed, _, minor, major, number, _, _, flags, _, size = _ENTRY.unpack_from(raw)
    if header_size < MIN_ENTRY or header_size > stop - position:
        problems.append(Problem(position, f"a fatbin entry has a header of {header_size} bytes"))
        return None
    room = stop - position - header_size
    if padded > room:
        problems.append(Problem(position, f"a fatbin entry has {padded} bytes of payload where {room} are left"))
        return None
    # The magic of the payload would tell the method as well, but only the flags are there without reading it.
    method: Compression = "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else ""
    stored = compressed if method else padded
    if stored > padded:
        problems.append(Problem(position, f"a fatbin entry has {stored} compressed bytes in {padded}"))
        return None
    if kind in (KIND_PTX, KIND_ELF) and not 10 <= number <= 999:
        problems.append(Problem(position, f"a fatbin entry is for architecture {number}"))
    arch = _arch(number, flags & _SUFFIX_BITS)
    version = (major, minor)
    entry = Entry(kind, arch, version, position, header_size, stored, size or stored, method, flags)
    return entry, position + header_size + padded


@lru_cache(maxsize=1024)
def _arch(number: int, bits: int) -> Arch:
    suffix: Suffix = "" if bits == 0 else "a" if bits == _SUFFIX_A else "f" if bits == _SUFFIX_F else "?"
    return Arch(number, suffix)


def _skip_zeros(handle: ReadAt, position: int, end: int) -> int:
    """Offset of the first byte that is not zero, or ``end``. Padding is short, so the first look is, too."""
    size = 16
    while position < end:
        data = handle.read(position, min(size, end - position))
        if not data:
            return end
        rest = data.lstrip(b"\0")
        if rest:
            return position + len(data) - len(rest)
        position = min(end, handle.data_from(position + len(data)))
        size = _STEP
    return end
