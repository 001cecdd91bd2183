"""The members of an archive's outer tar: names, sizes and where their bytes lie; nothing is unpacked.

Reads what writers of image archives use: ustar, GNU long names and big sizes, PAX paths and sizes. It is strict where
leniency would hide damage: header checksums, an end-of-archive marker, names that stay inside the archive.

Sources: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from buildkit.errors import FormatError
from buildkit.image.compress import Readable, ReadableInto

BLOCK = 512
MAX_EXTENSION = 2**20
"""Bytes of one extended header (PAX records, GNU long name) that are believed."""
MAX_MEMBERS = 100_000

Kind = Literal["file", "link", "symlink", "dir", "other"]

_SKIP = 1 << 20
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "link",
    b"2": "symlink",
    b"5": "dir",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """``offset`` and ``size`` in bytes: where the content begins in the tar, and its length there."""

    name: str
    kind: Kind
    size: int
    offset: int
    target: str = ""
    """Of links, as written."""
    sparse: bool = False
    """The content is packed in a way that only tar programs undo."""


class TarReader:
    """Walks a tar from front to back. ``next_member``, then ``read`` for its content, as often as there are members.

    ``source`` is read strictly forward; content that was not read is skipped, by seeking where ``seek`` is given.
    """

    def __init__(self, source: Readable, *, where: str, seek: BinaryIO | None = None) -> None:
        self._source = source
        self._into = source if isinstance(source, ReadableInto) else None
        self._seek = seek
        self._size = seek.seek(0, 2) if seek is not None else None
        if seek is not None:
            seek.seek(0)
        self._where = where
        self._offset = 0
        self._left = 0
        self._padding = 0
        self._count = 0
        self._globals: dict[str, str] = {}

    def next_member(self) -> Member | None:
        """The next member, or None at the end-of-archive marker. Raises FormatError for anything that is no tar."""
        self._skip()
        own: dict[str, str] = {}
        long_name = long_target = None
        while True:
            at = self._offset
            header = self._exactly(BLOCK)
            if header.count(0) == BLOCK:
                return None
            if not _checksum_fits(header):
                hint = None if at else "this is not a tar archive"
                raise FormatError("tar header checksum is wrong", where=self._where, offset=at, hint=hint)
            size = self._number(header[124:136], at)
            kind = header[156:157]
            if kind in (b"L", b"K", b"x", b"g", b"X"):
                if size > MAX_EXTENSION:
                    raise FormatError(f"extended header of {size} bytes", where=self._where, offset=at)
                data = self._exactly(size)
                self._exactly(-size % BLOCK)
                if kind == b"L":
                    long_name = data.rstrip(b"\0")
                elif kind == b"K":
                    long_target = data.rstrip(b"\0")
                elif kind == b"g":
                    self._globals.update(self._records(data, at))
                else:
                    own.update(self._records(data, at))
                continue
            return self._member(header, kind, size, at, {**self._globals, **own}, long_name, long_target)

    def read(self, size: int, /) -> bytes:
        """Content of the current member; ``b""`` at its end."""
        data = self._source.read(min(size, self._left)) if self._left and size else b""
        self._took(len(data), size)
        return data

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: self._left]
        if not target:
            return 0
        if self._into is not None:
            count = self._into.readinto(target) or 0
        else:
            data = self._source.read(len(target))
            count = len(data)
            target[:count] = data
        self._took(count, len(target))
        return count

    def _took(self, count: int, asked: int) -> None:
        if self._left and asked and not count:
            raise FormatError(f"ends {self._left} bytes early", where=self._where, offset=self._offset)
        self._left -= count
        self._offset += count

    def _skip(self) -> None:
        ahead = self._left + self._padding
        if self._seek is not None and self._size is not None:
            if self._offset + ahead > self._size:
                raise FormatError(
                    f"ends {self._offset + ahead - self._size} bytes early", where=self._where, offset=self._size
                )
            self._seek.seek(ahead, 1)
            self._offset += ahead
        else:
            while self._left:
                self.read(_SKIP)
            self._exactly(self._padding)
        self._left = self._padding = 0

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._source.read(size - len(data))
            if not more:
                raise FormatError("ends early", where=self._where, offset=self._offset + len(data))
            data += more
        self._offset += size
        return data

    def _number(self, field: bytes, at: int) -> int:
        if field[0] & 0x80:  # base-256, GNU's way to write sizes of 8 GiB and more
            value = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
            if field[0] == 0xFF or value >= 2**63:
                raise FormatError("size is out of range", where=self._where, offset=at)
            return value
        text = field.strip(b" \0")
        if not text:
            return 0
        if not all(48 <= digit <= 55 for digit in text):
            raise FormatError("size is not a number", where=self._where, offset=at)
        return int(text, 8)

    def _records(self, data: bytes, at: int) -> dict[str, str]:
        """PAX records: ``"%d %s=%s\\n"``, the number being the record's whole length."""
        out: dict[str, str] = {}
        while data.strip(b"\0"):
            length, space, _ = data.partition(b" ")
            if not space or not length.isdigit() or len(length) > 8:
                raise FormatError("malformed PAX record", where=self._where, offset=at)
            end = int(length)
            key, equals, value = data[len(length) + 1 : end].partition(b"=")
            if not len(length) + 1 < end <= len(data) or not equals or not value.endswith(b"\n"):
                raise FormatError("malformed PAX record", where=self._where, offset=at)
            out[key.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
            data = data[end:]
        return out

    def _member(
        self,
        header: bytes,
        kind: bytes,
        size: int,
        at: int,
        records: dict[str, str],
        long_name: bytes | None,
        long_target: bytes | None,
    ) -> Member:
        self._count += 1
        if self._count > MAX_MEMBERS:
            raise FormatError(f"more than {MAX_MEMBERS} members", where=self._where, offset=at)
        raw = long_name if long_name is not None else _text(header[:100])
        if long_name is None and header[257:263] == b"ustar\0" and header[345]:
            raw = _text(header[345:500]) + b"/" + raw
        name = records.get("path", raw.decode(errors="surrogateescape"))
        target = records.get(
            "linkpath",
            (long_target if long_target is not None else _text(header[157:257])).decode(errors="surrogateescape"),
        )
        if "size" in records:
            if not records["size"].isdigit() or len(records["size"]) > 19:
                raise FormatError("PAX size is not a number", where=self._where, offset=at)
            size = int(records["size"])
        shape: Kind = _KINDS.get(kind, "other")
        if shape in ("link", "symlink", "dir"):
            size = 0  # pax, "typeflag": no content follows, whatever the size says
        self._left, self._padding = size, -size % BLOCK
        return Member(
            name=inside(name, where=self._where, offset=at),
            kind=shape,
            size=size,
            offset=self._offset,
            target=target,
            sparse=kind == b"S" or any(key.startswith("GNU.sparse.") for key in records),
        )


def inside(name: str, *, where: str, offset: int | None = None) -> str:
    """``name`` without ``./`` and doubled slashes. Raises FormatError where it would leave the archive."""
    normal = posixpath.normpath(name) if name else ""
    if not normal or normal.startswith("/") or ".." in name.split("/"):
        raise FormatError(f"member {name!r} lies outside the archive", where=where, offset=offset)
    return normal


def index(file: BinaryIO, *, where: str) -> dict[str, Member]:
    """All members of a seekable tar by name; of members with the same name the last, as when unpacking."""
    return {member.name: member for member in _members(TarReader(file, where=where, seek=file))}


def _members(reader: TarReader) -> Iterator[Member]:
    while (member := reader.next_member()) is not None:
        yield member


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _checksum_fits(header: bytes) -> bool:
    text = header[148:156].strip(b" \0")
    if not text or not all(48 <= digit <= 55 for digit in text):
        return False
    rest = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(rest)
    # Some historic writers summed signed bytes.
    return int(text, 8) in (unsigned, unsigned - 256 * sum(byte >= 0x80 for byte in rest))
