"""The table of ``docs/howto/old-card.md``: which torch has code for which card. Downloads 6 GB, a wheel at a time."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from buildkit.check import run_check
from buildkit.cuda.arch import Arch
from buildkit.cuda.fatbin import KIND_ELF
from buildkit.cuda.policy import Policy
from buildkit.cuda.scan import coverage

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "old-card.md").read_text()
ROWS = re.findall(r"^\| \**([0-9.]+)\** \| ([0-9.]+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def test_the_table_is_found() -> None:
    assert len(ROWS) >= 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_the_table_says_what_the_wheels_hold(row: tuple[str, ...], tmp_path: Path) -> None:
    torch, cuda, *covered = row
    for_python = ["--python-version", "3.11", "--only-binary", ":all:"]
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux1")]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet", "-d", str(tmp_path)]
    subprocess.run([*command, *for_python, *platforms, f"torch=={torch}"], check=True)
    (wheel,) = tmp_path.glob("torch-*.whl")
    try:
        report = run_check(wheel, Policy())
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            needs = re.findall(
                r"^Requires-Dist: (?:nvidia-cuda-runtime-cu12|cuda-toolkit\[\S+\]) ?\(?==(\d+\.\d+)",
                archive.read(name).decode(),
                re.MULTILINE,
            )
    finally:
        wheel.unlink()
    assert needs == [cuda]
    library = next(file for file in report.files if file.path.endswith("/libtorch_cuda.so"))
    counts, total = coverage(library.scan.loadable), len(library.scan.units)
    found = [f"{counts.get((KIND_ELF, Arch(arch)), 0)} of {total}" for arch in (60, 70, 75)]
    assert [text.strip("*") for text in covered] == ["none" if text.startswith("0 ") else text for text in found]
