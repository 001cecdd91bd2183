"""What packages a file lists: the databases of Debian and Alpine, Python's and npm's metadata, Rust's dependency lists.

Bytes in, values out, no I/O. The files may be hostile: every size is bounded, text is decoded whatever it is, and what
cannot be read raises FormatError, which costs that one file.

Sources: deb-control(5) and dpkg's ``status``; DEP-5, "Machine-readable debian/copyright file"; apk-tools, the installed
database; Python's "Core metadata" specification; npm, ``package.json``; cargo-auditable, PARSING.md (zlib-compressed
JSON in the section ``.dep-v0``).
"""

from __future__ import annotations

import email.parser
import email.policy
import json
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from buildkit.cuda import elf
from buildkit.cuda.readat import ReadAt, read_exactly
from buildkit.errors import FormatError, one_line

Kind = Literal["deb", "apk", "pypi", "npm", "cargo"]

MAX_DATABASE = 64 * 2**20
"""Bytes of a package database that are read."""
MAX_METADATA = 512 * 2**10
"""Bytes of one package's own metadata; of more, the beginning is read (the rest is a description)."""
MAX_SECTION = 8 * 2**20
MAX_UNPACKED = 16 * 2**20
_MAX_WORD = 300
_MAX_LICENSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One installed package. ``qualifiers`` are those of its purl; ``licenses`` as its author wrote them."""

    kind: Kind
    name: str
    version: str
    namespace: str = ""
    qualifiers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    licenses: tuple[str, ...] = ()


Reader = Callable[[bytes], Iterator[Package]]


def reader_for(path: str) -> tuple[Reader, int] | None:
    """What reads the file at ``path`` (absolute, in the image), and how many bytes of it; None where it lists nothing.

    The reader raises FormatError.
    """
    folder, name = posixpath.split(path)
    parent = posixpath.basename(folder)
    if path == "/var/lib/dpkg/status":
        return read_dpkg, MAX_DATABASE
    if folder == "/var/lib/dpkg/status.d" and not name.endswith(".md5sums"):
        return read_dpkg, MAX_METADATA
    if path in ("/lib/apk/db/installed", "/usr/lib/apk/db/installed"):
        return read_apk, MAX_DATABASE
    if (name == "METADATA" and parent.endswith(".dist-info")) or name.endswith(".egg-info"):
        return read_python, MAX_METADATA
    if name == "PKG-INFO" and (parent.endswith(".egg-info") or parent == "EGG-INFO"):
        return read_python, MAX_METADATA
    if name == "package.json":
        above = posixpath.dirname(folder)
        if posixpath.basename(posixpath.dirname(above) if posixpath.basename(above)[:1] == "@" else above) == (
            "node_modules"
        ):
            return read_npm, MAX_METADATA
    return None


RPM_DATABASES = frozenset(
    f"{folder}/{name}"
    for folder in ("/var/lib/rpm", "/usr/lib/sysimage/rpm", "/usr/share/rpm")
    for name in ("Packages", "Packages.db", "rpmdb.sqlite")
)
"""Where RPM's database may lie; it is not read."""
OS_RELEASE = ("/usr/lib/os-release", "/etc/os-release")


def read_os_release(data: bytes) -> dict[str, str]:
    """os-release(5): ``ID``, ``VERSION_ID`` and the like, quotes removed."""
    found = {}
    for line in data.decode("utf-8", "replace").splitlines()[:200]:
        name, equals, value = line.strip().partition("=")
        if equals and re.fullmatch(r"[A-Z_0-9]+", name):
            found[name] = _word(value.strip().strip("\"'"))
    return found


def read_copyright(data: bytes) -> tuple[str, ...]:
    """The short names of licenses in a Debian package's machine-readable copyright file; nothing of other forms."""
    if not data[:200].lstrip().lower().startswith(b"format"):
        return ()
    lines = (line.partition(b":")[2] for line in data.split(b"\n") if line[:8].lower() == b"license:")
    names = (_word(line[:1000].decode("utf-8", "replace")) for line in lines)
    return tuple(dict.fromkeys(name for name in names if name))[:_MAX_LICENSES]


def read_dpkg(data: bytes) -> Iterator[Package]:
    """The installed packages among the paragraphs of ``status``."""
    for fields in _paragraphs(data):
        status = fields.get("status")
        if not fields.get("package") or (status is not None and status.split()[-1:] != ["installed"]):
            continue
        source, _, rest = fields.get("source", "").partition(" ")
        qualifiers = {"arch": fields.get("architecture", "")}
        if source:
            version = rest.strip("() ")
            qualifiers["upstream"] = f"{source}@{version}" if version else source
        yield Package(
            kind="deb",
            name=fields["package"],
            version=fields.get("version", ""),
            qualifiers=MappingProxyType({k: v for k, v in qualifiers.items() if v}),
        )


