"""Files by name, in a folder or in an uncompressed tar: the ground that layouts and archives stand on.

Neither unpacks anything. A file is a range of a local file, which can be read at random and any number of times.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from buildkit.errors import FormatError, NotFoundError, StorageError, UsageError
from buildkit.image.blobfile import FileBlob, Window
from buildkit.image.tarindex import Member, index, inside
from buildkit.model import Descriptor

MAX_LINKS = 40
"""Symlinks that are followed for one name, as in the kernel (path_resolution(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """``size`` bytes from ``offset`` in the file at ``path``. ``what`` names it in messages."""

    path: Path
    offset: int
    size: int
    what: str

    def open(self) -> Window:
        """A fresh reader; the caller closes it."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}") from error
        return Window(handle, self.offset, self.offset + self.size)

    def bytes(self, limit: int) -> bytes:
        """All of it. FormatError where that is more than ``limit`` bytes."""
        if self.size > limit:
            raise FormatError(f"is {self.size} bytes, more than the {limit} that are read", where=self.what)
        with self.open() as window:
            return _all(window, self.size)

    def blob(self, descriptor: Descriptor, *, label: str) -> FileBlob:
        """The range as an uploadable blob; not proven yet."""
        return FileBlob.open(self.path, descriptor, label=label, offset=self.offset)


def _all(window: Window, size: int) -> bytes:
    out = bytearray(size)
    view, at = memoryview(out), 0
    while at < size:
        at += window.readinto(view[at:])
    return bytes(out)


class Files(Protocol):
    """Named files. ``where`` is what the user called the whole."""

    @property
    def where(self) -> str: ...

    def find(self, name: str) -> FileRange | None:
        """The file called ``name`` (``/`` between folders), or None. FormatError where it cannot be read as a file."""
        ...


class FolderFiles:
    """The files below a folder."""

    def __init__(self, folder: Path, where: str) -> None:
        self._folder = folder
        self.where = where

    def find(self, name: str) -> FileRange | None:
        path = self._folder / inside(name, where=self.where)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("is not a regular file", where=str(path))
        return FileRange(path=path, offset=0, size=status.st_size, what=str(path))


class TarFiles:
    """The members of a tar file. Opening reads its headers only. Links inside the archive are followed."""

    def __init__(self, path: Path, where: str) -> None:
        self._path = path
        self.where = where
        try:
            with open(path, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UsageError(f"{path} is not a regular file")
                _refuse_compressed(file, path)
                self.members: Mapping[str, Member] = index(cast(BinaryIO, file), where=str(path))
        except IsADirectoryError as error:
            raise UsageError(f"{path} is a folder, not an archive", hint="a layout's folder is oci:DIR") from error
        except FileNotFoundError as error:
            raise UsageError(f"there is no file {path}") from error
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error

    def find(self, name: str) -> FileRange | None:
        at = inside(name, where=self.where)
        for _ in range(MAX_LINKS):
            member = self.members.get(at)
            if member is None:
                return None
            if member.kind == "symlink":
                if member.target.startswith("/"):
                    raise FormatError(f"link {at!r} leads out of the archive", where=str(self._path))
                joined = posixpath.normpath(posixpath.join(posixpath.dirname(at), member.target))
                at = inside(joined, where=str(self._path))
            elif member.kind == "link":
                at = inside(member.target, where=str(self._path))
            elif member.kind == "file" and not member.sparse:
                return FileRange(
                    path=self._path, offset=member.offset, size=member.size, what=f"{self._path}: {member.name}"
                )
            else:
                shape = "a sparse file" if member.sparse else "not a regular file"
                hint = "pack the archive without --sparse" if member.sparse else None
                raise FormatError(f"member {at!r} is {shape}", where=str(self._path), hint=hint)
        raise FormatError(f"links from {name!r} go round in a circle", where=str(self._path))


def require(files: Files, name: str, what: str) -> FileRange:
    """The file ``name``, which is ``what``. NotFoundError where it is missing."""
    found = files.find(name)
    if found is None:
        raise NotFoundError(f"{files.where} lacks {what} ({name})", hint="the archive or layout is incomplete")
    return found


def _refuse_compressed(file: BinaryIO | object, path: Path) -> None:
    head = os.pread(file.fileno(), 6, 0)  # type: ignore[union-attr]
    for magic, program in {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ\0": "unxz"}.items():
        if head.startswith(magic):
            raise UsageError(f"{path} is a compressed archive", hint=f"unpack it first: {program} {path.name}")
