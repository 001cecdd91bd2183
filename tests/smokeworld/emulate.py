"""Builds the probe kernels for the CPU, and a ``libcuda.so.1`` whose device is the host's memory, with g++."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
EMULATION = HERE / "emulation"
KERNELS = HERE.parents[1] / "images/cuda-probe/kernels/gdn.cu"

_LAUNCH = re.compile(r"(\w+<[^;{}]*?>)<<<(.*?)>>>\(\s*(.*?)\);", re.DOTALL)


def compiler(*arguments: str | Path) -> None:
    """Run g++; its messages are in the error."""
    done = subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def build_driver(folder: Path) -> Path:
    """``libcuda.so.1`` in ``folder``, which is to go into LD_LIBRARY_PATH."""
    compiler(EMULATION / "libcuda.cc", "-o", folder / "libcuda.so.1")
    return folder


def build_kernels(target: Path, *, fault: str = "none", contract: str = "log", source: str | None = None) -> Path:
    """The probe library for the CPU, from the same source as for the GPU."""
    text = _LAUNCH.sub(r"emulate::launch(\2, [=]() { \1(\3); });", source or KERNELS.read_text(encoding="utf-8"))
    unit = target.with_suffix(".cc")
    unit.write_text(text, encoding="utf-8")
    defines = [] if fault == "none" else [f"-DGDN_FAULT_{fault.upper().replace('-', '_')}"]
    defines += ["-DGDN_CONTRACT_DECAY"] if contract == "decay" else []
    compiler("-O2", f"-I{EMULATION}", *defines, unit, "-o", target)
    return target
