"""Decides which parts a layer is divided into. Pure: inventory, sizes and budget in, parts out.

An *atom* is a run of neighbouring entries that are compressed together; atoms divide the tar without gap. Compressed
sizes of atoms add up, so a plan is exact. Atoms that hold bound entries form a *cluster*, which goes to one part whole.

A part is a subset of the source's spans in the source's order: its atoms, the directories above its entries (repeated
from the source where they lie in another part), the PAX global headers before its entries, and the end of the archive.

Two layouts. *Sequential* fills one part after the other to the limit. *Stable* cuts where the content says so: in the
last quarter of a part the next boundary whose path's hash is low enough ends it (content-defined chunking, as in
Muthitacharoen and others, "A Low-bandwidth Network File System", 2001), and entries of a megabyte and more go to parts
of their own, apart from the crowd of small ones. A small change in the source then moves few boundaries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from buildkit.errors import UsageError
from buildkit.split.bonds import Bonds
from buildkit.split.inventory import NONE, Inventory

MIN_LIMIT = 1024
"""Bytes. Below this even an empty file and the directories above it may be too large."""
LARGE = 2**20
"""Bytes of a span from which on an entry is an atom of its own, and in the stable layout goes with its like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``limit``: most compressed bytes of a part. ``overhead``: bytes of every part beside its spans (framing and end
    of archive). ``stable``: cut where the content says so.
    """

    limit: int
    overhead: int
    stable: bool

    def __post_init__(self) -> None:
        if self.limit < MIN_LIMIT:
            raise UsageError(f"a limit of {self.limit} bytes is too small to hold a layer", hint="use 1 MB or more")

    @property
    def atom(self) -> int:
        """Most bytes (not compressed) of an atom of several entries: a small share of a part, whatever the limit."""
        return max(1024, min(4 * LARGE, self.limit // 32))

    @property
    def reserve(self) -> int:
        """Bytes that the first part leaves free for the whiteouts."""
        return self.limit // 64

    @property
    def ripe(self) -> int:
        """Bytes from which on the stable layout looks for the end of a part."""
        return self.limit * 3 // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Compressed bytes: of each atom, of each global header, and of a directory's entry when it is repeated."""

    atoms: Sequence[int]
    global_header: Callable[[int], int]
    directory: Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer to be. ``atoms`` and ``carried`` (entries of directories that lie in other parts) are ascending.

    ``global_headers`` says how many of the source's global headers it takes, from the first; ``size`` is its exact size
    in compressed bytes. ``indivisible``: it is one cluster, above the limit, that no layer format can divide.
    """

    atoms: tuple[int, ...]
    carried: tuple[int, ...]
    global_headers: int
    size: int
    indivisible: bool


class Atoms:
    """Boundaries of the atoms: ``first[i]`` is the first entry of atom ``i``, ascending; the last ends with the tar."""

    def __init__(self, first: Iterable[int] = (), *, end: int = 0) -> None:
        self.first = array("I", first)
        self.end = end

    def __len__(self) -> int:
        return len(self.first)

    def entries(self, atom: int) -> range:
        after = atom + 1
        return range(self.first[atom], self.first[after] if after < len(self.first) else self.end)

    def of(self, entry: int) -> int:
        """The atom that holds an entry."""
        return bisect_right(self.first, entry) - 1


def plan(inventory: Inventory, atoms: Atoms, bonds: Bonds, budget: Budget, sizes: Sizes) -> tuple[Part, ...]:
    """The parts, lowest first. Depends on the arguments alone; linear in the number of entries."""
    if not len(atoms):
        # A tar without entries stays a layer.
        return (Part(atoms=(), carried=(), global_headers=0, size=budget.overhead, indivisible=False),)
    groups, pinned = clusters(atoms, bonds)
    packing = Packing(inventory, atoms, budget, sizes, bonds.needs)
    if budget.overhead + sum(sizes.atoms) <= budget.limit:
        whole, everything = OpenPart(packing.view), tuple(range(len(atoms)))
        whole.add(everything, whole.delta(everything))
        if not whole.over(budget.limit):
            return (whole.close(budget.limit),)
    for group in groups:
        packing.add(group)
    opened = sorted(packing.parts, key=lambda part: part.atoms[0])
    if pinned:
        # Whiteouts first. They are few and small: with the first part, where that leaves it within the limit.
        merged = OpenPart(packing.view)
        merged.add(pinned, merged.delta(pinned))
        if opened and not opened[0].over(budget.limit):
            rest = tuple(sorted(opened[0].atoms))
            both = merged.delta(rest)
            if merged.size + both.size <= budget.limit:
                merged.add(rest, both)
                opened = opened[1:]
        opened.insert(0, merged)
    return tuple(part.close(budget.limit) for part in opened)


def clusters(atoms: Atoms, bonds: Bonds) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Atoms that must stay together, ascending, clusters by their first atom; and the pinned ones."""
    up = list(range(len(atoms)))

    def root(a: int) -> int:
        while up[a] != a:
            up[a] = up[up[a]]
            a = up[a]
        return a

    bound = np.flatnonzero(bonds.label != np.arange(len(bonds.label), dtype=np.uint32))
    for e in bound.tolist():
        a, b = sorted((root(atoms.of(e)), root(atoms.of(int(bonds.label[e])))))
        up[b] = a
    pinned_roots = {root(atoms.of(label)) for label in bonds.pinned}
    groups: dict[int, list[int]] = defaultdict(list)
    pinned = []
    for atom in range(len(atoms)):
        if (r := root(atom)) in pinned_roots:
            pinned.append(atom)
        else:
            groups[r].append(atom)
    return [tuple(group) for group in groups.values()], tuple(pinned)


