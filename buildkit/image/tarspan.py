"""Reads a tar as spans: where each entry begins and ends, byte for byte, and what its headers say.

A span is everything that belongs to one entry: its extended headers (PAX ``x``, GNU ``L`` and ``K``), its header, the
extension blocks of an old GNU sparse file, its data and its padding. Copied whole, a span says the same in another tar;
nothing is ever written anew. PAX global headers (``g``) stand between the spans.

Where readers disagree, this one reads like Go's ``archive/tar``, which Docker, containerd and podman use, and refuses
what would mean different files to different readers.

Sources: POSIX.1-2017 ``pax`` (ustar and pax interchange formats), GNU tar manual ("Basic Tar Format", "Storing Sparse
Files"), ``tar(5)`` of libarchive, Go ``archive/tar``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from buildkit.errors import FormatError
from buildkit.image.compress import Readable, ReadableInto

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)
TRAILER = bytes(2 * BLOCK)
"""Two zero blocks end an archive."""

MAX_EXTENDED = 2**20
"""Bytes of one extended header; Go's reader has the same bound (``maxSpecialFileSize``)."""
MAX_HEAD = 4 * 2**20
"""Bytes of all headers of one entry, sparse map included."""
MAX_GLOBALS = 8 * 2**20
"""Bytes of all PAX global headers of one tar: each may have to be repeated in every tar that is made from it."""
_MAX_SIZE = 2**62
_READ = 2**20

# Type flags, as the byte that stands in the header.
REGULAR, OLD_REGULAR, HARDLINK, SYMLINK, CHAR, BLOCK_DEVICE, DIRECTORY, FIFO = b"0\x0012" + b"3456"
CONTIGUOUS, SPARSE = b"7S"
_GLOBAL, _LOCAL, _LONG_NAME, _LONG_LINK = b"gxLK"
_HEADER_ONLY = frozenset((HARDLINK, SYMLINK, CHAR, BLOCK_DEVICE, DIRECTORY, FIFO))
"""Types without data whatever their size field says (Go: ``isHeaderOnly``)."""
_EXTENDED = frozenset((_GLOBAL, _LOCAL, _LONG_NAME, _LONG_LINK))

Records = Mapping[bytes, bytes]
_NO_RECORDS: Records = MappingProxyType({})


