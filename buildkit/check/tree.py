"""What is in a source: the files that a check looks at, each in its topmost version, with what was found in them."""

from __future__ import annotations

import fnmatch
import hashlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from buildkit.cuda import cubin, fatbin, ptx
from buildkit.cuda.readat import MemoryReader, ReadAt
from buildkit.cuda.scan import FileScan, scan_file
from buildkit.errors import FormatError

MAX_TEXT = 256 * 1024
"""Bytes of a script that is read for what it does at the start."""
TEXT_BUDGET = 64 * 2**20
"""Bytes of all scripts that are kept of one source."""
MAX_KERNELS = 100_000

_IDENTIFIER = re.compile(r"\d+")
_SCRIPT_SUFFIXES = (".sh", ".bash", ".py", ".toml")
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python", "/usr/share/", "/usr/lib/python")
_NAMED = re.compile(r"(?:requirements[^/]*\.txt|constraints[^/]*\.txt|Cargo\.lock|version\.json|pip\.conf|pip3?\.ini)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What to find beside the headers: kernels by these globs, digests of fatbins."""

    kernels: tuple[str, ...] = ()
    fatbins: bool = False

    @property
    def payloads(self) -> bool:
        return bool(self.kernels) or self.fatbins


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel's mangled name, and the targets (``sm_70``, ``compute_70``) that the file has it for."""

    name: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file, or a link where ``link`` names its target. ``layer`` counts from 0, None outside of images.

    ``fatbins`` are sha256 digests of whole fatbins, in order; ``text`` is the content of what may be a script.
    """

    path: str
    size: int = 0
    layer: int | None = None
    link: str | None = None
    executable: bool = False
    scan: FileScan | None = None
    kernels: tuple[Kernel, ...] = ()
    fatbins: tuple[str, ...] = ()
    text: bytes | None = None

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All of a source. ``paths`` are all paths (absolute, as in the image), ``files`` the ones that were looked at."""

    files: Mapping[str, File]
    paths: frozenset[str] = frozenset()
    skipped_text: int = 0
    """Scripts that were not kept because there were too many."""
    problems: tuple[str, ...] = field(default=())

    def scanned(self) -> Iterator[File]:
        """The files with ELF, archive, fatbin or PTX content, by path."""
        return (self.files[path] for path in sorted(self.files) if self.files[path].scan is not None)

    def resolve(self, path: str, *, depth: int = 40) -> str | None:
        """The path that ``path`` leads to through links; None where that is nowhere."""
        for _ in range(depth):
            path = posixpath.normpath(path)
            entry = self.files.get(path)
            if entry is not None and entry.link is not None:
                path = posixpath.join(posixpath.dirname(path), entry.link)
                continue
            if path in self.paths or path in self.files:
                return path
            moved = self._through_folder_link(path)
            if moved is None:
                return None
            path = moved
        return None

    def _through_folder_link(self, path: str) -> str | None:
        """``path`` with its first folder that is a link replaced: ``/lib/x`` on systems where ``/lib`` is one."""
        parts = path.split("/")
        for count in range(2, len(parts)):
            entry = self.files.get("/".join(parts[:count]))
            if entry is not None and entry.link is not None:
                folder = posixpath.dirname("/".join(parts[:count]))
                return posixpath.normpath(posixpath.join(folder, entry.link, *parts[count:]))
        return None


def examine(handle: ReadAt, path: str, want: Want) -> tuple[FileScan | None, tuple[Kernel, ...], tuple[str, ...]]:
    """What ``want`` asks of one file: its scan, its kernels, its fatbins' digests."""
    scan = scan_file(handle, path)
    if scan is None:
        return None, (), ()
    kernels: tuple[Kernel, ...] = ()
    if want.kernels:
        kernels, problems = find_kernels(handle, scan, want.kernels)
        scan = with_problems(scan, problems)
    digests = tuple(fatbin_digests(handle, scan)) if want.fatbins else ()
    return scan, kernels, digests


def with_problems(scan: FileScan, problems: Iterable[fatbin.Problem]) -> FileScan:
    """The scan with more problems."""
    more = tuple(problems)
    if not more:
        return scan
    return FileScan(
        kind=scan.kind,
        machine=scan.machine,
        type=scan.type,
        units=scan.units,
        problems=(*scan.problems, *more),
        needed=scan.needed,
        soname=scan.soname,
        search=scan.search,
        members=scan.members,
    )


def find_kernels(
    handle: ReadAt, scan: FileScan, patterns: tuple[str, ...]
) -> tuple[tuple[Kernel, ...], list[fatbin.Problem]]:
    """The kernels whose name, or one of whose identifiers, matches one of the globs; and what could not be read.

    Identifiers: ``causal_conv1d*`` finds ``_ZN4demo17causal_conv1d_fwdIfEEvPT_S1_``.
    """
    targets: dict[str, set[str]] = {}
    problems: list[fatbin.Problem] = []
    for unit in scan.units:
        for entry in unit.entries:
            try:
                if unit.form == "ptx":
                    names = list(ptx.kernels(_ptx_text(handle, entry.offset)))
                elif entry.kind == fatbin.KIND_ELF:
                    names = cubin.kernels(MemoryReader(fatbin.payload(handle, entry)))
                elif entry.kind == fatbin.KIND_PTX:
                    names = list(ptx.kernels(fatbin.payload(handle, entry)))
                else:
                    continue
            except FormatError as error:
                problems.append(fatbin.Problem(entry.offset, f"kernels of {entry.target}: {error.message}"))
                continue
            for name in names:
                if matches(name, patterns) and (name in targets or len(targets) < MAX_KERNELS):
                    targets.setdefault(name, set()).add(entry.target)
    found = tuple(Kernel(name=name, targets=tuple(sorted(targets[name]))) for name in sorted(targets))
    return found, problems


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a mangled name, or an identifier in it, matches one of the globs."""
    names = [name, *identifiers(name)]
    return any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns for n in names)


def identifiers(mangled: str) -> list[str]:
    """The identifiers of an Itanium-mangled name: each is written as its length and itself."""
    if not mangled.startswith("_Z"):
        return []
    found: list[str] = []
    at = 2
    while (match := _IDENTIFIER.search(mangled, at)) is not None:
        # A template argument like Li128E is a number as well; what is no identifier of that length is passed over.
        length = int(match[0][:6])
        text = mangled[match.end() : match.end() + length]
        if len(text) == length and length > 0 and text.isidentifier():
            found.append(text)
            at = match.end() + length
        else:
            at = match.end()
    return found


def fatbin_digests(handle: ReadAt, scan: FileScan) -> Iterator[str]:
    """sha256 of every fatbin's bytes, header included, in order of their offsets."""
    for unit in scan.units:
        if unit.form != "fatbin":
            continue
        digest = hashlib.sha256()
        at, end = unit.offset, unit.offset + unit.size
        while at < end:
            data = handle.read(at, min(1 << 20, end - at))
            if not data:
                break
            digest.update(data)
            at += len(data)
        yield digest.hexdigest()


def is_text_of_interest(path: str, size: int, head: bytes) -> bool:
    """Whether a file may be a script that runs at the start, or lists packages."""
    if size > MAX_TEXT or size == 0:
        return False
    name = posixpath.basename(path)
    if _NAMED.fullmatch(name):
        return True
    if any(folder in path for folder in _PACKAGE_FOLDERS):
        return False
    if head.startswith(b"#!"):
        return True
    return name.endswith(_SCRIPT_SUFFIXES)


def _ptx_text(handle: ReadAt, offset: int) -> bytes:
    """The module's text from ``.version`` to the NUL after it, in steps, at most 16 MiB."""
    out = bytearray()
    while len(out) < 16 * 2**20:
        data = handle.read(offset + len(out), 1 << 16)
        end = data.find(b"\0")
        out += data if end < 0 else data[:end]
        if end >= 0 or len(data) < 1 << 16:
            break
    return bytes(out)
