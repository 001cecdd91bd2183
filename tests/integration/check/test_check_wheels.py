"""PyTorch's own wheels: what `pip install -U torch` does to a V100. Downloads about 1.4 GB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from buildkit.check import CheckReport, run_check
from buildkit.cuda.arch import Arch
from buildkit.cuda.fatbin import KIND_ELF
from buildkit.cuda.policy import Policy, Verdict
from buildkit.cuda.scan import coverage

pytestmark = pytest.mark.slow


def fetched(requirement: str, folder: Path) -> CheckReport:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("torch-*.whl")
    return run_check(wheel, Policy(require=(Arch(70),)))


def test_torch_2_7_1_has_sm_70_in_every_fatbin(tmp_path: Path) -> None:
    report = fetched("torch==2.7.1", tmp_path)
    assert report.ok
    library = next(f for f in report.files if f.path.endswith("/libtorch_cuda.so"))
    assert library.verdict is Verdict.NATIVE
    counts = coverage(library.scan.loadable)
    assert len(library.scan.units) == 378
    assert {a for a in (50, 60, 70, 75, 80, 86, 90) if counts[KIND_ELF, Arch(a)] == 378} == {50, 60, 70, 75, 80, 86, 90}
    assert counts[KIND_ELF, Arch(89)] == 2
    assert sum(len(u.entries) for u in library.scan.units) == 2651


def test_a_current_torch_has_none(tmp_path: Path) -> None:
    report = fetched("torch>=2.14", tmp_path)
    assert not report.ok
    assert {f.path for f in report.violations} >= {"/torch/lib/libtorch_cuda.so"}
    assert next(f for f in report.files if f.path.endswith("/libtorch_cuda.so")).verdict is Verdict.MISSING
