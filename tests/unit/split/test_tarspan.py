"""The span reader: spans cover the tar, fields are right, and whatever is hostile is refused with its offset."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import tracemalloc

import pytest
from golden.split.cases import CASES, Case
from golden.split.tars import END, directory, file, gnu_long, gnu_sparse, hardlink, header, number, padded, pax, tar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from buildkit.errors import FormatError
from buildkit.image.tarspan import MAX_EXTENDED, MAX_HEAD, Entry, TarReader, attributes, normalise


def read(data: bytes) -> list[Entry]:
    reader = TarReader(io.BytesIO(data), where="x.tar")
    entries = list(reader)
    reader.finish()
    return entries


class Trickle:
    """Gives a few bytes at a time, as sockets do."""

    def __init__(self, data: bytes, step: int) -> None:
        self._rest = io.BytesIO(data)
        self._step = step

    def read(self, size: int, /) -> bytes:
        return self._rest.read(min(size, self._step))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spans_and_globals_cover_the_tar_without_gap(case: Case) -> None:
    for data in case.layers:
        reader = TarReader(io.BytesIO(data), where="x.tar")
        pieces = [(entry.offset, entry.span) for entry in reader]
        pieces += [(header.offset, len(header.raw)) for header in reader.globals]
        at = 0
        for offset, size in sorted(pieces):
            assert offset == at
            at += size
        assert not data[at:].strip(b"\0")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("step", [1, 511, 513, 4096])
def test_any_read_size_gives_the_same(case: Case, step: int) -> None:
    data = case.layers[-1][:40_000]
    data = data[: len(data) // 512 * 512]

    def outcome(source: object) -> object:
        reader = TarReader(source, where="x")  # type: ignore[arg-type]
        out: list[object] = []
        try:
            for entry in reader:
                content = b""
                while piece := reader.read(1000):
                    content += piece
                out.append((entry, content))
        except FormatError as error:
            out.append(str(error))
        return out

    assert outcome(Trickle(data, step)) == outcome(io.BytesIO(data))


@pytest.mark.parametrize("fmt", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_agrees_with_the_standard_library(fmt: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt) as archive:
        for n in range(300):
            member = tarfile.TarInfo(
                f"d{n // 50}/{'x' * (n % 90)}{n}" + ("y" * n if fmt != tarfile.USTAR_FORMAT else "")
            )
            member.size, member.mode, member.uid, member.mtime = n * 7, n, n * 1000, n
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    data = out.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
    entries = read(data)
    assert [(m.offset, m.name, m.size, m.mode, m.uid, m.mtime) for m in members] == [
        (e.offset, e.name.decode(), e.size, (a := attributes(e)).mode, a.uid, a.mtime_ns / 10**9) for e in entries
    ]


def bad_checksum(block: bytes) -> bytes:
    return block[:10] + b"!" + block[11:]


def resized(size: bytes) -> bytes:
    """A header with this size field and a right checksum."""
    block = header(b"f")
    block = block[:124] + size + block[136:148] + b" " * 8 + block[156:]
    return block[:148] + f"{sum(block):06o}\0 ".encode() + block[156:]


FIRST = file(b"first", b"1")

HOSTILE = {
    "checksum": (FIRST + bad_checksum(header(b"f")), 1024, "checksum"),
    "no header": (FIRST + b"x" * 512, 1024, "not a tar header|checksum"),
    "zero block between": (FIRST + bytes(512) + FIRST, 1024, "zero block"),
    "negative size": (FIRST + resized(number(-1, 12)), 1024, "size -1"),
    "size overflow": (FIRST + resized(b"\x80" + b"\xff" * 11), 1024, "not possible"),
    "size in letters": (FIRST + resized(b"0x00000000ff"), 1024, "not a number"),
    "size with underscores": (FIRST + resized(b"0000000_0010"), 1024, "not a number"),
    "PAX size overflow": (FIRST + pax({b"size": b"9" * 19}) + header(b"f"), 2048, "not possible"),
    "PAX size negative": (FIRST + pax({b"size": b"-5"}) + header(b"f"), 2048, "not possible"),
    "truncated data": (FIRST + header(b"f", size=10**6) + bytes(5000), 6536, "ends 995448 bytes before"),
    "giant extended header": (FIRST + header(b"x", "x", size=MAX_EXTENDED + 1), 1024, "extended header of"),
    "giant long name": (FIRST + header(b"x", "L", size=2**40), 1024, "extended header of"),
    "endless extended headers": (
        FIRST + (header(b"x", "x", size=MAX_EXTENDED) + padded(b"")) * 1 + bytes(MAX_EXTENDED), 1024, "malformed",
    ),
    "too many extended headers": (FIRST + gnu_long(b"x" * 1000) * (MAX_HEAD // 1536 + 2), 1024, "extended headers"),
    "extended header at the end": (FIRST + pax({b"a": b"b"}) + END, 1024, "without an entry"),
    "extended header cut": (FIRST + header(b"x", "x", size=512) + b"20 a=", 1541, "ends within a header"),
    "record too long": (FIRST + header(b"x", "x", size=512) + padded(b"99999 a=b\n"), 1024, "malformed"),
    "record without equals": (FIRST + header(b"x", "x", size=6) + padded(b"6 abc\n"), 1024, "malformed"),
    "record without length": (FIRST + header(b"x", "x", size=5) + padded(b" a=b\n"), 1024, "malformed"),
    "record of length zero": (FIRST + header(b"x", "x", size=6) + padded(b"0 a=b\n"), 1024, "malformed"),
    "NUL in a PAX path": (FIRST + pax({b"path": b"a\0b"}) + header(b"f"), 1024, "NUL"),
    "global path": (FIRST + pax({b"path": b"all"}, "g") + header(b"f"), 1024, "for all entries"),
    "global size": (FIRST + pax({b"size": b"1"}, "g") + header(b"f"), 1024, "for all entries"),
    "global later": (FIRST + pax({b"a": b"b"}) + pax({b"a": b"b"}, "g") + header(b"f"), 2048, "header between"),
    "endless sparse map": (
        FIRST + gnu_sparse(b"s", [(0, 1)] * 5, b"", 5)[:512]
        + (bytes(504) + b"\1" + bytes(7)) * (MAX_HEAD // 512 + 2), 1024, "sparse map",
    ),
    "sparse without GNU": (FIRST + header(b"s", "S"), 1024, "not in GNU format"),
    "no name": (FIRST + header(b""), 1024, "without a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tar_is_refused_with_its_offset(name: str) -> None:
    data, offset, message = HOSTILE[name]
    with pytest.raises(FormatError) as caught:
        read(data)
    assert caught.value.offset == offset
    assert re.search(message, str(caught.value))
    assert "x.tar" in str(caught.value)


def test_memory_is_bounded_whatever_a_header_claims() -> None:
    tracemalloc.start()
    try:
        for data, _, _ in HOSTILE.values():
            source = io.BytesIO(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(FormatError):
                list(TarReader(source, where="x"))
            assert tracemalloc.get_traced_memory()[1] - before < 40 * 2**20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=3000).map(lambda b: b[: len(b) // 512 * 512 or len(b)]))
@example(b"\x80" * 512)
def test_garbage_is_an_error_or_nothing(data: bytes) -> None:
    assert outcome_of(data) in ("nothing", "refused")


@given(
    st.sampled_from(CASES), st.integers(0, 20_000), st.sampled_from([0, 1, 0x37, 0x80, 0xFF, 0x20, 0x2F])
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_one_wrong_byte_is_an_error_or_another_tar(case: Case, at: int, value: int) -> None:
    data = bytearray(case.layers[-1][:30_000])
    if data:
        data[at % len(data)] = value
    assert outcome_of(bytes(data)) in ("nothing", "entries", "refused")


def outcome_of(data: bytes) -> str:
    """Attributes may be out of range where only an extractor cares; everything else is an error with an offset."""
    try:
        entries = read(data)
    except FormatError as error:
        return "refused" if error.offset is not None else "refused without an offset"
    for entry in entries:
        with contextlib.suppress(ValueError):
            attributes(entry)
    return "entries" if entries else "nothing"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (b"a", b"a"), (b"/a", b"a"), (b"./a", b"a"), (b"a/", b"a"), (b"a//b", b"a/b"), (b"a/./b", b"a/b"), (b".", b""),
        (b"./", b""), (b"/", b""), (b"a/.", b"a"), (b"..a/b..", b"..a/b.."), (b"a/.b/", b"a/.b"), (b"//", b""),
        (b"...", b"..."), (b".a", b".a"), (b"a./b", b"a./b"), (b"././/a/./", b"a"),
    ],
)  # fmt: skip
def test_normalised_names(name: bytes, path: bytes) -> None:
    assert normalise(name) == path


@pytest.mark.parametrize("name", [b"..", b"../a", b"a/..", b"a/../b", b"/..", b"./../a", b"a/b/../../../c"])
def test_names_that_lead_out_are_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"\.\."):
        normalise(name)


def test_signed_checksums_of_old_writers_are_read() -> None:
    block = header(b"\xe9t\xe9")
    signed = sum(b - 256 if b > 127 else b for b in block[:148] + b" " * 8 + block[156:])
    old = block[:148] + f"{signed:06o}\0 ".encode() + block[156:]
    assert [entry.name for entry in read(tar(old))] == [b"\xe9t\xe9"]


def test_later_extended_header_replaces_the_earlier() -> None:
    data = tar(pax({b"path": b"one", b"uid": b"5"}) + pax({b"path": b"two"}) + header(b"f"))
    (entry,) = read(data)
    assert (entry.name, attributes(entry).uid) == (b"two", 0)


def test_end_marker_and_what_follows_it() -> None:
    for data, marked, extra in ((FIRST + END + b"junk", True, 4), (FIRST, False, 0), (FIRST + bytes(512), False, 0)):
        reader = TarReader(io.BytesIO(data), where="x")
        assert [e.name for e in reader] == [b"first"]
        assert (reader.end_marker, reader.finish()) == (marked, extra)


def test_entry_says_where_it_lies() -> None:
    first, second = read(tar(directory(b"d"), hardlink(b"l", b"d/x")))
    assert (first.offset, first.span, second.offset, second.link) == (0, 512, 512, b"d/x")
