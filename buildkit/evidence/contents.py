"""The packages in an image, read in one pass over its layers."""

from __future__ import annotations

import itertools
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import BinaryIO, cast

from buildkit.check.readahead import ReadAhead
from buildkit.cuda.elf import MAGIC
from buildkit.cuda.readat import FileReader
from buildkit.errors import FormatError, StorageError
from buildkit.evidence.packages import (
    MAX_METADATA,
    OS_RELEASE,
    RPM_DATABASES,
    Package,
    read_audited,
    read_copyright,
    read_os_release,
    reader_for,
)
from buildkit.image import tarspan
from buildkit.image.overlay import Overlay
from buildkit.image.source import ImageSource
from buildkit.image.streams import tar_of

MAX_PACKAGES = 20_000
"""Packages that are listed; more are counted, and said."""
MAX_KEPT = 200_000
"""Packages that are kept in memory meanwhile."""
MAX_PROBLEMS = 50
MAX_PROGRAM = 2**30
"""Bytes of a program that is searched for a list of its crates."""
_MAX_OS_RELEASE = 64 * 2**10
_STEP = 1 << 20
_MARK = b".dep-v0\0"
_COPYRIGHT = re.compile(r"/usr/share/doc/([^/]+)/copyright")
_FILES = (tarspan.REGULAR, tarspan.CONTIGUOUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """``packages`` with the paths of the files that list each. ``system`` is os-release; ``unread`` says, one line for
    each, what was seen and could not be read."""

    packages: Mapping[Package, tuple[str, ...]]
    system: Mapping[str, str]
    unread: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one file says."""

    packages: tuple[Package, ...] = ()
    licenses: tuple[str, ...] = ()
    system: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""


def read_contents(source: ImageSource, *, progress: Callable[[int], object] = lambda _: None) -> Contents:
    """The packages of the file system that a container would see. Every layer is read once, to its verified end.

    ``progress`` is told how many more bytes have been read. Raises ImageError for a corrupt image, StorageError; what
    is wrong within one file costs that file.
    """
    try:
        with tempfile.TemporaryFile(prefix="buildkit-program-") as spool:
            reading = _Reading(cast(BinaryIO, spool), progress)
            for stream in source.stream(range(len(source.layers))):
                with stream, ReadAhead(tar_of(stream)) as ahead:
                    reading.layer(tarspan.TarReader(ahead, where=f"layer {stream.index + 1}"), stream.index)
    except OSError as error:
        raise StorageError(f"the folder for temporary files: {error.strerror}") from error
    return _summed(reading.overlay.values())


class _Reading:
    """One pass. ``spool`` holds one program at a time; ``left`` is how many packages are still kept, hidden ones
    included: a hostile image may list more than there is memory for."""

    def __init__(self, spool: BinaryIO, progress: Callable[[int], object]) -> None:
        self.overlay: Overlay[_Found] = Overlay()
        self._spool = spool
        self._progress = progress
        self._left = MAX_KEPT

    def layer(self, reader: tarspan.TarReader, layer: int) -> None:
        """Read one layer, to its verified end."""
        told = 0
        own: dict[str, _Found] = {}
        for entry in reader:
            self._progress(reader.offset - told)
            told = reader.offset
            try:
                path = self.overlay.enter(entry.name, layer)
                target = tarspan.normalise(entry.link) if entry.kind == tarspan.HARDLINK else b""
            except ValueError:
                continue  # it leads out of the image: no container sees it
            if path is None:
                continue
            found: _Found | None = None
            if entry.kind in _FILES:
                found = self._file(reader, entry, path)
            elif entry.kind == tarspan.HARDLINK and reader_for(path) is not None:
                # Installers that link out of a cache: the content came with the first name, in the same layer.
                found = own.get("/" + target.decode("utf-8", "surrogateescape"))
            if found is not None:
                own[path] = found
            self.overlay.add(path, layer, found, folder=entry.kind == tarspan.DIRECTORY)
        # What follows the end belongs to the layer's digest: the source compares it only after the last byte.
        reader.finish()
        self._progress(reader.offset - told)

    def _file(self, reader: tarspan.TarReader, entry: tarspan.Entry, path: str) -> _Found | None:
        chosen = reader_for(path)
        try:
            if chosen is not None:
                read, limit = chosen
                return self._kept(read(_exactly(reader, min(entry.size, limit))), path)
            if _COPYRIGHT.fullmatch(path):
                return _Found(licenses=read_copyright(_exactly(reader, min(entry.size, MAX_METADATA))))
            if path in OS_RELEASE:
                return _Found(system=read_os_release(_exactly(reader, min(entry.size, _MAX_OS_RELEASE))))
            if path in RPM_DATABASES:
                return _Found(unread=f"{path}: RPM's database is not read")
            if _may_be_program(entry, path):
                return self._program(reader, entry.size, path)
        except FormatError as error:
            return _Found(unread=f"{path}: {error.message}")
        return None

    def _kept(self, packages: Iterator[Package], path: str) -> _Found:
        kept = tuple(itertools.islice(packages, self._left))
        self._left -= len(kept)
        return _Found(packages=kept, unread="" if self._left else f"{path}: the image lists too many packages")

    def _program(self, reader: tarspan.TarReader, size: int, path: str) -> _Found | None:
        """A program's crates, if its section names may have theirs. Only ELF files are copied aside."""
        head = _exactly(reader, min(size, len(MAGIC)))
        if head != MAGIC:
            return None
        if size > MAX_PROGRAM:
            return _Found(unread=f"{path}: is {size} bytes, and was not searched for crates")
        spool = self._spool
        spool.seek(0)
        spool.truncate()
        spool.write(head)
        left, tail, marked = size - len(head), head, False
        while left and (data := reader.read(min(left, _STEP))):
            spool.write(data)
            marked = marked or _MARK in tail[-len(_MARK) :] + data
            tail = data
            left -= len(data)
        if not marked:
            return None
        spool.flush()
        return self._kept(read_audited(FileReader(spool)), path)


def _may_be_program(entry: tarspan.Entry, path: str) -> bool:
    try:
        mode = tarspan.attributes(entry).mode
    except ValueError:
        return False
    name = posixpath.basename(path)
    return bool(mode & 0o111) and entry.size >= 64 and ".so" not in name


def _exactly(reader: tarspan.TarReader, size: int) -> bytes:
    pieces = []
    while size and (data := reader.read(size)):
        pieces.append(data)
        size -= len(data)
    return b"".join(pieces)


def _summed(files: Mapping[str, _Found]) -> Contents:
    packages: dict[Package, list[str]] = {}
    system: dict[str, str] = {}
    unread: list[str] = []
    dropped = 0
    licenses = {
        match[1]: f.licenses for path, f in files.items() if f.licenses and (match := _COPYRIGHT.fullmatch(path))
    }
    for path in sorted(files):
        found = files[path]
        shown = path.encode("utf-8", "replace").decode()
        if found.unread:
            unread.append(found.unread.encode("utf-8", "replace").decode())
        system = {**found.system, **system}  # /etc comes first, and counts (os-release(5))
        for listed in found.packages:
            package = listed
            if package.kind == "deb":
                package = replace(package, licenses=licenses.get(package.name, ()))
            if package in packages or len(packages) < MAX_PACKAGES:
                packages.setdefault(package, []).append(shown)
            else:
                dropped += 1
    return Contents(
        packages={package: tuple(dict.fromkeys(paths)) for package, paths in packages.items()},
        system=system,
        unread=tuple(_cut(unread, dropped)),
    )


def _cut(unread: list[str], dropped: int) -> Iterable[str]:
    yield from unread[:MAX_PROBLEMS]
    if len(unread) > MAX_PROBLEMS:
        yield f"{len(unread) - MAX_PROBLEMS} more files"
    if dropped:
        yield f"{dropped} packages above the {MAX_PACKAGES} that are listed"
