"""The outer tar of archives: every way to write names and sizes, and nothing believed that does not fit."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.image.image_samples import tar_members

from buildkit.errors import FormatError
from buildkit.image.files import TarFiles
from buildkit.image.tarindex import BLOCK, TarReader, index


def header(name: bytes, size: bytes, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    block = bytearray(BLOCK)
    block[0 : len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148] = size.rjust(12, b"0"), b"00000000000\0"
    block[148:156], block[156:157], block[257:265] = b" " * 8, kind, magic
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


END = bytes(2 * BLOCK)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_names_of_every_length_in_every_form(form: int) -> None:
    names = ["a", "b" * 100, "d" * 50 + "/" + "e" * 99]
    if form != tarfile.USTAR_FORMAT:
        names += ["f" * 101, "g" * 100 + "/" + "h" * 300, "naïve/ünïcödé"]
    raw = tar_members([(name, name.encode()) for name in names], form=form)
    found = index(io.BytesIO(raw), where="t")
    assert sorted(found) == sorted(names)
    for name, member in found.items():
        assert raw[member.offset : member.offset + member.size] == name.encode()


def test_sizes_in_base_256_and_in_pax_records_count() -> None:
    big = (5).to_bytes(12, "big")
    gnu = header(b"a", b"\x80" + big[1:]) + padded(b"hello") + END
    assert index(io.BytesIO(gnu), where="t")["a"].size == 5
    pax = header(b"x", b"%o" % 9, b"x") + padded(b"9 size=5\n") + header(b"a", b"0") + padded(b"hello") + END
    assert index(io.BytesIO(pax), where="t")["a"].size == 5
    for field in (b"\xff" * 12, b"\x80" + b"\x7f" + b"\xff" * 10, b"not a number"):
        with pytest.raises(FormatError, match="size"):
            index(io.BytesIO(header(b"a", field) + END), where="t")


def test_a_size_of_eight_gib_is_read_from_a_sparse_file(tmp_path: Path) -> None:
    """A member above 8 GiB needs base-256 (GNU) or a PAX record; the file's middle is a hole."""
    size = 9 * 2**30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member = tarfile.TarInfo("huge")
        member.size = size
        head = member.tobuf(form)
        path = tmp_path / "huge.tar"
        with open(path, "wb") as file:
            file.write(head)
            file.seek(size, 1)
            file.write(tar_members([("after", b"x")]))
        files = TarFiles(path, "t")
        found, after = files.find("huge"), files.find("after")
        assert found is not None
        assert after is not None
        assert (found.size, found.offset) == (size, len(head))
        assert after.bytes(10) == b"x"


def test_pax_globals_apply_until_replaced_and_own_records_win() -> None:
    def record(text: bytes) -> bytes:
        length = len(text) + 4
        return b"%d %s\n" % (length, text)

    raw = (
        header(b"g", b"%o" % len(record(b"path=globalname")), b"g")
        + padded(record(b"path=globalname"))
        + header(b"one", b"0")
        + header(b"x", b"%o" % len(record(b"path=ownname888")), b"x")
        + padded(record(b"path=ownname888"))
        + header(b"two", b"0")
        + END
    )
    assert list(index(io.BytesIO(raw), where="t")) == ["globalname", "ownname888"]


def test_sparse_members_are_refused_when_they_are_needed(tmp_path: Path) -> None:
    for block in (
        header(b"a", b"0", b"S"),
        header(b"x", b"%o" % 22, b"x") + padded(b"22 GNU.sparse.major=1\n") + header(b"a", b"0"),
    ):
        (tmp_path / "a.tar").write_bytes(block + END)
        with pytest.raises(FormatError, match="sparse"):
            TarFiles(tmp_path / "a.tar", "t").find("a")


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"5 a=b\n", b"99 a=b\n", b"6 ab\n", b"0 a=b\n", b"-6 a=b\n", b"6 a=bX", b"999999999999 a=b\n", b" =\n"],
)
def test_malformed_pax_records_are_errors(data: bytes) -> None:
    raw = header(b"x", b"%o" % len(data), b"x") + padded(data) + header(b"a", b"0") + END
    if data == b"":
        assert "a" in index(io.BytesIO(raw), where="t")
        return
    with pytest.raises(FormatError, match="malformed PAX record"):
        index(io.BytesIO(raw), where="t")


def test_a_giant_extension_is_not_read_into_memory() -> None:
    for kind in (b"x", b"g", b"L", b"K"):
        with pytest.raises(FormatError, match="extended header of"):
            index(io.BytesIO(header(b"x", b"77777777777", kind) + END), where="t")


def test_a_missing_end_marker_and_a_wrong_checksum_are_errors() -> None:
    raw = tar_members([("a", b"x" * 600), ("b", b"y")])
    end = len(raw.rstrip(b"\0"))
    with pytest.raises(FormatError, match="ends early"):
        index(io.BytesIO(raw[: end + BLOCK - end % BLOCK]), where="t")
    bad = bytearray(raw)
    bad[3] ^= 1
    with pytest.raises(FormatError, match="checksum"):
        index(io.BytesIO(bytes(bad)), where="t")


@given(st.binary(max_size=3000))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_tar_or_an_error(data: bytes) -> None:
    for raw in (data, data + END, header(b"a", b"0") + data + END):
        for seek in (True, False):
            file = io.BytesIO(raw)
            reader = TarReader(file, where="t", seek=file if seek else None)
            try:
                while reader.next_member() is not None:
                    pass
            except FormatError:
                continue


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z]{1,8}(/[a-z]{1,150})?", fullmatch=True), st.binary(max_size=2000))),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_seeking_and_streaming_see_the_same_members(members: list[tuple[str, bytes]], data: st.DataObject) -> None:
    raw = tar_members(members)
    file = io.BytesIO(raw)
    seeking, streaming = TarReader(file, where="t", seek=file), TarReader(io.BytesIO(raw), where="t")
    for name, content in [*members, ("", b"")]:
        one, two = seeking.next_member(), streaming.next_member()
        assert one == two
        if one is None:
            assert name == ""
            break
        assert one.name == name
        if data.draw(st.booleans()):
            taken = streaming.read(data.draw(st.integers(0, 100)))
            assert content.startswith(taken)
