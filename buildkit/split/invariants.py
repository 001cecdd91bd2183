"""Checks a plan against the rules of dividing, by the names of the entries alone.

Written apart from the planner and in the plainest way, so that the two do not share a mistake. It takes a dictionary of
all paths: for tests, and for a look at a plan that is in doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from buildkit.image.tarspan import DIRECTORY, HARDLINK
from buildkit.split.inventory import WHITEOUT, Inventory
from buildkit.split.planner import Atoms, Budget, Part, Sizes, pieces


def check_plan(
    inventory: Inventory, atoms: Atoms, parts: Sequence[Part], budget: Budget, sizes: Sizes
) -> tuple[str, ...]:
    """What is wrong with the plan, one line each; empty if nothing is.

    Nothing is lost or doubled, the source's order is kept, what is bound stays together, whiteouts are in the first
    part, the directories above an entry are there once, sizes are exact, and no part is above the limit but for those
    that say so and hold nothing that could go elsewhere.
    """
    return tuple(_Check(inventory, atoms, parts, budget, sizes).run())


class _Check:
    def __init__(self, inventory: Inventory, atoms: Atoms, parts: Sequence[Part], budget: Budget, sizes: Sizes) -> None:
        self._inv = inventory
        self._atoms = atoms
        self._parts = parts
        self._budget = budget
        self._sizes = sizes
        self._part_of: dict[int, int] = {}
        self._names = [inventory.name(e) for e in range(len(inventory))]
        self._by_name: dict[bytes, list[int]] = defaultdict(list)
        for e, name in enumerate(self._names):
            self._by_name[name].append(e)

    def run(self) -> Iterator[str]:
        yield from self._complete()
        if len(self._part_of) != len(self._inv):
            return
        yield from self._ordered()
        yield from self._bound()
        yield from self._whiteouts()
        yield from self._directories()
        yield from self._within()

    def _complete(self) -> Iterator[str]:
        for number, part in enumerate(self._parts):
            if not part.atoms and len(self._inv):
                yield f"part {number} is empty"
            for atom in part.atoms:
                for e in self._atoms.entries(atom):
                    if e in self._part_of:
                        yield f"{self._inv.show(e)} is in parts {self._part_of[e]} and {number}"
                    self._part_of[e] = number
        for e in range(len(self._inv)):
            if e not in self._part_of:
                yield f"{self._inv.show(e)} is in no part"

    def _ordered(self) -> Iterator[str]:
        for number, part in enumerate(self._parts):
            starts = []
            headers = []
            for piece in pieces(self._inv, self._atoms, part):
                if piece.kind == "global":
                    headers.append(piece.number)
                    continue
                e = self._atoms.first[piece.number] if piece.kind == "atom" else piece.number
                starts.append(self._inv.start[e])
                in_force = sum(before <= e for before in self._inv.global_before)
                if headers != list(range(in_force)):
                    yield f"part {number}: {self._inv.show(e)} stands behind other global headers than in the source"
            if any(b <= a for a, b in pairwise(starts)):
                yield f"part {number} is not in the source's order"

    def _bound(self) -> Iterator[str]:
        for name, entries in self._by_name.items():
            if len({self._part_of[e] for e in entries}) > 1:
                yield f"entries of {name!r} are in several parts"
        for link in self._inv.links(HARDLINK):
            for target in self._by_name.get(link.target, ()):
                if self._part_of[target] != self._part_of[link.entry]:
                    yield f"{self._inv.show(link.entry)} is apart from its target"
        missing: dict[bytes, int] = {}
        for link in self._inv.links(HARDLINK):
            if link.target not in self._by_name:
                first = missing.setdefault(link.target, self._part_of[link.entry])
                if first != self._part_of[link.entry]:
                    yield f"links to {link.target!r} in a lower layer are in several parts"
        for e, name in enumerate(self._names):
            directory, _, base = name.rpartition(b"/")
            if base.startswith(WHITEOUT):
                for other in self._at(_joined(directory, base[len(WHITEOUT) :])):
                    if self._part_of[other] != self._part_of[e]:
                        yield f"{self._inv.show(e)} is apart from what it deletes"
            for above in _above(name):
                for other in self._by_name.get(above, ()):
                    if self._inv.kind[other] != DIRECTORY and self._part_of[other] != self._part_of[e]:
                        yield f"{self._inv.show(e)} is apart from {self._inv.show(other)}, which is no directory"

    def _whiteouts(self) -> Iterator[str]:
        for e, name in enumerate(self._names):
            if name.rpartition(b"/")[2].startswith(WHITEOUT) and self._part_of[e] != 0:
                yield f"whiteout {self._inv.show(e)} is in part {self._part_of[e]}"

    def _directories(self) -> Iterator[str]:
        last = {
            name: [e for e in entries if self._inv.kind[e] == DIRECTORY][-1:] for name, entries in self._by_name.items()
        }
        for number, part in enumerate(self._parts):
            carried = list(part.carried)
            for e in carried:
                if self._part_of[e] == number or carried.count(e) > 1:
                    yield f"part {number} has {self._inv.show(e)} twice"
                if last[self._names[e]] != [e]:
                    yield f"part {number} repeats {self._inv.show(e)}, which is not the last entry of its directory"
            held = {self._names[e] for e in carried}
            held |= {self._names[e] for a in part.atoms for e in self._atoms.entries(a)}
            for name in {self._names[e] for a in part.atoms for e in self._atoms.entries(a)}:
                for above in _above(name):
                    if last.get(above) and above not in held:
                        yield f"part {number} has {name!r} without its directory {above!r}"

    def _within(self) -> Iterator[str]:
        for number, part in enumerate(self._parts):
            size = self._budget.overhead + sum(self._sizes.atoms[a] for a in part.atoms)
            size += sum(map(self._sizes.directory, part.carried))
            size += sum(map(self._sizes.global_header, range(part.global_headers)))
            if size != part.size:
                yield f"part {number} takes {size} bytes, not {part.size}"
            if part.indivisible != (size > self._budget.limit):
                yield f"part {number} of {size} bytes is {'' if part.indivisible else 'not '}called indivisible"
            if part.indivisible and len(part.atoms) > 1 and not self._one_bond(part):
                yield f"part {number} is above the limit and could be divided"

    def _one_bond(self, part: Part) -> bool:
        """Whether the atoms hang together by bonds (whiteouts count as bound), each found by name."""
        entries = [e for a in part.atoms for e in self._atoms.entries(a)]
        group = {e: e for e in entries}

        def root(e: int) -> int:
            while group[e] != e:
                e = group[e]
            return e

        def join(several: Sequence[int]) -> None:
            for e in several[1:]:
                group[root(e)] = root(several[0])

        for a in part.atoms:
            join(list(self._atoms.entries(a)))
        join([e for e in entries if self._names[e].rpartition(b"/")[2].startswith(WHITEOUT)])
        targets = defaultdict(list)
        for link in self._inv.links(HARDLINK):
            if link.entry in group:
                targets[link.target].append(link.entry)
        for name in {self._names[e] for e in entries} | set(targets):
            join([e for e in self._by_name.get(name, ()) if e in group] + targets.get(name, []))
        for e in entries:
            directory, _, base = self._names[e].rpartition(b"/")
            if base.startswith(WHITEOUT):
                join([e, *self._at(_joined(directory, base[len(WHITEOUT) :]))])
        # What symbolic links bind beyond names is not worked out here: one such entry excuses the part.
        paths = {above for name in {self._names[e] for e in entries} | set(targets) for above in _above(name)}
        if any(self._inv.kind[other] != DIRECTORY for path in paths for other in self._at(path)):
            return True
        return len({root(e) for e in entries}) == 1

    def _at(self, name: bytes) -> Sequence[int]:
        return self._by_name.get(name, ())


def _joined(directory: bytes, base: bytes) -> bytes:
    return directory + b"/" + base if directory else base


def _above(name: bytes) -> Iterator[bytes]:
    """The paths above a path, the root (``b""``) included."""
    while name:
        name = name.rpartition(b"/")[0]
        yield name
