"""Foretells a layer's parts from a sample: everything is read, but only one segment in sixteen is compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from buildkit.image.compress import Codec, Readable, compress_segment
from buildkit.image.tarspan import TarReader
from buildkit.split.bonds import find_bonds
from buildkit.split.inventory import Inventory
from buildkit.split.measure import Buffers, Place, Raw, feed
from buildkit.split.planner import Atoms, Budget, Part, Sizes, plan, recut
from buildkit.split.report import MAX_NAMED, Indivisible, PartReport

EVERY = 16
"""One segment in so many is the sample."""
_DIRECTORY = 200
"""Bytes that a repeated directory's entry takes, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a sample foretells of a layer. Sizes in bytes; ``predicted`` is that of the whole layer, compressed."""

    entries: int
    tar_size: int
    predicted: int
    parts: tuple[PartReport, ...]


def survey(
    tar: Readable, *, where: str, codec: Codec, budget: Budget, progress: Callable[[int], object] = lambda _: None
) -> Survey:
    """Read ``tar`` to its end. Raises FormatError with the offset for a tar that does not parse."""
    reader = TarReader(tar, where=where)
    inventory = Inventory(where=where)
    atoms = Atoms()
    sampled = [0, 0]
    seen = 0
    buffers = Buffers(1)

    def emit(raw: Raw, place: Place) -> None:
        nonlocal seen
        if seen % EVERY == 0:
            sampled[0] += len(raw)
            sampled[1] += compress_segment(codec, raw).size
        seen += 1
        if place.opens:
            atoms.first.append(place.first)
            atoms.end = place.first + 1
        if place.stop is not None:
            atoms.end = place.stop
        progress(len(raw))
        if isinstance(raw, memoryview):
            buffers.give(raw)

    feed(reader, inventory, codec, budget, emit, buffers)
    progress(reader.finish())
    share = sampled[1] / sampled[0] if sampled[0] else 1.0

    def sizes_of(table: Atoms) -> Sizes:
        return Sizes(
            atoms=[round(tar_size_of(inventory, table, (atom,)) * share) for atom in range(len(table))],
            global_header=lambda number: round(len(reader.globals[number].raw) * share),
            directory=lambda _: _DIRECTORY,
        )

    bonds = find_bonds(inventory)
    sizes = sizes_of(atoms)
    cuts = recut(atoms, bonds, budget, sizes.atoms)
    if cuts:
        atoms = Atoms((e for a, first in enumerate(atoms.first) for e in (first, *cuts.get(a, ()))), end=atoms.end)
        sizes = sizes_of(atoms)
    parts = plan(inventory, atoms, bonds, budget, sizes)
    return Survey(
        entries=len(inventory),
        tar_size=reader.offset,
        predicted=round(reader.offset * share),
        parts=tuple(part_report(inventory, atoms, part, share=share) for part in parts),
    )


def tar_size_of(inventory: Inventory, atoms: Atoms, numbers: Iterable[int]) -> int:
    """Bytes of the spans of these atoms. Spans of an atom have no gap between them."""
    total = 0
    for atom in numbers:
        run = atoms.entries(atom)
        total += inventory.start[run.stop - 1] + inventory.length[run.stop - 1] - inventory.start[run.start]
    return total


def part_report(inventory: Inventory, atoms: Atoms, part: Part, *, share: float) -> PartReport:
    """A part for people; ``share`` is the sample's ratio of compressed to uncompressed bytes."""
    tar_size = tar_size_of(inventory, atoms, part.atoms) + sum(inventory.length[e] for e in part.carried) + 1024
    return PartReport(
        entries=sum(len(atoms.entries(atom)) for atom in part.atoms),
        carried=len(part.carried),
        tar_size=tar_size,
        predicted=round(tar_size * share),
        size=None,
        indivisible=indivisible(inventory, atoms, part) if part.indivisible else None,
    )


def indivisible(inventory: Inventory, atoms: Atoms, part: Part) -> Indivisible:
    """What a part above the limit holds, its largest entries first."""
    entries = [e for atom in part.atoms for e in atoms.entries(atom)]
    largest: Sequence[int] = sorted(entries, key=lambda e: (-inventory.length[e], e))[:MAX_NAMED]
    return Indivisible(
        paths=tuple(inventory.show(e) for e in largest),
        entries=len(entries),
        tar_size=tar_size_of(inventory, atoms, part.atoms),
        size=part.size,
    )
