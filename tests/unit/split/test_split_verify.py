"""The judge: a tree says what its layers make, and every kind of difference is found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from golden.split.cases import CASES, filler
from golden.split.sources import TarsSource
from golden.split.tars import directory, file, hardlink, header, pax, symlink, tar
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import FormatError
from buildkit.split.config import divided_config, replace_members
from buildkit.split.flatten import Node, compare, flatten
from buildkit.split.rewrite import SplitOptions, split_image
from buildkit.split.verify import compare_configs, verify

BASE = (directory(b"d"), file(b"d/f", b"data"), file(b"g", b"other"))


def differences(before: tuple[bytes, ...], after: tuple[bytes, ...]) -> list[str]:
    found = compare(flatten(TarsSource([tar(*before)])), flatten(TarsSource([tar(*after)])))
    assert found.equal == (not found.differences)
    return [f"{d.path}: {d.what}" for d in found.differences]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((directory(b"d", 0o700), *BASE[1:]), ["/d: mode"]),
        ((directory(b"d", uid=1), *BASE[1:]), ["/d: owner"]),
        ((*BASE[:2], file(b"g", b"OTHER")), ["/g: content"]),
        ((*BASE[:2], file(b"g", b"other", mtime=2)), ["/g: mtime"]),
        ((*BASE[:2], pax({b"mtime": b"1.000000001"}) + file(b"g", b"other")), ["/g: mtime"]),
        ((*BASE[:2], pax({b"SCHILY.xattr.user.a": b"b"}) + file(b"g", b"other")), ["/g: xattrs"]),
        ((*BASE[:2],), ["/g: entry"]),
        ((*BASE, file(b"h")), ["/h: entry"]),
        ((*BASE[1:],), ["/d: type", "/d: mtime"]),
        ((*BASE[:2], symlink(b"g", b"d/f")), ["/g: type", "/g: mode", "/g: size", "/g: content", "/g: link"]),
        ((pax({b"comment": b"x"}, "g"), *BASE), ["/d: PAX globals", "/d/f: PAX globals", "/g: PAX globals"]),
    ],
)
def test_every_difference_is_found(after: tuple[bytes, ...], expected: list[str]) -> None:
    assert differences(BASE, after) == expected
    assert sorted(differences(after, BASE)) == sorted(expected)
    assert differences(after, after) == []


def test_copies_are_not_hard_links() -> None:
    linked = (file(b"a", b"x"), hardlink(b"b", b"a"), hardlink(b"c", b"a"))
    copied = (file(b"a", b"x"), file(b"b", b"x"), hardlink(b"c", b"a"))
    assert differences(linked, copied) == ["/b: hard link of"]
    assert differences(copied, (file(b"a", b"x"), hardlink(b"b", b"a"), file(b"c", b"x"))) == [
        "/b: hard link of",
        "/c: hard link of",
    ]


def test_devices_differ_by_number() -> None:
    one, two = (header(b"n", "3", device=(1, n)) for n in (3, 5))
    assert differences((one,), (two,)) == ["/n: device"]


def test_link_across_layers_is_not_a_link() -> None:
    """What a careless split would do: every layer is extracted on its own."""
    before = TarsSource([tar(file(b"a", b"x"), hardlink(b"b", b"a"))])
    after = TarsSource([tar(file(b"a", b"x")), tar(hardlink(b"b", b"a"))])
    assert not compare(flatten(before), flatten(after)).equal


def test_directory_without_its_entry_in_the_upper_layer_loses_its_mode() -> None:
    before = TarsSource([tar(directory(b"d", 0o700), file(b"d/a"), file(b"d/b"))])
    after = TarsSource([tar(directory(b"d", 0o700), file(b"d/a")), tar(file(b"d/b"))])
    assert {d.what for d in compare(flatten(before), flatten(after)).differences} == {"mode", "type", "mtime"}


def test_late_whiteout_deletes_what_an_earlier_part_brought() -> None:
    low = tar(directory(b"d"), file(b"d/old"))
    before = TarsSource([low, tar(directory(b"d"), file(b"d/new"), file(b"d/.wh..wh..opq"))])
    after = TarsSource([low, tar(directory(b"d"), file(b"d/new")), tar(directory(b"d"), file(b"d/.wh..wh..opq"))])
    assert [d.path for d in compare(flatten(before), flatten(after)).differences] == ["/d/new"]


bytes_ = st.binary(max_size=20)
pairs = st.lists(st.tuples(bytes_, bytes_), max_size=3).map(tuple)
signed = st.integers(-(2**60), 2**60)


@given(
    st.builds(
        Node, kind=st.sampled_from("01234567S"), mode=st.integers(0, 0o7777), uid=signed, gid=signed, mtime_ns=signed,
        implied=st.booleans(), stray=st.booleans(), size=st.integers(0, 2**60), device=st.tuples(signed, signed),
        content=bytes_, link=bytes_, sparse=bytes_, xattrs=pairs, globals=pairs,
    )
)  # fmt: skip
def test_packed_nodes_come_back_as_they_were(node: Node) -> None:
    assert Node.unpack(node.pack()) == node


def test_loop_of_symbolic_links_is_an_error_with_its_offset() -> None:
    data = tar(symlink(b"a", b"b"), symlink(b"b", b"a"), file(b"a/x"))
    with pytest.raises(FormatError, match=r"layer 1 at byte 1024: entry /a/x: symbolic links form a loop"):
        flatten(TarsSource([data]))


@pytest.mark.parametrize("name", [b"../x", b"a/../x"])
def test_path_that_leads_out_is_an_error_with_its_offset(name: bytes) -> None:
    with pytest.raises(FormatError, match=r"layer 1 at byte 512: .*'\.\.'"):
        flatten(TarsSource([tar(file(b"ok"), file(name))]))


@pytest.mark.parametrize("value", [2**70, -(2**70)])
def test_times_and_owners_out_of_all_range_are_errors(value: int) -> None:
    with pytest.raises(FormatError, match="byte 0"):
        flatten(TarsSource([tar(pax({b"mtime": b"%d" % value}) + file(b"f"))]))


# Verification --------------------------------------------------------------------------------------------------------


def test_verification_of_a_split() -> None:
    source = TarsSource(
        [tar(*BASE), tar(*(file(b"%d" % n, filler(n)) for n in range(20)), file(b"big", filler(1, 90_000)))]
    )
    with split_image(source, SplitOptions(limit=20_000)) as result:
        reported = [part.digest for _, part, _ in result.report.indivisible if part.digest]
        good = verify(source, result.image, limit=20_000, reported=reported)
        bad = verify(source, result.image, limit=20_000)
        other = verify(TarsSource([tar(*BASE)]), result.image)
    assert good.passed
    assert "verified: the same 25 paths over 2 and" in good.lines()[0]
    assert not bad.passed
    assert "limit: layer" in bad.lines()[-1]
    assert not other.passed
    assert other.tree.count == 21
    assert json.loads(json.dumps(other.to_json()))["differences"] == 21


@pytest.mark.parametrize("key", ["config", "architecture", "created", "history", "rootfs"])
def test_config_that_changed_is_found(key: str) -> None:
    source = TarsSource([tar(*BASE)])
    document = dict(source.config().document)
    changed: Any = {**document["rootfs"], "type": "x"} if key == "rootfs" else [{"created_by": "?"}]
    raw = json.dumps({**document, key: changed}).encode()
    other = replace(source.config(), raw=raw, document=json.loads(raw))
    (text,) = compare_configs(source.config(), other)
    assert text.startswith(key)


@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists)),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_replaced_members_leave_every_other_byte(document: dict[str, Any], indent: Any, ascii_only: bool) -> None:
    document["x"] = 1
    raw = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    new = replace_members(raw, {"x": [2], "absent": 3})
    assert json.loads(new.decode("utf-8", "surrogatepass")) == {**document, "x": [2]}
    assert replace_members(raw, {}) == raw


def test_config_without_a_divided_layer_is_the_same_object() -> None:
    config = TarsSource([c.layers[0] for c in CASES[:3]]).config()
    assert divided_config(config, [[d] for d in config.diff_ids]) is config
