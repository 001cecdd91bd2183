"""An image of this machine's own Python with NumPy, made without any registry: the probe server runs in it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy

import buildkit

LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "lib2to3", "__pycache__", "config"}
IMAGE = "bk-test-smoke:probe"
LIBRARY = "/usr/local/lib/libgdn.so"
PYTHON = Path(os.path.realpath(sys.executable))


def root_tar(extra: Mapping[str, Path]) -> Iterator[bytes]:
    """The root file system as a tar: Python where it lies here, what it is linked with, NumPy, this package and its
    tests in /app, and ``extra``: path in the image → file here, or a link's target where the file is none."""
    packages = Path(numpy.__file__).parents[1]
    stdlib = Path(sysconfig.get_path("stdlib"))
    trees = {
        stdlib: stdlib,
        Path("/app/buildkit"): Path(buildkit.__file__).parent,
        Path("/app/smokeworld"): Path(__file__).parent,
        Path("/app/numpy"): packages / "numpy",
        Path("/app/numpy.libs"): packages / "numpy.libs",
    }
    files = {target / path.relative_to(source): path for target, source in trees.items() for path in _walk(source)}
    binaries = [PYTHON, *(path for path in files.values() if ".so" in path.suffixes)]
    files |= {library: library for library in _linked(binaries)} | {PYTHON: PYTHON}
    files |= {Path(name): path for name, path in extra.items()}
    for target, path in files.items():
        entry = tarfile.TarInfo(str(target).lstrip("/"))
        entry.mode = 0o755
        if not path.is_file():
            entry.type, entry.linkname = tarfile.SYMTYPE, str(path)
            yield entry.tobuf()
            continue
        data = path.read_bytes()
        entry.size = len(data)
        yield entry.tobuf() + data + b"\0" * (-len(data) % 512)
    for name, mode in (("tmp", 0o1777), ("dev", 0o755), ("proc", 0o755), ("sys", 0o755)):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        yield entry.tobuf()
    yield io.BytesIO(b"\0" * 1024).read()


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            if path.name.split("-")[0] not in LEFT_OUT:
                yield from _walk(path)
        elif path.suffix != ".a":
            yield path


def _linked(binaries: list[Path]) -> set[Path]:
    """The shared libraries that the loader finds for the binaries, outside of their own folders."""
    done = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True)
    found = re.findall(r"(?:=> )?(/\S+) \(0x", done.stdout)
    return {Path(name) for name in found if ".libs/" not in name}
