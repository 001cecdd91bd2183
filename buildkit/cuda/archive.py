"""Static archives (``.a``): their members, in order, without unpacking.

Sources: ``ar.h`` and "ar" in the GNU binutils manual; the variants are System V/GNU (long names in the member ``//``)
and BSD (``#1/LENGTH``, the name before the content). A thin archive holds no content, only names of files elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from buildkit.cuda.fatbin import Problem
from buildkit.cuda.readat import ReadAt

MAGIC = b"!<arch>\n"
THIN_MAGIC = b"!<thin>\n"
MAX_NAMES = 16 * 2**20
_HEADER_SIZE = 60
_MAX_NAME = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive; its content is ``[offset, offset + size)`` of the archive."""

    name: str
    offset: int
    size: int


def iter_members(handle: ReadAt, problems: list[Problem]) -> Iterator[Member]:
    """The members that are files: without symbol tables and the table of long names.

    A member that is cut short is reported in ``problems`` and still yielded, with the bytes that are there; after a
    header that makes no sense nothing more is read.
    """
    names = b""
    position = len(MAGIC)
    while position < handle.size:
        header = handle.read(position, _HEADER_SIZE)
        if len(header) < _HEADER_SIZE:
            if header.strip(b"\n\0"):
                problems.append(Problem(position, f"an archive header is cut short: {len(header)} of 60 bytes"))
            return
        digits = header[48:58].strip()
        if header[58:60] != b"`\n" or not digits.isdigit():
            problems.append(Problem(position, "is not the header of an archive member"))
            return
        size = int(digits)
        offset = position + _HEADER_SIZE
        room = handle.size - offset
        if size > room:
            problems.append(Problem(position, f"an archive member is cut short: {room} of {size} bytes"))
        # Members start at even offsets; the newline between them is not part of any.
        position = offset + size + (size & 1)
        size = min(size, room)
        raw = header[:16].rstrip()
        if raw == b"//":
            names = handle.read(offset, min(size, MAX_NAMES))
            continue
        if raw in (b"/", b"/SYM64/"):
            continue
        name = raw.removesuffix(b"/")
        if raw.startswith(b"#1/") and raw[3:].isdigit():
            length = min(int(raw[3:]), size)
            name = handle.read(offset, min(length, _MAX_NAME)).rstrip(b"\0")
            offset, size = offset + length, size - length
            if name.startswith(b"__.SYMDEF"):
                continue
        elif raw.startswith(b"/") and raw[1:].isdigit():
            start = int(raw[1:])
            if start >= len(names):
                problems.append(Problem(offset - _HEADER_SIZE, f"an archive member's name {start} is not in the table"))
            end = names.find(b"\n", start, start + _MAX_NAME)
            name = names[start : end if end >= 0 else start].removesuffix(b"/")
        yield Member(name.decode("utf-8", "replace"), offset, size)
