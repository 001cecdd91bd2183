"""Putting a layer's tar together from the engine's tar-split file and its unpacked files, byte for byte.

``tar-split.json.gz`` is a gzip file of JSON lines, in the order of the tar. Type 2 holds raw bytes (``payload``,
base64): headers and padding. Type 1 stands for the content of a file: ``name`` (``name_raw``, base64, where it is not
UTF-8), ``size``, and a CRC64 that is not needed here, since the whole is proven by the layer's diff_id.

Source: vbatts/tar-split, ``tar/storage/entry.go``; moby, ``layer/layer_store.go``.
"""

from __future__ import annotations

import binascii
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from buildkit.errors import FormatError
from buildkit.image.compress import Readable

MAX_LINE = 2**26
"""Bytes of one line of JSON. Runs of raw bytes are headers and padding, far below this."""
READ_AHEAD = 2**24
"""Bytes of a file that the kernel is asked to fetch before they are read."""

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class TarSplitReader:
    """The tar of one layer, front to back. ``pieces`` is the unpacked tar-split; it owns ``pieces`` and ``folder``.

    Raises OSError where a file is gone or a path leads through a symlink, FormatError where the description and the
    files do not fit. Never reads outside ``folder``.
    """

    def __init__(self, pieces: Readable, folder: int, *, where: str) -> None:
        self._entries = _entries(pieces, where)
        self._tree = _Tree(folder)
        self._where = where
        self._raw = memoryview(b"")
        self._file = -1
        self._at = 0
        self._size = 0

    def read(self, size: int, /) -> bytes:
        buffer = bytearray(size)
        count = self.readinto(buffer)
        return bytes(memoryview(buffer)[:count])

    def readinto(self, buffer: Any, /) -> int:
        """Fills ``buffer`` unless the tar ends."""
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(target):
            if self._raw:
                count = min(len(self._raw), len(target) - filled)
                target[filled : filled + count] = self._raw[:count]
                self._raw = self._raw[count:]
            elif self._file >= 0:
                count = self._from_file(target[filled:])
            elif self._next():
                continue
            else:
                break
            filled += count
        return filled

    def close(self) -> None:
        self._close_file()
        self._tree.close()

    def _next(self) -> bool:
        entry = next(self._entries, None)
        if entry is None:
            return False
        if isinstance(entry, bytes):
            self._raw = memoryview(entry)
            return True
        name, size = entry
        if size:
            self._file = self._tree.open(name, self._where)
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise FormatError(f"{os.fsdecode(name)!r} is not a file of {size} bytes", where=self._where)
            self._at, self._size = 0, size
        return True

    def _from_file(self, target: memoryview) -> int:
        wanted = min(len(target), self._size - self._at)
        ahead = self._at + wanted
        if ahead < self._size:
            os.posix_fadvise(self._file, ahead, min(READ_AHEAD, self._size - ahead), os.POSIX_FADV_WILLNEED)
        count = os.preadv(self._file, [target[:wanted]], self._at)
        if not count:
            raise FormatError("a file was cut short while it was read", where=self._where)
        self._at += count
        if self._at == self._size:
            self._close_file()
        return count

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Tree:
    """Opens files below a folder one component at a time, through no symlink, keeping the path of the last one open."""

    def __init__(self, root: int) -> None:
        self._open: list[tuple[bytes, int]] = [(b"", root)]

    def open(self, name: bytes, where: str) -> int:
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if not parts or b".." in parts or b"\0" in name:
            raise FormatError(f"{os.fsdecode(name)!r} lies outside the layer", where=where)
        *folders, last = parts
        shared = 0
        while shared < min(len(folders), len(self._open) - 1) and self._open[shared + 1][0] == folders[shared]:
            shared += 1
        self._shorten(shared + 1)
        for folder in folders[shared:]:
            self._open.append((folder, os.open(folder, _FOLDER, dir_fd=self._open[-1][1])))
        return os.open(last, _FILE, dir_fd=self._open[-1][1])

    def close(self) -> None:
        self._shorten(0)

    def _shorten(self, length: int) -> None:
        while len(self._open) > length:
            os.close(self._open.pop()[1])


def _entries(pieces: Readable, where: str) -> Iterator[bytes | tuple[bytes, int]]:
    """Raw bytes, or name and size of a file whose content comes next."""
    for line in _lines(pieces, where):
        try:
            entry = json.loads(line)
            kind = entry["type"]
            if kind == 2:
                yield binascii.a2b_base64(entry.get("payload") or "", strict_mode=True)
                continue
            raw = entry.get("name_raw")
            name = binascii.a2b_base64(raw, strict_mode=True) if raw else entry["name"].encode()
            size = entry.get("size", 0)
            if kind != 1 or not isinstance(size, int) or size < 0:
                raise FormatError(f"tar-split entry of type {kind!r} and size {size!r}", where=where)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError("malformed tar-split entry", where=where) from error
        yield name, size


def _lines(pieces: Readable, where: str) -> Iterator[bytes]:
    rest = b""
    while data := pieces.read(1 << 18):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if len(rest) > MAX_LINE:
            raise FormatError(f"tar-split line of more than {MAX_LINE} bytes", where=where)
    if rest:
        yield rest
