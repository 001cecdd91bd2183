"""What real compilers wrote, beside what NVIDIA's own cuobjdump says of it. ``scripts/golden-cuda`` makes the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from buildkit.cuda import cubin, fatbin, ptx
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Verdict, judge
from buildkit.cuda.readat import FileReader, MemoryReader
from buildkit.cuda.scan import FileScan, scan_file

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "cuda"
TABLE = json.loads((GOLDEN / "cuobjdump.json").read_text())

KERNELS = {"scale", "_ZN4demo17causal_conv1d_fwdIfEEvPT_S1_", "_ZN4demo17causal_conv1d_fwdIiEEvPT_S1_"}


def scan(name: str) -> FileScan:
    with (GOLDEN / name).open("rb") as handle:
        result = scan_file(FileReader(handle), name)
    assert result is not None
    return result


def targets(name: str) -> set[str]:
    return {e.target for u in scan(name).units for e in u.entries}


@pytest.mark.parametrize("name", TABLE)
def test_files_are_the_ones_that_cuobjdump_read(name: str) -> None:
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == TABLE[name]["sha256"]


@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("cuda11-raw-cubins.so",) and not n.endswith(".ptx")])
def test_the_same_entries_as_cuobjdump(name: str) -> None:
    """cuobjdump sees neither lone cubins in data sections nor PTX text, and drops the f of machine code.

    Of a linked program it does not list the relocatable code either.
    """
    result = scan(name)
    linked = result.type == "shared object" and any(not u.linkable for u in result.units)
    entries = [e for u in result.units if u.form != "ptx" and not (linked and u.linkable) for e in u.entries]
    elf = sorted(e.target.removesuffix("f") for e in entries if e.kind == fatbin.KIND_ELF)
    text = sorted(e.target.replace("compute", "sm") for e in entries if e.kind == fatbin.KIND_PTX)
    assert elf == sorted(TABLE[name]["cuobjdump"]["elf"])
    assert text == sorted(TABLE[name]["cuobjdump"]["ptx"])


@pytest.mark.parametrize("name", TABLE)
def test_real_files_have_no_problems(name: str) -> None:
    assert scan(name).problems == ()


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("cuda11-sm70.so", Verdict.NATIVE),
        ("cuda11-gencode.so", Verdict.NATIVE),
        ("cuda11-no-compress.so", Verdict.NATIVE),
        ("cuda11-ptx-only.so", Verdict.JIT),
        ("cuda11-sm80-only.so", Verdict.MISSING),
        ("cuda11-partial.so", Verdict.PARTIAL),
        ("cuda11-rdc.so", Verdict.NATIVE),
        ("cuda11-stub.so", Verdict.NATIVE),
        ("cuda11-separate-code.so", Verdict.NATIVE),
        ("cuda11-dc.o", Verdict.NATIVE),
        ("cuda11-archive.a", Verdict.PARTIAL),
        ("cuda11-sm70.cubin", Verdict.NATIVE),
        ("cuda11-sm70.fatbin", Verdict.NATIVE),
        ("cuda11-compute70.ptx", Verdict.JIT),
        ("cuda11-ptx-text.so", Verdict.JIT),
        ("cuda11-raw-cubins.so", Verdict.NATIVE),
        ("cuda13-size.so", Verdict.MISSING),
        ("cuda13-sm90a.so", Verdict.MISSING),
        ("cuda13-sm75.cubin", Verdict.MISSING),
        ("nvrtc12-sm70.cubin", Verdict.NATIVE),
        ("nvrtc12-compute70.ptx", Verdict.JIT),
        ("host-only.so", Verdict.NOT_CUDA),
    ],
)
def test_verdicts_for_a_v100(name: str, verdict: Verdict) -> None:
    assert judge(scan(name), Arch(70)).verdict is verdict


def test_partial_names_the_fatbin_that_lacks_the_architecture() -> None:
    judgement = judge(scan("cuda11-partial.so"), Arch(70))
    assert (judgement.native, judgement.total) == (1, 2)
    (lacking,) = judgement.lacking
    assert lacking.place == ".nv_fatbin"
    assert [e.target for e in lacking.entries] == ["sm_80"]


def test_suffixes_are_read_from_fatbins_cubins_and_text() -> None:
    assert targets("cuda13-blackwell.so") == {"sm_100f", "compute_100f", "sm_100a", "sm_120"}
    assert targets("cuda13-sm90a.so") == {"sm_90a", "compute_90a"}
    assert targets("cuda13-sm90a.cubin") == {"sm_90a"}
    assert targets("cuda13-sm90.cubin") == {"sm_90"}
    assert targets("cuda13-sm100f.cubin") == {"sm_100f"}
    assert targets("cuda13-sm100.cubin") == {"sm_100"}
    assert targets("nvrtc12-sm90a.cubin") == {"sm_90a"}


def test_relocatable_code_does_not_count_where_linked_code_is() -> None:
    result = scan("cuda11-rdc.so")
    assert sorted((u.place, u.linkable) for u in result.units) == [
        (".nv_fatbin", False),
        ("__nv_relfatbin", True),
        ("__nv_relfatbin", True),
    ]
    assert [u.place for u in result.loadable] == [".nv_fatbin"]


def test_an_empty_cubin_for_the_linkers_default_architecture_does_not_count() -> None:
    result = scan("cuda11-stub.so")
    assert {e.target for u in result.units if u.empty for e in u.entries} >= {"sm_52"}
    assert {e.target for u in result.loadable for e in u.entries} == {"sm_70", "compute_70"}


def test_lto_code_is_reported_and_runs_nowhere_by_itself() -> None:
    assert targets("cuda11-dlto.o") == {"compute_70", "lto_70"}
    assert judge(scan("cuda11-dlto.o"), Arch(70)).verdict is Verdict.JIT


def test_archives_name_the_member() -> None:
    result = scan("cuda11-archive.a")
    assert result.members == 4
    assert [u.place for u in result.units] == [
        "kernel.o: .nv_fatbin",
        "other.o: .nv_fatbin",
        "cuda11-dc.o: __nv_relfatbin",
    ]


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("cuda13-none.so", ""),
        ("cuda13-speed.so", "lz4"),
        ("cuda13-size.so", "zstd"),
        ("cuda13-balance.so", "zstd"),
        ("cuda11-sm70.so", "lz4"),
        ("cuda11-no-compress.so", ""),
    ],
)
def test_every_compression_yields_the_kernels(name: str, compression: str) -> None:
    (unit,) = scan(name).units
    assert compression in {e.compression for e in unit.entries}
    with (GOLDEN / name).open("rb") as handle:
        reader = FileReader(handle)
        for item in unit.entries:
            data = fatbin.payload(reader, item)
            names = cubin.kernels(MemoryReader(data)) if item.kind == fatbin.KIND_ELF else list(ptx.kernels(data))
            assert set(names) == KERNELS


@pytest.mark.parametrize("name", [n for n in TABLE if n.endswith(".cubin")])
def test_kernels_of_a_cubin(name: str) -> None:
    assert set(cubin.kernels(MemoryReader((GOLDEN / name).read_bytes()))) == KERNELS


def test_ptx_versions_are_read_without_decompressing() -> None:
    def versions(name: str) -> set[tuple[int, int]]:
        return {e.version for u in scan(name).units for e in u.entries if e.kind == fatbin.KIND_PTX}

    assert versions("cuda11-sm70.so") == {(7, 8)}
    assert versions("cuda13-size.so") == {(9, 0)}
    assert versions("nvrtc12-compute70.ptx") == {(8, 8)}
