"""How fast the check is, and how much memory it takes, beside the least that reading the same bytes costs.

    python benchmarks/check.py --file libtorch_cuda.so --wheel torch.whl --archive image.tar --cuobjdump cuobjdump

Each run is a process of its own; what ``python -c pass`` takes is subtracted. The best of ``--repeat`` runs counts. The
yardsticks: for a wheel, inflating its members with isal and nothing else; for an archive, reading the file through
sha256; for a file, ``cuobjdump --list-elf`` where there is one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

INFLATE = """
import sys, zipfile
from isal import isal_zlib
with open(sys.argv[1], "rb") as raw, zipfile.ZipFile(raw) as archive:
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_DEFLATED:
            continue
        raw.seek(info.header_offset + 26)
        name, extra = int.from_bytes(raw.read(2), "little"), int.from_bytes(raw.read(2), "little")
        raw.seek(name + extra, 1)
        inflate, left = isal_zlib.decompressobj(-15), info.compress_size
        while left:
            data = raw.read(min(left, 1 << 18))
            left -= len(data)
            inflate.decompress(data)
"""
SHA256 = """
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb", buffering=0) as file:
    while data := file.read(1 << 20):
        digest.update(data)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Wall-clock and processor seconds, and the peak of resident memory in bytes."""

    seconds: float
    cpu: float
    memory: int


def run(command: list[str]) -> Run:
    """Run a command; its output is thrown away. Exit codes 0 and 1 (a violated policy) are both results."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        sys.exit(f"{command[0]} ended with {process.returncode}: {command}")
    return Run(seconds=seconds, cpu=usage.ru_utime + usage.ru_stime, memory=usage.ru_maxrss * 1024)


def best(command: list[str], repeat: int) -> Run:
    return min((run(command) for _ in range(repeat)), key=lambda r: r.seconds)


def show(name: str, result: Run, base: Run) -> None:
    seconds, cpu = result.seconds - base.seconds, result.cpu - base.cpu
    print(f"{name:<44} {seconds:8.3f} s {cpu:8.3f} s cpu {result.memory / 1e6:8.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, action="append", default=[])
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    parser.add_argument("--archive", type=Path, action="append", default=[], help="a docker-archive")
    parser.add_argument("--cuobjdump")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    python = sys.executable
    check = [python, "-m", "buildkit.check"]
    base = best([python, "-c", "pass"], options.repeat)
    print(f"python -c pass: {base.seconds:.3f} s, {base.memory / 1e6:.0f} MB (subtracted from the times below)")
    for path in options.file:
        show(f"check {path.name}", best([*check, str(path.resolve()), "sm_70"], options.repeat), base)
        if options.cuobjdump:
            show(
                f"cuobjdump --list-elf {path.name}",
                best([options.cuobjdump, "--list-elf", str(path.resolve())], 1),
                Run(seconds=0, cpu=0, memory=0),
            )
    for path in options.wheel:
        show(f"inflate {path.name[:30]}", best([python, "-c", INFLATE, str(path.resolve())], options.repeat), base)
        show(f"check {path.name[:30]}", best([*check, str(path.resolve()), "sm_70"], options.repeat), base)
    for path in options.archive:
        show(f"sha256 {path.name}", best([python, "-c", SHA256, str(path.resolve())], options.repeat), base)
        show(
            f"check docker-archive:{path.name}",
            best([*check, f"docker-archive:{path.resolve()}", "sm_70"], options.repeat),
            base,
        )


if __name__ == "__main__":
    main()