class Entry(NamedTuple):
    """One entry. ``[offset, offset + len(head) + padded data)`` is its span in the tar.

    ``head`` holds all header blocks, verbatim; ``size`` counts the data bytes that follow (for a sparse file: those
    that are stored). ``name`` and ``link`` are raw bytes as the headers give them, ``kind`` is the type flag.
    ``records`` are the entry's own PAX records; ``globals_before`` counts the global headers in force.
    """

    offset: int
    head: bytes
    kind: int
    name: bytes
    link: bytes
    size: int
    records: Records
    globals_before: int

    @property
    def padded(self) -> int:
        """Bytes of data with its padding."""
        return -(-self.size // BLOCK) * BLOCK

    @property
    def span(self) -> int:
        """Bytes from the first header to the end of the padding."""
        return len(self.head) + self.padded


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalHeader:
    """A PAX global header with its data and padding, verbatim."""

    offset: int
    raw: bytes
    records: Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What an extractor sets. ``mtime_ns`` in nanoseconds since the epoch; ``xattrs`` without their PAX prefix.

    ``sparse`` describes the holes of a sparse file (records and map as stored), empty for all others.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    device: tuple[int, int]
    xattrs: tuple[tuple[bytes, bytes], ...]
    sparse: bytes


class TarReader:
    """Entries of a tar from front to back; memory is bounded by one entry's headers and one read.

    ``source`` is read in pieces of up to 1 MiB. ``where`` names it in errors, whose offsets count from the tar's first
    byte. Iterate, or call ``next_entry``; between two entries ``read`` gives the data, what is left of it is skipped.
    """

    def __init__(self, source: Readable, *, where: str) -> None:
        self._source = source
        self._where = where
        self._buffer = b""
        self._at = 0
        self._base = 0  # offset in the tar of the buffer's first byte
        self._left = 0  # bytes of the current entry's data and padding not yet taken
        self._ended = False
        self.globals: list[GlobalHeader] = []
        self._globals_size = 0
        self.end_marker = False
        """Whether the zero blocks that end an archive were there (known at the end)."""

    @property
    def offset(self) -> int:
        """Bytes of the tar taken so far."""
        return self._base + self._at

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self.next_entry()) is not None:
            yield entry

    def next_entry(self) -> Entry | None:
        """The next entry, or None at the end of the archive. Raises FormatError with the offset."""
        while self._left:
            self.read(_READ)
        if self._ended:
            return None
        start = self.offset
        heads: list[bytes] = []
        taken = 0
        records: Records = _NO_RECORDS
        long_name = long_link = b""
        while True:
            at = self.offset
            block = self._block(BLOCK, b"")
            if not block or block == ZERO_BLOCK:
                if heads:
                    raise self._error("extended header without an entry", start)
                self._end(block, at)
                return None
            kind = block[156]
            size = self._check(block, at)
            if kind not in _EXTENDED:
                break
            if size > MAX_EXTENDED:
                raise self._error(f"extended header of {size} bytes, more than {MAX_EXTENDED}", at)
            stored = -(-size // BLOCK) * BLOCK
            data = self._block(stored, block)
            payload = data[:size]
            if kind == _GLOBAL:
                if heads:
                    raise self._error("global header between an extended header and its entry", at)
                self._add_global(at, block + data, payload)
                start = self.offset
                continue
            heads += (block, data)
            taken += BLOCK + stored
            if taken > MAX_HEAD:
                raise self._error(f"more than {MAX_HEAD} bytes of extended headers for one entry", start)
            if kind == _LOCAL:
                records = self._records(payload, at)
            elif kind == _LONG_NAME:
                long_name = payload.split(b"\0", 1)[0]
            else:
                long_link = payload.split(b"\0", 1)[0]
        name = long_name or records.get(b"path") or _name(block)
        link = long_link or records.get(b"linkpath") or _string(block[157:257])
        if kind == OLD_REGULAR:
            kind = DIRECTORY if name.endswith(b"/") else REGULAR
        if records:
            if records.get(b"size"):
                size = self._decimal(records[b"size"], at)
            if kind != SPARSE and _pax_sparse(records):
                name = records.get(b"GNU.sparse.name") or name
        head = block
        if kind == SPARSE:
            head += self._sparse_extensions(block, at)
        if heads:
            head = b"".join(heads) + head
        if kind in _HEADER_ONLY:
            size = 0
        if b"\0" in name or not name:
            raise self._error("entry without a name" if not name else "name with a NUL byte", start)
        self._left = -(-size // BLOCK) * BLOCK
        return Entry(start, head, kind, name, link, size, records, len(self.globals))

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes of the current entry's data and padding; ``b""`` after its last."""
        want = min(size, self._left)
        if not want:
            return b""
        have = len(self._buffer) - self._at
        if have:
            data = self._buffer[self._at : self._at + want]
            self._at += len(data)
        else:
            data = self._source.read(want)
            self._base += self._at + len(data)
            self._buffer, self._at = b"", 0
            if not data:
                raise self._error(f"the tar ends {self._left} bytes before the end of an entry's data", self.offset)
        self._left -= len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        """``read`` without a copy, as far as ``buffer`` goes; the number of bytes."""
        want = min(len(buffer), self._left)
        if not want:
            return 0
        if self._at < len(self._buffer) or not isinstance(self._source, ReadableInto):
            data = self.read(want)
            buffer[: len(data)] = data
            return len(data)
        count = self._source.readinto(buffer[:want]) or 0
        self._base += self._at + count
        self._buffer, self._at = b"", 0
        if not count:
            raise self._error(f"the tar ends {self._left} bytes before the end of an entry's data", self.offset)
        self._left -= count
        return count

    def finish(self) -> int:
        """Read whatever follows the end of the archive, so that the source proves itself; the number of bytes."""
        extra = len(self._buffer) - self._at
        self._base += len(self._buffer)
        self._buffer, self._at = b"", 0
        while data := self._source.read(_READ):
            extra += len(data)
            self._base += len(data)
        return extra

    # -- parts of a header

    def _block(self, size: int, context: bytes) -> bytes:
        """Exactly ``size`` bytes; with an empty ``context`` (between entries) ``b""`` where the tar ends."""
        end = self._at + size
        if end > len(self._buffer):
            parts = [self._buffer[self._at :]]
            self._base += self._at
            have = len(parts[0])
            while have < size and (data := self._source.read(max(size - have, _READ))):
                parts.append(data)
                have += len(data)
            self._buffer, self._at = b"".join(parts), 0
            end = size
            if have < size:
                if not have and not context:
                    return b""
                raise self._error("the tar ends within a header", self._base + have)
        block = self._buffer[self._at : end]
        self._at = end
        return block

    def _check(self, block: bytes, at: int) -> int:
        """Check the header's checksum (unsigned, or signed as old writers had it); its size field."""
        field = block[148:156]
        try:
            expected = _octal(field)
            if expected != sum(block) - sum(field) + 8 * 32:
                signed = sum(struct.unpack("512b", block)) - sum(struct.unpack("8b", field)) + 8 * 32
                if expected != signed:
                    raise self._error("header checksum is wrong", at)
            size = _number(block[124:136])
        except ValueError as error:
            raise self._error(f"not a tar header ({error})", at) from error
        if not 0 <= size < _MAX_SIZE:
            raise self._error(f"size {size} is not possible", at)
        return size

    def _end(self, block: bytes, at: int) -> None:
        self._ended = True
        if block:
            second = self._block(BLOCK, b"")
            if second and second != ZERO_BLOCK:
                raise self._error("a zero block stands between the entries", at)
            self.end_marker = bool(second)

    def _add_global(self, at: int, raw: bytes, payload: bytes) -> None:
        records = self._records(payload, at)
        for key in records:
            # Go's reader ignores globals, others apply them: with these two readers would see different files.
            if key in (b"path", b"linkpath", b"size") or key.startswith(b"GNU.sparse"):
                raise self._error(f"global header sets {key.decode(errors='replace')!r} for all entries", at)
        self._globals_size += len(raw)
        if self._globals_size > MAX_GLOBALS:
            raise self._error(f"more than {MAX_GLOBALS} bytes of global headers", at)
        self.globals.append(GlobalHeader(offset=at, raw=raw, records=MappingProxyType(records)))

    def _records(self, data: bytes, at: int) -> dict[bytes, bytes]:
        """``"%d %s=%s\\n"`` records (POSIX, "pax Extended Header"); a later one wins, sparse 0.0 pairs add up."""
        records: dict[bytes, bytes] = {}
        pos = 0
        while pos < len(data):
            space = data.find(b" ", pos, pos + 20)
            digits = data[pos:space] if space > 0 else b""
            end = pos + int(digits) if digits.isdigit() else 0
            equals = data.find(b"=", space + 1, max(end - 1, 0))
            if not space < end <= len(data) or data[end - 1] != 0x0A or equals <= space + 1:
                raise self._error("malformed extended header record", at)
            key, value = data[space + 1 : equals], data[equals + 1 : end - 1]
            if b"\0" in (value if key in (b"path", b"linkpath", b"uname", b"gname", b"GNU.sparse.name") else key):
                raise self._error("extended header record with a NUL byte", at)
            if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes") and key in records:
                value = records[key] + b"," + value
            records[key] = value
            pos = end
        return records

    def _decimal(self, value: bytes, at: int) -> int:
        if not value.isdigit() or len(value) > 19 or int(value) >= _MAX_SIZE:
            raise self._error(f"size {value[:40].decode(errors='replace')!r} is not possible", at)
        return int(value)

    def _sparse_extensions(self, block: bytes, at: int) -> bytes:
        """The blocks that continue an old GNU sparse map (GNU tar manual, "Basic Tar Format": ``struct sparse``)."""
        if block[257:265] != b"ustar  \0":
            raise self._error("sparse entry that is not in GNU format", at)
        more, blocks = block[482], []
        while more:
            blocks.append(self._block(BLOCK, block))
            if len(blocks) * BLOCK > MAX_HEAD:
                raise self._error(f"sparse map of more than {MAX_HEAD} bytes", at)
            more = blocks[-1][504]
        return b"".join(blocks)

    def _error(self, message: str, offset: int) -> FormatError:
        return FormatError(message, where=self._where, offset=offset)


def normalise(name: bytes) -> bytes:
    """The path below the root: no leading ``/`` or ``./``, no trailing slash, no empty or ``.`` part; ``b""`` is root.

    Raises ValueError for a ``..`` part: such a name leads out of its directory.
    """
    if b".." not in name and b"//" not in name and b"./" not in name and name[:1] != b"/" and name[-2:] != b"/.":
        return b"" if name == b"." else name.rstrip(b"/")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise ValueError("name with a '..' part")
    return b"/".join(parts)


def attributes(entry: Entry) -> Attributes:
    """What the entry's headers say beside name, type and size; PAX records win over the header. ValueError if bad."""
    at = len(entry.head) - BLOCK if entry.kind != SPARSE else _sparse_header(entry.head)
    block = entry.head[at : at + BLOCK]
    records = entry.records
    mtime = records.get(b"mtime")
    uid, gid = records.get(b"uid"), records.get(b"gid")
    device = (0, 0)
    if entry.kind in (CHAR, BLOCK_DEVICE):
        device = (_number(block[329:337]), _number(block[337:345]))
    sparse = b""
    if entry.kind == SPARSE:
        sparse = block[386:495] + entry.head[at + BLOCK :]
    elif _pax_sparse(records):
        sparse = b"\n".join(k + b"=" + v for k, v in sorted(records.items()) if k.startswith(b"GNU.sparse."))
    return Attributes(
        mode=_number(block[100:108]) & 0o7777,
        uid=int(uid) if uid else _number(block[108:116]),
        gid=int(gid) if gid else _number(block[116:124]),
        mtime_ns=_nanoseconds(mtime) if mtime else _number(block[136:148]) * 10**9,
        device=device,
        xattrs=tuple(sorted((k[13:], v) for k, v in records.items() if k.startswith(b"SCHILY.xattr."))),
        sparse=sparse,
    )


def _sparse_header(head: bytes) -> int:
    """Where an old GNU sparse entry's header block lies in ``head``, behind its extended headers."""
    at = 0
    while head[at + 156] in _EXTENDED:
        at += BLOCK + -(-_number(head[at + 124 : at + 136]) // BLOCK) * BLOCK
    return at


def _nanoseconds(text: bytes) -> int:
    """Decimal seconds to whole nanoseconds, digits beyond the ninth dropped, as Go does (``parsePAXTime``)."""
    whole, _, fraction = text.partition(b".")
    negative = whole.startswith(b"-")
    if not whole.lstrip(b"-").isdigit() or (fraction and not fraction.isdigit()) or len(whole) > 20:
        raise ValueError(f"time {text[:40]!r}")
    nanos = int((fraction + b"000000000")[:9])
    return int(whole) * 10**9 + (-nanos if negative else nanos)


def _pax_sparse(records: Records) -> bool:
    """Whether the records describe a sparse file of a version that Go's reader knows (0.0, 0.1, 1.0)."""
    major, minor = records.get(b"GNU.sparse.major"), records.get(b"GNU.sparse.minor")
    if major is None and minor is None:
        return bool(records.get(b"GNU.sparse.map")) or b"GNU.sparse.numblocks" in records
    return (major, minor) in ((b"0", b"0"), (b"0", b"1"), (b"1", b"0"))


def _name(block: bytes) -> bytes:
    """The name field; with the ustar prefix in POSIX archives, and star's shorter one in star's."""
    name = _string(block[:100])
    if block[257:263] == b"ustar\0":
        prefix = _string(block[345:476] if block[508:512] == b"tar\0" else block[345:500])
        if prefix:
            return prefix + b"/" + name
    return name


def _string(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0").split(b"\0", 1)[0]
    if not digits:
        return 0
    if not digits.isdigit():
        raise ValueError(f"{field!r} is not a number")
    return int(digits, 8)


def _number(field: bytes) -> int:
    """Octal digits, or big-endian two's complement when the first bit is set (GNU, star: "base-256")."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes((field[0] & 0x7F, *field[1:])), "big")
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    return _octal(field)
