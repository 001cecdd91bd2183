"""Golden images: each a list of layers, and the tree that they make, written down by hand.

What is expected of every case: the tree, its hard links, and that dividing at any limit leaves both as they are.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from golden.split import tars
from golden.split.tars import directory, file, gnu_long, gnu_sparse, hardlink, header, pax, symlink, tar

from buildkit.split.flatten import Node


@dataclass(frozen=True, kw_only=True)
class Case:
    """``tree`` without the root, which is implied unless ``tree`` has it; ``links`` are the groups of hard links."""

    name: str
    layers: tuple[bytes, ...]
    tree: Mapping[bytes, Node]
    links: frozenset[frozenset[bytes]] = field(default_factory=frozenset)

    @property
    def whole(self) -> dict[bytes, Node]:
        return {b"": IMPLIED, **self.tree}


IMPLIED = Node(kind="5", mode=0o755, implied=True)


def f(data: bytes = b"", **more: object) -> Node:
    """A file."""
    content = hashlib.sha256(data).digest() if data else b""
    return replace(Node(kind="0", mode=0o644, mtime_ns=10**9, size=len(data), content=content), **more)  # type: ignore[arg-type]


def d(mode: int = 0o755, **more: object) -> Node:
    """A directory."""
    return replace(Node(kind="5", mode=mode, mtime_ns=10**9), **more)  # type: ignore[arg-type]


def ln(target: bytes, **more: object) -> Node:
    """A symbolic link."""
    return replace(Node(kind="2", mode=0o777, mtime_ns=10**9, link=target), **more)  # type: ignore[arg-type]


def group(*paths: bytes) -> frozenset[frozenset[bytes]]:
    return frozenset((frozenset(paths),))


def filler(seed: int, size: int = 3000) -> bytes:
    """Bytes that do not compress, so that a boundary falls where the test wants one."""
    return random.Random(seed).randbytes(size)


def fillers(prefix: bytes, count: int) -> tuple[bytes, dict[bytes, Node]]:
    """Entries between the interesting ones, and their nodes."""
    names = [b"%s%d" % (prefix, n) for n in range(count)]
    entries = b"".join(file(name, filler(n)) for n, name in enumerate(names))
    return entries, {name: f(filler(n)) for n, name in enumerate(names)}


_GAP, _GAP_TREE = fillers(b"gap", 8)
_GAP2, _GAP2_TREE = fillers(b"more", 8)


def _cases() -> list[Case]:
    a = filler(99)
    long_name = b"deep/" + b"n" * 90 + b"/" + b"m" * 120
    names = [b"t%03d/f%05d" % (n % 100, n) for n in range(2000)]
    return [
        Case(
            name="hard link across a boundary",
            layers=(tar(file(b"a", a), _GAP, hardlink(b"b", b"a", mode=0o600)),),
            tree={b"a": f(a, mode=0o600), b"b": f(a, mode=0o600), **_GAP_TREE},
            links=group(b"a", b"b"),
        ),
        Case(
            name="chain of hard links, spelled in several ways",
            layers=(
                tar(
                    directory(b"x"),
                    file(b"x/a", a),
                    _GAP,
                    hardlink(b"./b", b"./x/a"),
                    _GAP2,
                    hardlink(b"c", b"/b"),
                    hardlink(b"x/d", b"x//a"),
                ),
            ),
            tree={b"x": d(), b"x/a": f(a), b"x/d": f(a), b"b": f(a), b"c": f(a), **_GAP_TREE, **_GAP2_TREE},
            links=group(b"x/a", b"x/d", b"b", b"c"),
        ),
        Case(
            name="hard link to a lower layer",
            layers=(tar(file(b"low", b"low")), tar(_GAP, hardlink(b"up", b"low"), _GAP2, hardlink(b"up2", b"low"))),
            tree={
                b"low": f(b"low"),
                b"up": Node(kind="1", mode=0o644, mtime_ns=10**9, link=b"low"),
                b"up2": Node(kind="1", mode=0o644, mtime_ns=10**9, link=b"low"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="hard link to a symbolic link and to a device",
            layers=(
                tar(
                    symlink(b"s", b"nowhere"),
                    header(b"null", "3", device=(1, 3), mode=0o666),
                    _GAP,
                    hardlink(b"s2", b"s", mode=0o777),
                    hardlink(b"null2", b"null", mode=0o666),
                ),
            ),
            tree={
                b"s": ln(b"nowhere"),
                b"s2": ln(b"nowhere"),
                b"null": Node(kind="3", mode=0o666, mtime_ns=10**9, device=(1, 3)),
                b"null2": Node(kind="3", mode=0o666, mtime_ns=10**9, device=(1, 3)),
                **_GAP_TREE,
            },
            links=group(b"s", b"s2") | group(b"null", b"null2"),
        ),
        Case(
            name="whiteouts first, between and last",
            layers=(
                tar(
                    directory(b"d"),
                    file(b"d/one", b"1"),
                    file(b"d/two", b"2"),
                    file(b"three", b"3"),
                    file(b"four", b"4"),
                ),
                tar(file(b"d/.wh.one"), _GAP, file(b".wh.three"), _GAP2, file(b".wh.missing"), file(b"d/new", b"n")),
            ),
            tree={
                b"d": IMPLIED,
                b"d/two": f(b"2"),
                b"d/new": f(b"n"),
                b"four": f(b"4"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="opaque marker before and after what it does not hide",
            layers=(
                tar(directory(b"d"), file(b"d/old", b"o"), directory(b"e"), file(b"e/old", b"o")),
                tar(
                    directory(b"d", 0o700),
                    file(b"d/.wh..wh..opq"),
                    file(b"d/a", a),
                    _GAP,
                    directory(b"e", 0o711),
                    file(b"e/a", a),
                    _GAP2,
                    file(b"e/.wh..wh..opq"),
                    file(b"e/z", b"z"),
                ),
            ),
            tree={
                b"d": d(0o700),
                b"d/a": f(a),
                b"e": d(0o711),
                b"e/a": f(a),
                b"e/z": f(b"z"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="a name deleted and brought back in one layer",
            layers=(
                tar(file(b"a", b"old"), directory(b"k"), file(b"k/x", b"x")),
                tar(file(b".wh.a"), _GAP, file(b"a", a), _GAP2, directory(b"k"), file(b"k/y", b"y"), file(b".wh.k")),
            ),
            tree={b"a": f(a), b"k": d(), b"k/y": f(b"y"), **_GAP_TREE, **_GAP2_TREE},
        ),
        Case(
            name="directory replaced by a symbolic link, and the reverse, over two layers",
            layers=(
                tar(directory(b"d"), file(b"d/x", b"x"), symlink(b"l", b"d"), directory(b"t")),
                tar(_GAP, symlink(b"d", b"t"), _GAP2, directory(b"l"), file(b"l/y", b"y")),
            ),
            tree={b"d": ln(b"t"), b"l": d(), b"l/y": f(b"y"), b"t": d(), **_GAP_TREE, **_GAP2_TREE},
        ),
        Case(
            name="directory replaced by a symbolic link, and the reverse, in one layer",
            layers=(
                tar(
                    directory(b"d"),
                    file(b"d/x", a),
                    symlink(b"l", b"t"),
                    directory(b"t", 0o750),
                    _GAP,
                    symlink(b"d", b"t"),
                    _GAP2,
                    file(b"d/y", b"y"),
                    directory(b"l"),
                    file(b"l/z", b"z"),
                ),
            ),
            tree={
                b"d": ln(b"t"),
                b"t": d(0o750),
                b"t/y": f(b"y"),
                b"l": d(),
                b"l/z": f(b"z"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="entries below a symbolic link of the same layer",
            layers=(
                tar(
                    directory(b"usr"),
                    directory(b"usr/lib", 0o751),
                    symlink(b"lib", b"usr/lib"),
                    _GAP,
                    file(b"lib/a", a),
                    _GAP2,
                    file(b"usr/lib/b", b"b"),
                    directory(b"lib/sub", 0o700),
                    file(b"usr/lib/sub/c", b"c"),
                    hardlink(b"h", b"lib/b"),
                ),
            ),
            tree={
                b"usr": d(),
                b"usr/lib": d(0o751),
                b"lib": ln(b"usr/lib"),
                b"usr/lib/a": f(a),
                b"usr/lib/b": f(b"b"),
                b"usr/lib/sub": d(0o700),
                b"usr/lib/sub/c": f(b"c"),
                b"h": f(b"b"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
            links=group(b"usr/lib/b", b"h"),
        ),
        Case(
            name="entry below a symbolic link whose target is only implied",
            layers=(tar(file(b"t/first", a), _GAP, symlink(b"s", b"/t"), _GAP2, file(b"s/second", b"2")),),
            tree={
                b"t": IMPLIED,
                b"t/first": f(a),
                b"s": ln(b"/t"),
                b"t/second": f(b"2"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="entry below a file, which no extractor can place",
            layers=(tar(file(b"p", b"p"), _GAP, file(b"p/q", a)),),
            tree={b"p": f(b"p"), b"p/q": f(a, stray=True), **_GAP_TREE},
        ),
        Case(
            name="duplicates of files and directories",
            layers=(
                tar(
                    file(b"a", b"first"),
                    directory(b"d", 0o700),
                    file(b"d/x", a),
                    _GAP,
                    file(b"a", b"second"),
                    directory(b"d", 0o755, uid=7),
                    _GAP2,
                    file(b"d/y", b"y"),
                    hardlink(b"b", b"a"),
                ),
            ),
            tree={
                b"a": f(b"second"),
                b"b": f(b"second"),
                b"d": d(0o755, uid=7),
                b"d/x": f(a),
                b"d/y": f(b"y"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
            links=group(b"a", b"b"),
        ),
        Case(
            name="directories after their content, and parents that are missing",
            layers=(
                tar(
                    file(b"a/b/c", a),
                    _GAP,
                    directory(b"a", 0o711, gid=5),
                    _GAP2,
                    file(b"a/b/d", b"d"),
                    file(b"only/implied/x", b"x"),
                ),
            ),
            tree={
                b"a": d(0o711, gid=5),
                b"a/b": IMPLIED,
                b"a/b/c": f(a),
                b"a/b/d": f(b"d"),
                b"only": IMPLIED,
                b"only/implied": IMPLIED,
                b"only/implied/x": f(b"x"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="the root's own entry",
            layers=(tar(directory(b".", 0o700, uid=3), _GAP, file(b"./x", b"x"), _GAP2),),
            tree={b"": d(0o700, uid=3), b"x": f(b"x"), **_GAP_TREE, **_GAP2_TREE},
        ),
        Case(
            name="PAX globals that change",
            layers=(
                tar(
                    pax({b"comment": b"one"}, "g"),
                    directory(b"d"),
                    file(b"d/a", a),
                    _GAP,
                    pax({b"comment": b"two", b"mtime": b"5"}, "g"),
                    _GAP2,
                    file(b"d/b", b"b"),
                    pax({b"comment": b"three"}, "g"),
                ),
            ),
            tree={
                b"d": d(globals=((b"comment", b"one"),)),
                b"d/a": f(a, globals=((b"comment", b"one"),)),
                b"d/b": f(b"b", globals=((b"comment", b"two"), (b"mtime", b"5"))),
                **{k: replace(v, globals=((b"comment", b"one"),)) for k, v in _GAP_TREE.items()},
                **{k: replace(v, globals=((b"comment", b"two"), (b"mtime", b"5"))) for k, v in _GAP2_TREE.items()},
            },
        ),
        Case(
            name="GNU and PAX long names and links",
            layers=(
                tar(
                    directory(b"deep"),
                    gnu_long(long_name) + file(b"short", a),
                    _GAP,
                    pax({b"path": long_name + b"p", b"linkpath": b"t" * 300}) + symlink(b"short", b"short"),
                    gnu_long(long_name, "K") + hardlink(b"hard", b"cut"),
                    header(b"e" * 100, size=1, tail=b"pre/" + b"fix") + tars.padded(b"e"),
                ),
            ),
            tree={
                b"deep": d(),
                b"deep/" + b"n" * 90: IMPLIED,
                long_name: f(a),
                long_name + b"p": ln(b"t" * 300),
                b"hard": f(a),
                b"pre": IMPLIED,
                b"pre/fix": IMPLIED,
                b"pre/fix/" + b"e" * 100: f(b"e"),
                **_GAP_TREE,
            },
            links=group(long_name, b"hard"),
        ),
        Case(
            name="capabilities and other binary xattrs",
            layers=(
                tar(
                    pax(
                        [
                            (b"SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x20\0\0\n=\xff" + bytes(9)),
                            (b"SCHILY.xattr.user.z", b"a\nb=c"),
                            (b"mtime", b"1.5"),
                        ]
                    )
                    + file(b"ping", a, mode=0o755),
                    _GAP,
                    pax({b"SCHILY.xattr.trusted.x": b"\0"}) + directory(b"d"),
                    _GAP2,
                    file(b"d/x", b"x"),
                ),
            ),
            tree={
                b"ping": f(
                    a,
                    mode=0o755,
                    mtime_ns=1_500_000_000,
                    xattrs=(
                        (b"security.capability", b"\x01\0\0\x02\0\x20\0\0\n=\xff" + bytes(9)),
                        (b"user.z", b"a\nb=c"),
                    ),
                ),
                b"d": d(xattrs=((b"trusted.x", b"\0"),)),
                b"d/x": f(b"x"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="sparse files, old GNU and PAX 0.0, 0.1, 1.0",
            layers=(
                tar(
                    gnu_sparse(b"old", [(0, 512), (8192, 512)], a[:1024], 1 << 21),
                    gnu_sparse(b"many", [(n * 1024, 10) for n in range(40)], a[:400], 1 << 20),
                    _GAP,
                    pax(
                        [
                            (b"GNU.sparse.size", b"9000"),
                            (b"GNU.sparse.numblocks", b"2"),
                            (b"GNU.sparse.offset", b"0"),
                            (b"GNU.sparse.numbytes", b"3"),
                            (b"GNU.sparse.offset", b"8997"),
                            (b"GNU.sparse.numbytes", b"3"),
                        ]
                    )
                    + file(b"p00", b"abcdef"),
                    pax({b"GNU.sparse.size": b"9000", b"GNU.sparse.map": b"0,3,8997,3", b"GNU.sparse.name": b"p01"})
                    + file(b"GNUSparseFile.0/p01", b"abcdef"),
                    _GAP2,
                    pax(
                        {
                            b"GNU.sparse.major": b"1",
                            b"GNU.sparse.minor": b"0",
                            b"GNU.sparse.name": b"p10",
                            b"GNU.sparse.realsize": b"9000",
                        }
                    )
                    + file(b"GNUSparseFile.0/p10", tars.padded(b"1\n8997\n3\n") + b"end"),
                ),
            ),
            tree={
                b"old": f(
                    a[:1024],
                    kind="S",
                    sparse=gnu_sparse(b"old", [(0, 512), (8192, 512)], b"", 1 << 21)[386:495],
                ),
                b"many": f(
                    a[:400],
                    kind="S",
                    sparse=(m := gnu_sparse(b"many", [(n * 1024, 10) for n in range(40)], b"", 1 << 20))[386:495]
                    + m[512:],
                ),
                b"p00": f(
                    b"abcdef",
                    sparse=b"GNU.sparse.numblocks=2\nGNU.sparse.numbytes=3,3\nGNU.sparse.offset=0,8997\nGNU.sparse.size=9000",
                ),
                b"p01": f(b"abcdef", sparse=b"GNU.sparse.map=0,3,8997,3\nGNU.sparse.name=p01\nGNU.sparse.size=9000"),
                b"p10": f(
                    tars.padded(b"1\n8997\n3\n") + b"end",
                    sparse=b"GNU.sparse.major=1\nGNU.sparse.minor=0\nGNU.sparse.name=p10\nGNU.sparse.realsize=9000",
                ),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="device nodes and fifos",
            layers=(
                tar(
                    directory(b"dev"),
                    header(b"dev/null", "3", device=(1, 3), mode=0o666),
                    _GAP,
                    header(b"dev/sda", "4", device=(8, 2**21), mode=0o660, gid=6),
                    header(b"dev/pipe", "6", mode=0o600),
                ),
            ),
            tree={
                b"dev": d(),
                b"dev/null": Node(kind="3", mode=0o666, mtime_ns=10**9, device=(1, 3)),
                b"dev/sda": Node(kind="4", mode=0o660, gid=6, mtime_ns=10**9, device=(8, 2**21)),
                b"dev/pipe": Node(kind="6", mode=0o600, mtime_ns=10**9),
                **_GAP_TREE,
            },
        ),
        Case(
            name="empty layers, with and without an end marker",
            layers=(tar(), file(b"a", a), b"", bytes(512), tar(file(b"b", b"b")) + bytes(9216)),
            tree={b"a": f(a), b"b": f(b"b")},
        ),
        Case(
            name="names that are not UTF-8",
            layers=(
                tar(
                    directory(b"\xff\xfe"),
                    file(b"\xff\xfe/\xe9t\xe9", a),
                    _GAP,
                    pax({b"path": b"\x80/\xc3(", b"linkpath": b"\xfe"}) + symlink(b"x", b"x"),
                    _GAP2,
                    hardlink(b"\xf0", b"\xff\xfe/\xe9t\xe9"),
                ),
            ),
            tree={
                b"\xff\xfe": d(),
                b"\xff\xfe/\xe9t\xe9": f(a),
                b"\xf0": f(a),
                b"\x80": IMPLIED,
                b"\x80/\xc3(": ln(b"\xfe"),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
            links=group(b"\xff\xfe/\xe9t\xe9", b"\xf0"),
        ),
        Case(
            name="owners above 2^21 and times in nanoseconds",
            layers=(
                tar(
                    file(b"gnu", a, uid=3_000_000, gid=2**40, mtime=2**33),
                    _GAP,
                    pax({b"uid": b"4294967294", b"gid": b"70000000000", b"mtime": b"1700000000.123456789123"})
                    + file(b"pax"),
                    pax({b"mtime": b"-1.25"}) + file(b"before", b"b"),
                    file(b"negative", mtime=-7),
                ),
            ),
            tree={
                b"gnu": f(a, uid=3_000_000, gid=2**40, mtime_ns=2**33 * 10**9),
                b"pax": f(uid=4294967294, gid=70000000000, mtime_ns=1_700_000_000_123_456_789),
                b"before": f(b"b", mtime_ns=-1_250_000_000),
                b"negative": f(mtime_ns=-7 * 10**9),
                **_GAP_TREE,
            },
        ),
        Case(
            name="setuid, setgid and sticky",
            layers=(
                tar(
                    directory(b"tmp", 0o1777),
                    directory(b"sg", 0o2755, gid=8),
                    _GAP,
                    file(b"sg/su", a, mode=0o4755),
                    _GAP2,
                    file(b"tmp/x", b"x", mode=0),
                ),
            ),
            tree={
                b"tmp": d(0o1777),
                b"sg": d(0o2755, gid=8),
                b"sg/su": f(a, mode=0o4755),
                b"tmp/x": f(b"x", mode=0),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
        ),
        Case(
            name="many tiny files",
            layers=(tar(*(directory(b"t%03d" % n) for n in range(100)), *(file(n, n) for n in sorted(names))),),
            tree={**{b"t%03d" % n: d() for n in range(100)}, **{n: f(n) for n in names}},
        ),
        Case(
            name="a single huge file",
            layers=(tar(directory(b"big"), file(b"big/file", filler(5, 200_000))),),
            tree={b"big": d(), b"big/file": f(filler(5, 200_000))},
        ),
        Case(
            name="a huge file among others, with a hard link far away",
            layers=(
                tar(
                    _GAP,
                    directory(b"big", 0o711),
                    file(b"big/file", filler(5, 200_000)),
                    _GAP2,
                    hardlink(b"z", b"big/file"),
                ),
            ),
            tree={
                b"big": d(0o711),
                b"big/file": f(filler(5, 200_000)),
                b"z": f(filler(5, 200_000)),
                **_GAP_TREE,
                **_GAP2_TREE,
            },
            links=group(b"big/file", b"z"),
        ),
        Case(
            name="old regular type and directory by its slash",
            layers=(
                tar(header(b"v7/", "\0", magic=bytes(8), mode=0o755), _GAP, header(b"v7/f", "\0", magic=bytes(8))),
            ),
            tree={b"v7": d(), b"v7/f": f(), **_GAP_TREE},
        ),
        Case(
            name="links with a size in their header, which has no data",
            layers=(
                tar(
                    file(b"a", a),
                    _GAP,
                    header(b"b", "1", link=b"a", size=3000),
                    header(b"c", "2", link=b"a", size=9, mode=0o777),
                ),
            ),
            tree={b"a": f(a), b"b": f(a), b"c": ln(b"a"), **_GAP_TREE},
            links=group(b"a", b"b"),
        ),
    ]


CASES = _cases()
