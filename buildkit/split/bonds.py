"""Which entries of a layer must stay in one layer.

Every layer is extracted on its own, into its own directory. So these belong together, whatever it costs:

- a hard link and its target, and all links to one target, through chains of links;
- all entries of one path (only the last counts, and a layer with a path in two layers would be another image);
- an entry and the symbolic link, or other non-directory, of the same layer that it lies below; then also what lies
  where that link leads, because the entry lands there;
- a whiteout and an entry of the very name that it deletes: extractors differ on which of the two wins.

Whiteouts delete from *lower* layers. All of them, and what is bound to them, are *pinned* to the first part.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from buildkit.errors import FormatError
from buildkit.image.tarspan import DIRECTORY, HARDLINK, SYMLINK
from buildkit.split.inventory import NONE, OPAQUE, WHITEOUT, Inventory, key_of

MAX_HOPS = 40
"""Symbolic links followed for one path; Linux's MAXSYMLINKS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bonds:
    """``label[e]`` is the lowest number of the entries that entry ``e`` is bound to (its own where it is free).

    ``pinned`` are labels that belong into the first part. ``needs`` maps an entry to nodes whose directories it needs
    beside its own ancestors: where a symbolic link leads it.
    """

    label: npt.NDArray[np.uint32]
    pinned: frozenset[int]
    needs: dict[int, tuple[int, ...]]


def find_bonds(inventory: Inventory) -> Bonds:
    """Pure, and linear but for one sort. Raises FormatError, with the offset, for loops of links."""
    return _Finder(inventory).find()


