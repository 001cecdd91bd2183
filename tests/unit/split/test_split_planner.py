"""The pure planner over inventories that come from no tar, and the checker that must notice a bad plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from buildkit.errors import FormatError, UsageError
from buildkit.image.tarspan import DIRECTORY, HARDLINK, REGULAR, SYMLINK
from buildkit.split.bonds import find_bonds
from buildkit.split.invariants import check_plan
from buildkit.split.inventory import MAX_PATH, Inventory
from buildkit.split.planner import Atoms, Budget, Part, Sizes, plan, recut

Row = tuple[bytes, int, int, bytes]
KINDS = {b"f": REGULAR, b"d": DIRECTORY, b"h": HARDLINK, b"s": SYMLINK}


def inventory(rows: Sequence[Row], headers: Sequence[int] = ()) -> Inventory:
    inv = Inventory(where="layer 1")
    at = 0
    for n, (name, kind, size, link) in enumerate(rows):
        before = sum(first <= n for first in headers)
        inv.append(name=name, kind=kind, start=at, length=512 + size, link=link, global_headers=before)
        at += 512 + size
    return inv


def files(*names: bytes, size: int = 1000) -> list[Row]:
    return [(name, DIRECTORY if name.endswith(b"/") else REGULAR, size, b"") for name in names]


def planned(
    inv: Inventory, limit: int, *, stable: bool = False, atom: int = 1
) -> tuple[Atoms, tuple[Part, ...], Budget, Sizes]:
    """A plan with atoms of ``atom`` entries; compressed sizes are half the spans'."""
    budget = Budget(limit=limit, overhead=20, stable=stable)
    bonds = find_bonds(inv)

    def sizes_of(atoms: Atoms) -> Sizes:
        return Sizes(
            atoms=[sum(inv.length[e] for e in atoms.entries(a)) // 2 for a in range(len(atoms))],
            global_header=lambda n: 30 + n,
            directory=lambda e: 40 + e % 3,
        )

    bounds = {e for e in range(len(inv)) if e % atom == 0}
    bounds |= {e for w in inv.whiteouts for e in (w, w + 1) if e < len(inv)} | set(inv.global_before)
    atoms = Atoms(sorted(bounds), end=len(inv))
    cuts = recut(atoms, bonds, budget, sizes_of(atoms).atoms)
    atoms = Atoms(sorted(bounds | {e for found in cuts.values() for e in found}), end=len(inv))
    sizes = sizes_of(atoms)
    return atoms, plan(inv, atoms, bonds, budget, sizes), budget, sizes


def names_of(inv: Inventory, atoms: Atoms, part: Part) -> list[bytes]:
    return [inv.name(e) for a in part.atoms for e in atoms.entries(a)]


names = st.lists(st.sampled_from([b"a", b"b", b"c", b"dd"]), min_size=1, max_size=4).map(b"/".join)
special = st.sampled_from([b".wh.a", b".wh.b", b".wh..wh..opq"])
rows = st.one_of(
    st.tuples(names, st.just(REGULAR), st.integers(0, 9000), st.just(b"")),
    st.tuples(names, st.just(DIRECTORY), st.just(0), st.just(b"")),
    st.tuples(names, st.just(HARDLINK), st.just(0), names),
    st.tuples(names, st.just(SYMLINK), st.just(0), names),
    st.tuples(st.tuples(names, special).map(b"/".join), st.just(REGULAR), st.just(0), st.just(b"")),
)


@given(
    st.lists(rows, max_size=60),
    st.lists(st.integers(0, 60), max_size=3),
    st.integers(1024, 20_000),
    st.booleans(),
    st.integers(1, 9),
)
@settings(max_examples=500, deadline=None)
def test_every_plan_keeps_the_rules(rows: list[Row], headers: list[int], limit: int, stable: bool, atom: int) -> None:
    inv = inventory(rows, headers)
    try:
        atoms, parts, budget, sizes = planned(inv, limit, stable=stable, atom=atom)
    except FormatError as error:
        assume("loop" not in error.message)
        raise
    assert check_plan(inv, atoms, parts, budget, sizes) == ()


def test_everything_that_fits_is_one_part() -> None:
    inv = inventory(files(b"a", b"d/", b"d/b", b"d/.wh.x"))
    _, parts, _, _ = planned(inv, 10_000, stable=True)
    assert len(parts) == 1


def test_nothing_is_one_empty_part() -> None:
    inv = inventory([])
    atoms, parts, budget, sizes = planned(inv, 10_000)
    assert [part.atoms for part in parts] == [()]
    assert check_plan(inv, atoms, parts, budget, sizes) == ()


def test_what_cannot_be_divided_says_so_and_stands_alone() -> None:
    inv = inventory([*files(b"a", b"b"), (b"big", REGULAR, 100_000, b""), *files(b"c", b"d")])
    atoms, parts, _, _ = planned(inv, 5_000)
    assert [(names_of(inv, atoms, p), p.indivisible) for p in parts] == [
        ([b"a", b"b", b"c", b"d"], False),
        ([b"big"], True),
    ]


def test_last_entry_of_a_directory_is_the_one_that_is_repeated() -> None:
    inv = inventory([*files(b"d/", b"d/a"), (b"d", DIRECTORY, 7, b""), *files(*(b"d/%d" % n for n in range(20)))])
    _, parts, _, _ = planned(inv, 4_000)
    assert len(parts) > 2
    assert {part.carried for part in parts[1:]} == {(2,)}


@pytest.fixture
def good() -> tuple[Inventory, Atoms, tuple[Part, ...], Budget, Sizes]:
    inv = inventory(
        [
            *files(b"d/", b"d/a", b"d/b", b"d/.wh.gone"),
            (b"e", HARDLINK, 0, b"d/a"),
            *files(*(b"d/%d" % n for n in range(9))),
            *files(b"d/a"),
        ],
        headers=[2],
    )
    atoms, parts, budget, sizes = planned(inv, 4_000)
    assert check_plan(inv, atoms, parts, budget, sizes) == ()
    assert len(parts) >= 3
    return inv, atoms, parts, budget, sizes


Plan = tuple[Inventory, Atoms, tuple[Part, ...], Budget, Sizes]


def moved(parts: tuple[Part, ...], atom: int, to: int) -> tuple[Part, ...]:
    without = [replace(p, atoms=tuple(a for a in p.atoms if a != atom)) for p in parts]
    without[to] = replace(without[to], atoms=tuple(sorted((*without[to].atoms, atom))))
    return tuple(without)


def holder(plan: Plan, name: bytes) -> tuple[int, int]:
    """Atom and part that hold the first entry of a name."""
    inv, atoms, parts, _, _ = plan
    e = next(e for e in range(len(inv)) if inv.name(e) == name)
    return atoms.of(e), next(n for n, p in enumerate(parts) if atoms.of(e) in p.atoms)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: p[2][1:], "is in no part"),
        (lambda p: (*p[2], p[2][-1]), "is in parts"),
        (lambda p: (replace(p[2][0], atoms=()), *p[2][1:]), "is empty|in no part"),
        (lambda p: p[2][::-1], "whiteout"),
        (lambda p: moved(p[2], holder(p, b"d/a")[0], 2 if holder(p, b"d/a")[1] != 2 else 1), "are in several parts"),
        (lambda p: moved(p[2], holder(p, b"e")[0], 2 if holder(p, b"e")[1] != 2 else 1), "apart from its target"),
        (lambda p: tuple(replace(x, carried=()) for x in p[2]), "without its directory"),
        (lambda p: (replace(p[2][0], carried=(0, *p[2][0].carried)), *p[2][1:]), "twice|has 'd'|not in the source"),
        (lambda p: tuple(replace(x, size=x.size + 1) for x in p[2]), "bytes, not"),
        (lambda p: tuple(replace(x, indivisible=True) for x in p[2]), "called indivisible"),
        (lambda p: tuple(replace(x, global_headers=0) for x in p[2]), "other global headers"),
        (lambda p: (replace(p[2][0], atoms=tuple(a for x in p[2] for a in x.atoms)),), "not called|could be divided"),
    ],
)
def test_checker_notices(good: Plan, spoil: object, complaint: str) -> None:
    parts = spoil(good)  # type: ignore[operator]
    found = check_plan(good[0], good[1], parts, good[3], good[4])
    assert any(re.search(complaint, line) for line in found), found