def recut(atoms: Atoms, bonds: Bonds, budget: Budget, sizes: Sequence[int]) -> dict[int, list[int]]:
    """Atoms that must be cut further, and the entries before which: so that clusters stay small.

    Whole atoms are joined while that costs no more than an eighth of a part. Beyond it, bound entries are taken out of
    their atoms, and so is whatever is pinned.
    """
    up = list(range(len(atoms)))
    weight = list(sizes)

    def root(a: int) -> int:
        while up[a] != a:
            up[a] = up[up[a]]
            a = up[a]
        return a

    taken_out = set(bonds.pinned)
    bound = np.flatnonzero(bonds.label != np.arange(len(bonds.label), dtype=np.uint32))
    for e in bound.tolist():
        label = int(bonds.label[e])
        a, b = sorted((root(atoms.of(e)), root(atoms.of(label))))
        if a == b or label in taken_out:
            continue
        if weight[a] + weight[b] <= budget.limit // 8:
            up[b] = a
            weight[a] += weight[b]
        else:
            taken_out.add(label)
    if not taken_out:
        return {}
    members = np.isin(bonds.label, np.fromiter(taken_out, dtype=np.uint32, count=len(taken_out)))
    cuts: dict[int, list[int]] = {}
    for atom in sorted({atoms.of(e) for e in np.flatnonzero(members).tolist()}):
        run = atoms.entries(atom)
        # Whatever is pinned goes to one place: -2. What is free or stays with its atom: -1.
        owner = [
            -1 if not members[e] else -2 if int(bonds.label[e]) in bonds.pinned else int(bonds.label[e]) for e in run
        ]
        found = [e for e, left, right in zip(run[1:], owner, owner[1:], strict=False) if left != right]
        if found:
            cuts[atom] = found
    return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What packing looks at. While a layer is being read, the inventory may be ahead of the atoms."""

    inventory: Inventory
    atoms: Atoms
    sizes: Sizes
    overhead: int
    needs: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What adding a cluster to a part brings: bytes, directories to carry (by node), nodes seen, global headers."""

    size: int
    carried: dict[int, int]
    seen: set[int]
    global_headers: int


class OpenPart:
    """A part that is being filled."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.atoms: list[int] = []
        self.size = view.overhead
        self.global_headers = 0
        self.last = 0
        """Bytes of the cluster added last."""
        self._held: set[int] = set()
        self._seen: set[int] = set()
        self._carried: dict[int, int] = {}  # node: entry
        self._homes: dict[int, list[int]] = defaultdict(list)  # atom: carried nodes whose own entry lies in it

    def delta(self, cluster: tuple[int, ...]) -> Delta:
        """What ``add`` would bring; changes nothing. Linear in the cluster's entries."""
        view, inv = self._view, self._view.inventory
        parents, node_entry, node_parent = inv.parent, inv.node_entry, inv.node_parent
        end = view.atoms.end
        mine = set(cluster)
        seen: set[int] = set()
        carried: dict[int, int] = {}
        size = 0
        reach = 0
        for atom in cluster:
            size += view.sizes.atoms[atom]
            run = view.atoms.entries(atom)
            reach = max(reach, run.stop - 1)
            last = NONE
            starts = []
            for e in run:
                node = parents[e]
                if node != last:
                    last = node
                    starts.append(node)
                if view.needs and e in view.needs:
                    starts.extend(view.needs[e])
            for node in starts:
                while node != NONE and node not in seen and node not in self._seen:
                    seen.add(node)
                    entry = node_entry[node]
                    if entry < end and (home := view.atoms.of(entry)) not in mine and home not in self._held:
                        carried[node] = entry
                        size += view.sizes.directory(entry)
                        reach = max(reach, entry)
                    node = node_parent[node]
            for node in self._homes.get(atom, ()):
                # Carried so far, and now here in its own place.
                size -= view.sizes.directory(self._carried[node])
        count = max(self.global_headers, bisect_right(inv.global_before, reach))
        size += sum(map(view.sizes.global_header, range(self.global_headers, count)))
        return Delta(size=size, carried=carried, seen=seen, global_headers=count)

    def add(self, cluster: tuple[int, ...], delta: Delta) -> None:
        self.atoms.extend(cluster)
        self._held.update(cluster)
        self._seen |= delta.seen
        for atom in cluster:
            for node in self._homes.pop(atom, ()):
                del self._carried[node]
        for node, entry in delta.carried.items():
            self._carried[node] = entry
            self._homes[self._view.atoms.of(entry)].append(node)
        self.size += delta.size
        self.global_headers = delta.global_headers
        self.last = delta.size

    def over(self, limit: int) -> bool:
        return self.size > limit

    def close(self, limit: int) -> Part:
        return Part(
            atoms=tuple(sorted(self.atoms)),
            carried=tuple(sorted(self._carried.values())),
            global_headers=self.global_headers,
            size=self.size,
            indivisible=self.size > limit,
        )


