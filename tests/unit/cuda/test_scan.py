"""Files written by hand: where device code may hide, and what may be wrong with the file around it."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import cudafiles as make
import pytest
from cudafiles import Part
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildkit.cuda import scan as scan_module
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Verdict, judge
from buildkit.cuda.readat import FileReader, MemoryReader
from buildkit.cuda.scan import FileScan, scan_file

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cuda"
SM70 = make.fatbin(make.entry(make.CUBIN, 70, b"x" * 5000))
SM80 = make.fatbin(make.entry(make.CUBIN, 80, b"x" * 5000))


def scan(data: bytes, name: str = "lib.so") -> FileScan:
    result = scan_file(MemoryReader(data), name)
    assert result is not None
    return result


def verdict(data: bytes, arch: int = 70) -> Verdict:
    return judge(scan(data), Arch(arch)).verdict


@pytest.mark.parametrize("section", [".nv_fatbin", ".rodata", ".data", ".data.rel.ro", ".lrodata", "anything"])
def test_fatbins_are_found_in_every_section_that_is_loaded(section: str) -> None:
    data = make.elf(Part(name=section, data=bytes(16) + SM70 + bytes(16)))
    assert verdict(data) is Verdict.NATIVE
    assert scan(data).units[0].place == section


def test_machine_code_and_debug_sections_are_not_searched() -> None:
    assert verdict(make.elf(Part(name=".text", data=SM70, flags=6))) is Verdict.NOT_CUDA
    assert verdict(make.elf(Part(name=".debug_str", data=SM70, flags=0))) is Verdict.NOT_CUDA


def test_the_magic_as_a_constant_is_neither_code_nor_a_problem() -> None:
    data = make.elf(
        Part(name=".rodata", data=b"\x50\xed\x55\xba" * 9 + b"\x50\xed\x55\xba\x01\x00\x10\x00" + bytes(40))
    )
    assert scan(data).problems == ()
    assert verdict(data) is Verdict.NOT_CUDA


@pytest.mark.parametrize("at", [(1 << 20) - n for n in (1, 3, 4, 7, 8, 16, 40)])
def test_code_over_the_edge_of_two_windows_is_found_once(at: int) -> None:
    text = make.ptx_text()
    for code in (SM70, make.cubin(), text):
        # The section's content starts at byte 64 of the file; windows are counted from there.
        data = make.elf(Part(name=".rodata", data=bytes(at) + code + bytes(64)))
        assert sum(len(u.entries) for u in scan(data).units) == 1
        assert scan(data).problems == ()


@pytest.mark.parametrize("edge", range(1, 12))
def test_short_marks_within_the_overlap_of_two_windows_are_found_once(edge: int) -> None:
    head, target = make.ptx_text().split(b".target", 1)
    data = make.elf(Part(name=".rodata", data=bytes((1 << 20) - edge - len(head)) + head + b".target" + target + b"\0"))
    assert sum(len(u.entries) for u in scan(data).units) == 1


def test_partial_names_what_is_lacking() -> None:
    data = make.elf(Part(name=".nv_fatbin", data=SM70 + SM80 + SM70))
    judgement = judge(scan(data), Arch(70))
    assert (judgement.verdict, judgement.native, judgement.total) == (Verdict.PARTIAL, 2, 3)
    assert [u.offset for u in judgement.lacking] == [64 + len(SM70)]


def test_lone_cubins_of_a_section_are_alternatives() -> None:
    data = make.elf(Part(name=".rodata", data=make.cubin(70) + bytes(8) + make.cubin(80)))
    assert verdict(data) is Verdict.NATIVE
    assert verdict(data, 90) is Verdict.MISSING


def test_relocatable_cubins_beside_linked_ones_are_alternatives_too() -> None:
    other = bytearray(make.cubin(62))
    other[16:18] = b"\x01\x00"  # ET_REL
    for pair in (bytes(other) + make.cubin(70), make.cubin(70) + bytes(other), make.cubin(60) + bytes(other)):
        (unit,) = scan(make.elf(Part(name=".rodata", data=pair))).units
        assert len(unit.entries) == 2
        assert not unit.linkable
    assert verdict(make.elf(Part(name=".rodata", data=bytes(other) + make.cubin(70)))) is Verdict.NATIVE


def test_ptx_text_counts_by_module() -> None:
    both = make.ptx_text("sm_70") + b"\0" + make.ptx_text("sm_80") + b"\0"
    data = make.elf(Part(name=".rodata", data=b"\0" + both))
    assert verdict(data) is Verdict.PARTIAL
    assert verdict(data, 80) is Verdict.JIT


@pytest.mark.parametrize(
    "text",
    [
        b".target sm_70\0",
        b".version %d.%d\n.target sm_%d\n.address_size 64\n\0",
        b".version 7.8\n.target sm_70\n\0",
        b".version 7.8\0.target sm_70\n.address_size 64\n\0",
        b".version 7.8\n.target sm_70x9\n.address_size 64\n",
    ],
)
def test_what_a_compiler_keeps_to_write_ptx_is_not_ptx(text: bytes) -> None:
    assert verdict(make.elf(Part(name=".rodata", data=b"\0" + text))) is Verdict.NOT_CUDA


def test_comments_may_stand_between_the_directives() -> None:
    text = b"//\n// by LLVM\n//\n.version 6.0\n// here\n.target  sm_70, debug\n\n.address_size 64\n.func f() {}\n"
    assert [e.target for u in scan(text, "k.ptx").units for e in u.entries] == ["compute_70"]


def test_a_file_called_ptx_that_is_none_is_a_problem() -> None:
    assert "no module" in scan(b"hello", "k.ptx").problems[0].message


def test_other_files_are_of_no_interest() -> None:
    for data in (b"", b"#!/bin/sh\n", b"PK\x03\x04", b"\x7fEL", b"// a C file about .target and .version"):
        assert scan_file(MemoryReader(data), "x") is None or data.startswith(b"//")


def test_archives_are_read_member_by_member() -> None:
    inner = make.elf(Part(name=".nv_fatbin", data=SM70), type=1)
    data = make.ar(make.member("odd.txt/", b"x"), make.member("a.o/", inner), make.member("b.cubin/", make.cubin(80)))
    result = scan(data, "lib.a")
    assert result.members == 3
    assert [(u.form, u.place) for u in result.units] == [("fatbin", "a.o: .nv_fatbin"), ("cubin", "b.cubin")]
    fatbin = result.units[0]
    assert data[fatbin.offset :].startswith(b"\x50\xed\x55\xba")
    assert data[fatbin.entries[0].offset :].startswith(b"\x02\x00\x01\x01")


def test_long_member_names_of_both_kinds() -> None:
    inner = make.elf(Part(name=".nv_fatbin", data=SM70), type=1)
    gnu = make.ar(make.member("//", b"a_very_long_member_name.cu.o/\n"), make.member("/0", inner))
    bsd = make.ar(make.member("#1/20", b"long_member_name.o\0\0" + inner))
    assert scan(gnu).units[0].place == "a_very_long_member_name.cu.o: .nv_fatbin"
    assert scan(bsd).units[0].place == "long_member_name.o: .nv_fatbin"


def test_a_member_cut_short_is_a_problem() -> None:
    inner = make.elf(Part(name=".nv_fatbin", data=SM70), type=1)
    data = make.ar(make.member("a.o/", inner), make.member("b.o/", inner))
    for length in (len(data) - 1, len(data) - len(inner), len(data) - len(inner) - 30):
        assert scan(data[:length]).problems
        assert judge(scan(data[:length]), Arch(70)).verdict is Verdict.NOT_UNDERSTOOD


def test_a_thin_archive_is_not_passed_silently() -> None:
    assert "thin archive" in scan(b"!<thin>\n" + bytes(60)).problems[0].message


def test_a_section_beyond_the_file_is_a_problem() -> None:
    data = bytearray(make.elf(Part(name=".nv_fatbin", data=SM70), Part(name=".rodata", data=b"x")))
    table = struct.unpack_from("<Q", data, 40)[0]
    for row, field in ((1, 24), (1, 32), (2, 32)):
        bad = bytearray(data)
        struct.pack_into("<Q", bad, table + 64 * row + field, 2**64 - 1)
        assert judge(scan(bytes(bad)), Arch(70)).verdict is Verdict.NOT_UNDERSTOOD


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.suffix not in (".json", ".md")))
def test_no_truncation_of_a_real_file_is_silent_or_raises(name: str) -> None:
    whole = (GOLDEN / name).read_bytes()
    complete = scan_file(MemoryReader(whole), name)
    assert complete is not None
    for length in sorted({0, 1, 4, 16, 63, 64, 100, *range(len(whole) // 64, len(whole), len(whole) // 64)}):
        result = scan_file(MemoryReader(whole[:length]), name)
        if name.endswith((".so", ".o", ".cubin")) and length >= 16:
            assert result is not None
            assert result.problems
        elif result is not None and name.endswith(".a"):
            assert result.problems or len(result.units) < len(complete.units)


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.suffix not in (".json", ".md")))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_real_files_never_raise(name: str, data: st.DataObject) -> None:
    raw = bytearray((GOLDEN / name).read_bytes())
    interesting = [0, 1, 0x7F, 0x80, 0xFF]
    for _ in range(data.draw(st.integers(1, 8))):
        # Half of the hits in headers: at the front, where most structure is.
        at = data.draw(st.one_of(st.integers(0, min(255, len(raw) - 1)), st.integers(0, len(raw) - 1)))
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        value = bytes([data.draw(st.sampled_from(interesting))]) * width
        raw[at : at + width] = value
    result = scan_file(MemoryReader(bytes(raw)), name)
    if result is not None:
        judge(result, Arch(70))
        assert all(u.offset >= 0 and u.size >= 0 for u in result.units)


def test_a_sparse_file_of_10_gb_is_no_work(tmp_path: Path) -> None:
    """Its one section claims 10 GB of PTX, cubins or fatbins, and there are only zeros."""
    path = tmp_path / "sparse.so"
    small = make.elf(Part(name=".nv_fatbin", data=SM70))
    with path.open("wb") as handle:
        handle.write(small)
        table = struct.unpack_from("<Q", small, 40)[0]
        handle.seek(table + 64 + 32)
        handle.write(struct.pack("<Q", 10**10 - 64))
        handle.truncate(10**10)
    if os.stat(path).st_blocks * 512 > 1 << 20:
        pytest.fail("this file system keeps no holes")
    with path.open("rb") as handle:
        result = scan_file(FileReader(handle), path.name)
    assert result is not None
    assert [e.target for u in result.units for e in u.entries] == ["sm_70"]
    assert result.problems


def test_overlapping_names_do_not_become_gigabytes() -> None:
    names = b"\0" + b"x" * 4000
    data = bytearray(make.elf(*[Part(name="", data=b"x")] * 60000, Part(name=".pad", data=names)))
    table = struct.unpack_from("<Q", data, 40)[0]
    count = struct.unpack_from("<H", data, 60)[0]
    struct.pack_into("<H", data, 62, count - 2)
    for row in range(count):
        struct.pack_into("<I", data, table + 64 * row, 1)
    assert "names" in scan(bytes(data)).problems[0].message


def test_problems_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = make.fatbin(make.entry(make.CUBIN, 70, b"", header=64))
    broken = broken[:20] + bytes(4) + broken[24:]
    data = make.elf(Part(name=".nv_fatbin", data=broken * 1000))
    assert len(scan(data).problems) == scan_module.MAX_PROBLEMS + 1


def test_a_handle_without_a_descriptor_serves_as_well() -> None:
    data = make.elf(Part(name=".nv_fatbin", data=SM70))
    assert scan_file(FileReader(io.BytesIO(data)), "x") == scan(data)


def test_32_bit_and_big_endian_files_are_no_problem() -> None:
    ident = b"\x7fELF\x01\x01\x01" + bytes(9)
    small = ident + struct.pack("<HHIIIIIHHHHHH", 3, 3, 1, 0, 0, 0, 0, 52, 32, 0, 40, 0, 0)
    assert (scan(small).machine, scan(small).problems) == ("i386", ())
    big = b"\x7fELF\x02\x02\x01" + bytes(9) + struct.pack(">HHIQQQIHHHHHH", 3, 22, 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0)
    assert (scan(big).machine, scan(big).problems) == ("s390", ())
