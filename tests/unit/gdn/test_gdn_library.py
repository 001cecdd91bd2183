"""What can be said of a kernels' library without a GPU: it is looked at before any driver is asked."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from buildkit.errors import FormatError, NotFoundError, UsageError
from buildkit.gdn.compare import Verdict
from buildkit.gdn.contracts import CONTRACTS
from buildkit.gdn.harness import run_kernel_level, symbols
from buildkit.gdn.library import exports


def library(target: Path, names: tuple[str, ...], *options: str) -> Path:
    source = target.with_suffix(".c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", *options, str(source), "-o", str(target)], check=True)
    return target


ALL = tuple(dict.fromkeys(name for c in CONTRACTS.values() for name in symbols(c, ("f32", "f16"))))


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def test_what_a_library_exports_is_read_stripped_or_not(tmp_path: Path) -> None:
    assert {"one", "two"} <= (exports(library(tmp_path / "a.so", ("one", "two"))) or set())
    stripped = exports(library(tmp_path / "b.so", ("one", "two"), "-s"))
    assert stripped is not None
    assert {"one", "two"} <= stripped
    hidden = exports(library(tmp_path / "c.so", ("one",), "-fvisibility=hidden"))
    assert "one" not in (hidden or ())
    # a name that is only wanted is not exported
    (tmp_path / "d.c").write_text("void other(void); void one(void) { other(); }")
    subprocess.run(["gcc", "-shared", "-fPIC", str(tmp_path / "d.c"), "-o", str(tmp_path / "d.so")], check=True)
    assert "other" not in (exports(tmp_path / "d.so") or ())


def test_a_library_without_sections_cannot_be_told(tmp_path: Path) -> None:
    path = library(tmp_path / "a.so", ("one",))
    data = bytearray(path.read_bytes())
    data[40:48] = struct.pack("<Q", 0)
    data[60:64] = bytes(4)
    path.write_bytes(data)
    assert exports(path) is None


def test_only_a_proper_library_is_not_run_without_a_gpu(tmp_path: Path) -> None:
    for contract in ("auto", *CONTRACTS):
        report = run_kernel_level(library(tmp_path / "good.so", ALL), contract=contract)
        assert report.verdict is Verdict.NOT_RUN
        assert "no NVIDIA driver" in report.reason


@pytest.mark.parametrize("contract", ["auto", *CONTRACTS])
def test_a_library_without_entry_points_fails_without_a_gpu(tmp_path: Path, contract: str) -> None:
    report = run_kernel_level(library(tmp_path / "other.so", ("main_loop",)), contract=contract)
    assert report.verdict is Verdict.FAIL
    assert report.reason.startswith("other.so lacks 14 of 14 entry points: causal_conv1d_fwd_f32, ")
    names = tuple(name for name in ALL if not name.startswith("l2_norm"))
    report = run_kernel_level(library(tmp_path / "part.so", names), contract=contract)
    assert report.verdict is Verdict.FAIL
    assert report.reason.startswith("part.so lacks 2 of 14 entry points: l2_norm_last_dim_f32, l2_norm_last_dim_f16; ")
    assert "no NVIDIA driver" in report.reason


def test_what_is_no_library_fails_without_a_gpu(tmp_path: Path) -> None:
    good = library(tmp_path / "good.so", ALL).read_bytes()
    program = tmp_path / "program"
    (tmp_path / "p.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-c", str(tmp_path / "p.c"), "-o", str(program)], check=True)
    for data in (b"", b"text", b"#!/bin/sh\n", good[:4], good[:64], b"\0" * 4096, program.read_bytes(), b"!<arch>\n"):
        path = tmp_path / "bad.so"
        path.write_bytes(data)
        report = run_kernel_level(path)
        assert report.verdict is Verdict.FAIL
        assert report.reason.startswith("bad.so cannot be loaded: ")


def test_a_library_cut_short_anywhere_fails(tmp_path: Path) -> None:
    good = library(tmp_path / "good.so", ("one",)).read_bytes()
    path = tmp_path / "cut.so"
    for size in range(0, len(good), 997):
        path.write_bytes(good[:size])
        with pytest.raises(FormatError):
            exports(path)


def test_what_is_no_file_is_not_found_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(NotFoundError, match="no library"):
            run_kernel_level(path)


def test_a_gpu_has_no_negative_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="-1 is not the number of a GPU"):
        run_kernel_level(library(tmp_path / "a.so", ("one",)), ordinal=-1)