class Packing:
    """The greedy itself, one cluster after the other. Also runs while a layer is read, to foresee the plan."""

    def __init__(
        self,
        inventory: Inventory,
        atoms: Atoms,
        budget: Budget,
        sizes: Sizes,
        needs: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.view = View(inventory=inventory, atoms=atoms, sizes=sizes, overhead=budget.overhead, needs=needs or {})
        self._budget = budget
        self.parts: list[OpenPart] = []
        self._open: dict[bool, OpenPart] = {}

    def candidate(self, cluster: tuple[int, ...]) -> tuple[OpenPart | None, int]:
        """The open part that the cluster joins if it fits there, and how large that part may become."""
        part = self._open.get(self._lane(cluster))
        if part is None or self._cut_before(part, cluster):
            return None, self._budget.limit
        return part, self._capacity(part)

    def add(self, cluster: tuple[int, ...]) -> tuple[OpenPart, Delta]:
        """Put the cluster into a part; that part, and what it brought there."""
        lane = self._lane(cluster)
        part, capacity = self.candidate(cluster)
        if part is not None:
            delta = part.delta(cluster)
            if part.size + delta.size <= capacity:
                part.add(cluster, delta)
                return part, delta
        fresh = OpenPart(self.view)
        delta = fresh.delta(cluster)
        fresh.add(cluster, delta)
        self.parts.append(fresh)
        if fresh.over(self._budget.limit):
            # Alone. In the stable layout such an entry is also a landmark that ends a part that is ripe.
            if self._budget.stable and part is not None and part.size >= self._budget.ripe:
                del self._open[lane]
        else:
            self._open[lane] = fresh
        return fresh, delta

    def _lane(self, cluster: tuple[int, ...]) -> bool:
        if not self._budget.stable:
            return False
        run = self.view.atoms.entries(cluster[0])
        return len(run) == 1 and self.view.inventory.length[run.start] >= LARGE

    def _capacity(self, part: OpenPart) -> int:
        return self._budget.limit - (self._budget.reserve if part is self.parts[0] else 0)

    def _cut_before(self, part: OpenPart, cluster: tuple[int, ...]) -> bool:
        """Whether the stable layout ends the part here: by chance, one cut in every tenth of the limit's bytes."""
        if not self._budget.stable or part.size < self._budget.ripe:
            return False
        strength = self.view.inventory.cut[self.view.atoms.first[cluster[0]]]
        return strength * self._budget.limit < part.last * 10 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is written next into a part: an atom, a repeated directory's entry, or a global header, by its number."""

    kind: str
    number: int


def pieces(inventory: Inventory, atoms: Atoms, part: Part) -> Iterator[Piece]:
    """A part's pieces in the source's order."""
    at = [(inventory.start[atoms.first[a]], Piece(kind="atom", number=a)) for a in part.atoms]
    at += [(inventory.start[e], Piece(kind="directory", number=e)) for e in part.carried]
    headers = 0
    for start, piece in sorted(at, key=lambda item: item[0]):
        del start
        first = atoms.first[piece.number] if piece.kind == "atom" else piece.number
        while headers < part.global_headers and inventory.global_before[headers] <= first:
            yield Piece(kind="global", number=headers)
            headers += 1
        yield piece
