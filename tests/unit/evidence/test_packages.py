"""What each kind of file lists, also where it is broken or hostile."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator

import pytest
from cudafiles import Part, elf
from hypothesis import given
from hypothesis import strategies as st

from buildkit.cuda.readat import MemoryReader
from buildkit.errors import FormatError
from buildkit.evidence.packages import (
    MAX_SECTION,
    Package,
    read_apk,
    read_audited,
    read_copyright,
    read_dpkg,
    read_npm,
    read_os_release,
    read_python,
    reader_for,
)

DPKG = b"""\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u10
Description: GNU C Library
 Package: not-a-package
 more text

Package: gone
Status: deinstall ok config-files
Version: 1

Package: libssl3
Status: hold ok installed
Architecture: amd64
Source: openssl (3.0.16-1)
Version: 3.0.16-1~deb12u1

Status: install ok installed
Version: 5

"""
APK = b"""\
C:Q1qKcZ+j23xssAXmgQhkOO8dHnbWw=
P:musl
V:1.2.5-r0
A:x86_64
L:MIT
o:musl
F:lib
R:ld-musl-x86_64.so.1

P:libcrypto3
V:3.3.2-r0
A:x86_64
L:Apache-2.0
o:openssl
"""


def names(found: Iterator[Package]) -> list[tuple[str, str]]:
    return [(package.name, package.version) for package in found]


def test_dpkg_lists_what_is_installed() -> None:
    found = list(read_dpkg(DPKG))
    assert [(p.name, p.version) for p in found] == [("libc6", "2.36-9+deb12u10"), ("libssl3", "3.0.16-1~deb12u1")]
    assert dict(found[0].qualifiers) == {"arch": "amd64", "upstream": "glibc"}
    assert dict(found[1].qualifiers) == {"arch": "amd64", "upstream": "openssl@3.0.16-1"}
    assert names(read_dpkg(b"Package: base\nVersion: 1\n")) == [("base", "1")], "distroless files have no Status"


def test_apk_lists_what_is_installed() -> None:
    found = list(read_apk(APK))
    assert [(p.name, p.version, p.licenses) for p in found] == [
        ("musl", "1.2.5-r0", ("MIT",)),
        ("libcrypto3", "3.3.2-r0", ("Apache-2.0",)),
    ]
    assert dict(found[1].qualifiers) == {"arch": "x86_64", "upstream": "openssl"}


@pytest.mark.parametrize(
    ("text", "name", "version", "licenses"),
    [
        ("Name: Flask_SQL.Alchemy\nVersion: 3.1\nLicense: BSD\n", "flask-sql-alchemy", "3.1", ("BSD",)),
        ("Name: a\nVersion: 1\nLicense-Expression: MIT OR Apache-2.0\nLicense: x", "a", "1", ("MIT OR Apache-2.0",)),
        ("Name: a\r\nVersion: 1\r\n\r\nName: b\r\n", "a", "1", ()),
        ("Name: a\nVersion: 1\nLicense: Apache\n  Version 2.0\n  whole text", "a", "1", ()),
        (
            "Name: a\nVersion: 1\nLicense: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License\n",
            "a", "1", ("MIT License",),
        ),
        ("Name: a\nClassifier: License :: OSI Approved\n", "a", "", ()),
        ("Name: a\nVersion: 1\n\nVersion: 2\nA description", "a", "1", ()),
        ("Metadata-Version: 2.1\nName: ä\nVersion: 1", "ä", "1", ()),
    ],
)  # fmt: skip
def test_python_metadata(text: str, name: str, version: str, licenses: tuple[str, ...]) -> None:
    [found] = read_python(text.encode())
    assert (found.name, found.version, found.licenses) == (name, version, licenses)


def test_python_metadata_without_a_name_is_an_error() -> None:
    for data in (b"", b"Version: 1", b"\xff\xfe\0\0", b"Name: \nVersion: 1", b"Name:\0\0"):
        with pytest.raises(FormatError):
            list(read_python(data))


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"name": "left-pad", "version": "1.3.0", "license": "WTFPL"}, ("", "left-pad", "1.3.0", ("WTFPL",))),
        ({"name": "@types/node", "version": "20.1.0"}, ("@types", "node", "20.1.0", ())),
        ({"name": "a", "version": "1", "license": {"type": "MIT", "url": "u"}}, ("", "a", "1", ("MIT",))),
        ({"name": "a", "version": "1", "licenses": [{"type": "MIT"}, "ISC", 5]}, ("", "a", "1", ("MIT", "ISC"))),
        ({"type": "module"}, None),
        ({"name": "a"}, None),
        ({"name": 5, "version": "1"}, None),
    ],
)
def test_npm(document: dict[str, object], expected: tuple[object, ...] | None) -> None:
    found = [(p.namespace, p.name, p.version, p.licenses) for p in read_npm(json.dumps(document).encode())]
    assert found == ([expected] if expected else [])


def audited(packages: object) -> bytes:
    return elf(Part(name=".dep-v0", data=zlib.compress(json.dumps({"packages": packages}).encode())))


def test_the_crates_of_a_program() -> None:
    program = audited(
        [
            {"name": "attention-rs", "version": "0.1.0", "source": "git+https://git.example.org/a", "root": True},
            {"name": "serde", "version": "1.0.203", "source": "crates.io", "dependencies": [2]},
            {"name": "cc", "version": "1.0.0", "source": "crates.io", "kind": "build"},
            {"name": 5},
            "text",
        ]
    )
    found = list(read_audited(MemoryReader(program)))
    assert [(p.kind, p.name, p.version, dict(p.qualifiers)) for p in found] == [
        ("cargo", "attention-rs", "0.1.0", {"source": "git+https://git.example.org/a"}),
        ("cargo", "serde", "1.0.203", {}),
    ]
    assert list(read_audited(MemoryReader(elf(Part(name=".text"))))) == []


@pytest.mark.parametrize(
    "data",
    [
        elf(Part(name=".dep-v0", data=b"not zlib")),
        elf(Part(name=".dep-v0", data=zlib.compress(b"[1]"))),
        elf(Part(name=".dep-v0", data=zlib.compress(b"{" * 1000))),
        elf(Part(name=".dep-v0", data=zlib.compress(b"x" * 1000)[:-20])),
        elf(Part(name=".dep-v0", data=zlib.compress(bytes(65 * 2**20)))),
        elf(Part(name=".dep-v0", data=bytes(64), type=8)),
        b"\x7fELF" + bytes(60),
        b"",
    ],
)
def test_broken_lists_of_crates_are_format_errors(data: bytes) -> None:
    with pytest.raises(FormatError):
        list(read_audited(MemoryReader(data)))


def test_a_section_of_any_size_is_not_read() -> None:
    big = elf(Part(name=".dep-v0", data=bytes(MAX_SECTION + 1)))
    with pytest.raises(FormatError, match="is not read"):
        list(read_audited(MemoryReader(big)))


def test_copyright_names_licenses_where_machines_can_read_it() -> None:
    text = b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: GPL-2+\n "
    assert read_copyright(text + b"text\n\nLicense: MIT\n\nLicense: GPL-2+\n") == ("GPL-2+", "MIT")
    assert read_copyright(b"This package was put together by\nLicense: me") == ()


def test_os_release() -> None:
    data = b"ID=debian\nVERSION_ID=\"12\"\nPRETTY_NAME='Debian'\n# x\nbad line\nlower=1\nX=\xff\n"
    assert read_os_release(data) == {"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian", "X": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/lib/dpkg/status", read_dpkg),
        ("/var/lib/dpkg/status.d/base", read_dpkg),
        ("/var/lib/dpkg/status.d/base.md5sums", None),
        ("/var/lib/dpkg/status-old", None),
        ("/lib/apk/db/installed", read_apk),
        ("/opt/venv/lib/python3.11/site-packages/torch-2.1.dist-info/METADATA", read_python),
        ("/usr/lib/python3/dist-packages/six-1.16.egg-info", read_python),
        ("/usr/lib/python3/dist-packages/six.egg-info/PKG-INFO", read_python),
        ("/usr/lib/python3/x/METADATA", None),
        ("/app/node_modules/a/package.json", read_npm),
        ("/app/node_modules/@s/a/package.json", read_npm),
        ("/app/node_modules/a/lib/package.json", None),
        ("/app/package.json", None),
        ("/package.json", None),
        ("/", None),
    ],
)
def test_which_files_list_packages(path: str, expected: Callable[[bytes], Iterator[Package]] | None) -> None:
    found = reader_for(path)
    assert (found[0] if found else None) is expected


@given(data=st.binary(max_size=400) | st.text(max_size=400).map(lambda t: t.encode("utf-8", "surrogatepass")))
@pytest.mark.parametrize("read", [read_dpkg, read_apk, read_python, read_npm])
def test_any_bytes_give_packages_of_valid_text_or_a_format_error(
    read: Callable[[bytes], Iterator[Package]], data: bytes
) -> None:
    try:
        found = list(read(data))
    except FormatError:
        return
    for package in found:
        assert package.name
        for text in (package.name, package.version, package.namespace, *package.licenses, *package.qualifiers.values()):
            text.encode()
            assert text.isprintable()


FIELDS = st.sampled_from(["Package", "Status", "Version", "Source", "Name", "License", "Classifier", "P", "V", "L"])


@given(lines=st.lists(st.tuples(FIELDS, st.text(max_size=30)), max_size=12))
@pytest.mark.parametrize("read", [read_dpkg, read_apk, read_python])
def test_fields_with_any_text_are_read(
    read: Callable[[bytes], Iterator[Package]], lines: list[tuple[str, str]]
) -> None:
    data = "\n".join(f"{name}: {text}" for name, text in lines).encode("utf-8", "surrogatepass")
    try:
        for package in read(data):
            assert package.name.isprintable()
    except FormatError:
        pass
