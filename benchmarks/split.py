"""Measures splitting: against compressing alone, with a million entries, and what of a changed image is used again.

::

    python benchmarks/split.py speed SOURCE [--spool DIR]   # compressing only, splitting into a layout; ratio
    python benchmarks/split.py entries [COUNT ...]          # layers of that many entries: time, time per entry, memory
    python benchmarks/split.py plan [COUNT]                 # the pure planner alone
    python benchmarks/split.py reuse SOURCE [--spool DIR]   # share of bytes used again after a change

Every measurement runs in a process of its own, because peak memory belongs to a process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from buildkit.image.compress import Compressor
from buildkit.image.source import ImageSource, LayerStream, SourceLayer
from buildkit.image.streams import tar_of
from buildkit.image.tarspan import DIRECTORY, HARDLINK, REGULAR, TRAILER, TarReader
from buildkit.image.transports import open_source
from buildkit.image.write import write_image
from buildkit.model import Digest, ImageConfig, Manifest
from buildkit.split.bonds import find_bonds
from buildkit.split.inventory import Inventory
from buildkit.split.planner import Atoms, Budget, Sizes, plan, recut
from buildkit.split.rewrite import SplitOptions, split_image
from buildkit.units import format_size


def peak() -> int:
    """Bytes of memory that this process has used at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(*arguments: str) -> dict[str, Any]:
    """Run this program in a process of its own; what it prints last, decoded."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.monotonic() - self._wall, "cpu": time.process_time() - self._cpu}


# Speed ---------------------------------------------------------------------------------------------------------------


def compress_only(name: str, folder: Path) -> dict[str, Any]:
    """Every layer compressed into a file, as a push would."""
    with open_source(name) as source, Compressor() as compressor:
        clock = Clock()
        for stream in source.stream(range(len(source.layers))):
            with stream, open(folder / f"{stream.index}", "wb") as file:
                compressor.run(tar_of(stream), file.write, hash_input=False)
        return {**clock.read(), "memory": peak()}


def split_to_layout(name: str, folder: Path, stable: bool) -> dict[str, Any]:
    """The whole way from the source into an ``oci:`` layout."""
    target = folder / "layout"
    with open_source(name) as source:
        clock = Clock()
        with split_image(source, SplitOptions(spool=target, stable=stable)) as result:
            image = result.image
            image.link_blobs(target)
            write_image(f"oci:{target}:x", image.output())
            return {**clock.read(), "memory": peak(), "layers": result.report.layers_after}


def speed(name: str, spool: Path, rounds: int) -> None:
    rows = []
    for _ in range(rounds):
        row = {}
        for what in ("compress", "split", "sequential"):
            folder = Path(tempfile.mkdtemp(dir=spool))
            try:
                row[what] = apart("_speed", what, name, str(folder))
            finally:
                shutil.rmtree(folder)
        rows.append(row)
    print("| round | way | wall s | cpu s | wall ratio | cpu ratio | peak memory | layers |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for number, row in enumerate(rows, 1):
        base = row["compress"]
        for what, found in row.items():
            print(
                f"| {number} | {what} | {found['seconds']:.1f} | {found['cpu']:.1f} "
                f"| {found['seconds'] / base['seconds']:.2f} | {found['cpu'] / base['cpu']:.2f} "
                f"| {format_size(found['memory'])} | {found.get('layers', '-')} |"
            )


# Many entries --------------------------------------------------------------------------------------------------------


class Made:
    """A tar that is made while it is read: directories of 100 files, now and then a hard link."""

    def __init__(self, count: int) -> None:
        self._parts = self._make(count)
        self._rest = b""

    @staticmethod
    def _make(count: int) -> Iterator[bytes]:
        draw = random.Random(1)
        noise = draw.randbytes(2**20)
        batch = []
        for n in range(count):
            folder = b"srv/data/%04d/%04d" % (n // 10_000, n // 100 % 100)
            if n % 100 == 0:
                batch.append(_header(folder, b"5", 0))
            elif n % 100 == 99:
                batch.append(_header(folder + b"/link-%07d" % n, b"1", 0, folder + b"/file-%07d" % (n - 50)))
            else:
                size = draw.randrange(1, 512)
                at = draw.randrange(2**19)
                batch.append(_header(folder + b"/file-%07d" % n, b"0", size) + noise[at : at + size].ljust(512, b"\0"))
            if len(batch) == 1000:
                yield b"".join(batch)
                batch = []
        yield b"".join(batch) + TRAILER

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            self._rest = next(self._parts, b"")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


_TEMPLATE = b"0000644\0" + b"0000000\0" * 2


def _header(name: bytes, kind: bytes, size: int, link: bytes = b"") -> bytes:
    block = b"".join(
        (name.ljust(100, b"\0"), _TEMPLATE, b"%011o\0" % size, b"%011o\0" % 1, b" " * 8, kind, link.ljust(100, b"\0"),
         b"ustar\x0000", bytes(247))
    )  # fmt: skip
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


class OneLayer:
    """An image of one layer that is read from ``opener``; its diff_id is not known and not checked."""

    method = "made"
    reason = ""
    manifest: Manifest | None = None
    random_access = False

    def __init__(self, name: str, opener: Callable[[], Any]) -> None:
        self.name = name
        self._opener = opener
        self.layers = (SourceLayer(diff_id=Digest.of(name.encode())),)
        document = {"rootfs": {"type": "layers", "diff_ids": [str(self.layers[0].diff_id)]}}
        self._config = ImageConfig.parse(json.dumps(document).encode(), where=name)
        self.image_id = self._config.digest

    def config(self) -> ImageConfig:
        return self._config

    def stream(self, wanted: Collection[int]) -> Iterator[LayerStream]:
        for index in sorted(wanted):
            yield self.open(index)

    def open(self, index: int) -> LayerStream:
        return _Plain(self._opener(), index, self.layers[index])

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        pass


class _Plain:
    kind: Literal["tar", "blob"] = "tar"

    def __init__(self, reader: Any, index: int, layer: SourceLayer) -> None:
        self.index = index
        self.layer = layer
        self.read = reader.read

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        pass


def split_made(count: int) -> dict[str, Any]:
    source = OneLayer(f"made:{count}", lambda: Made(count))
    clock = Clock()
    # The limit grows with the layer, so that all are divided into about as many parts.
    with split_image(source, SplitOptions(limit=max(2**20, count * 20))) as result:
        return {**clock.read(), "memory": peak(), "parts": result.report.layers_after}


def read_made(count: int) -> dict[str, Any]:
    """Making and reading the tar alone, to take it off."""
    clock = Clock()
    made = Made(count)
    while made.read(2**20):
        pass
    return clock.read()


def entries(counts: list[int]) -> None:
    print("| entries | wall s | of which making the tar | µs per entry (cpu) | peak memory | parts |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for count in counts:
        found, made = apart("_entries", str(count)), apart("_made", str(count))
        print(
            f"| {count} | {found['seconds']:.1f} | {made['seconds']:.1f} "
            f"| {(found['cpu'] - made['cpu']) / count * 1e6:.1f} | {format_size(found['memory'])} | {found['parts']} |"
        )


# The planner alone ---------------------------------------------------------------------------------------------------


def plan_alone(count: int) -> None:
    inventory = Inventory()
    clock = Clock()
    for n in range(count):
        folder = b"srv/data/%04d/%04d" % (n // 10_000, n // 100 % 100)
        kind, name, link = REGULAR, folder + b"/file-%07d" % n, b""
        if n % 100 == 0:
            kind, name = DIRECTORY, folder
        elif n % 100 == 99:
            kind, link = HARDLINK, folder + b"/file-%07d" % (n - 50)
        elif n % 1000 == 501:
            name = folder + b"/.wh.file-%07d" % n
        inventory.append(name=name, kind=kind, start=n * 1024, length=1024, link=link)
    stock = clock.read()
    for label, per_atom in (("atoms of 100 entries", 100), ("every entry an atom", 1)):
        clock = Clock()
        bonds = find_bonds(inventory)
        found = clock.read()
        atoms = Atoms(range(0, count, per_atom), end=count)
        sizes = Sizes(atoms=[400 * per_atom] * len(atoms), global_header=lambda _: 100, directory=lambda _: 150)
        budget = Budget(limit=count * 4, overhead=30, stable=True)
        clock = Clock()
        cuts = recut(atoms, bonds, budget, sizes.atoms)
        fine = Atoms(sorted({*atoms.first, *(e for cut in cuts.values() for e in cut)}), end=count)
        exact = replace(sizes, atoms=[400 * len(fine.entries(a)) for a in range(len(fine))])
        parts = plan(inventory, fine, bonds, budget, exact)
        done = clock.read()
        print(
            f"{count} entries, {label}: taking stock {stock['seconds']:.1f} s, bonds {found['seconds']:.1f} s, "
            f"planning {done['seconds']:.1f} s, {len(parts)} parts, peak memory {format_size(peak())}"
        )


# Re-use --------------------------------------------------------------------------------------------------------------


class Changed:
    """A layer's tar with a change: spans are passed on, ``edit`` may alter one, ``insert`` stand before the first."""

    def __init__(self, stream: LayerStream, insert: bytes, edit: Callable[[bytes, bytes], bytes]) -> None:
        self._parts = self._pass(stream, insert, edit)
        self._rest = b""

    @staticmethod
    def _pass(stream: LayerStream, insert: bytes, edit: Callable[[bytes, bytes], bytes]) -> Iterator[bytes]:
        reader = TarReader(stream, where="layer")
        yield insert
        for entry in reader:
            yield entry.head
            while data := reader.read(2**22):
                yield edit(entry.name, data)
        yield TRAILER

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return b""
            self._rest = part
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def package_of(name: str, layer: int) -> list[bytes]:
    """Files of one package of medium size, by dpkg's lists in the layer: one whose largest file is below 20 MB."""
    lists: dict[bytes, list[bytes]] = {}
    sizes: dict[bytes, int] = {}
    with open_source(name) as source, source.open(layer) as stream:
        reader = TarReader(tar_of(stream), where="layer")
        for entry in reader:
            sizes[entry.name] = entry.size
            if entry.name.startswith(b"var/lib/dpkg/info/") and entry.name.endswith(b".list"):
                data = b""
                while piece := reader.read(2**20):
                    data += piece
                lists[entry.name] = [line.lstrip(b"/") for line in data[: entry.size].split(b"\n") if line]
    good = {
        listing: [n for n in names if sizes.get(n)]
        for listing, names in lists.items()
        if 2**20 < max((sizes.get(n, 0) for n in names), default=0) < 20 * 10**6
    }
    listing = max(sorted(good), key=lambda key: sum(sizes[n] for n in good[key]))
    print(
        f"package: {listing.decode()}, {len(good[listing])} files, {format_size(sum(sizes[n] for n in good[listing]))}"
    )
    return [*good[listing], listing, b"var/lib/dpkg/status"]