def read_apk(data: bytes) -> Iterator[Package]:
    """The packages of Alpine's ``installed``: one-letter fields, paragraphs apart by empty lines."""
    for fields in _paragraphs(data, keep_case=True):
        if not fields.get("P"):
            continue
        qualifiers = {"arch": fields.get("A", "")}
        if fields.get("o") and fields["o"] != fields["P"]:
            qualifiers["upstream"] = fields["o"]
        yield Package(
            kind="apk",
            name=fields["P"],
            version=fields.get("V", ""),
            qualifiers=MappingProxyType({k: v for k, v in qualifiers.items() if v}),
            licenses=(fields["L"],) if fields.get("L") else (),
        )


def read_python(data: bytes) -> Iterator[Package]:
    """One distribution's core metadata. Raises FormatError without a name."""
    # The classic parser without a policy of its own: it never fails on bad headers, it keeps them as text.
    head = data.partition(b"\n\n")[0].replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    try:
        message = email.parser.Parser(policy=email.policy.compat32).parsestr(
            head.decode("utf-8", "replace"), headersonly=True
        )
    except (ValueError, LookupError, TypeError) as error:
        raise FormatError("is not Python metadata") from error
    name = _word(message.get("Name"))
    if not name:
        raise FormatError("is Python metadata without a Name")
    yield Package(
        kind="pypi",
        name=re.sub(r"[-_.]+", "-", name).lower(),
        version=_word(message.get("Version")),
        licenses=_python_licenses(message),
    )


def read_npm(data: bytes) -> Iterator[Package]:
    """One package's ``package.json``; nothing for those without a name, which only say how a folder is to be read."""
    document = _json(data)
    name, version = document.get("name"), document.get("version")
    if not isinstance(name, str) or not name.strip() or not isinstance(version, str):
        return
    namespace, slash, last = name.partition("/")
    licenses = document.get("license") or document.get("licenses")
    entries = licenses if isinstance(licenses, list) else [licenses]
    words = (entry.get("type") if isinstance(entry, dict) else entry for entry in entries[:_MAX_LICENSES])
    yield Package(
        kind="npm",
        name=_word(last if slash else namespace),
        namespace=_word(namespace) if slash else "",
        version=_word(version),
        licenses=tuple(_word(word) for word in words if isinstance(word, str) and word.strip()),
    )


def read_audited(handle: ReadAt) -> Iterator[Package]:
    """The crates in an ELF file's ``.dep-v0``; nothing where there is no such section. Raises FormatError."""
    header = elf.read_header(handle)
    section = next((s for s in elf.read_sections(handle, header) if s.name == ".dep-v0"), None)
    if section is None:
        return
    if section.size > MAX_SECTION or section.type == elf.SHT_NOBITS:
        raise FormatError(f".dep-v0 of {section.size} bytes is not read")
    packed = read_exactly(handle, section.offset, section.size, ".dep-v0")
    unpack = zlib.decompressobj()
    try:
        data = unpack.decompress(packed, MAX_UNPACKED)
    except zlib.error as error:
        raise FormatError(f".dep-v0 is not zlib data: {error}") from error
    if not unpack.eof:
        raise FormatError(f".dep-v0 is cut short, or unpacks to more than {MAX_UNPACKED} bytes")
    entries = _json(data).get("packages")
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("kind", "runtime") != "runtime":
            continue
        name, version, source = entry.get("name"), entry.get("version"), entry.get("source")
        if isinstance(name, str) and isinstance(version, str) and name.strip():
            # A crate out of the workspace itself, or from git, has no address in the registry.
            outside = isinstance(source, str) and source not in ("crates.io", "registry")
            qualifiers = {"source": _word(source)} if outside else {}
            yield Package(
                kind="cargo", name=_word(name), version=_word(version), qualifiers=MappingProxyType(qualifiers)
            )


def _python_licenses(message: Any) -> tuple[str, ...]:
    expression = _word(message.get("License-Expression"))
    if expression:
        return (expression,)
    text = str(message.get("License") or "")
    # Many put the whole text of the license there.
    if text.strip() and len(text) <= 100 and "\n" not in text.strip() and text.strip().upper() != "UNKNOWN":
        return (_word(text),)
    marks = (str(value) for value in (message.get_all("Classifier") or [])[:200])
    found = (mark.rpartition("::")[2].strip() for mark in marks if mark.startswith("License ::"))
    return tuple(_word(text) for text in found if text and text != "OSI Approved")[:_MAX_LICENSES]


def _paragraphs(data: bytes, *, keep_case: bool = False) -> Iterator[dict[str, str]]:
    """Fields by name; of continued lines the first counts, which is all that is read of any field here."""
    fields: dict[str, str] = {}
    for line in data.split(b"\n"):
        if not line.strip():
            if fields:
                yield fields
            fields = {}
        elif line[:1] not in (b" ", b"\t"):
            name, colon, value = line[:4096].decode("utf-8", "replace").partition(":")
            if colon and len(fields) < 200:
                fields.setdefault(name if keep_case else name.lower(), _word(value))
    if fields:
        yield fields


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("is not JSON") from error
    if not isinstance(document, dict):
        raise FormatError("is not a JSON object")
    return document


def _word(value: object) -> str:
    """One line of text that is valid Unicode and not too long; empty for nothing."""
    text = one_line(str(value), _MAX_WORD) if value is not None else ""
    return text.encode("utf-8", "replace").decode()