@pytest.mark.parametrize(
    "links",
    [
        [(b"a", b"a")],
        [(b"a", b"b"), (b"b", b"a")],
        [(b"a", b"b"), (b"b", b"c"), (b"c", b"./a")],
    ],
)
def test_loops_of_hard_links_are_refused_with_their_offset(links: list[tuple[bytes, bytes]]) -> None:
    inv = inventory([*files(b"x"), *((name, HARDLINK, 0, target) for name, target in links)])
    with pytest.raises(FormatError, match=r"layer 1 at byte \d+: entry /a: hard links form a loop"):
        find_bonds(inv)


def test_loop_of_symbolic_links_is_refused_where_something_lies_below() -> None:
    loop: list[Row] = [(b"a", SYMLINK, 0, b"b"), (b"b", SYMLINK, 0, b"/a")]
    assert len(find_bonds(inventory(loop)).label) == 2
    with pytest.raises(FormatError, match=r"layer 1 at byte 1024: entry /a/x: symbolic links form a loop"):
        find_bonds(inventory([*loop, *files(b"a/x")]))


@pytest.mark.parametrize(
    ("name", "kind", "link", "complaint"),
    [
        (b"../x", REGULAR, b"", "'..'"),
        (b"a/../../x", DIRECTORY, b"", "'..'"),
        (b"l", HARDLINK, b"../etc/passwd", "'..'"),
        (b"l", HARDLINK, b"", "hard link to nothing"),
        (b"/", REGULAR, b"", "root is not a directory"),
        (b"x" * (MAX_PATH + 1), REGULAR, b"", "path above"),
    ],
)
def test_paths_that_no_extractor_should_meet(name: bytes, kind: int, link: bytes, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint) as caught:
        inventory([*files(b"x"), (name, kind, 0, link)])
    assert caught.value.offset == 1512


def test_absurdly_deep_paths_do_not_fill_the_memory() -> None:
    rows: list[Row] = [(b"%d/" % n + b"a/" * 2000, REGULAR, 0, b"") for n in range(100)]
    with pytest.raises(FormatError, match="directories"):
        inventory(rows)


def test_symbolic_links_may_lead_anywhere_and_in_circles() -> None:
    inv = inventory([(b"X11", SYMLINK, 0, b"."), (b"up", SYMLINK, 0, b"../../.."), (b"self", SYMLINK, 0, b"self")])
    assert find_bonds(inv).label.tolist() == [0, 1, 2]


def test_limit_must_hold_something() -> None:
    with pytest.raises(UsageError, match="too small"):
        Budget(limit=1000, overhead=20, stable=False)