class _Finder:
    def __init__(self, inventory: Inventory) -> None:
        self._inv = inventory
        count = len(inventory)
        keys = inventory.keys()
        # Sorted by path, then by number, so that the first of equal paths has the lowest number.
        self._order = np.lexsort((np.arange(count), keys[:, 1], keys[:, 0]))
        self._sorted = keys[self._order]
        self._first = np.ascontiguousarray(self._sorted[:, 0])
        self._up = array("I", range(count))
        self._needs: dict[int, tuple[int, ...]] = {}
        self._first_below: array[int] | None = None

    def find(self) -> Bonds:
        self._bind_equal_paths()
        self._bind_hard_links()
        self._bind_below_links()
        self._bind_whiteouts()
        pinned = frozenset(self._root(e) for e in self._inv.whiteouts)
        label = np.array(self._up, dtype=np.uint32)
        while not np.array_equal(label, above := label[label]):
            label = above
        return Bonds(label=label, pinned=pinned, needs=self._needs)

    # -- union-find: the lowest number is the root

    def _root(self, e: int) -> int:
        up = self._up
        while up[e] != e:
            up[e] = up[up[e]]
            e = up[e]
        return e

    def _join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a < b:
            self._up[b] = a
        elif b < a:
            self._up[a] = b

    # -- look-ups

    def _at(self, path: bytes) -> list[int]:
        """Numbers of the entries with this path, ascending."""
        high, low = key_of(path)
        i = int(np.searchsorted(self._first, np.uint64(high)))
        found = []
        while i < len(self._first) and int(self._first[i]) == high:
            if int(self._sorted[i, 1]) == low:
                found.append(int(self._order[i]))
            i += 1
        return found

    # -- the rules

    def _bind_equal_paths(self) -> None:
        same = np.flatnonzero((self._sorted[1:] == self._sorted[:-1]).all(axis=1))
        for i in same.tolist():
            self._join(int(self._order[i]), int(self._order[i + 1]))

    def _bind_hard_links(self) -> None:
        inv = self._inv
        follows: dict[int, int] = {}
        missing: dict[bytes, int] = {}
        for link in inv.links(HARDLINK):
            found = self._at(link.target)
            if found:
                # What an extractor would find: the last one before the link, else the first one after it.
                before = [e for e in found if e < link.entry]
                follows[link.entry] = before[-1] if before else found[0]
                self._join(link.entry, found[0])
            else:
                # In a lower layer. Links to one such target stay together: they are one file.
                self._join(link.entry, missing.setdefault(link.target, link.entry))
        self._refuse_loops(follows)

    def _refuse_loops(self, follows: dict[int, int]) -> None:
        done: set[int] = set()
        for begin in follows:
            path: set[int] = set()
            e = begin
            while e in follows and e not in done:
                if e in path:
                    raise FormatError(
                        f"entry {self._inv.show(e)}: hard links form a loop",
                        where=self._inv.where,
                        offset=self._inv.start[e],
                    )
                path.add(e)
                e = follows[e]
            done |= path

    def _bind_below_links(self) -> None:
        """Bind what lies below a non-directory of the same layer, and what lies where symbolic links lead it."""
        inv = self._inv
        below = self._inherit(self._blocked_nodes())
        through = self._links_through_links()
        if not below and not through:
            return
        symlinks = {inv.name(link.entry): link.target for link in inv.links(SYMLINK)}
        real: dict[bytes, bytes] = {}

        def resolve(directory: bytes, e: int) -> bytes:
            if directory not in real:
                real[directory] = self._resolve(directory, symlinks, e)
            return real[directory]

        landed: dict[int, int] = {}
        for e, node in enumerate(inv.parent):
            if (rep := below.get(node)) is not None:
                self._join(e, rep)
                directory, _, base = inv.name(e).rpartition(b"/")
                path = self._land(e, resolve(directory, e), base)
                if (node := inv.node(path)) != NONE:
                    self._join(e, landed.setdefault(node, e))
        for e, (target, rep) in through.items():
            self._join(e, rep)
            directory, _, base = target.rpartition(b"/")
            self._land(e, resolve(directory, e), base)
        landed = self._inherit(landed)
        if landed:
            for e, node in enumerate(inv.parent):
                if (rep := landed.get(node)) is not None:
                    self._join(e, rep)

    def _links_through_links(self) -> dict[int, tuple[bytes, int]]:
        """Hard links whose target is no entry and lies below one that is no directory: target and that entry."""
        inv = self._inv
        blocked: dict[bytes, int | None] = {b"": None}

        def blocking(directory: bytes) -> int | None:
            parts = directory.split(b"/")
            for depth in range(len(parts) + 1):
                path = b"/".join(parts[:depth])
                if path not in blocked:
                    others = [e for e in self._at(path) if inv.kind[e] != DIRECTORY]
                    blocked[path] = others[-1] if others else None
                if (rep := blocked[path]) is not None:
                    return rep
            return None

        through = {}
        for link in inv.links(HARDLINK):
            if not self._at(link.target) and (rep := blocking(link.target.rpartition(b"/")[0])) is not None:
                through[link.entry] = (link.target, rep)
        return through

    def _blocked_nodes(self) -> dict[int, int]:
        """Nodes that something lies in though an entry of that path is no directory: that entry."""
        inv = self._inv
        kinds = np.frombuffer(bytes(inv.kind), dtype=np.uint8)
        if bool((kinds == DIRECTORY).all()):
            return {}
        blocked = {}
        plain = np.sort(np.ascontiguousarray(inv.keys()[kinds != DIRECTORY, 0]))
        paths = list(inv.node_paths())
        highs = np.fromiter((key_of(p)[0] for p in paths), dtype=np.uint64, count=len(paths))
        slots = np.minimum(np.searchsorted(plain, highs), len(plain) - 1)
        for node in np.flatnonzero(plain[slots] == highs).tolist():
            for e in self._at(paths[node]):
                if inv.kind[e] != DIRECTORY:
                    blocked[node] = e
        return blocked

    def _inherit(self, roots: dict[int, int]) -> dict[int, int]:
        """``roots`` and all nodes below them, each with the entry of its nearest root; nested roots are joined."""
        below: dict[int, int] = {}
        for node in range(self._inv.nodes):
            above = below.get(self._inv.node_parent[node]) if node else None
            own = roots.get(node)
            if own is not None and above is not None:
                self._join(own, above)
            if (rep := own if own is not None else above) is not None:
                below[node] = rep
        return below

    def _land(self, e: int, real: bytes, base: bytes) -> bytes:
        """Bind ``e`` to what lies at ``base`` in the directory ``real``, where it really goes; that path."""
        inv = self._inv
        path = real + b"/" + base if real else base
        for other in self._at(path):
            self._join(e, other)
        node = inv.node(real)
        if node != NONE:
            self._needs[e] = (*self._needs.get(e, ()), node)
            if inv.node_entry[node] == NONE:
                # The directory is only there because something lies in it.
                self._join(e, self._first_entry_below(node))
        return path

    def _first_entry_below(self, node: int) -> int:
        inv = self._inv
        if self._first_below is None:
            self._first_below = array("I", [NONE]) * inv.nodes
            for e, parent in enumerate(inv.parent):
                for step in inv.chain(parent):
                    if self._first_below[step] != NONE:
                        break
                    self._first_below[step] = e
        return self._first_below[node]

    def _resolve(self, directory: bytes, symlinks: dict[bytes, bytes], e: int) -> bytes:
        """Where a directory path leads by the layer's own symbolic links; ``..`` never leads above the root."""
        todo = [part for part in reversed(directory.split(b"/")) if part]
        done: list[bytes] = []
        hops = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if done:
                    done.pop()
                continue
            target = symlinks.get(b"/".join((*done, part)))
            if target is None:
                done.append(part)
                continue
            hops += 1
            if hops > MAX_HOPS:
                raise FormatError(
                    f"entry {self._inv.show(e)}: symbolic links form a loop",
                    where=self._inv.where,
                    offset=self._inv.start[e],
                )
            if target.startswith(b"/"):
                done.clear()
            todo.extend(reversed(target.split(b"/")))
        return b"/".join(done)

    def _bind_whiteouts(self) -> None:
        for e in self._inv.whiteouts:
            directory, _, base = self._inv.name(e).rpartition(b"/")
            if base != OPAQUE:
                hidden = base[len(WHITEOUT) :]
                for other in self._at(directory + b"/" + hidden if directory else hidden):
                    self._join(e, other)