def blobs(name: str, layer: int, spool: Path, change: str, stable: bool, touched: Collection[bytes]) -> dict[str, Any]:
    files = frozenset(touched)

    def edit(path: bytes, data: bytes) -> bytes:
        if change == "package" and path in files and data.strip(b"\0"):
            # Another build of the same sources: every page differs somewhere.
            out = bytearray(data)
            for at in range(0, max(1, len(data.rstrip(b"\0"))), 4096):
                out[at] ^= 0x5A
            return bytes(out)
        return data

    insert = _header(b"a-new-file", b"0", 300) + b"new".ljust(512, b"\0") if change == "file" else b""
    with open_source(name) as source:
        changed = OneLayer(name, lambda: Changed(tar_of(source.open(layer)), insert, edit))
        with split_image(changed, SplitOptions(spool=spool, stable=stable, max_layers=1000)) as result:
            parts = result.report.layers[0].parts
            return {
                "blobs": {str(p.digest): p.size for p in parts},
                "whole": [str(p.digest) for p in parts if p.indivisible],
            }


def reuse(name: str, spool: Path) -> None:
    with open_source(name) as source:
        layer = max(range(len(source.layers)), key=lambda n: _size(source, n))
    touched = package_of(name, layer)
    listing = spool / "touched"
    listing.write_bytes(b"\n".join(touched))
    print("| layout | change | parts | mean fill | bytes used again | of what was divided | parts sent |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    limit = SplitOptions().limit
    for layout in ("sequential", "stable"):
        before: dict[str, int] = {}
        for change in ("none", "file", "package"):
            found = apart("_reuse", name, str(layer), str(spool), change, layout)
            sizes, whole = found["blobs"], set(found["whole"])
            before = before or sizes
            again = sum(size for digest, size in sizes.items() if digest in before)
            divided = {d: s for d, s in sizes.items() if d not in whole}
            divided_again = sum(s for d, s in divided.items() if d in before)
            print(
                f"| {layout} | {change} | {len(sizes)} | {sum(divided.values()) / len(divided) / limit:.0%} "
                f"| {again / sum(sizes.values()):.1%} | {divided_again / sum(divided.values()):.1%} "
                f"| {sum(d not in before for d in sizes)} |"
            )
    listing.unlink()


def _size(source: ImageSource, layer: int) -> int:
    found = source.layers[layer]
    return found.tar_size or (found.blob.size if found.blob else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("speed", "entries", "plan", "reuse"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--spool", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = sys.argv[1:]
    match arguments:
        case ["_speed", "compress", name, folder]:
            print(json.dumps(compress_only(name, Path(folder))))
        case ["_speed", layout, name, folder]:
            print(json.dumps(split_to_layout(name, Path(folder), layout == "split")))
        case ["_entries", count]:
            print(json.dumps(split_made(int(count))))
        case ["_made", count]:
            print(json.dumps(read_made(int(count))))
        case ["_reuse", name, layer, spool, change, layout]:
            touched = (Path(spool) / "touched").read_bytes().split(b"\n")
            print(json.dumps(blobs(name, int(layer), Path(spool), change, layout == "stable", touched)))
        case _:
            given = parser.parse_args(arguments)
            given.spool.mkdir(parents=True, exist_ok=True)
            match given.what:
                case "speed":
                    speed(given.arguments[0], given.spool, given.rounds)
                case "entries":
                    entries([int(n) for n in given.arguments] or [250_000, 500_000, 1_000_000])
                case "plan":
                    plan_alone(int((given.arguments or ["1000000"])[0]))
                case _:
                    reuse(given.arguments[0], given.spool)


if __name__ == "__main__":
    main()
