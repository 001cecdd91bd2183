"""Builds the Tree of a source: of an image, a folder, a wheel or a single file.

An image's layers come in the source's own order, each once, so the topmost version of a file is known only at the end:
what a file of a higher layer hides or a whiteout removes is dropped then (OCI image-spec, layer.md, "Whiteouts").
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from isal import isal_zlib

from buildkit.check.readahead import ReadAhead
from buildkit.check.spool import Spool
from buildkit.check.tree import TEXT_BUDGET, File, Tree, Want, examine, is_text_of_interest, with_problems
from buildkit.cuda import ptx
from buildkit.cuda.fatbin import Problem
from buildkit.cuda.readat import FileReader
from buildkit.cuda.scan import interesting
from buildkit.errors import FormatError, UsageError
from buildkit.image import tarspan
from buildkit.image.overlay import Overlay
from buildkit.image.source import ImageSource
from buildkit.image.streams import tar_of

Progress = Callable[[int], object]
"""Told how many more bytes have been read."""

STEP = 1 << 20
"""Bytes asked for at once; files larger than that are worth a thread that decompresses them."""
_LINKS = (tarspan.HARDLINK, tarspan.SYMLINK)
_FILES = (tarspan.REGULAR, tarspan.CONTIGUOUS, tarspan.SPARSE)
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_ENCRYPTED = 0x1
MAX_MEMBERS = 1_000_000


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def walk_image(source: ImageSource, want: Want, *, progress: Progress = lambda _: None) -> Tree:
    """The files of an image as a container would see them. Reads each layer once; verified by the source.

    Raises ImageError for content that is corrupt; what is wrong inside one file is a problem of that file.
    """
    found = _Layers()
    with Spool() as spool:
        for stream in source.stream(range(len(source.layers))):
            with stream:
                tar = tar_of(stream)
                with ReadAhead(tar) as ahead:
                    _walk_layer(_Counted(ahead, progress), stream.index, want, spool, found)
    return found.tree()


def walk_folder(folder: Path, want: Want, *, progress: Progress = lambda _: None) -> Tree:
    """The files below a folder; links are kept as links, other file systems are entered, devices are not read."""
    files: dict[str, File] = {}
    paths: set[str] = set()
    problems: list[str] = []
    texts = _Texts()
    for parent, folders, names in os.walk(folder, onerror=lambda error: problems.append(_unreadable(error))):
        folders.sort()
        for name in [*names, *folders]:
            place = Path(parent) / name
            path = "/" + place.relative_to(folder).as_posix()
            paths.add(path)
            try:
                status = place.lstat()
                if stat.S_ISLNK(status.st_mode):
                    files[path] = File(path=path, link=os.readlink(place))
                elif stat.S_ISREG(status.st_mode):
                    entry = _examine_file(place, path, status, want, texts)
                    progress(status.st_size)
                    if entry is not None:
                        files[path] = entry
            except OSError as error:
                problems.append(_unreadable(error))
    return Tree(files=files, paths=frozenset(paths), skipped_text=texts.skipped, problems=tuple(problems))


def walk_file(path: Path, want: Want, *, progress: Progress = lambda _: None) -> Tree:
    """A single file. Raises UsageError where it has no CUDA code's form at all: asked for it by name, that is wrong."""
    status = path.stat()
    name = "/" + path.name
    entry = _examine_file(path, name, status, want, _Texts())
    progress(status.st_size)
    if entry is None or entry.scan is None:
        raise UsageError(
            f"{path} is no ELF file, static archive, fatbin, cubin, PTX, wheel or image",
            hint="name an image by its transport, like docker-archive:FILE.tar",
        )
    return Tree(files={name: entry}, paths=frozenset([name]))


