"""Every way to the files: layers, folders, wheels, single files; and the spool that makes streams readable."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tarfile
import zipfile
from pathlib import Path

import cudafiles as make
import pytest
from cudafiles import Part
from cudafiles.image import Item, MemoryImage, folder, symlink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildkit.check.spool import Spool
from buildkit.check.tree import Tree, Want
from buildkit.check.walk import walk_file, walk_folder, walk_image, walk_wheel
from buildkit.cuda.readat import MemoryReader
from buildkit.cuda.scan import scan_file
from buildkit.errors import DigestMismatchError, FormatError, UsageError

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cuda"
BINARIES = sorted(p.name for p in GOLDEN.iterdir() if p.suffix not in (".json", ".md"))
SM70 = (GOLDEN / "cuda11-sm70.so").read_bytes()
SM80 = (GOLDEN / "cuda11-sm80-only.so").read_bytes()
BIG = make.elf(
    Part(name=".nv_fatbin", data=make.fatbin(make.entry(make.CUBIN, 70, random.Random(1).randbytes(300_000)))),
    Part(name=".rodata", data=b"r" * 5000),
    Part(name=".data", data=bytes(64) + make.fatbin(make.entry(make.CUBIN, 80, bytes(200_001)))),
)


def targets(tree: Tree, path: str) -> set[str]:
    scan = tree.files[path].scan
    assert scan is not None
    return {e.target for u in scan.units for e in u.entries}


def spooled(data: bytes, step: int, *, keep: bool = False) -> Spool:
    spool = Spool()
    spool.begin(keep_payloads=keep)
    for start in range(0, len(data), step):
        spool.feed(data[start : start + step])
    spool.finish()
    return spool


# The spool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BINARIES, "BIG"])
@pytest.mark.parametrize("step", [1000, 4097, 1 << 20])
def test_a_stream_is_scanned_as_the_file_is(name: str, step: int) -> None:
    data = BIG if name == "BIG" else (GOLDEN / name).read_bytes()
    with spooled(data, step) as spool:
        scan = scan_file(spool, name)
        assert scan == scan_file(MemoryReader(data), name)
        assert scan is not None
        assert spool.unaccounted(scan.units) is None


@pytest.mark.parametrize("step", [1, 3, 17])
def test_headers_over_the_edges_of_pieces_are_recognised(step: int) -> None:
    data = make.elf(
        Part(name=".nv_fatbin", data=make.fatbin(*[make.entry(make.CUBIN, 70, b"k" * 70_000, header=112)] * 2))
    )
    with spooled(data, step) as spool:
        assert scan_file(spool, "x") == scan_file(MemoryReader(data), "x")
        assert spool._stored < 10_000


def test_large_payloads_are_left_out_unless_they_are_wanted() -> None:
    with spooled(BIG, 1 << 16) as spool:
        assert spool._stored < len(BIG) - 490_000
    with spooled(BIG, 1 << 16, keep=True) as spool:
        assert spool.read(0, len(BIG)) == BIG


def test_an_executable_segment_over_the_headers_is_not_left_out() -> None:
    data = bytearray((GOLDEN / "cuda11-sm70.so").read_bytes())
    at, count = int.from_bytes(data[32:40], "little"), int.from_bytes(data[56:58], "little")
    flags = [4, *[5] * (count - 1)]  # one of constants, the others executable, one of those from offset 0
    for index in range(count):
        row = at + 56 * index
        data[row : row + 8] = (1).to_bytes(4, "little") + flags[index].to_bytes(4, "little")
    data[at + 56 + 8 : at + 56 + 16] = bytes(8)
    with spooled(bytes(data), 1 << 20) as spool:
        assert scan_file(spool, "x") == scan_file(MemoryReader(bytes(data)), "x")


def test_the_front_of_a_file_is_always_kept() -> None:
    forged = make.fatbin(make.entry(make.CUBIN, 70, bytes(100_000)))
    data = b".version 7.8\n" + forged[:100] + b"\n.target sm_70\n.address_size 64\n.func f() {}\n" + bytes(200_000)
    for step in (100, 5000, 1 << 20):
        with spooled(data, step) as spool:
            assert spool.read(0, 4096) == data[:4096]
            assert scan_file(spool, "x") == scan_file(MemoryReader(data), "x")


def test_a_forged_header_cannot_hide_what_follows() -> None:
    """In a section that the scan does not search, it would swallow the fatbins after it."""
    forged = bytearray(make.fatbin(make.entry(make.CUBIN, 70, b"")))
    forged[8:16] = (1_000_000).to_bytes(8, "little")
    forged[24:32] = (900_000).to_bytes(8, "little")
    data = make.elf(
        Part(name=".comment", data=bytes(forged), flags=0),
        Part(name=".nv_fatbin", data=make.fatbin(make.entry(make.CUBIN, 80, b"x" * 100_000))),
        Part(name=".pad", data=bytes(1_000_000), flags=0),
    )
    with spooled(data, 1 << 20) as spool:
        scan = scan_file(spool, "x")
        assert scan is not None
        assert spool.unaccounted(scan.units) is not None


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_was_kept_is_what_was_fed(data: st.DataObject) -> None:
    raw = bytearray(BIG)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(raw) - 9))
        raw[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    with spooled(bytes(raw), data.draw(st.sampled_from([777, 65536, 1 << 20]))) as spool:
        assert spool.size == len(raw)
        for at, _, length in spool._extents:
            assert spool.read(at, length) == bytes(raw[at : at + length])


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_topmost_version_of_a_file_counts_in_any_order_of_layers(order: tuple[int, ...]) -> None:
    image = MemoryImage(
        {"opt/a.so": SM80, "opt/b.so": SM80, "opt/c.so": SM80, "opt/d.so": SM80},
        {"opt/a.so": SM70, "opt/.wh.b.so": b""},
        {"opt/c.so": b"not a library any more"},
        order=order,
    )
    tree = walk_image(image, Want())
    assert targets(tree, "/opt/a.so") == {"sm_70", "compute_70"}
    assert tree.files["/opt/a.so"].layer == 1
    assert "/opt/b.so" not in tree.paths
    assert tree.files["/opt/c.so"].scan is None
    assert targets(tree, "/opt/d.so") == {"sm_80"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_whiteouts_of_folders_and_opaque_ones(order: tuple[int, ...]) -> None:
    image = MemoryImage(
        {"a/x/l.so": SM70, "b/l.so": SM70, "c/l.so": SM70, "d/x/l.so": SM70, "e/l.so": SM70},
        {
            ".wh.a": b"",
            "b/.wh..wh..opq": b"",
            "b/new.so": SM80,
            "c": symlink("e"),
            "d": folder(),
            "e/other": b"x",
        },
        order=order,
    )
    tree = walk_image(image, Want())
    assert {f.path for f in tree.scanned()} == {"/b/new.so", "/d/x/l.so", "/e/l.so"}
    assert tree.resolve("/c/l.so") == "/e/l.so"


def test_a_whiteout_in_the_same_layer_removes_nothing_of_it() -> None:
    image = MemoryImage({"a/l.so": SM70}, {"a/.wh.l.so": b"", "a/l.so": SM80})
    assert targets(walk_image(image, Want()), "/a/l.so") == {"sm_80"}


def test_links_are_followed_within_the_image() -> None:
    image = MemoryImage(
        {
            "usr/lib/libx.so.1.2": SM70,
            "usr/lib/libx.so.1": symlink("libx.so.1.2"),
            "usr/lib/libx.so": Item(type=tarfile.LNKTYPE, link="usr/lib/libx.so.1.2"),
            "lib": symlink("usr/lib"),
            "etc/loop": symlink("loop"),
            "etc/out": symlink("../../../usr/lib/libx.so.1"),
        }
    )
    tree = walk_image(image, Want())
    for path in ("/usr/lib/libx.so", "/usr/lib/libx.so.1", "/lib/libx.so.1", "/etc/out", "/usr/lib/../lib/libx.so"):
        assert tree.resolve(path) == "/usr/lib/libx.so.1.2"
    assert tree.resolve("/etc/loop") is None
    assert tree.resolve("/nowhere") is None


def test_names_that_lead_out_are_reported_and_left_out() -> None:
    tree = walk_image(MemoryImage({"../evil.so": SM70, "good.so": SM70}), Want())
    assert {f.path for f in tree.scanned()} == {"/good.so"}
    assert "'..'" in tree.problems[0]


def test_corrupt_layers_are_errors() -> None:
    with pytest.raises(DigestMismatchError):
        walk_image(MemoryImage({"a.so": SM70}, corrupt=True), Want())


def test_a_sparse_library_is_not_passed_silently() -> None:
    head = bytearray(512)
    head[:9] = b"lib/x.so\0"
    head[100:108], head[108:116], head[116:124] = b"0000755\0", b"0000000\0", b"0000000\0"
    stored = SM70[:512]
    head[124:136], head[136:148], head[156:157] = f"{len(stored):011o}\0".encode(), b"00000000000\0", b"S"
    head[257:265] = b"ustar  \0"
    head[386:410] = b"00000000000\0" + f"{len(stored):011o}\0".encode()
    head[483:495] = b"02402000000\0"[:12]
    head[148:156] = b"        "
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    image = MemoryImage(bytes(head) + stored + bytes(1024))
    tree = walk_image(image, Want())
    assert "/lib/x.so" in tree.problems[0]
    assert "sparse" in tree.problems[0]


# Folders, wheels, files ----------------------------------------------------------------------------------------------


def wheel(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_wheels_are_read_without_unpacking(tmp_path: Path, compression: int) -> None:
    path = wheel(tmp_path / "x.whl", {"pkg/big.so": BIG, "pkg/a.so": SM70, "pkg/b.py": b"x = 1\n"}, compression)
    seen: list[int] = []
    tree = walk_wheel(path, Want(), progress=seen.append)
    assert targets(tree, "/pkg/big.so") == {"sm_70", "sm_80"}
    assert targets(tree, "/pkg/a.so") == {"sm_70", "compute_70"}
    assert sum(seen) >= len(BIG) + len(SM70)


def test_damaged_wheels_are_one_line_errors(tmp_path: Path) -> None:
    path = wheel(tmp_path / "x.whl", {"pkg/big.so": BIG})
    whole = path.read_bytes()
    for at in (10, 40, len(whole) // 2, len(whole) - 30):
        bad = bytearray(whole)
        bad[at] ^= 0xFF
        path.write_bytes(bytes(bad))
        with contextlib.suppress(FormatError):
            walk_wheel(path, Want())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="not a readable wheel"):
        walk_wheel(path, Want())


def test_a_member_that_lies_about_its_size_is_an_error(tmp_path: Path) -> None:
    path = wheel(tmp_path / "x.whl", {"a.so": BIG})
    raw = bytearray(path.read_bytes())
    at = raw.rfind(b"PK\x01\x02") + 24
    raw[at : at + 4] = (50_000).to_bytes(4, "little")
    path.write_bytes(bytes(raw))
    with pytest.raises(FormatError, match="larger than it says"):
        walk_wheel(path, Want())
    path = wheel(tmp_path / "y.whl", {"a.so": BIG})
    raw = bytearray(path.read_bytes())
    at = raw.rfind(b"PK\x01\x02") + 16
    raw[at : at + 4] = b"\0\0\0\0"
    path.write_bytes(bytes(raw))
    with pytest.raises(FormatError, match="checksum"):
        walk_wheel(path, Want())


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.so").write_bytes(SM70)
    (tmp_path / "lib" / "link.so").symlink_to("a.so")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\ntrue\n")
    tree = walk_folder(tmp_path, Want())
    assert [f.path for f in tree.scanned()] == ["/lib/a.so"]
    assert tree.files["/lib/link.so"].link == "a.so"
    assert tree.files["/run.sh"].text == b"#!/bin/sh\ntrue\n"
    assert "/pipe" in tree.paths


def test_an_unreadable_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.so").write_bytes(SM70)

    def refuse(self: Path, *_: object, **__: object) -> io.BytesIO:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    tree = walk_folder(tmp_path, Want())
    assert "Permission denied" in tree.problems[0]


def test_a_single_file_must_be_one_with_code(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(UsageError, match="is no ELF file"):
        walk_file(path, Want())
    path.write_bytes(SM70)
    assert targets(walk_file(path, Want()), "/notes.txt") == {"sm_70", "compute_70"}
