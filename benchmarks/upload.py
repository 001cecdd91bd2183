"""One complete blob to the real registry: this client against curl PATCHing the same bytes, in turns.

``python benchmarks/upload.py [--size 600MB] [--rounds 5]`` prints the rates and their ratio. The registry and its data
live in memory where there is ``/dev/shm``: what is compared is the clients, not a disk. curl reads its chunks from
files cut beforehand, outside the measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from buildkit import stack
from buildkit.blob import BlobState
from buildkit.model import OCI_LAYER_GZIP, Descriptor, Digest
from buildkit.registry import Anonymous, RegistryClient, RegistryOptions
from buildkit.stack import StackOptions
from buildkit.units import format_size, parse_size

CHUNK = RegistryOptions().chunk_size


class _Blob:
    """A complete blob in a file."""

    label = "blob"

    def __init__(self, path: Path, descriptor: Descriptor) -> None:
        self._path, self._descriptor = path, descriptor

    def state(self) -> BlobState:
        return BlobState(available=self._descriptor.size, descriptor=self._descriptor)

    def wait(self, available: int, timeout: float) -> BlobState:
        del available, timeout
        return self.state()

    def window(self, start: int, end: int) -> BinaryIO:
        del end
        file = self._path.open("rb", buffering=0)
        file.seek(start)
        return file


def _curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", "-i", *arguments], capture_output=True, text=True, check=True)
    if not re.match(r"HTTP/1.1 20[124]", done.stdout):
        raise SystemExit(f"curl: {done.stdout[:300]}")
    location = re.search(r"(?im)^location: (\S+)", done.stdout)
    return location[1] if location else ""


def with_curl(registry: str, repository: str, chunks: list[Path], digest: Digest) -> float:
    """Seconds."""
    started, offset = time.perf_counter(), 0
    location = _curl("-X", "POST", f"http://{registry}/v2/{repository}/blobs/uploads/")
    for chunk in chunks:
        size = chunk.stat().st_size
        location = _curl(
            "-X", "PATCH", "-H", "Content-Type: application/octet-stream", "-H", "Expect:",
            "-H", f"Content-Range: {offset}-{offset + size - 1}", "-T", str(chunk), location,
        )  # fmt: skip
        offset += size
    _curl("-X", "PUT", "-H", "Content-Length: 0", f"{location}&digest={digest}")
    return time.perf_counter() - started


def with_ours(registry: str, repository: str, blob: _Blob, state: Path) -> tuple[float, float]:
    """Seconds of the clock, and of this process's CPU time."""
    started, cpu = time.perf_counter(), time.process_time()
    with RegistryClient(registry, credentials=Anonymous(), state=state) as client:
        client.upload(repository, blob)
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="600MB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    size = parse_size(arguments.size)
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="bk-upload-", dir=base))
    try:
        world = stack.up(folder / "stack", StackOptions(engine="none"))
        block = os.urandom(2**24)
        path, hasher = folder / "blob", hashlib.sha256()
        chunks = []
        with path.open("wb") as whole:
            for number, start in enumerate(range(0, size, CHUNK)):
                chunks.append(folder / f"chunk-{number}")
                length = min(CHUNK, size - start)
                piece = (block * (length // len(block) + 1))[:length]
                chunks[-1].write_bytes(piece)
                whole.write(piece)
                hasher.update(piece)
        digest = Digest("sha256", hasher.hexdigest())
        blob = _Blob(path, Descriptor(media_type=OCI_LAYER_GZIP, digest=digest, size=size))
        ours, curls, cpus = [], [], []
        for number in range(arguments.rounds):
            curls.append(with_curl(world.registry, f"curl/r{number}", chunks, digest))
            seconds, cpu = with_ours(world.registry, f"ours/r{number}", blob, folder)
            ours.append(seconds)
            cpus.append(cpu)
        for name, times in (("curl", curls), ("buildkit", ours)):
            print(f"{name:10} {format_size(int(size / statistics.median(times)))}/s (median of {len(times)})")
        print(f"ratio      {statistics.median(curls) / statistics.median(ours):.2f} (more is better)")
        print(f"CPU        {format_size(int(size / statistics.median(cpus)))} per second of this process's CPU time")
    finally:
        stack.down(folder / "stack", purge=True)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
