"""Random trees over several layers: dividing at any limit leaves the flattened tree as it is."""

from __future__ import annotations

import random

from golden.split.sources import TarsSource
from golden.split.tars import directory, file, hardlink, header, pax, symlink, tar
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from buildkit.errors import FormatError
from buildkit.split.flatten import compare, flatten
from buildkit.split.rewrite import SplitOptions, split_image

PARTS = [b"a", b"b", b"c", b".wh.a", b".wh.b", b".wh..wh..opq", b"d", b"e"]
"""Few names, so that paths meet: duplicates, links to what is there, whiteouts of what is there."""

plain = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), min_size=1, max_size=4).map(b"/".join)
below = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3)
any_path = st.tuples(below, st.sampled_from(PARTS)).map(lambda t: b"/".join([*t[0], t[1]]))
modes = st.sampled_from([0o644, 0o755, 0o4755, 0o1777, 0])


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from("ffffdddhhsgxw"))
    mode = draw(modes)
    mtime = draw(st.integers(0, 3))
    match kind:
        case "f":
            size = draw(st.sampled_from([0, 1, 600, 3000]))
            data = random.Random(draw(st.integers(0, 9))).randbytes(size)
            return file(draw(plain), data, mode=mode, mtime=mtime)
        case "d":
            return directory(draw(plain), mode, mtime=mtime)
        case "h":
            return hardlink(draw(plain), draw(plain), mode=mode)
        case "s":
            up = draw(st.sampled_from([b"", b"/", b"../", b"./"]))
            return symlink(draw(plain), up + draw(plain))
        case "g":
            return pax({b"comment": b"%d" % mtime}, "g")
        case "x":
            return pax({b"SCHILY.xattr.user.k": b"%d" % mtime, b"path": draw(plain)}) + header(b"x", mode=mode)
        case _:
            return file(draw(any_path))


layers = st.lists(st.lists(entries(), max_size=25).map(lambda parts: tar(*parts)), min_size=1, max_size=3)


@given(layers, st.integers(1024, 12_000), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_split_then_flatten_is_flatten(tars: list[bytes], limit: int, stable: bool, blobs: bool) -> None:
    source = TarsSource(tars, blobs=blobs)
    try:
        before = flatten(source)
    except FormatError as error:
        assume("loop" not in error.message)
        raise
    try:
        result = split_image(source, SplitOptions(limit=limit, stable=stable, max_layers=10**6, threads=1))
    except FormatError as error:
        assume("loop" not in error.message)
        raise
    with result:
        comparison = compare(before, flatten(result.image))
        assert comparison.equal, [str(difference) for difference in comparison.differences]
        assert before.link_groups() == flatten(result.image).link_groups()
        excused = {part.digest for _, part, _ in result.report.indivisible}
        for layer in result.image.layers:
            assert layer.blob is not None
            assert layer.blob.size <= limit or layer.blob.digest in excused
