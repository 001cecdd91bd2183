"""Foretells a layer's parts from a sample: everything is read, but only a sixteenth of each segment is compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from buildkit.image.compress import Codec, Readable, compress_segment
from buildkit.image.tarspan import TarReader
from buildkit.split.bonds import find_bonds
from buildkit.split.feed import Buffers, Place, Raw, feed
from buildkit.split.inventory import Inventory
from buildkit.split.planner import Atoms, Budget, Part, Sizes, plan, recut
from buildkit.split.report import MAX_NAMED, Indivisible, PartReport

SHARE = 16
"""One byte in so many is compressed."""
_LEAST = 2**14
"""Bytes that are compressed at least, where there are so many: less says little."""
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
    predictions: list[int] = []  # for each atom
    buffers = Buffers(1)

    def emit(raw: Raw, place: Place) -> None:
        # From the middle, because files begin with what is not like the rest.
        size = min(len(raw), max(_LEAST, len(raw) // SHARE))
        at = (len(raw) - size) // 2
        if place.opens:
            predictions.append(0)
            atoms.first.append(place.first)
            atoms.end = place.first + 1
        if place.stop is not None:
            atoms.end = place.stop
        predictions[-1] += compress_segment(codec, raw[at : at + size]).size * len(raw) // size
        progress(len(raw))
        if isinstance(raw, memoryview):
            buffers.give(raw)

    feed(reader, inventory, codec, budget, emit, buffers)
    progress(reader.finish())
    share = sum(predictions) / max(1, tar_size_of(inventory, atoms, range(len(atoms))))

    def sizes_of(table: Atoms) -> Sizes:
        """By atom; a piece of an atom that was cut further has its share."""
        shares = ((atoms.of(table.first[n]), tar_size_of(inventory, table, (n,))) for n in range(len(table)))
        return Sizes(
            atoms=[predictions[a] * size // tar_size_of(inventory, atoms, (a,)) for a, size in shares],
            global_header=lambda number: round(len(reader.globals[number].raw) * share),
            directory=lambda _: _DIRECTORY,
        )

    bonds = find_bonds(inventory)
    sizes = sizes_of(atoms)
    cuts = recut(atoms, bonds, budget, sizes.atoms)
    fine = Atoms((e for a, first in enumerate(atoms.first) for e in (first, *cuts.get(a, ()))), end=atoms.end)
    sizes = sizes_of(fine)
    parts = plan(inventory, fine, bonds, budget, sizes)
    return Survey(
        entries=len(inventory),
        tar_size=reader.offset,
        predicted=sum(predictions) + budget.overhead,
        parts=tuple(part_report(inventory, fine, part, predicted=part.size) for part in parts),
    )


def tar_size_of(inventory: Inventory, atoms: Atoms, numbers: Iterable[int]) -> int:
    """Bytes of the spans of these atoms. Spans of an atom have no gap between them."""
    total = 0
    for atom in numbers:
        run = atoms.entries(atom)
        total += inventory.start[run.stop - 1] + inventory.length[run.stop - 1] - inventory.start[run.start]
    return total


def part_report(inventory: Inventory, atoms: Atoms, part: Part, *, predicted: int) -> PartReport:
    """A part for people."""
    return PartReport(
        entries=sum(len(atoms.entries(atom)) for atom in part.atoms),
        carried=len(part.carried),
        tar_size=tar_size_of(inventory, atoms, part.atoms) + sum(inventory.length[e] for e in part.carried) + 1024,
        predicted=predicted,
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