def walk_wheel(path: Path, want: Want, *, progress: Progress = lambda _: None) -> Tree:
    """The members of a wheel, or any other zip, without unpacking it: one at a time, as a stream.

    Raises FormatError for a file that is no zip, or whose members are corrupt.
    """
    files: dict[str, File] = {}
    paths: set[str] = set()
    texts = _Texts()
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive, Spool() as spool:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise FormatError(f"has {len(members)} members, more than the {MAX_MEMBERS} read", where=str(path))
            for info in members:
                name = "/" + info.filename.strip("/")
                paths.add(name)
                if info.is_dir() or not info.file_size:
                    continue
                with _member(raw, archive, info) as content:
                    entry = _examine_stream(
                        _Counted(content, progress),
                        name,
                        info.file_size,
                        None,
                        info.external_attr >> 16,
                        want,
                        spool,
                        texts,
                        ahead=True,
                    )
                if entry is not None:
                    files[name] = entry
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"is not a readable wheel: {error}", where=str(path)) from error
    return Tree(files=files, paths=frozenset(paths), skipped_text=texts.skipped)


class _Layers(Overlay[File]):
    """Files of all layers so far."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.texts = _Texts()

    def tree(self) -> Tree:
        return Tree(
            files=self.values(),
            paths=self.paths(),
            skipped_text=self.texts.skipped,
            problems=tuple(self.problems),
        )


def _walk_layer(content: Readable, layer: int, want: Want, spool: Spool, found: _Layers) -> None:
    reader = tarspan.TarReader(content, where=f"layer {layer + 1}")
    for entry in reader:
        try:
            path = found.enter(entry.name, layer)
        except ValueError as error:
            found.problems.append(f"layer {layer + 1}: {entry.name.decode('utf-8', 'replace')!r}: {error}")
            continue
        if path is None:
            continue
        item: File | None = None
        if entry.kind in _LINKS:
            link = _text(entry.link)
            if entry.kind == tarspan.HARDLINK:
                link = posixpath.join("/", link)
            item = File(path=path, layer=layer, link=link)
        elif entry.kind in _FILES and not found.is_hidden(path, layer):
            attributes = tarspan.attributes(entry)
            data = _Entry(reader, entry.size)
            if attributes.sparse:
                item = _sparse(data, path, layer, entry.size, found)
            else:
                item = _examine_stream(data, path, entry.size, layer, attributes.mode, want, spool, found.texts)
        found.add(path, layer, item, folder=entry.kind == tarspan.DIRECTORY)
    # What follows the end belongs to the layer's digest: the source compares it only after the last byte.
    reader.finish()


def _sparse(data: Readable, path: str, layer: int, size: int, found: _Layers) -> File | None:
    """Sparse files keep a map before their data, in three forms; libraries are never stored so. Seen, not read."""
    head = data.read(min(size, ptx.HEAD))
    if interesting(head, path) or path.endswith((".so", ".a")) or ".so." in path:
        found.problems.append(f"{path} (layer {layer + 1}): is stored as a sparse file, which is not read")
    return None


def _examine_stream(
    content: Readable,
    path: str,
    size: int,
    layer: int | None,
    mode: int,
    want: Want,
    spool: Spool,
    texts: _Texts,
    *,
    ahead: bool = False,
) -> File | None:
    """The file that ``content`` has the bytes of; None where it is of no interest. Reads no more than it needs.

    ``ahead``: reading is work (decompressing), which a thread of its own does meanwhile for files worth it.
    """
    head = _exactly(content, min(size, ptx.HEAD))
    if interesting(head, path):
        spool.begin(keep_payloads=want.payloads)
        spool.feed(head)
        if ahead and size > STEP:
            with ReadAhead(content) as reader:
                _feed(spool, reader, size - len(head))
        else:
            _feed(spool, content, size - len(head))
        spool.finish()
        scan, kernels, fatbins = examine(spool, path, want)
        if scan is not None:
            lost = spool.unaccounted(scan.units)
            if lost is not None:
                scan = with_problems(scan, [Problem(lost, "holds what looks like a fatbin and is none that is loaded")])
        return File(
            path=path,
            size=size,
            layer=layer,
            executable=bool(mode & 0o111),
            scan=scan,
            kernels=kernels,
            fatbins=fatbins,
        )
    if is_text_of_interest(path, size, head) and texts.take(size):
        text = head + _exactly(content, size - len(head))
        return File(path=path, size=size, layer=layer, executable=bool(mode & 0o111), text=text)
    if mode & 0o111 or ".so" in path:
        return File(path=path, size=size, layer=layer, executable=bool(mode & 0o111))
    return None


def _feed(spool: Spool, content: Readable, left: int) -> None:
    while left and (data := content.read(min(left, STEP))):
        spool.feed(data)
        left -= len(data)
    # The end may hold the proof of what came before it: a checksum is compared when nothing is left.
    content.read(1)


def _examine_file(place: Path, path: str, status: os.stat_result, want: Want, texts: _Texts) -> File | None:
    with place.open("rb") as handle:
        head = handle.read(ptx.HEAD)
        executable = bool(status.st_mode & 0o111)
        if interesting(head, path):
            scan, kernels, fatbins = examine(FileReader(handle), path, want)
            return File(
                path=path, size=status.st_size, executable=executable, scan=scan, kernels=kernels, fatbins=fatbins
            )
        if is_text_of_interest(path, status.st_size, head) and texts.take(status.st_size):
            handle.seek(0)
            return File(path=path, size=status.st_size, executable=executable, text=handle.read(status.st_size))
    if executable or ".so" in path:
        return File(path=path, size=status.st_size, executable=executable)
    return None


@contextmanager
def _member(raw: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[Readable]:
    """A member's content. Deflate goes through isal, which is about three times as fast as zlib; the rest by zipfile.

    Source: PKWARE APPNOTE.TXT 4.3.7 (local file header).
    """
    if info.flag_bits & _ENCRYPTED or info.compress_type != zipfile.ZIP_DEFLATED:
        with closing(archive.open(info)) as content:
            yield content
        return
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise zipfile.BadZipFile(f"no member where {info.filename!r} should be")
    *_, name, extra = _LOCAL_HEADER.unpack(header)
    raw.seek(name + extra, io.SEEK_CUR)
    yield _Inflated(raw, info)


class _Inflated:
    """Raw deflate data, checked by size and CRC-32 before the end is reported."""

    def __init__(self, raw: BinaryIO, info: zipfile.ZipInfo) -> None:
        self._raw = raw
        self._info = info
        self._left = info.compress_size
        self._inflate = isal_zlib.decompressobj(-15)
        self._pending = b""
        self._crc = 0
        self._count = 0

    def read(self, size: int, /) -> bytes:
        while True:
            if not self._pending and self._left:
                self._pending = self._raw.read(min(self._left, 1 << 18))
                if not self._pending:
                    raise EOFError(f"{self._info.filename!r} is cut short")
                self._left -= len(self._pending)
            data = b""
            if not self._inflate.eof:
                try:
                    data = self._inflate.decompress(self._pending, size)
                except isal_zlib.error as error:  # type: ignore[misc]  # the stub has a value, not a class
                    raise zipfile.BadZipFile(f"{self._info.filename!r}: {error}") from error
                self._pending = self._inflate.unconsumed_tail
            if data:
                self._crc = isal_zlib.crc32(data, self._crc)
                self._count += len(data)
                if self._count > self._info.file_size:
                    raise zipfile.BadZipFile(f"{self._info.filename!r} is larger than it says")
                return data
            if self._inflate.eof or (not self._pending and not self._left):
                if (self._crc, self._count) != (self._info.CRC, self._info.file_size):
                    raise zipfile.BadZipFile(f"size or checksum of {self._info.filename!r} is wrong")
                return b""


class _Entry:
    """The data of the tar entry at hand, without its padding."""

    def __init__(self, reader: tarspan.TarReader, size: int) -> None:
        self._reader = reader
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._reader.read(min(size, self._left))
        self._left -= len(data)
        return data


class _Counted:
    def __init__(self, source: Readable, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self._progress(len(data))
        return data


class _Texts:
    """The budget for scripts."""

    def __init__(self) -> None:
        self._left = TEXT_BUDGET
        self.skipped = 0

    def take(self, size: int) -> bool:
        if size > self._left:
            self.skipped += 1
            return False
        self._left -= size
        return True


def _exactly(content: Readable, size: int) -> bytes:
    """``size`` bytes, or fewer where the content ends."""
    data = content.read(size) if size else b""
    if len(data) == size or not data:
        return data
    parts = [data]
    have = len(data)
    while have < size and (data := content.read(size - have)):
        parts.append(data)
        have += len(data)
    return b"".join(parts)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _unreadable(error: OSError) -> str:
    return f"{error.filename}: {error.strerror or error}"
